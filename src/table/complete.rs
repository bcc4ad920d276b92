//! Acknowledging copies: the last rank of a ticket carries the outcome into the tiers. For any thread.

use super::{BlockTable, Shared};
use crate::block::{CpuBlockId, Mixed};
use crate::error::{Error, Result};
use crate::event::{EventKind, EventPushes, TierName};
use crate::holds::TierReleases;
use crate::index::Index;
use crate::ticket::{Copies, Load, Store};
use crate::Gpu;

/// Blocks that are entered into the index before they are confirmed.
const BATCH: usize = 64;

impl BlockTable {
    /// Takes a rank's acknowledgement of a ticket; `failed` are the indices of the pairs that did not copy there.
    /// True if it was the last rank's.
    pub fn complete(&self, ticket: u64, rank: u32, failed: &[usize]) -> Result<bool> {
        let shared = &*self.shared;
        let acknowledged = shared.tickets.acknowledge(ticket, rank, failed).inspect_err(|error| {
            let is_stale = matches!(error, Error::StaleTicket { .. });
            shared.counters.num_stale_completions.add(usize::from(is_stale));
        })?;
        let Some(outcome) = acknowledged else { return Ok(false) };
        outcome.copies(|copies| {
            shared.complete_stores(copies);
            shared.complete_loads(copies);
        });
        outcome.finish();
        shared.host.end_activity(1);
        Ok(true)
    }
}

impl Shared {
    fn complete_stores(&self, copies: &Copies) {
        let stores = &copies.stores;
        if stores.is_empty() {
            return;
        }
        let (mut cpu, mut gpu) = (self.cpu().releases(stores.len()), self.gpu.releases(stores.len()));
        let mut events = self.events();
        let mut num_failed = 0;
        // Tail first: a parent becomes younger than its children.
        for (pair, &Store { source, destination, .. }) in stores.iter().enumerate().rev() {
            if copies.has_failed(pair) {
                num_failed += 1;
                self.cpu().retract(destination);
            } else {
                // Read while the slot is this ticket's.
                let hash = self.cpu().hash(destination);
                cpu.publish_copied(destination);
                events.push(EventKind::Stored, TierName::Cpu, hash, destination.index());
            }
            gpu.unhold(source);
        }
        self.counters.store_failed_blocks.add(num_failed);
        self.counters.stored_blocks.add(stores.len() - num_failed);
    }

    fn complete_loads(&self, copies: &Copies) {
        let loads = &copies.loads;
        if loads.is_empty() {
            return;
        }
        let (mut cpu, mut gpu) = (self.cpu().releases(loads.len()), self.gpu.releases(loads.len()));
        let mut events = self.events();
        let mut num_failed = 0;
        // By request and tail first in each. Requests in reverse, too: the whole list is walked backwards.
        let mut pair = loads.len();
        for request in loads.chunk_by(|a, b| a.owner == b.owner).rev() {
            let start = pair - request.len();
            let num_good = (start..pair).take_while(|&pair| !copies.has_failed(pair)).count();
            for load in request.iter().rev() {
                pair -= 1;
                // Behind a failed block everything is computed again, so it must stay the request's own.
                if pair >= start + num_good {
                    self.gpu.end_copy(load.destination);
                }
                if copies.has_failed(pair) {
                    num_failed += 1;
                    self.withdraw(load.source, &mut events);
                }
                cpu.unhold(load.source);
            }
            for batch in request[..num_good].rchunks(BATCH) {
                self.publish_loaded(batch, &mut gpu, &mut events);
            }
        }
        self.counters.load_failed_blocks.add(num_failed);
        self.counters.loaded_blocks.add(loads.len() - num_failed);
    }

    /// Makes up to `BATCH` loaded blocks hits, tail first. Where another block is the hit for its hash, a block is its
    /// request's private duplicate, or free.
    fn publish_loaded(&self, loads: &[Load], gpu: &mut TierReleases<'_, Gpu>, events: &mut EventPushes<'_>) {
        let mut mixed = [Mixed::default(); BATCH];
        for (load, mixed) in loads.iter().zip(&mut mixed) {
            *mixed = self.gpu.hash(load.destination).mix();
            self.gpu.prefetch_buckets(*mixed);
        }
        // A bit for each.
        let mut entered = 0_u64;
        for (at, load) in loads.iter().enumerate().rev() {
            let is_entered = self.gpu.enter_first(load.destination, mixed[at], &self.gpu.hash(load.destination));
            entered |= u64::from(is_entered) << at;
        }
        Index::after_entering();
        for (at, load) in loads.iter().enumerate().rev() {
            let hash = self.gpu.hash(load.destination);
            if entered >> at & 1 == 1 && self.gpu.confirm(load.destination, mixed[at], &hash) {
                gpu.publish_copied(load.destination);
                events.push(EventKind::Stored, TierName::Gpu, hash, load.destination.index());
            } else {
                self.gpu.end_copy(load.destination);
            }
        }
    }

    fn withdraw(&self, source: CpuBlockId, events: &mut EventPushes<'_>) {
        let hash = self.cpu().hash(source);
        // Another load of the same block may have failed before.
        if self.cpu().withdraw(source) {
            self.counters.cpu_withdrawn_blocks.add(1);
            self.host.num_withdrawn.add(1);
            events.push(EventKind::Removed, TierName::Cpu, hash, source.index());
        }
    }
}
