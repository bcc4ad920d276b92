//! Finding a prefix, holding it, and reserving blocks: `lookup`, `admit`.

use super::BlockTable;
use crate::mutex_table::block::{BlockHash, CpuBlockId, GpuBlockId};
use crate::mutex_table::error::{Error, Result};
use crate::mutex_table::event::{EventKind, TierName};
use crate::mutex_table::session::{Loads, Request, RequestId};
use crate::mutex_table::tier::State;

/// What `admit` found and reserved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Admission {
    /// Gpu block ids for all tokens, in order: hits, then loads, then fresh ones.
    pub(crate) block_ids: Vec<GpuBlockId>,
    /// Leading blocks that are in the Gpu tier.
    pub(crate) gpu_hit_blocks: usize,
    /// Blocks after those that the next step loads from the Cpu tier.
    pub(crate) cpu_hit_blocks: usize,
    /// Blocks after those, with nothing in them yet.
    pub(crate) fresh_blocks: usize,
    /// Tokens of the hit blocks.
    pub(crate) cached_tokens: usize,
}

impl BlockTable {
    /// How many leading blocks are in the Gpu tier, and how many after those in the Cpu tier.
    pub(crate) fn lookup_hashed(&self, hashes: &[BlockHash]) -> (usize, usize) {
        let gpu_hits = hashes.iter().take_while(|hash| self.gpu.find_cached(hash).is_some()).count();
        let cpu_hits = hashes[gpu_hits..].iter().take_while(|hash| self.cpu.find_cached(hash).is_some()).count();
        (gpu_hits, cpu_hits)
    }

    /// Blocks of a request that may hit: one token is always left to compute.
    fn num_hittable(&self, num_tokens: usize) -> usize {
        num_tokens.saturating_sub(1) / self.block_size
    }

    /// Finds the longest usable prefix, holds it, and reserves Gpu blocks for all tokens; or changes nothing. Takes the
    /// hashes of the `num_tokens / block_size` full blocks.
    pub(crate) fn admit_hashed(&mut self, id: RequestId, hashes: &[BlockHash], num_tokens: usize) -> Result<Admission> {
        self.requests.check_new(&id)?;
        if num_tokens == 0 {
            return Err(Error::config("num_tokens", num_tokens, "at least one token"));
        }
        self.check_hashes(hashes.len(), 0, num_tokens)?;
        self.admit_with(id, hashes.to_vec(), num_tokens)
    }

    fn check_hashes(&self, given: usize, num_tokens_before: usize, num_tokens: usize) -> Result<()> {
        let wanted = num_tokens / self.block_size - num_tokens_before / self.block_size;
        if given != wanted {
            let value = format!("{given} block hashes");
            return Err(Error::config("digests", value, format!("exactly {wanted}, one per full block of the tokens")));
        }
        Ok(())
    }

    fn admit_with(&mut self, id: RequestId, hashes: Vec<BlockHash>, num_tokens: usize) -> Result<Admission> {
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
}
