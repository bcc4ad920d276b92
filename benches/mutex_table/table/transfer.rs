//! Copies between the tiers: `step` plans them, `complete` takes their acknowledgements.

use std::collections::HashMap;

use super::{BlockTable, Published};
use crate::mutex_table::block::{BlockHash, CpuBlockId, GpuBlockId};
use crate::mutex_table::error::Result;
use crate::mutex_table::event::{EventKind, TierName};
use crate::mutex_table::plan::{Copies, Load, Plan};
use crate::mutex_table::session::{Loads, RequestRef};
use crate::mutex_table::tier::State;

impl BlockTable {
    /// Plans the copies that are due now: all loads, then stores within the budget.
    pub(crate) fn step(&mut self) -> Plan {
        let mut plan = Plan::default();
        self.plan_loads(&mut plan);
        self.plan_stores(&mut plan);
        plan
    }

    fn plan_loads(&mut self, plan: &mut Plan) {
        let number = self.tickets.next_number();
        let mut loads = Vec::new();
        for reference in std::mem::take(&mut self.planned_loads) {
            let Some(request) = self.requests.resolve(reference) else { continue };
            let Loads::Planned(sources) = std::mem::replace(&mut request.loads, Loads::Running(number)) else {
                continue;
            };
            loads.extend(request.load_positions().zip(sources).map(|(position, source)| Load {
                source,
                destination: request.block_ids[position],
                owner: reference,
                position,
            }));
        }
        if loads.is_empty() {
            return;
        }
        self.counters.loads_planned_blocks += loads.len() as u64;
        plan.loads = loads.iter().map(|load| (load.source, load.destination)).collect();
        plan.load_ticket = Some(self.tickets.issue(Copies::Loads(loads)));
    }

    fn plan_stores(&mut self, plan: &mut Plan) {
        let waiting = self.store_queue.len();
        let available = self.cpu.num_available();
        let num_stores = waiting.min(self.max_store_blocks_per_step).min(available);
        let left = waiting - num_stores;
        if self.max_store_blocks_per_step <= available {
            plan.num_deferred_budget = left;
        } else {
            plan.num_deferred_no_cpu_slot = left;
        }
        self.counters.stores_deferred_budget_blocks += plan.num_deferred_budget as u64;
        self.counters.stores_deferred_no_cpu_slot_blocks += plan.num_deferred_no_cpu_slot as u64;
        if num_stores == 0 {
            return;
        }

        let Self { cpu, events, counters, .. } = self;
        let slots = cpu.allocate(num_stores, State::InFlight, |id, hash| {
            events.push(EventKind::Removed, TierName::Cpu, hash, id.index());
            counters.cpu_evicted_blocks += 1;
        });
        for slot in slots {
            let Some(source) = self.store_queue.pop_old().map(GpuBlockId::new) else { break };
            if !self.cpu.announce(slot, self.gpu.hash(source)) {
                // Both index buckets are full: the block stays out of the Cpu tier.
                self.cpu.free(slot);
                self.counters.stores_lost_blocks += 1;
                continue;
            }
            self.gpu.hold(source);
            plan.stores.push((source, slot));
        }
        if plan.stores.is_empty() {
            return;
        }
        self.counters.stores_planned_blocks += plan.stores.len() as u64;
        plan.store_ticket = Some(self.tickets.issue(Copies::Stores(plan.stores.clone())));
    }

    /// Takes a rank's acknowledgement of a ticket; `failed` are the indices of the pairs that did not copy there.
    /// True if it was the last rank's.
    pub(crate) fn complete(&mut self, ticket: u64, rank: u32, failed: &[usize]) -> Result<bool> {
        let acknowledged = self.tickets.acknowledge(ticket, rank, failed).inspect_err(|error| {
            self.counters.num_stale_completions +=
                u64::from(matches!(error, crate::mutex_table::error::Error::StaleTicket { .. }));
        })?;
        let Some(ticket) = acknowledged else { return Ok(false) };
        match ticket.copies {
            Copies::Stores(stores) => self.complete_stores(&stores, &ticket.failed),
            Copies::Loads(loads) => self.complete_loads(&loads, &ticket.failed),
        }
        Ok(true)
    }

    fn complete_stores(&mut self, stores: &[(GpuBlockId, CpuBlockId)], failed: &[bool]) {
        for (&(source, slot), _) in stores.iter().zip(failed).filter(|(_, &failed)| failed) {
            self.counters.store_failed_blocks += 1;
            self.cpu.retract(slot);
            self.store_queue.push_young(source.index());
        }
        // Tail first: a parent becomes younger than its children.
        for (&(source, slot), &failed) in stores.iter().zip(failed).rev() {
            if !failed {
                self.counters.stored_blocks += 1;
                self.cpu.publish_announced(slot);
                self.events.push(EventKind::Stored, TierName::Cpu, self.cpu.hash(slot), slot.index());
            }
            self.gpu.unhold(source);
        }
    }

    fn complete_loads(&mut self, loads: &[Load], failed: &[bool]) {
        let first_failed = first_failed_positions(loads, failed);
        for (load, &failed) in loads.iter().zip(failed).rev() {
            let hash = self.cpu.hash(load.source);
            self.finish_load_destination(load, failed, first_failed.get(&load.owner.key()).copied(), hash);
            if failed {
                self.counters.load_failed_blocks += 1;
                self.withdraw(load.source, hash);
            } else {
                self.counters.loaded_blocks += 1;
            }
            self.cpu.unhold(load.source);
        }
        let mut last = None;
        for load in loads {
            // The loads of one request stand together.
            if last.replace(load.owner) != Some(load.owner) {
                self.finish_loads_of(load.owner, first_failed.get(&load.owner.key()).copied());
            }
        }
    }

    fn finish_load_destination(&mut self, load: &Load, failed: bool, first_failed: Option<usize>, hash: BlockHash) {
        let is_owned = self.requests.resolve(load.owner).is_some();
        // Behind a failed block everything is computed again, so it must stay the request's own.
        let is_good = if is_owned { first_failed.is_none_or(|first| load.position < first) } else { !failed };
        if is_good && self.published().publish(load.destination, hash, u32::from(is_owned)) {
            return;
        }
        if is_owned {
            self.gpu.claim(load.destination);
        } else {
            self.gpu.free(load.destination);
        }
    }

    fn withdraw(&mut self, source: CpuBlockId, hash: BlockHash) {
        // Another load of the same block may have failed before.
        if self.cpu.state(source) == State::Cached {
            self.cpu.withdraw(source);
            self.counters.cpu_withdrawn_blocks += 1;
            self.events.push(EventKind::Removed, TierName::Cpu, hash, source.index());
        }
    }

    fn finish_loads_of(&mut self, owner: RequestRef, first_failed: Option<usize>) {
        let Some(request) = self.requests.resolve(owner) else { return };
        request.loads = Loads::Finished;
        request.handled_blocks = first_failed.unwrap_or(request.load_positions().end);
        request.valid_tokens = request.handled_blocks * self.block_size;
        let commit = request.pending_commit.take();
        if let (Some(num_tokens), None) = (commit, first_failed) {
            let Self { gpu, cpu, store_queue, events, .. } = self;
            Published { gpu, cpu, store_queue, events }.commit(request, num_tokens, self.block_size);
        }
    }
}

/// The lowest failed position of each request that has one.
fn first_failed_positions(loads: &[Load], failed: &[bool]) -> HashMap<u64, usize> {
    let mut first = HashMap::new();
    for (load, _) in loads.iter().zip(failed).filter(|(_, &failed)| failed) {
        let position = first.entry(load.owner.key()).or_insert(load.position);
        *position = load.position.min(*position);
    }
    first
}
