//! The block table: two tiers, the requests that use them, and the copies between them.

mod admission;
mod ending;
mod transfer;

use crate::mutex_table::block::{BlockHash, GpuBlockId};
use crate::mutex_table::error::{Error, Result};
use crate::mutex_table::event::{EventKind, EventLog, TierName};
use crate::mutex_table::plan::Tickets;
use crate::mutex_table::session::{Loads, Request, RequestId, RequestRef, Requests};
use crate::mutex_table::slot_list::SlotList;
use crate::mutex_table::stats::Counters;
use crate::mutex_table::tier::Tier;
use crate::mutex_table::{Cpu, Gpu};

/// The block allocator of an engine, with a Gpu tier and a Cpu tier.
#[derive(Debug)]
pub(crate) struct BlockTable {
    gpu: Tier<Gpu>,
    cpu: Tier<Cpu>,
    block_size: usize,
    max_store_blocks_per_step: usize,
    requests: Requests,
    /// Requests whose loads the next step lists, in order of admission.
    planned_loads: Vec<RequestRef>,
    /// Published Gpu blocks that the Cpu tier lacks, oldest first.
    store_queue: SlotList,
    tickets: Tickets,
    events: EventLog,
    counters: Counters,
}

impl BlockTable {
    /// Makes an empty table with one rank.
    pub(crate) fn new(gpu_blocks: usize, cpu_blocks: usize, block_size: usize) -> Self {
        Self {
            gpu: Tier::new(gpu_blocks),
            cpu: Tier::new(cpu_blocks),
            block_size,
            max_store_blocks_per_step: usize::MAX,
            requests: Requests::default(),
            planned_loads: Vec::new(),
            store_queue: SlotList::new(gpu_blocks),
            tickets: Tickets::new(1),
            events: EventLog::default(),
            counters: Counters::default(),
        }
    }

    /// Says that the KV of the request's first `num_tokens` tokens is written.
    pub(crate) fn commit(&mut self, id: &RequestId, num_tokens: usize) -> Result<()> {
        let request = self.requests.get_mut(id)?;
        if num_tokens > request.num_tokens {
            let limit = format!("at most the request's {} tokens", request.num_tokens);
            return Err(Error::config("num_tokens", num_tokens, limit));
        }
        if request.loads != Loads::Finished {
            request.pending_commit = request.pending_commit.max(Some(num_tokens));
            return Ok(());
        }
        let Self { gpu, cpu, store_queue, events, block_size, .. } = self;
        Published { gpu, cpu, store_queue, events }.commit(request, num_tokens, *block_size);
        Ok(())
    }
}

/// The parts of a table that publishing a Gpu block touches, borrowed apart from its requests.
struct Published<'a> {
    gpu: &'a mut Tier<Gpu>,
    cpu: &'a Tier<Cpu>,
    store_queue: &'a mut SlotList,
    events: &'a mut EventLog,
}

impl Published<'_> {
    /// Makes a Gpu block a hit; false if another block is the hit for this hash already.
    fn publish(&mut self, id: GpuBlockId, hash: BlockHash, num_holds: u32) -> bool {
        if !self.gpu.publish(id, hash, num_holds) {
            return false;
        }
        self.events.push(EventKind::Stored, TierName::Gpu, hash, id.index());
        if self.cpu.len() > 0 && self.cpu.find(&hash).is_none() {
            self.store_queue.push_young(id.index());
        }
        true
    }

    /// Publishes every full block of a request up to `num_tokens` that was not handled yet.
    fn commit(&mut self, request: &mut Request, num_tokens: usize, block_size: usize) {
        for position in request.handled_blocks..num_tokens / block_size {
            // Not published: it stays a private duplicate of the block that is.
            let _ = self.publish(request.block_ids[position], request.hashes[position], 1);
            request.handled_blocks = position + 1;
        }
        request.valid_tokens = request.valid_tokens.max(num_tokens);
    }
}
