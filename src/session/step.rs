//! Planning the copies of a step.

use super::admission::cpu_ids;
use super::{Loads, Session};
use crate::block::GpuBlockId;
use crate::event::{EventKind, TierName};
use crate::index::Index;
use crate::plan::Plan;
use crate::ticket::{Load, Store};

impl Session {
    /// Plans the copies that are due now: all loads, then stores within the budget.
    pub fn step(&mut self) -> Plan {
        let mut plan = Plan::default();
        self.step_into(&mut plan);
        plan
    }

    /// As `step`, into a plan whose memory is used again.
    pub fn step_into(&mut self, plan: &mut Plan) {
        self.settle();
        plan.clear();
        self.plan_loads(plan);
        self.plan_stores(plan);
    }

    fn plan_loads(&mut self, plan: &mut Plan) {
        if self.planned_loads.is_empty() {
            return;
        }
        let Self { table, requests, planned_loads, num_withdrawn_before, .. } = self;
        let shared = &*table.shared;
        // The requests that these loads belong to are live, so no reset can run.
        shared.host.begin_activity(1);
        plan.load_ticket = shared.tickets.issue(|_, copies| {
            copies.num_withdrawn_before = *num_withdrawn_before;
            for owner in planned_loads.drain(..) {
                let Some(request) = requests.resolve(owner) else { continue };
                request.loads = Loads::Running;
                for (position, &source) in request.load_positions().zip(&request.load_sources) {
                    let destination = request.block_ids[position];
                    let generation = shared.gpu.word(destination).generation();
                    copies.loads.push(Load { source, destination, generation, owner });
                }
            }
            plan.loads.extend(copies.loads.iter().map(|load| (load.source, load.destination)));
        });
        shared.counters.loads_planned_blocks.add(plan.loads.len());
        match plan.load_ticket {
            Some(number) => self.tickets.push(number),
            None => shared.host.end_activity(1),
        }
    }

    fn plan_stores(&mut self, plan: &mut Plan) {
        let table = self.table.clone();
        let shared = &*table.shared;
        let budget = shared.config.max_store_blocks_per_step.unwrap_or(usize::MAX);
        let available = shared.cpu().num_available();
        let wanted = self.store_queue.len().min(budget).min(available);
        if wanted > 0 && shared.host.begin_activity(1) {
            plan.store_ticket = shared.tickets.issue(|_, copies| {
                self.fill_stores(wanted, &mut copies.stores);
                plan.stores.extend(copies.stores.iter().map(|store| (store.source, store.destination)));
            });
            match plan.store_ticket {
                Some(number) => self.tickets.push(number),
                None => shared.host.end_activity(1),
            }
        }
        shared.counters.stores_planned_blocks.add(plan.stores.len());
        let left = self.store_queue.len();
        if budget <= available {
            plan.num_deferred_budget = left;
        } else {
            plan.num_deferred_no_cpu_slot = left;
        }
        shared.counters.stores_deferred_budget_blocks.add(plan.num_deferred_budget);
        shared.counters.stores_deferred_no_cpu_slot_blocks.add(plan.num_deferred_no_cpu_slot);
        self.note_store_queue();
    }

    /// Takes Cpu slots for up to `wanted` blocks of the store queue.
    fn fill_stores(&mut self, wanted: usize, stores: &mut Vec<Store>) {
        let Self { table, store_queue, slots, .. } = self;
        let shared = &*table.shared;
        slots.clear();
        let mut num_evicted = 0;
        let mut events = shared.events();
        // Fewer than wanted where another session was faster, or is evicting now: the rest is stored at a later step.
        shared.cpu().allocate(wanted, slots, |id, hash| {
            events.push(EventKind::Removed, TierName::Cpu, hash, id.index());
            num_evicted += 1;
        });
        drop(events);
        shared.counters.cpu_evicted_blocks.add(num_evicted);
        // Before anybody can end one of the copies.
        shared.cpu().count_expected(slots.len().min(store_queue.len()));
        for destination in cpu_ids(slots) {
            let Some(source) = store_queue.pop_old().map(GpuBlockId::new) else {
                shared.cpu().releases(1).unhold(destination);
                continue;
            };
            shared.cpu().set_hash(destination, &shared.gpu.hash(source));
            // In flight before it is in the index, so that whoever finds it there knows that it is on its way.
            shared.cpu().expect_copy(destination, 0);
            stores.push(Store { source, generation: shared.gpu.word(source).generation(), destination });
        }
        // Of a block that another session stores just now, or for which both index buckets are full.
        let forget = |store: &Store| {
            shared.cpu().end_copy(store.destination);
            shared.counters.stores_lost_blocks.add(1);
        };
        // In passes of their own: an exchange waits until what was written before it has reached the cache.
        stores.retain(|store| {
            let hash = shared.cpu().hash(store.destination);
            let is_entered = shared.cpu().enter_first(store.destination, hash.mix(), &hash);
            if !is_entered {
                forget(store);
            }
            is_entered
        });
        Index::after_entering();
        let mut holds = shared.gpu.holds();
        stores.retain(|store| {
            let hash = shared.cpu().hash(store.destination);
            let is_confirmed = shared.cpu().confirm(store.destination, hash.mix(), &hash);
            if is_confirmed {
                holds.hold_cached(store.source);
            } else {
                forget(store);
            }
            is_confirmed
        });
    }
}
