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

/// Events that wait to be drained. When as many wait as may, those that follow are dropped, and counted: where nobody
/// drains them, events then cost next to nothing.
#[derive(Debug)]
pub(crate) struct EventLog {
    waiting: ArrayQueue<Event>,
    pub(crate) num_dropped: Counter,
}

impl EventLog {
    pub(crate) fn new() -> Self {
        Self { waiting: ArrayQueue::new(MAX_EVENTS), num_dropped: Counter::default() }
    }

    /// Starts the events of one call.
    pub(crate) fn pushes(&self) -> EventPushes<'_> {
        EventPushes { log: self, num_dropped: 0 }
    }

    /// What waits now; no more than that, so that the call ends while others go on.
    pub(crate) fn drain(&self) -> Vec<Event> {
        let waiting = self.waiting.len();
        std::iter::from_fn(|| self.waiting.pop()).take(waiting).collect()
    }
}

/// The events of one call: those that are dropped are counted together.
#[derive(Debug)]
pub(crate) struct EventPushes<'a> {
    log: &'a EventLog,
    num_dropped: usize,
}

impl EventPushes<'_> {
    /// Enters an event at once. Whoever lets another thread say more about a block does this first, so that the log
    /// tells things in the order in which they happened.
    #[inline]
    pub(crate) fn push(&mut self, kind: EventKind, tier: TierName, block_hash: BlockHash, block_id: usize) {
        let waiting = &self.log.waiting;
        // Looked at first, which costs two loads; a refused push costs a fence.
        let is_in = !waiting.is_full() && {
            let event = Event { kind, tier, block_hash, block_id: block_id as u32 };
            waiting.push(event).is_ok()
        };
        self.num_dropped += usize::from(!is_in);
    }
}

impl Drop for EventPushes<'_> {
    fn drop(&mut self) {
        self.log.num_dropped.add(self.num_dropped);
    }
}

#[cfg(all(test, not(kvtier_loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_finds_no_room_is_counted_and_what_waits_stays() {
        let log = EventLog::new();
        let mut pushes = log.pushes();
        for id in 0..MAX_EVENTS + 3 {
            pushes.push(EventKind::Stored, TierName::Cpu, BlockHash::default(), id);
        }
        drop(pushes);
        assert_eq!(log.num_dropped.get(), 3);
        let events = log.drain();
        assert_eq!(events.len(), MAX_EVENTS);
        assert!((0..).zip(&events).all(|(id, event)| event.block_id == id));
        log.pushes().push(EventKind::Removed, TierName::Cpu, BlockHash::default(), 7);
        assert_eq!(log.drain().len(), 1);
        assert_eq!(log.num_dropped.get(), 3);
    }
}
