//! Proof of the invariants, in time proportional to the table.

use std::collections::{HashMap, HashSet};

use super::BlockTable;
use crate::block::{CpuBlockId, GpuBlockId};
use crate::error::{Error, Result};
use crate::plan::Copies;
use crate::session::Loads;
use crate::tier::State;

/// Holds and owners, counted from requests and tickets.
#[derive(Default)]
struct Expected {
    gpu_holds: HashMap<GpuBlockId, u32>,
    cpu_holds: HashMap<CpuBlockId, u32>,
    /// Gpu slots that exactly one request owns.
    gpu_owned: HashSet<GpuBlockId>,
    gpu_in_flight: HashSet<GpuBlockId>,
    cpu_in_flight: HashSet<CpuBlockId>,
}

fn require(holds: bool, what: impl FnOnce() -> String) -> Result<()> {
    if holds {
        Ok(())
    } else {
        Err(Error::Invariant(what()))
    }
}

impl BlockTable {
    /// Proves that every slot is in one state, that every hold has an owner, and that tickets name slots of their own.
    pub fn audit(&self) -> Result<()> {
        self.gpu.audit("gpu")?;
        self.cpu.audit("cpu")?;
        let mut expected = Expected::default();
        self.audit_requests(&mut expected)?;
        self.audit_tickets(&mut expected)?;
        self.audit_gpu(&expected)?;
        for index in 0..self.cpu.len() {
            let id = CpuBlockId::new(index);
            let holds = expected.cpu_holds.get(&id).copied().unwrap_or(0);
            require(self.cpu.num_holds(id) == holds, || {
                format!("cpu slot {id:?}: {} holds kept, {holds} accounted for", self.cpu.num_holds(id))
            })?;
            let in_flight = expected.cpu_in_flight.contains(&id);
            require((self.cpu.state(id) == State::InFlight) == in_flight, || {
                format!("O6: cpu slot {id:?}: in flight without a ticket, or the reverse")
            })?;
        }
        Ok(())
    }

    fn audit_gpu(&self, expected: &Expected) -> Result<()> {
        for index in 0..self.gpu.len() {
            let id = GpuBlockId::new(index);
            let state = self.gpu.state(id);
            let holds = expected.gpu_holds.get(&id).copied().unwrap_or(0);
            require(self.gpu.num_holds(id) == holds, || {
                format!("gpu slot {id:?}: {} holds kept, {holds} accounted for", self.gpu.num_holds(id))
            })?;
            require((state == State::InFlight) == expected.gpu_in_flight.contains(&id), || {
                format!("O6: gpu slot {id:?}: in flight without a load, or the reverse")
            })?;
            require(!self.store_queue.contains(index) || state == State::Cached, || {
                format!("gpu slot {id:?}: in the store queue and not published")
            })?;
        }
        let queued = self.store_queue.iter().count();
        require(queued == self.store_queue.len(), || {
            format!("store queue: {queued} slots, {} kept", self.store_queue.len())
        })
    }

    fn audit_requests(&self, expected: &mut Expected) -> Result<()> {
        for request in self.requests.iter() {
            let total = request.num_tokens.div_ceil(self.block_size);
            let full = request.num_tokens / self.block_size;
            require(request.block_ids.len() == total && request.hashes.len() == full, || {
                format!("a request of {} tokens has {} blocks", request.num_tokens, request.block_ids.len())
            })?;
            for (position, &block) in request.block_ids.iter().enumerate() {
                match self.gpu.state(block) {
                    State::Cached => {
                        require(self.gpu.hash(block) == request.hashes[position], || {
                            format!("O2: gpu slot {block:?} is published under another hash than its request's")
                        })?;
                        *expected.gpu_holds.entry(block).or_default() += 1;
                    }
                    State::Claimed => {
                        expected.gpu_holds.insert(block, 1);
                        require(expected.gpu_owned.insert(block), || format!("O1: gpu slot {block:?} has two owners"))?;
                    }
                    State::InFlight => {
                        require(expected.gpu_owned.insert(block), || format!("O1: gpu slot {block:?} has two owners"))?;
                        require(
                            request.loads != Loads::Finished && request.load_positions().contains(&position),
                            || format!("gpu slot {block:?} waits for a load that its request does not have"),
                        )?;
                    }
                    State::Free => {
                        return Err(Error::Invariant(format!("O1: gpu slot {block:?} of a live request is free")));
                    }
                }
            }
            if let Loads::Planned(sources) = &request.loads {
                for (&source, position) in sources.iter().zip(request.load_positions()) {
                    *expected.cpu_holds.entry(source).or_default() += 1;
                    expected.gpu_in_flight.insert(request.block_ids[position]);
                }
            }
        }
        Ok(())
    }

    fn audit_tickets(&self, expected: &mut Expected) -> Result<()> {
        for (number, ticket) in self.tickets.iter() {
            match &ticket.copies {
                Copies::Stores(stores) => {
                    for &(source, slot) in stores {
                        *expected.gpu_holds.entry(source).or_default() += 1;
                        require(self.gpu.hash(source) == self.cpu.hash(slot), || {
                            format!("ticket {number}: source {source:?} and destination {slot:?} have different hashes")
                        })?;
                        require(expected.cpu_in_flight.insert(slot), || {
                            format!("O6: cpu slot {slot:?} is the destination of two tickets")
                        })?;
                    }
                }
                Copies::Loads(loads) => {
                    for load in loads {
                        *expected.cpu_holds.entry(load.source).or_default() += 1;
                        require(expected.gpu_in_flight.insert(load.destination), || {
                            format!("O6: gpu slot {:?} is the destination of two tickets", load.destination)
                        })?;
                    }
                }
            }
        }
        Ok(())
    }
}
