//! An ordered set of slots over two flat arrays: the eviction order of a tier, and the store queue.

const NONE: u32 = u32::MAX;
/// `next` of a slot that is not in the list.
const ABSENT: u32 = u32::MAX - 1;

/// Slots from old to young; every operation takes constant time.
#[derive(Debug)]
pub(crate) struct SlotList {
    prev: Vec<u32>,
    next: Vec<u32>,
    old: u32,
    young: u32,
    len: usize,
}

impl SlotList {
    /// An empty list over slots `0..capacity`.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { prev: vec![NONE; capacity], next: vec![ABSENT; capacity], old: NONE, young: NONE, len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn contains(&self, slot: usize) -> bool {
        self.next[slot] != ABSENT
    }

    pub(crate) fn push_young(&mut self, slot: usize) {
        debug_assert!(!self.contains(slot));
        self.prev[slot] = self.young;
        self.next[slot] = NONE;
        match self.young {
            NONE => self.old = slot as u32,
            young => self.next[young as usize] = slot as u32,
        }
        self.young = slot as u32;
        self.len += 1;
    }

    /// Takes a slot out; false if it was not in.
    pub(crate) fn remove(&mut self, slot: usize) -> bool {
        if !self.contains(slot) {
            return false;
        }
        let (prev, next) = (self.prev[slot], self.next[slot]);
        match prev {
            NONE => self.old = next,
            prev => self.next[prev as usize] = next,
        }
        match next {
            NONE => self.young = prev,
            next => self.prev[next as usize] = prev,
        }
        self.next[slot] = ABSENT;
        self.len -= 1;
        true
    }

    pub(crate) fn pop_old(&mut self) -> Option<usize> {
        let slot = (self.old != NONE).then_some(self.old as usize)?;
        self.remove(slot);
        Some(slot)
    }
}
