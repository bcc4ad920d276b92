//! The Cpu tier beside an engine that owns its Gpu blocks itself: no requests and no Gpu tier, only what host memory
//! holds, which copies are under way, and what they keep.
//!
//! Blocks are keyed by the engine's own 32-byte hashes, as they are. A table serves one group of layers, since a hash
//! names the tokens and not the layers; Gpu block ids pass through it unchanged.

mod complete;
mod counters;
mod history;

use std::collections::{BTreeMap, HashMap};

use crate::block::{BlockHash, CpuBlockId, MAX_BLOCKS};
use crate::error::{Error, Result};
use crate::event::{Event, EventKind, EventLog, TierName};
use crate::index::Inserted;
use crate::ticket::MAX_RANKS;
use crate::tier::{Tier, TierCounts};
use crate::Cpu;

pub use counters::HostCounters;
use history::History;

/// What `lookup` found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostHits {
    /// Leading blocks that can be loaded now.
    pub num_blocks: usize,
    /// Whether the block after those is under an open load ticket: it is better joined than loaded twice.
    pub is_loading: bool,
}

/// Copies under one ticket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPlan {
    /// To be acknowledged by every rank.
    pub ticket: u64,
    /// (Cpu block, Gpu block of the engine); the direction is that of the call.
    pub pairs: Vec<(CpuBlockId, u32)>,
}

/// What became of an offer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Offer {
    /// The stores to make, if any.
    pub plan: Option<HostPlan>,
    /// Blocks left out because the tier has them or is receiving them.
    pub num_known: usize,
    /// Blocks left out for the budget.
    pub num_over_budget: usize,
    /// Blocks left out for want of a Cpu slot.
    pub num_no_slot: usize,
    /// Blocks left out because they were used only once.
    pub num_first_use: usize,
}

/// Which of the blocks that the tier lacks an offer stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stores {
    /// All of them.
    All,
    /// Those that were used twice, as `HostTable::note_use` was told.
    Repeated,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Load,
    Store,
}

/// A ticket that some rank has not acknowledged.
#[derive(Debug)]
struct Open {
    direction: Direction,
    blocks: Vec<CpuBlockId>,
    /// Per pair: some rank failed to copy it.
    failed: Vec<bool>,
    /// A bit per rank that has acknowledged.
    acknowledged: u32,
}

/// The Cpu tier of an engine that owns its Gpu blocks. For one thread at a time.
#[derive(Debug)]
pub struct HostTable {
    tier: Tier<Cpu>,
    ranks: u32,
    last_ticket: u64,
    open: BTreeMap<u64, Open>,
    /// Blocks under open load tickets, with the number of those.
    loading: HashMap<BlockHash, u32>,
    history: History,
    events: EventLog,
    counters: HostCounters,
    slots: Vec<u32>,
}

impl HostTable {
    /// An empty table of `cpu_blocks` slots, whose tickets wait for `ranks` workers.
    pub fn new(cpu_blocks: usize, ranks: u32) -> Result<Self> {
        if !(1..=MAX_BLOCKS).contains(&cpu_blocks) {
            return Err(Error::config("cpu_blocks", cpu_blocks, format!("1 .. {MAX_BLOCKS}")));
        }
        if !(1..=MAX_RANKS).contains(&(ranks as usize)) {
            return Err(Error::config("ranks", ranks, format!("1 .. {MAX_RANKS}")));
        }
        Ok(Self {
            tier: Tier::new(cpu_blocks, "cpu_blocks")?,
            ranks,
            last_ticket: 0,
            open: BTreeMap::new(),
            loading: HashMap::new(),
            history: History::new(0),
            events: EventLog::new(),
            counters: HostCounters::default(),
            slots: Vec::new(),
        })
    }

    /// Remembers the uses of the last `num_blocks` different blocks, for `Stores::Repeated`.
    #[must_use]
    pub fn with_history(mut self, num_blocks: usize) -> Self {
        self.history = History::new(num_blocks);
        self
    }

    /// Takes note that a request uses blocks; once per request and block.
    pub fn note_use(&mut self, hashes: &[BlockHash]) {
        for hash in hashes {
            self.history.note(hash);
        }
    }

    /// Slots of the tier.
    pub fn cpu_blocks(&self) -> usize {
        self.tier.len()
    }

    /// Workers that acknowledge each ticket.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// How many leading blocks could be loaded now. Holds nothing.
    pub fn lookup(&mut self, hashes: &[BlockHash]) -> HostHits {
        let mut hits = HostHits { num_blocks: 0, is_loading: false };
        let (tier, loading) = (&self.tier, &self.loading);
        let mut next = hashes.iter();
        tier.find_each(hashes, |hit| {
            hits.is_loading = next.next().is_some_and(|hash| loading.contains_key(hash));
            let is_hit = hit.is_some() && !hits.is_loading;
            hits.num_blocks += usize::from(is_hit);
            is_hit
        });
        self.counters.num_lookups += 1;
        self.counters.lookup_blocks += hashes.len() as u64;
        self.counters.hit_blocks += hits.num_blocks as u64;
        hits
    }

    /// Plans loads of hits to Gpu blocks of the engine, and holds the hits until every rank has acknowledged. None, and
    /// nothing changed, if one of them is not a hit any more.
    pub fn load(&mut self, hashes: &[BlockHash], gpu_ids: &[u32]) -> Result<Option<HostPlan>> {
        check_lengths(hashes, gpu_ids)?;
        let mut blocks = Vec::with_capacity(hashes.len());
        let tier = &self.tier;
        let mut holds = tier.holds();
        tier.find_each(hashes, |hit| match hit {
            Some(hit) if holds.hold(&hit) => {
                blocks.push(hit.id);
                true
            }
            _ => false,
        });
        drop(holds);
        if blocks.len() < hashes.len() || blocks.is_empty() {
            let mut releases = tier.releases(blocks.len());
            for &block in blocks.iter().rev() {
                releases.unhold(block);
            }
            self.counters.loads_lost_blocks += hashes.len() as u64;
            return Ok(None);
        }
        for hash in hashes {
            *self.loading.entry(*hash).or_default() += 1;
        }
        self.counters.loads_planned_blocks += blocks.len() as u64;
        Ok(Some(self.issue(Direction::Load, blocks, gpu_ids.iter().copied())))
    }

    /// Plans stores of those blocks that the tier lacks, at most `budget`; evicts for them. What was left out may be
    /// offered again.
    pub fn offer(&mut self, hashes: &[BlockHash], gpu_ids: &[u32], budget: usize, which: Stores) -> Result<Offer> {
        check_lengths(hashes, gpu_ids)?;
        let mut unknown: Vec<usize> =
            (0..hashes.len()).filter(|&at| !self.tier.knows(hashes[at].mix(), &hashes[at])).collect();
        let mut offer = Offer { num_known: hashes.len() - unknown.len(), ..Offer::default() };
        if which == Stores::Repeated {
            let before = unknown.len();
            unknown.retain(|&at| self.history.is_repeated(&hashes[at]));
            offer.num_first_use = before - unknown.len();
        }
        let wanted = unknown.len().min(budget);
        offer.num_over_budget = unknown.len() - wanted;
        let Self { tier, events, counters, slots, .. } = self;
        slots.clear();
        let mut events = events.pushes();
        tier.allocate(wanted, slots, |id, hash| {
            events.push(EventKind::Removed, TierName::Cpu, hash, id.index());
            counters.evicted_blocks += 1;
        });
        drop(events);
        offer.num_no_slot = wanted - slots.len();
        tier.count_expected(slots.len());
        let (mut blocks, mut sources) = (Vec::with_capacity(slots.len()), Vec::with_capacity(slots.len()));
        for (&slot, &at) in slots.iter().zip(&unknown) {
            let block = CpuBlockId::new(slot as usize);
            tier.set_hash(block, &hashes[at]);
            // In flight before it is in the index: whoever finds it there sees that it is on its way.
            tier.expect_copy(block, 0);
            match tier.enter(block, &hashes[at]) {
                Inserted::Yes => {
                    blocks.push(block);
                    sources.push(gpu_ids[at]);
                }
                // The offer names it twice.
                Inserted::Exists => {
                    tier.end_copy(block);
                    offer.num_known += 1;
                }
                // Both index buckets are full.
                Inserted::Full => {
                    tier.end_copy(block);
                    offer.num_no_slot += 1;
                }
            }
        }
        counters.offered_blocks += hashes.len() as u64;
        counters.known_blocks += offer.num_known as u64;
        counters.over_budget_blocks += offer.num_over_budget as u64;
        counters.no_slot_blocks += offer.num_no_slot as u64;
        counters.first_use_blocks += offer.num_first_use as u64;
        counters.stores_planned_blocks += blocks.len() as u64;
        if !blocks.is_empty() {
            offer.plan = Some(self.issue(Direction::Store, blocks, sources.into_iter()));
        }
        Ok(offer)
    }

    fn issue(&mut self, direction: Direction, blocks: Vec<CpuBlockId>, gpu: impl Iterator<Item = u32>) -> HostPlan {
        self.last_ticket += 1;
        let pairs = blocks.iter().copied().zip(gpu).collect();
        let failed = vec![false; blocks.len()];
        self.open.insert(self.last_ticket, Open { direction, blocks, failed, acknowledged: 0 });
        HostPlan { ticket: self.last_ticket, pairs }
    }

    /// Tickets that wait for an acknowledgement, oldest first.
    pub fn open_tickets(&self) -> Vec<u64> {
        self.open.keys().copied().collect()
    }

    /// Forgets every block, and what open stores bring: those count as failed. False, and nothing changed, while a load
    /// is open.
    pub fn reset(&mut self) -> bool {
        if self.open.values().any(|open| open.direction == Direction::Load) {
            return false;
        }
        for open in self.open.values_mut() {
            open.failed.fill(true);
        }
        self.history.clear();
        let Self { tier, events, .. } = self;
        let mut events = events.pushes();
        tier.clear(|id, hash| events.push(EventKind::Removed, TierName::Cpu, hash, id.index()));
        drop(events);
        self.counters.num_resets += 1;
        true
    }

    /// What became a hit and what ceased to be one since the last call, in order.
    pub fn events(&self) -> Vec<Event> {
        self.events.drain()
    }

    /// Slots by state.
    pub fn counts(&self) -> TierCounts {
        self.tier.counts()
    }

    /// Counters since construction.
    pub fn counters(&self) -> HostCounters {
        HostCounters { events_dropped: self.events.num_dropped.get(), ..self.counters.clone() }
    }

    /// Proves that every slot is in one state, and that every hold and every copy belongs to a ticket.
    pub fn audit(&self) -> Result<()> {
        self.tier.audit("cpu")?;
        let counts = self.tier.counts();
        let broken = |what: String| Err(Error::Invariant(what));
        let (mut num_in_flight, mut holds) = (0, HashMap::<CpuBlockId, u32>::new());
        let mut loading = HashMap::<BlockHash, u32>::new();
        for open in self.open.values() {
            for &block in &open.blocks {
                if open.direction == Direction::Store {
                    num_in_flight += 1;
                } else {
                    *holds.entry(block).or_default() += 1;
                    *loading.entry(self.tier.hash(block)).or_default() += 1;
                }
            }
        }
        if num_in_flight != counts.in_flight {
            return broken(format!("{} slots in flight, {num_in_flight} under store tickets", counts.in_flight));
        }
        if counts.held != holds.len() {
            return broken(format!("{} slots held, {} under load tickets", counts.held, holds.len()));
        }
        for (block, num_holds) in holds {
            if self.tier.word(block).num_holds() != num_holds {
                return broken(format!("cpu slot {block:?}: {:?}, {num_holds} load tickets", self.tier.word(block)));
            }
        }
        if loading != self.loading {
            return broken("the blocks under load tickets are not those that are being loaded".to_owned());
        }
        Ok(())
    }
}

fn check_lengths(hashes: &[BlockHash], gpu_ids: &[u32]) -> Result<()> {
    if hashes.len() == gpu_ids.len() {
        return Ok(());
    }
    Err(Error::config("gpu_ids", format!("{} ids", gpu_ids.len()), format!("one per digest, {}", hashes.len())))
}
