//! What became a hit and what ceased to be one, for routers and for tests.

use crossbeam_queue::ArrayQueue;

use crate::block::BlockHash;
use crate::stats::Counter;

/// Most events that wait to be drained.
pub const MAX_EVENTS: usize = if cfg!(kvtier_loom) { 4 } else { 65_536 };

/// What happened to a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// It became a hit.
    Stored,
    /// It ceased to be one.
    Removed,
}

/// A tier, where it is data rather than a type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TierName {
    /// The engine's own memory.
    Gpu,
    /// Host memory.
    Cpu,
}

/// One change of what a tier holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// Where.
    pub tier: TierName,
    /// To which block.
    pub block_hash: BlockHash,
    /// In which slot of that tier.
    pub block_id: u32,
}

/// Events that wait to be drained; the oldest are dropped, and counted, when nobody drains them.
#[derive(Debug)]
pub(crate) struct EventLog {
    waiting: ArrayQueue<Event>,
    pub(crate) num_dropped: Counter,
}

impl EventLog {
    pub(crate) fn new() -> Self {
        Self { waiting: ArrayQueue::new(MAX_EVENTS), num_dropped: Counter::default() }
    }

    pub(crate) fn push(&self, kind: EventKind, tier: TierName, block_hash: BlockHash, block_id: usize) {
        let event = Event { kind, tier, block_hash, block_id: block_id as u32 };
        self.num_dropped.add(usize::from(self.waiting.force_push(event).is_some()));
    }

    /// What waits now; no more than that, so that the call ends while others go on.
    pub(crate) fn drain(&self) -> Vec<Event> {
        let waiting = self.waiting.len();
        std::iter::from_fn(|| self.waiting.pop()).take(waiting).collect()
    }
}
