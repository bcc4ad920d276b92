//! Finding a prefix, holding it, and reserving blocks: `lookup`, `admit`, `extend`.

use super::BlockTable;
use crate::block::{BlockHash, CpuBlockId, GpuBlockId};
use crate::error::{Error, Result};
use crate::event::{EventKind, TierName};
use crate::hash::{Chain, Identity};
use crate::session::{Loads, Request, RequestId};
use crate::tier::State;

/// What `admit` found and reserved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admission {
    /// Gpu block ids for all tokens, in order: hits, then loads, then fresh ones.
    pub block_ids: Vec<GpuBlockId>,
    /// Leading blocks that are in the Gpu tier.
    pub gpu_hit_blocks: usize,
    /// Blocks after those that the next step loads from the Cpu tier.
    pub cpu_hit_blocks: usize,
    /// Blocks after those, with nothing in them yet.
    pub fresh_blocks: usize,
    /// Tokens of the hit blocks.
    pub cached_tokens: usize,
}

impl BlockTable {
    /// The block hashes of the full blocks of these tokens.
    pub fn block_hashes(&self, token_ids: &[u32], identity: &Identity) -> Result<Vec<BlockHash>> {
        Ok(self.start_chain(token_ids, identity)?.1)
    }

    fn start_chain(&self, token_ids: &[u32], identity: &Identity) -> Result<(Chain, Vec<BlockHash>)> {
        if let Some(item) = identity.media.iter().find(|item| item.offset >= token_ids.len()) {
            let limit = format!("below the number of tokens, {}", token_ids.len());
            return Err(Error::config("media offset", item.offset, limit));
        }
        let mut chain = Chain::new(self.root, self.block_size, identity);
        let mut hashes = Vec::with_capacity(token_ids.len() / self.block_size);
        chain.extend(token_ids, &mut hashes);
        Ok((chain, hashes))
    }

    /// How many blocks `admit` of the same arguments would find: in the Gpu tier, then in the Cpu tier.
    pub fn lookup(&self, token_ids: &[u32], identity: &Identity) -> Result<(usize, usize)> {
        let hashes = self.block_hashes(token_ids, identity)?;
        Ok(self.lookup_hashed(&hashes[..self.num_hittable(token_ids.len())]))
    }

    /// How many leading blocks are in the Gpu tier, and how many after those in the Cpu tier.
    pub fn lookup_hashed(&self, hashes: &[BlockHash]) -> (usize, usize) {
        let gpu_hits = hashes.iter().take_while(|hash| self.gpu.find_cached(hash).is_some()).count();
        let cpu_hits = hashes[gpu_hits..].iter().take_while(|hash| self.cpu.find_cached(hash).is_some()).count();
        (gpu_hits, cpu_hits)
    }

    /// Blocks of a request that may hit: one token is always left to compute.
    fn num_hittable(&self, num_tokens: usize) -> usize {
        num_tokens.saturating_sub(1) / self.block_size
    }

    /// Finds the longest usable prefix, holds it, and reserves Gpu blocks for all tokens; or changes nothing.
    pub fn admit(&mut self, id: RequestId, token_ids: &[u32], identity: &Identity) -> Result<Admission> {
        self.requests.check_new(&id)?;
        if token_ids.is_empty() {
            return Err(Error::config("token_ids", "[]", "at least one token"));
        }
        let (chain, hashes) = self.start_chain(token_ids, identity)?;
        self.admit_with(id, hashes, token_ids.len(), Some(chain))
    }

    /// As `admit`, with the hashes of the `num_tokens / block_size` full blocks given.
    pub fn admit_hashed(&mut self, id: RequestId, hashes: Vec<BlockHash>, num_tokens: usize) -> Result<Admission> {
        self.requests.check_new(&id)?;
        if num_tokens == 0 {
            return Err(Error::config("num_tokens", num_tokens, "at least one token"));
        }
        self.check_hashes(hashes.len(), 0, num_tokens)?;
        self.admit_with(id, hashes, num_tokens, None)
    }

    fn check_hashes(&self, given: usize, num_tokens_before: usize, num_tokens: usize) -> Result<()> {
        let wanted = num_tokens / self.block_size - num_tokens_before / self.block_size;
        if given != wanted {
            let value = format!("{given} block hashes");
            return Err(Error::config("digests", value, format!("exactly {wanted}, one per full block of the tokens")));
        }
        Ok(())
    }

    fn admit_with(
        &mut self,
        id: RequestId,
        hashes: Vec<BlockHash>,
        num_tokens: usize,
        chain: Option<Chain>,
    ) -> Result<Admission> {
        let hittable = &hashes[..self.num_hittable(num_tokens)];
        let gpu_hits: Vec<GpuBlockId> = hittable.iter().map_while(|hash| self.gpu.find_cached(hash)).collect();
        let cpu_hits: Vec<CpuBlockId> =
            hittable[gpu_hits.len()..].iter().map_while(|hash| self.cpu.find_cached(hash)).collect();

        let total = num_tokens.div_ceil(self.block_size);
        let needed = total - gpu_hits.len();
        // A hit that nobody holds yet is evictable now, and will not be once it is held.
        let idle_hits = gpu_hits.iter().filter(|&&hit| self.gpu.num_holds(hit) == 0).count();
        self.check_available(needed, self.gpu.num_available() - idle_hits)?;

        for &hit in &gpu_hits {
            self.gpu.hold(hit);
        }
        for &hit in &cpu_hits {
            self.cpu.hold(hit);
        }
        let (gpu_hit_blocks, cpu_hit_blocks) = (gpu_hits.len(), cpu_hits.len());
        let mut block_ids = gpu_hits;
        block_ids.extend(self.allocate_gpu(needed));
        for &load in &block_ids[gpu_hit_blocks..gpu_hit_blocks + cpu_hit_blocks] {
            self.gpu.expect_copy(load);
        }

        let fresh_blocks = needed - cpu_hit_blocks;
        let admission = Admission {
            block_ids: block_ids.clone(),
            gpu_hit_blocks,
            cpu_hit_blocks,
            fresh_blocks,
            cached_tokens: (gpu_hit_blocks + cpu_hit_blocks) * self.block_size,
        };
        let has_loads = cpu_hit_blocks > 0;
        let reference = self.requests.insert(
            id,
            Request {
                serial: 0,
                block_ids,
                hashes,
                chain,
                num_tokens,
                gpu_hit_blocks,
                cpu_hit_blocks,
                handled_blocks: gpu_hit_blocks,
                valid_tokens: gpu_hit_blocks * self.block_size,
                pending_commit: None,
                loads: if has_loads { Loads::Planned(cpu_hits) } else { Loads::Finished },
            },
        );
        if has_loads {
            self.planned_loads.push(reference);
        }

        let counters = &mut self.counters;
        counters.num_admitted += 1;
        counters.prompt_tokens += num_tokens as u64;
        counters.gpu_hit_blocks += gpu_hit_blocks as u64;
        counters.cpu_hit_blocks += cpu_hit_blocks as u64;
        counters.gpu_hit_tokens += (gpu_hit_blocks * self.block_size) as u64;
        counters.cpu_hit_tokens += (cpu_hit_blocks * self.block_size) as u64;
        counters.fresh_blocks += fresh_blocks as u64;
        Ok(admission)
    }

    fn check_available(&mut self, needed: usize, available: usize) -> Result<()> {
        if needed > available {
            self.counters.num_refused += 1;
            return Err(Error::OutOfBlocks { needed, available, total: self.gpu.len() });
        }
        Ok(())
    }

    /// Takes Gpu slots that are known to be available, all claimed.
    fn allocate_gpu(&mut self, n: usize) -> Vec<GpuBlockId> {
        let Self { gpu, store_queue, events, counters, .. } = self;
        gpu.allocate(n, State::Claimed, |id, hash| {
            events.push(EventKind::Removed, TierName::Gpu, hash, id.index());
            counters.gpu_evicted_blocks += 1;
            counters.stores_lost_blocks += u64::from(store_queue.remove(id.index()));
        })
    }

    /// Adds tokens at the end of a request and returns the ids of the blocks added.
    pub fn extend(&mut self, id: &RequestId, token_ids: &[u32]) -> Result<Vec<GpuBlockId>> {
        let request = self.requests.get(id)?;
        if request.chain.is_none() {
            return Err(Error::config("request_id", id, "a request admitted with token ids; use extend_hashed"));
        }
        let added = self.reserve_more(id, token_ids.len())?;
        let request = self.requests.get_mut(id)?;
        if let Some(chain) = &mut request.chain {
            chain.extend(token_ids, &mut request.hashes);
        }
        Ok(added)
    }

    /// As `extend`, with the hashes of the blocks that became full.
    pub fn extend_hashed(
        &mut self,
        id: &RequestId,
        hashes: &[BlockHash],
        num_tokens: usize,
    ) -> Result<Vec<GpuBlockId>> {
        let request = self.requests.get(id)?;
        if request.chain.is_some() {
            return Err(Error::config("request_id", id, "a request admitted with block hashes; use extend"));
        }
        let before = request.num_tokens;
        let after = before.checked_add(num_tokens);
        let after = after.ok_or_else(|| Error::config("num_tokens", num_tokens, "a number of tokens in memory"))?;
        self.check_hashes(hashes.len(), before, after)?;
        let added = self.reserve_more(id, num_tokens)?;
        self.requests.get_mut(id)?.hashes.extend_from_slice(hashes);
        Ok(added)
    }

    fn reserve_more(&mut self, id: &RequestId, num_tokens: usize) -> Result<Vec<GpuBlockId>> {
        let request = self.requests.get(id)?;
        let total = (request.num_tokens + num_tokens).div_ceil(self.block_size);
        let needed = total - request.block_ids.len();
        self.check_available(needed, self.gpu.num_available())?;
        let added = self.allocate_gpu(needed);
        let request = self.requests.get_mut(id)?;
        request.block_ids.extend_from_slice(&added);
        request.num_tokens += num_tokens;
        self.counters.fresh_blocks += needed as u64;
        Ok(added)
    }
}
