//! The block table: two tiers, the requests that use them, and the copies between them.

mod admission;
mod audit;
mod ending;
mod transfer;

use crate::block::{BlockHash, GpuBlockId, MAX_BLOCKS, MAX_BLOCK_SIZE};
use crate::error::{Error, Result};
use crate::event::{Event, EventKind, EventLog, TierName};
use crate::hash;
use crate::plan::{Tickets, MAX_RANKS};
use crate::session::{Loads, Request, RequestId, RequestRef, Requests};
use crate::slot_list::SlotList;
use crate::stats::{Counters, Stats};
use crate::tier::Tier;
use crate::{Cpu, Gpu};

pub use admission::Admission;

/// What a table is made from.
#[derive(Debug, Clone)]
pub struct Config {
    /// Blocks of the Gpu tier, 1 to [`MAX_BLOCKS`].
    pub gpu_blocks: usize,
    /// Blocks of the Cpu tier, up to [`MAX_BLOCKS`]; zero makes a plain prefix cache.
    pub cpu_blocks: usize,
    /// Tokens per block, 1 to [`MAX_BLOCK_SIZE`].
    pub block_size: usize,
    /// Name of the eviction policy: `lru`.
    pub policy: String,
    /// Name of the store mode: `eager`.
    pub store: String,
    /// Most stores that one step plans; none: no limit.
    pub max_store_blocks_per_step: Option<usize>,
    /// Workers that acknowledge each ticket, 1 to 64.
    pub ranks: u32,
    /// Name of the hash function: `sha256`.
    pub hash: String,
    /// Mixed into every block hash.
    pub root: Vec<u8>,
}

impl Config {
    /// The defaults, for the given sizes.
    pub fn new(gpu_blocks: usize, cpu_blocks: usize, block_size: usize) -> Self {
        Self {
            gpu_blocks,
            cpu_blocks,
            block_size,
            policy: "lru".into(),
            store: "eager".into(),
            max_store_blocks_per_step: None,
            ranks: 1,
            hash: "sha256".into(),
            root: Vec::new(),
        }
    }

    fn check(&self) -> Result<()> {
        let sizes = [
            ("gpu_blocks", self.gpu_blocks, 1, MAX_BLOCKS),
            ("cpu_blocks", self.cpu_blocks, 0, MAX_BLOCKS),
            ("block_size", self.block_size, 1, MAX_BLOCK_SIZE),
            ("ranks", self.ranks as usize, 1, MAX_RANKS),
        ];
        for (name, value, low, high) in sizes {
            if !(low..=high).contains(&value) {
                return Err(Error::config(name, value, format!("{low} .. {high}")));
            }
        }
        let names = [("policy", &self.policy, "lru"), ("store", &self.store, "eager"), ("hash", &self.hash, "sha256")];
        for (argument, name, known) in names {
            if name != known {
                return Err(Error::config(argument, format!("{name:?}"), format!("one of: {known:?}")));
            }
        }
        Ok(())
    }
}

/// The block allocator of an engine, with a Gpu tier and a Cpu tier.
#[derive(Debug)]
pub struct BlockTable {
    gpu: Tier<Gpu>,
    cpu: Tier<Cpu>,
    block_size: usize,
    max_store_blocks_per_step: usize,
    root: BlockHash,
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
    /// Makes an empty table.
    pub fn new(config: &Config) -> Result<Self> {
        config.check()?;
        Ok(Self {
            gpu: Tier::new(config.gpu_blocks),
            cpu: Tier::new(config.cpu_blocks),
            block_size: config.block_size,
            max_store_blocks_per_step: config.max_store_blocks_per_step.unwrap_or(usize::MAX),
            root: hash::table_root(config.block_size, &config.root),
            requests: Requests::default(),
            planned_loads: Vec::new(),
            store_queue: SlotList::new(config.gpu_blocks),
            tickets: Tickets::new(config.ranks),
            events: EventLog::default(),
            counters: Counters::default(),
        })
    }

    /// Blocks of the Gpu tier.
    pub fn gpu_blocks(&self) -> usize {
        self.gpu.len()
    }

    /// Blocks of the Cpu tier.
    pub fn cpu_blocks(&self) -> usize {
        self.cpu.len()
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Workers that acknowledge each ticket.
    pub fn ranks(&self) -> u32 {
        self.tickets.ranks()
    }

    /// All Gpu block ids of a live request, in order.
    pub fn block_ids(&self, id: &RequestId) -> Result<&[GpuBlockId]> {
        Ok(&self.requests.get(id)?.block_ids)
    }

    /// Whether all loads of the request have finished, well or badly.
    pub fn is_ready(&self, id: &RequestId) -> Result<bool> {
        Ok(self.requests.get(id)?.loads == Loads::Finished)
    }

    /// How many leading tokens have valid KV now.
    pub fn valid_tokens(&self, id: &RequestId) -> Result<usize> {
        Ok(self.requests.get(id)?.valid_tokens)
    }

    /// Tickets that wait for an acknowledgement, oldest first.
    pub fn open_tickets(&self) -> Vec<u64> {
        self.tickets.numbers().collect()
    }

    /// Says that the KV of the request's first `num_tokens` tokens is written.
    pub fn commit(&mut self, id: &RequestId, num_tokens: usize) -> Result<()> {
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

    /// Forgets every cached block of both tiers; false, and nothing changed, while a request is live or a ticket open.
    pub fn reset(&mut self) -> bool {
        if self.requests.len() > 0 || self.tickets.len() > 0 {
            return false;
        }
        let Self { gpu, cpu, store_queue, events, .. } = self;
        gpu.clear(|id, hash| {
            store_queue.remove(id.index());
            events.push(EventKind::Removed, TierName::Gpu, hash, id.index());
        });
        cpu.clear(|id, hash| events.push(EventKind::Removed, TierName::Cpu, hash, id.index()));
        self.counters.num_resets += 1;
        true
    }

    /// What became a hit and what ceased to be one since the last call, in order.
    pub fn events(&mut self) -> Vec<Event> {
        self.events.drain()
    }

    /// Counters since construction, and gauges of now.
    pub fn stats(&self) -> Stats {
        Stats {
            gpu: self.gpu.counts(),
            cpu: self.cpu.counts(),
            num_requests: self.requests.len(),
            num_tickets: self.tickets.len(),
            store_queue_blocks: self.store_queue.len(),
            counters: Counters { events_dropped: self.events.num_dropped, ..self.counters.clone() },
        }
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
