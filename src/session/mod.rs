//! What one scheduler does: admit, extend, commit, step, and end requests. A session owns its requests and its Gpu tier;
//! it shares a Cpu tier, and everything in [`BlockTable`], with any number of other threads.

mod admission;
mod audit;
mod ending;
mod requests;
mod step;

use std::sync::Arc;

use crate::block::{BlockHash, GpuBlockId, Mixed};
use crate::error::{Error, Result};
use crate::event::{EventKind, TierName};
use crate::index::Index;
use crate::slot::State;
use crate::slot_list::SlotList;
use crate::sync::Relaxed;
use crate::table::{BlockTable, Config, Shared};
use crate::ticket::Copies;

pub use admission::Admission;
pub use requests::RequestId;
pub(crate) use requests::RequestRef;
use requests::{Loads, Request, Requests};

/// The scheduler's side of a table.
#[derive(Debug)]
pub struct Session {
    table: BlockTable,
    requests: Requests,
    /// Requests whose loads the next step lists, in order of admission.
    planned_loads: Vec<RequestRef>,
    /// How many blocks the Cpu tier had withdrawn before the first of these was admitted.
    num_withdrawn_before: u64,
    /// Published Gpu blocks that the Cpu tier lacks, oldest first.
    store_queue: SlotList,
    /// Tickets issued and not collected, oldest first.
    tickets: Vec<u64>,
    num_collected: u64,
    /// Room for slots on their way from a tier to a request.
    slots: Vec<u32>,
}

impl Session {
    /// Makes an empty table and its session.
    pub fn new(config: &Config) -> Result<Self> {
        Ok(Self::over(Shared::new(config, None)?))
    }

    /// Makes a session with a Gpu tier of its own that shares the Cpu tier of another table.
    pub fn sharing(config: &Config, other: &BlockTable) -> Result<Self> {
        config.check_shareable(other.config())?;
        let shared = Shared::new(config, Some(Arc::clone(&other.shared.host)))?;
        if shared.root != other.shared.root {
            return Err(Error::config("root", format!("{:?}", config.root), "the root of the shared table"));
        }
        Ok(Self::over(shared))
    }

    fn over(shared: Shared) -> Self {
        Self {
            store_queue: SlotList::new(shared.gpu.len()),
            table: BlockTable { shared: Arc::new(shared) },
            requests: Requests::default(),
            planned_loads: Vec::new(),
            num_withdrawn_before: 0,
            tickets: Vec::new(),
            num_collected: 0,
            slots: Vec::new(),
        }
    }

    /// The part that other threads may use.
    pub fn table(&self) -> &BlockTable {
        &self.table
    }

    fn shared(&self) -> &Shared {
        &self.table.shared
    }

    fn block_size(&self) -> usize {
        self.shared().config.block_size
    }

    /// All Gpu block ids of a live request, in order.
    pub fn block_ids(&self, id: &RequestId) -> Result<&[GpuBlockId]> {
        Ok(&self.requests.get(id)?.block_ids)
    }

    /// Whether all loads of the request have finished, well or badly.
    pub fn is_ready(&mut self, id: &RequestId) -> Result<bool> {
        self.settle();
        Ok(self.requests.get(id)?.loads == Loads::Finished)
    }

    /// How many leading tokens have valid KV now.
    pub fn valid_tokens(&mut self, id: &RequestId) -> Result<usize> {
        self.settle();
        Ok(self.requests.get(id)?.valid_tokens)
    }

    /// Tickets that wait for an acknowledgement, oldest first.
    pub fn open_tickets(&mut self) -> Vec<u64> {
        self.settle();
        self.tickets.clone()
    }

    /// As [`BlockTable::complete`], the session taking note at once.
    pub fn complete(&mut self, ticket: u64, rank: u32, failed: &[usize]) -> Result<bool> {
        let result = self.table.complete(ticket, rank, failed);
        self.settle();
        result
    }

    /// Says that the KV of the request's first `num_tokens` tokens is written.
    pub fn commit(&mut self, id: &RequestId, num_tokens: usize) -> Result<()> {
        self.settle();
        let block_size = self.block_size();
        let request = self.requests.get_mut(id)?;
        if num_tokens > request.num_tokens {
            let limit = format!("at most the request's {} tokens", request.num_tokens);
            return Err(Error::config("num_tokens", num_tokens, limit));
        }
        if request.loads == Loads::Finished {
            self.table.shared.commit(&mut self.store_queue, request, num_tokens, block_size);
            self.note_store_queue();
        } else {
            request.pending_commit = request.pending_commit.max(Some(num_tokens));
        }
        Ok(())
    }

    /// Forgets every cached block of this session's Gpu tier and of the Cpu tier; false, and nothing changed, while any
    /// session of the Cpu tier has a live request or an open ticket.
    pub fn reset(&mut self) -> bool {
        self.settle();
        let Self { table, store_queue, .. } = self;
        let shared = &table.shared;
        if !shared.host.begin_reset() {
            return false;
        }
        let mut events = shared.events();
        shared.gpu.clear(|id, hash| {
            store_queue.remove(id.index());
            events.push(EventKind::Removed, TierName::Gpu, hash, id.index());
        });
        shared.cpu().clear(|id, hash| events.push(EventKind::Removed, TierName::Cpu, hash, id.index()));
        drop(events);
        shared.host.end_reset();
        shared.counters.num_resets.add(1);
        self.note_store_queue();
        true
    }

    /// Takes note of tickets that have been finished since the last call: every method begins with it. Other threads
    /// finish tickets; only the session touches its requests and its store queue.
    pub fn settle(&mut self) {
        let num_finished = self.shared().tickets.num_finished();
        if num_finished == self.num_collected {
            return;
        }
        let mut tickets = std::mem::take(&mut self.tickets);
        let table = self.table.clone();
        tickets.retain(|&number| {
            let collected = table.shared.tickets.collect(number, |copies| self.settle_copies(copies));
            self.num_collected += u64::from(collected);
            !collected
        });
        self.tickets = tickets;
        self.note_store_queue();
    }

    fn settle_copies(&mut self, copies: &Copies) {
        let Self { table, requests, store_queue, .. } = self;
        let shared = &*table.shared;
        for (_, store) in copies.stores.iter().enumerate().filter(|&(pair, _)| copies.has_failed(pair)) {
            if shared.is_still_cached(store.source, store.generation) {
                store_queue.push_young(store.source.index());
            } else {
                shared.counters.stores_lost_blocks.add(1);
            }
        }
        // Where another load of the same block has failed, the Cpu tier has lost it.
        let may_be_lost = shared.host.num_withdrawn.get() != copies.num_withdrawn_before;
        for request in copies.loads_by_request().filter(|_| may_be_lost) {
            for load in &request.loads[..request.num_good] {
                if shared.is_still_cached(load.destination, load.generation) {
                    let hash = shared.gpu.hash(load.destination);
                    shared.offer_to_store(store_queue, load.destination, hash.mix(), &hash);
                }
            }
        }
        for loads in copies.loads_by_request() {
            let Some(request) = requests.resolve(loads.loads[0].owner) else { continue };
            request.loads = Loads::Finished;
            request.handled_blocks = request.gpu_hit_blocks + loads.num_good;
            request.valid_tokens = request.handled_blocks * shared.config.block_size;
            let commit = request.pending_commit.take();
            if let (Some(num_tokens), true) = (commit, loads.num_good == loads.loads.len()) {
                shared.commit(store_queue, request, num_tokens, shared.config.block_size);
            }
        }
    }

    fn note_store_queue(&self) {
        // Relaxed: a statistic.
        self.shared().store_queue_blocks.store(self.store_queue.len() as i64, Relaxed);
    }
}

impl Shared {
    fn is_still_cached(&self, id: GpuBlockId, generation: u32) -> bool {
        let word = self.gpu.word(id);
        word.state() == State::Cached && word.generation() == generation
    }

    /// Puts a published Gpu block into the store queue, unless the Cpu tier has it or is receiving it.
    fn offer_to_store(&self, store_queue: &mut SlotList, id: GpuBlockId, mixed: Mixed, hash: &BlockHash) {
        if self.cpu().len() > 0 && !store_queue.contains(id.index()) && !self.cpu().knows(mixed, hash) {
            store_queue.push_young(id.index());
        }
    }

    /// Makes a claimed Gpu block a hit, for the caller to count; false if another block is the hit for this hash already.
    fn publish(&self, store_queue: &mut SlotList, id: GpuBlockId, hash: &BlockHash) -> bool {
        let published = self.gpu.publish(id, hash);
        if published {
            self.events().push(EventKind::Stored, TierName::Gpu, *hash, id.index());
            self.offer_to_store(store_queue, id, hash.mix(), hash);
        }
        published
    }

    /// Publishes every full block of a request up to `num_tokens` that was not handled yet.
    fn commit(&self, store_queue: &mut SlotList, request: &mut Request, num_tokens: usize, block_size: usize) {
        let mut num_published = 0;
        let mut events = self.events();
        let end = num_tokens / block_size;
        while request.handled_blocks < end {
            // A batch has a bit for each of its blocks.
            let batch = request.handled_blocks..end.min(request.handled_blocks + 64);
            let Request { hashes, block_ids, .. } = &*request;
            let mut entered = 0_u64;
            let mut mixed = [Mixed::default(); 64];
            for (position, mixed) in batch.clone().zip(&mut mixed) {
                *mixed = hashes[position].mix();
                self.gpu.prefetch_buckets(*mixed);
                self.cpu().prefetch_buckets(*mixed);
                self.gpu.set_hash(block_ids[position], &hashes[position]);
            }
            for position in batch.clone() {
                let at = position - batch.start;
                let is_entered = self.gpu.enter_first(block_ids[position], mixed[at], &hashes[position]);
                entered |= u64::from(is_entered) << at;
            }
            Index::after_entering();
            for position in batch.clone() {
                let at = position - batch.start;
                let (block, mixed, hash) = (block_ids[position], mixed[at], &hashes[position]);
                // Not published: it stays a private duplicate of the block that is.
                if entered >> at & 1 == 1 && self.gpu.confirm(block, mixed, hash) {
                    self.gpu.publish_entered(block);
                    events.push(EventKind::Stored, TierName::Gpu, *hash, block.index());
                    self.offer_to_store(store_queue, block, mixed, hash);
                    num_published += 1;
                }
            }
            request.handled_blocks = batch.end;
        }
        self.gpu.count_published(num_published);
        request.valid_tokens = request.valid_tokens.max(num_tokens);
    }
}
