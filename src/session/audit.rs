//! Proof of the invariants, in time proportional to the table.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::{Loads, Session};
use crate::block::{BlockId, CpuBlockId, GpuBlockId, TierKind};
use crate::error::{Error, Result};
use crate::slot::State;
use crate::tier::Tier;

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

impl Session {
    /// Proves that every slot is in one state, that every hold has an owner, and that tickets name slots of their own.
    ///
    /// No other thread may use the table or its Cpu tier meanwhile, or the proof may fail for no fault.
    pub fn audit(&mut self) -> Result<()> {
        self.settle();
        let shared = self.shared();
        shared.gpu.audit("gpu")?;
        shared.cpu().audit("cpu")?;
        let mut expected = Expected::default();
        self.audit_requests(&mut expected)?;
        self.audit_tickets(&mut expected)?;
        audit_tier("gpu", &shared.gpu, &expected.gpu_holds, &expected.gpu_in_flight)?;
        // Where other sessions share the Cpu tier, its holds and copies are not all ours to account for.
        if Arc::strong_count(&shared.host) == 1 {
            audit_tier("cpu", shared.cpu(), &expected.cpu_holds, &expected.cpu_in_flight)?;
        }
        for slot in self.store_queue.iter() {
            let state = shared.gpu.word(GpuBlockId::new(slot)).state();
            require(state == State::Cached, || format!("gpu slot {slot}: in the store queue and {state:?}"))?;
        }
        let queued = self.store_queue.iter().count();
        require(queued == self.store_queue.len(), || format!("store queue: {queued} of {}", self.store_queue.len()))
    }

    fn audit_requests(&self, expected: &mut Expected) -> Result<()> {
        let gpu = &self.shared().gpu;
        for request in self.requests.iter() {
            let total = request.num_tokens.div_ceil(self.block_size());
            let full = request.num_tokens / self.block_size();
            require(request.block_ids.len() == total && request.hashes.len() == full, || {
                format!("a request of {} tokens has {} blocks", request.num_tokens, request.block_ids.len())
            })?;
            for (position, &block) in request.block_ids.iter().enumerate() {
                let state = gpu.word(block).state();
                if state == State::Cached {
                    require(gpu.hash(block) == request.hashes[position], || {
                        format!("O2: gpu slot {block:?} is published under another hash than its request's")
                    })?;
                    *expected.gpu_holds.entry(block).or_default() += 1;
                    continue;
                }
                require(state != State::Free, || format!("O1: gpu slot {block:?} of a live request is free"))?;
                require(expected.gpu_owned.insert(block), || format!("O1: gpu slot {block:?} has two owners"))?;
                expected.gpu_holds.insert(block, 1);
                let waits = request.loads != Loads::Finished && request.load_positions().contains(&position);
                require(state != State::InFlight || waits, || {
                    format!("gpu slot {block:?} waits for a load that its request does not have")
                })?;
            }
            if request.loads == Loads::Planned {
                for (position, &source) in request.load_positions().zip(&request.load_sources) {
                    *expected.cpu_holds.entry(source).or_default() += 1;
                    expected.gpu_in_flight.insert(request.block_ids[position]);
                }
            }
        }
        Ok(())
    }

    fn audit_tickets(&self, expected: &mut Expected) -> Result<()> {
        let shared = self.shared();
        for &number in &self.tickets {
            shared.tickets.read(number, |copies| {
                for store in &copies.stores {
                    *expected.gpu_holds.entry(store.source).or_default() += 1;
                    require(shared.gpu.hash(store.source) == shared.cpu().hash(store.destination), || {
                        format!("ticket {number}: the ends of {store:?} have different hashes")
                    })?;
                    require(expected.cpu_in_flight.insert(store.destination), || {
                        format!("O6: cpu slot {:?} is the destination of two tickets", store.destination)
                    })?;
                }
                for load in &copies.loads {
                    *expected.cpu_holds.entry(load.source).or_default() += 1;
                    require(expected.gpu_in_flight.insert(load.destination), || {
                        format!("O6: gpu slot {:?} is the destination of two tickets", load.destination)
                    })?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }
}

fn audit_tier<T: TierKind>(
    name: &str,
    tier: &Tier<T>,
    holds: &HashMap<BlockId<T>, u32>,
    in_flight: &HashSet<BlockId<T>>,
) -> Result<()> {
    for id in (0..tier.len()).map(BlockId::new) {
        let word = tier.word(id);
        let expected = holds.get(&id).copied().unwrap_or(0);
        require(word.num_holds() == expected, || format!("{name} slot {id:?}: {word:?}, {expected} accounted for"))?;
        require((word.state() == State::InFlight) == in_flight.contains(&id), || {
            format!("O6: {name} slot {id:?}: in flight without a copy, or the reverse")
        })?;
    }
    Ok(())
}
