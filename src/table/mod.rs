//! The shared part of a block table: what any thread may do at any time. Look up, read statistics and events, complete
//! tickets. What only the scheduler does is in `session`.

mod complete;
mod config;

use std::sync::Arc;

use crate::block::{BlockHash, TierKind};
use crate::error::{Error, Result};
use crate::event::{Event, EventLog, EventPushes};
use crate::hash::{self, Chain, Identity};
use crate::stats::{Counter, Counters, SharedCounters, Stats};
use crate::sync::{at_least_zero, AcqRel, AtomicI64, AtomicU64, Relaxed, Release};
use crate::ticket::Tickets;
use crate::tier::Tier;
use crate::{Cpu, Gpu};

pub use config::Config;

/// The Cpu tier of one table, or of several that share it.
#[derive(Debug)]
pub(crate) struct HostTier {
    pub(crate) tier: Tier<Cpu>,
    pub(crate) events: EventLog,
    /// Blocks that were withdrawn because a load of them failed, for all sessions.
    pub(crate) num_withdrawn: Counter,
    /// Live requests and open tickets of all sessions; the top bit while a reset runs.
    activity: AtomicU64,
}

const RESETTING: u64 = 1 << 63;

impl HostTier {
    /// Counts `n` more requests or tickets; false, and nothing counted, while a reset runs.
    pub(crate) fn begin_activity(&self, n: usize) -> bool {
        // AcqRel: what follows comes after a reset that has ended.
        if self.activity.fetch_add(n as u64, AcqRel) & RESETTING == 0 {
            return true;
        }
        self.end_activity(n);
        false
    }

    pub(crate) fn end_activity(&self, n: usize) {
        // Release: a reset that sees zero sees everything that was done.
        self.activity.fetch_sub(n as u64, Release);
    }

    /// Keeps new activity out; false if there is some.
    pub(crate) fn begin_reset(&self) -> bool {
        // AcqRel: comes after all activity that has ended. Relaxed on failure: nothing is done.
        self.activity.compare_exchange(0, RESETTING, AcqRel, Relaxed).is_ok()
    }

    pub(crate) fn end_reset(&self) {
        // Release: new activity sees the tiers empty.
        self.activity.fetch_and(!RESETTING, Release);
    }
}

/// What the threads of one session share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) gpu: Tier<Gpu>,
    pub(crate) host: Arc<HostTier>,
    pub(crate) tickets: Tickets,
    pub(crate) counters: SharedCounters,
    pub(crate) num_requests: AtomicI64,
    pub(crate) store_queue_blocks: AtomicI64,
    pub(crate) config: Config,
    pub(crate) root: BlockHash,
}

impl Shared {
    pub(crate) fn new(config: &Config, host: Option<Arc<HostTier>>) -> Result<Self> {
        config.check()?;
        let host = match host {
            Some(host) => host,
            None => Arc::new(HostTier {
                tier: Tier::new(config.cpu_blocks, "cpu_blocks")?,
                events: EventLog::new(),
                num_withdrawn: Counter::default(),
                activity: AtomicU64::new(0),
            }),
        };
        Ok(Self {
            gpu: Tier::new(config.gpu_blocks, "gpu_blocks")?,
            tickets: Tickets::new(config.ranks, config.gpu_blocks + host.tier.len()),
            host,
            counters: SharedCounters::default(),
            num_requests: AtomicI64::new(0),
            store_queue_blocks: AtomicI64::new(0),
            config: config.clone(),
            root: hash::table_root(config.block_size, &config.root, config.algorithm()),
        })
    }

    pub(crate) fn cpu(&self) -> &Tier<Cpu> {
        &self.host.tier
    }

    /// Starts the events of one call.
    pub(crate) fn events(&self) -> EventPushes<'_> {
        self.host.events.pushes()
    }
}

/// A table as any thread sees it. Cloning gives another view of the same table.
#[derive(Debug, Clone)]
pub struct BlockTable {
    pub(crate) shared: Arc<Shared>,
}

impl BlockTable {
    /// What the table was made from.
    pub fn config(&self) -> &Config {
        &self.shared.config
    }

    /// The block hashes of the full blocks of these tokens.
    pub fn block_hashes(&self, token_ids: &[u32], identity: &Identity) -> Result<Vec<BlockHash>> {
        let mut hashes = Vec::new();
        self.start_chain(token_ids, identity, &mut hashes)?;
        Ok(hashes)
    }

    pub(crate) fn start_chain(
        &self,
        token_ids: &[u32],
        identity: &Identity,
        hashes: &mut Vec<BlockHash>,
    ) -> Result<Chain> {
        if let Some(item) = identity.media.iter().find(|item| item.offset >= token_ids.len()) {
            let limit = format!("below the number of tokens, {}", token_ids.len());
            return Err(Error::config("media offset", item.offset, limit));
        }
        let mut chain =
            Chain::new(self.shared.root, self.shared.config.block_size, identity, self.shared.config.algorithm());
        hashes.reserve(token_ids.len() / self.shared.config.block_size);
        chain.extend(token_ids, hashes);
        Ok(chain)
    }

    /// How many blocks `admit` of the same arguments would find: in the Gpu tier, then in the Cpu tier.
    pub fn lookup(&self, token_ids: &[u32], identity: &Identity) -> Result<(usize, usize)> {
        let hashes = self.block_hashes(token_ids, identity)?;
        Ok(self.lookup_hashed(&hashes[..self.num_hittable(token_ids.len())]))
    }

    /// How many leading blocks are in the Gpu tier, and how many after those in the Cpu tier.
    pub fn lookup_hashed(&self, hashes: &[BlockHash]) -> (usize, usize) {
        fn count<T: TierKind>(tier: &Tier<T>, hashes: &[BlockHash]) -> usize {
            let mut num_hits = 0;
            tier.find_each(hashes, |hit| {
                num_hits += usize::from(hit.is_some());
                hit.is_some()
            });
            num_hits
        }
        let gpu_hits = count(&self.shared.gpu, hashes);
        (gpu_hits, count(self.shared.cpu(), &hashes[gpu_hits..]))
    }

    /// Blocks of a request that may hit: one token is always left to compute.
    pub(crate) fn num_hittable(&self, num_tokens: usize) -> usize {
        num_tokens.saturating_sub(1) / self.shared.config.block_size
    }

    /// What became a hit and what ceased to be one since the last call, in order; of the Cpu tier and of all Gpu tiers
    /// that share it.
    pub fn events(&self) -> Vec<Event> {
        self.shared.host.events.drain()
    }

    /// Counters since construction, and gauges of now.
    pub fn stats(&self) -> Stats {
        let shared = &*self.shared;
        // Relaxed: statistics.
        let gauge = |value: &AtomicI64| at_least_zero(value.load(Relaxed));
        Stats {
            gpu: shared.gpu.counts(),
            cpu: shared.cpu().counts(),
            num_requests: gauge(&shared.num_requests),
            num_tickets: shared.tickets.num_open(),
            store_queue_blocks: gauge(&shared.store_queue_blocks),
            counters: Counters { events_dropped: shared.host.events.num_dropped.get(), ..shared.counters.read() },
        }
    }
}
