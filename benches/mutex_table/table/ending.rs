//! The end of a request: `release`, `abort`, `preempt`.

use super::{BlockTable, Published};
use crate::mutex_table::error::Result;
use crate::mutex_table::session::{Loads, Request, RequestId};
use crate::mutex_table::tier::State;

impl BlockTable {
    /// Ends a finished request; its committed full blocks stay cached.
    pub(crate) fn release(&mut self, id: &RequestId) -> Result<()> {
        self.end(id)?;
        self.counters.num_released += 1;
        Ok(())
    }

    fn end(&mut self, id: &RequestId) -> Result<()> {
        let (reference, request) = self.requests.remove(id)?;
        if matches!(request.loads, Loads::Planned(_)) {
            self.planned_loads.retain(|&planned| planned != reference);
        }
        // Tail first: a parent becomes younger than its children, and so outlives them.
        for position in (0..request.block_ids.len()).rev() {
            self.end_block(&request, position);
            let is_refreshed = (request.gpu_hit_blocks..request.handled_blocks).contains(&position);
            if let Some(copy) = is_refreshed.then(|| self.cpu.find_cached(&request.hashes[position])).flatten() {
                self.cpu.refresh(copy);
            }
        }
        Ok(())
    }

    fn end_block(&mut self, request: &Request, position: usize) {
        let block = request.block_ids[position];
        match self.gpu.state(block) {
            State::Cached => self.gpu.unhold(block),
            State::Claimed if position < request.handled_blocks => self.end_private_duplicate(request, position),
            State::Claimed => self.gpu.free(block),
            State::InFlight => {
                // Under a ticket the copy goes on; its completion finds that the request has gone.
                if let Loads::Planned(sources) = &request.loads {
                    self.gpu.free(block);
                    self.cpu.unhold(sources[position - request.gpu_hit_blocks]);
                    self.counters.loads_cancelled_blocks += 1;
                }
            }
            State::Free => debug_assert!(false, "a request's block is free"),
        }
    }

    /// The block has valid content under a hash that another block was published for.
    fn end_private_duplicate(&mut self, request: &Request, position: usize) {
        let (block, hash) = (request.block_ids[position], request.hashes[position]);
        if let Some(twin) = self.gpu.find_cached(&hash) {
            self.gpu.refresh(twin);
        } else if self.published().publish(block, hash, 0) {
            return;
        }
        self.gpu.free(block);
    }

    /// What publishing touches, apart from the requests.
    pub(super) fn published(&mut self) -> Published<'_> {
        Published { gpu: &mut self.gpu, cpu: &self.cpu, store_queue: &mut self.store_queue, events: &mut self.events }
    }
}
