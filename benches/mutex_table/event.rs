//! What became a hit and what ceased to be one, for routers and for tests.

use crate::mutex_table::block::BlockHash;

/// Most events that wait to be drained.
pub(crate) const MAX_EVENTS: usize = 65_536;

/// What happened to a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EventKind {
    /// It became a hit.
    Stored,
    /// It ceased to be one.
    Removed,
}

/// A tier, where it is data rather than a type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TierName {
    /// The engine's own memory.
    Gpu,
    /// Host memory.
    Cpu,
}

/// One change of what a tier holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Event {
    /// What happened.
    pub(crate) kind: EventKind,
    /// Where.
    pub(crate) tier: TierName,
    /// To which block.
    pub(crate) block_hash: BlockHash,
    /// In which slot of that tier.
    pub(crate) block_id: u32,
}

/// Events that wait to be drained. When as many wait as may, those that follow are dropped, and counted.
#[derive(Debug, Default)]
pub(crate) struct EventLog {
    waiting: Vec<Event>,
    pub(crate) num_dropped: u64,
}

impl EventLog {
    pub(crate) fn push(&mut self, kind: EventKind, tier: TierName, block_hash: BlockHash, block_id: usize) {
        if self.waiting.len() == MAX_EVENTS {
            self.num_dropped += 1;
            return;
        }
        self.waiting.push(Event { kind, tier, block_hash, block_id: block_id as u32 });
    }

    pub(crate) fn drain(&mut self) -> Vec<Event> {
        self.waiting.drain(..).collect()
    }
}
