//! Finding a prefix, holding it, and reserving blocks: `admit`, `extend`.

use super::{Loads, Request, RequestId, Session};
use crate::block::{BlockHash, CpuBlockId, GpuBlockId};
use crate::error::{Error, Result};
use crate::event::{EventKind, TierName};
use crate::hash::Identity;
use crate::sync::Relaxed;
use crate::tier::{Hit, Tier};
use crate::Gpu;

/// What `admit` found and reserved.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
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

impl Session {
    /// Finds the longest usable prefix, holds it, and reserves Gpu blocks for all tokens; or changes nothing.
    pub fn admit(&mut self, id: RequestId, token_ids: &[u32], identity: &Identity) -> Result<Admission> {
        self.settle();
        self.requests.check_new(&id)?;
        if token_ids.is_empty() {
            return Err(Error::config("token_ids", "[]", "at least one token"));
        }
        let Self { table, requests, .. } = self;
        let request = requests.spare();
        request.chain = Some(table.start_chain(token_ids, identity, &mut request.hashes)?);
        let mut admission = Admission::default();
        self.admit_spare(id, token_ids.len(), &mut admission)?;
        Ok(admission)
    }

    /// As `admit`, with the hashes of the `num_tokens / block_size` full blocks given.
    pub fn admit_hashed(&mut self, id: RequestId, hashes: &[BlockHash], num_tokens: usize) -> Result<Admission> {
        let mut admission = Admission::default();
        self.admit_hashed_into(id, hashes, num_tokens, &mut admission)?;
        Ok(admission)
    }

    /// As `admit_hashed`, into an admission whose memory is used again; unchanged where the call is refused.
    pub fn admit_hashed_into(
        &mut self,
        id: RequestId,
        hashes: &[BlockHash],
        num_tokens: usize,
        admission: &mut Admission,
    ) -> Result<()> {
        self.settle();
        self.requests.check_new(&id)?;
        if num_tokens == 0 {
            return Err(Error::config("num_tokens", num_tokens, "at least one token"));
        }
        self.check_hashes(hashes.len(), 0, num_tokens)?;
        self.requests.spare().hashes.extend_from_slice(hashes);
        self.admit_spare(id, num_tokens, admission)
    }

    fn check_hashes(&self, given: usize, num_tokens_before: usize, num_tokens: usize) -> Result<()> {
        let wanted = num_tokens / self.block_size() - num_tokens_before / self.block_size();
        if given != wanted {
            let value = format!("{given} block hashes");
            return Err(Error::config("digests", value, format!("exactly {wanted}, one per full block of the tokens")));
        }
        Ok(())
    }

    /// Admits the spare request, whose hashes are in place.
    fn admit_spare(&mut self, id: RequestId, num_tokens: usize, admission: &mut Admission) -> Result<()> {
        let block_size = self.block_size();
        let table = self.table.clone();
        let shared = &*table.shared;
        let num_hittable = table.num_hittable(num_tokens);
        // First find, then hold: nobody else evicts from this Gpu tier, so what is found can be held.
        // Counted before the hits: one that a completer releases in between is then subtracted without having been
        // counted, which can only refuse. The other way round it would be counted, and then held.
        let counted = shared.gpu.num_available();
        let Request { hashes, block_ids, .. } = self.requests.spare_in_use();
        let num_idle = find_hits(&shared.gpu, &hashes[..num_hittable], block_ids);
        let gpu_hit_blocks = block_ids.len();
        let total = num_tokens.div_ceil(block_size);
        let needed = total - gpu_hit_blocks;
        // A hit that nobody holds yet is evictable now, and will not be once it is held.
        let mut available = counted.saturating_sub(num_idle);
        if needed > available {
            // A caller's hashes may name one block twice: then fewer blocks are lost to holds than hits were counted.
            let num_different = num_idle_blocks(&shared.gpu, &self.spare().hashes[..gpu_hit_blocks]);
            available = counted.saturating_sub(num_different);
        }
        self.check_available(needed, available)?;
        if !shared.host.begin_activity(1) {
            // A reset runs in another thread: refused, not waited for.
            return self.refuse(needed, 0);
        }

        let request = self.requests.spare_in_use();
        let Request { hashes, block_ids, load_sources, .. } = &mut *request;
        let mut holds = shared.gpu.holds();
        for &block in block_ids.iter() {
            holds.hold_cached(block);
        }
        drop(holds);
        if self.planned_loads.is_empty() {
            // Before the holds: a block that is held and then withdrawn is counted after this.
            self.num_withdrawn_before = shared.host.num_withdrawn.get();
        }
        let mut holds = shared.cpu().holds();
        // Other sessions evict from the Cpu tier: the prefix ends where a hold does not succeed.
        shared.cpu().find_each(&hashes[gpu_hit_blocks..num_hittable], |hit: Option<Hit<_>>| match hit {
            Some(hit) if holds.hold(&hit) => {
                load_sources.push(hit.id);
                true
            }
            _ => false,
        });
        drop(holds);
        let cpu_hit_blocks = load_sources.len();
        let cached_tokens = (gpu_hit_blocks + cpu_hit_blocks) * block_size;
        request.num_tokens = num_tokens;
        request.gpu_hit_blocks = gpu_hit_blocks;
        request.handled_blocks = gpu_hit_blocks;
        request.valid_tokens = gpu_hit_blocks * block_size;
        request.loads = if cpu_hit_blocks > 0 { Loads::Planned } else { Loads::Finished };

        self.allocate_gpu(needed);
        let request = self.requests.spare_in_use();
        request.block_ids.extend(self.slots.iter().map(|&slot| GpuBlockId::new(slot as usize)));
        shared.gpu.count_expected(cpu_hit_blocks);
        for position in request.load_positions() {
            shared.gpu.set_hash(request.block_ids[position], &request.hashes[position]);
            shared.gpu.expect_copy(request.block_ids[position], 1);
        }
        admission.block_ids.clear();
        admission.block_ids.extend_from_slice(&request.block_ids);
        let reference = self.requests.insert(id);
        if cpu_hit_blocks > 0 {
            self.planned_loads.push(reference);
        }

        let fresh_blocks = needed - cpu_hit_blocks;
        let counters = &shared.counters;
        // Relaxed: a statistic.
        shared.num_requests.fetch_add(1, Relaxed);
        counters.num_admitted.add(1);
        counters.prompt_tokens.add(num_tokens);
        counters.gpu_hit_blocks.add(gpu_hit_blocks);
        counters.cpu_hit_blocks.add(cpu_hit_blocks);
        counters.gpu_hit_tokens.add(gpu_hit_blocks * block_size);
        counters.cpu_hit_tokens.add(cpu_hit_blocks * block_size);
        counters.fresh_blocks.add(fresh_blocks);
        let block_ids = std::mem::take(&mut admission.block_ids);
        *admission = Admission { block_ids, gpu_hit_blocks, cpu_hit_blocks, fresh_blocks, cached_tokens };
        Ok(())
    }

    fn spare(&mut self) -> &Request {
        self.requests.spare_in_use()
    }

    fn check_available(&self, needed: usize, available: usize) -> Result<()> {
        if needed > available {
            return self.refuse(needed, available);
        }
        Ok(())
    }

    fn refuse<T>(&self, needed: usize, available: usize) -> Result<T> {
        self.shared().counters.num_refused.add(1);
        Err(Error::OutOfBlocks { needed, available, total: self.shared().gpu.len() })
    }

    /// Takes Gpu slots that are known to be available, all claimed, into `slots`.
    fn allocate_gpu(&mut self, n: usize) {
        let Self { table, store_queue, slots, .. } = self;
        let shared = &*table.shared;
        slots.clear();
        if n == 0 {
            return;
        }
        let (mut num_evicted, mut num_lost) = (0, 0);
        let mut events = shared.events();
        let taken = shared.gpu.allocate(n, slots, |id, hash| {
            events.push(EventKind::Removed, TierName::Gpu, hash, id.index());
            num_evicted += 1;
            num_lost += usize::from(store_queue.remove(id.index()));
        });
        drop(events);
        debug_assert_eq!(taken, n, "the session alone takes Gpu slots, and it had counted them");
        shared.counters.gpu_evicted_blocks.add(num_evicted);
        shared.counters.stores_lost_blocks.add(num_lost);
        self.note_store_queue();
    }

    /// Adds tokens at the end of a request and returns the ids of the blocks added.
    pub fn extend(&mut self, id: &RequestId, token_ids: &[u32]) -> Result<Vec<GpuBlockId>> {
        self.settle();
        if self.requests.get(id)?.chain.is_none() {
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
        self.settle();
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
        let total = (request.num_tokens + num_tokens).div_ceil(self.block_size());
        let needed = total - request.block_ids.len();
        self.check_available(needed, self.shared().gpu.num_available())?;
        self.allocate_gpu(needed);
        let added: Vec<_> = self.slots.iter().map(|&slot| GpuBlockId::new(slot as usize)).collect();
        let request = self.requests.get_mut(id)?;
        request.block_ids.extend_from_slice(&added);
        request.num_tokens += num_tokens;
        self.shared().counters.fresh_blocks.add(needed);
        Ok(added)
    }
}

/// Appends the leading hits; gives how many of them nobody holds.
fn find_hits(gpu: &Tier<Gpu>, hashes: &[BlockHash], block_ids: &mut Vec<GpuBlockId>) -> usize {
    let mut num_idle = 0;
    gpu.find_each(hashes, |hit| {
        let Some(hit) = hit else { return false };
        block_ids.push(hit.id);
        num_idle += usize::from(hit.is_idle);
        true
    });
    num_idle
}

/// Different blocks among these hits that nobody holds.
fn num_idle_blocks(gpu: &Tier<Gpu>, hashes: &[BlockHash]) -> usize {
    let mut idle = std::collections::HashSet::new();
    gpu.find_each(hashes, |hit| {
        idle.extend(hit.filter(|hit| hit.is_idle).map(|hit| hit.id));
        true
    });
    idle.len()
}

/// The ids of Cpu slots.
pub(super) fn cpu_ids(slots: &[u32]) -> impl Iterator<Item = CpuBlockId> + '_ {
    slots.iter().map(|&slot| CpuBlockId::new(slot as usize))
}
