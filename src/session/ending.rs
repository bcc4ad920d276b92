//! The end of a request: `release`, `abort`, `preempt`.

use super::{Loads, Request, RequestId, Session};
use crate::error::Result;
use crate::holds::TierReleases;
use crate::slot::State;
use crate::sync::Relaxed;
use crate::{Cpu, Gpu};

impl Session {
    /// Ends a finished request; its committed full blocks stay cached.
    pub fn release(&mut self, id: &RequestId) -> Result<()> {
        self.end(id)?;
        self.shared().counters.num_released.add(1);
        Ok(())
    }

    /// Ends a request that will not finish; its committed full blocks stay cached.
    pub fn abort(&mut self, id: &RequestId) -> Result<()> {
        self.end(id)?;
        self.shared().counters.num_aborted.add(1);
        Ok(())
    }

    /// Ends a request that will be admitted again: its committed full blocks stay cached and come back as hits.
    pub fn preempt(&mut self, id: &RequestId) -> Result<()> {
        self.end(id)?;
        self.shared().counters.num_preempted.add(1);
        Ok(())
    }

    fn end(&mut self, id: &RequestId) -> Result<()> {
        self.settle();
        let (reference, request) = self.requests.remove(id)?;
        if request.loads == Loads::Planned {
            self.planned_loads.retain(|&planned| planned != reference);
        }
        let table = self.table.clone();
        let shared = &*table.shared;
        let num_blocks = request.block_ids.len();
        // A private duplicate refreshes the published block and releases its own.
        let mut gpu = shared.gpu.releases(2 * num_blocks);
        let mut cpu = shared.cpu().releases(num_blocks);
        // Tail first: a parent becomes younger than its children, and so outlives them.
        for position in (0..num_blocks).rev() {
            if let Some(next) = position.checked_sub(8) {
                shared.gpu.prefetch(request.block_ids[next].index());
            }
            self.end_block(&request, position, &mut gpu, &mut cpu);
            if (request.gpu_hit_blocks..request.handled_blocks).contains(&position) {
                if let Some(copy) = shared.cpu().find_cached(&request.hashes[position]) {
                    cpu.refresh(copy.id);
                }
            }
        }
        drop((gpu, cpu));
        // Relaxed: a statistic.
        shared.num_requests.fetch_sub(1, Relaxed);
        shared.host.end_activity(1);
        self.note_store_queue();
        self.requests.give_back(reference, request);
        Ok(())
    }

    fn end_block(
        &mut self,
        request: &Request,
        position: usize,
        gpu: &mut TierReleases<'_, Gpu>,
        cpu: &mut TierReleases<'_, Cpu>,
    ) {
        let shared = &*self.table.shared;
        let block = request.block_ids[position];
        let word = shared.gpu.word(block);
        if word.state() == State::InFlight {
            if request.loads == Loads::Planned {
                shared.gpu.abandon_copy(block);
                shared.gpu.end_copy(block);
                cpu.unhold(request.load_sources[position - request.gpu_hit_blocks]);
                shared.counters.loads_cancelled_blocks.add(1);
                return;
            }
            if shared.gpu.abandon_copy(block) {
                // The copy goes on; its completion finds that nobody waits for it.
                return;
            }
        }
        // The block may have been finished by another thread a moment ago: what counts is its state now.
        if shared.gpu.word(block).state() == State::Claimed && position < request.handled_blocks {
            // Valid content under a hash that another block was published for.
            let hash = &request.hashes[position];
            if let Some(twin) = shared.gpu.find_cached(hash) {
                gpu.refresh(twin.id);
            } else {
                let Self { table, store_queue, .. } = self;
                let published = table.shared.publish(store_queue, block, hash);
                table.shared.gpu.count_published(usize::from(published));
            }
        }
        gpu.unhold_own(block);
    }
}
