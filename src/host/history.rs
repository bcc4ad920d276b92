//! Which blocks were used before, in bounded memory: for storing only what is used again.

use std::collections::{HashMap, VecDeque};

use crate::block::BlockHash;

/// The last blocks that were used for the first time, by the first 8 bytes of their hashes. Two blocks with the same
/// first bytes would be stored a use too early, and nothing else.
#[derive(Debug)]
pub(super) struct History {
    /// Whether there was a second use.
    is_repeated: HashMap<u64, bool>,
    /// In the order of their first use.
    order: VecDeque<u64>,
    capacity: usize,
}

fn fingerprint(hash: &BlockHash) -> u64 {
    hash.0.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

impl History {
    pub(super) fn new(capacity: usize) -> Self {
        Self { is_repeated: HashMap::new(), order: VecDeque::new(), capacity }
    }

    /// Takes note of one use.
    pub(super) fn note(&mut self, hash: &BlockHash) {
        let name = fingerprint(hash);
        if let Some(is_repeated) = self.is_repeated.get_mut(&name) {
            *is_repeated = true;
            return;
        }
        if self.capacity == 0 {
            return;
        }
        if self.order.len() == self.capacity {
            if let Some(oldest) = self.order.pop_front() {
                self.is_repeated.remove(&oldest);
            }
        }
        self.is_repeated.insert(name, false);
        self.order.push_back(name);
    }

    /// Whether a block was used twice since it was remembered.
    pub(super) fn is_repeated(&self, hash: &BlockHash) -> bool {
        self.is_repeated.get(&fingerprint(hash)).copied().unwrap_or(false)
    }

    pub(super) fn clear(&mut self) {
        self.is_repeated.clear();
        self.order.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(name: u8) -> BlockHash {
        BlockHash([name; 32])
    }

    #[test]
    fn forgets_the_oldest_first() {
        let mut history = History::new(2);
        for name in [1, 2, 1] {
            history.note(&hash(name));
        }
        assert!(history.is_repeated(&hash(1)) && !history.is_repeated(&hash(2)));
        history.note(&hash(3)); // 1 goes
        assert!(!history.is_repeated(&hash(1)));
        history.note(&hash(2));
        assert!(history.is_repeated(&hash(2)));
        history.note(&hash(1)); // 2 goes; 1 is new again
        assert!(!history.is_repeated(&hash(1)) && !history.is_repeated(&hash(2)));
        history.clear();
        assert!(!history.is_repeated(&hash(3)));
    }

    #[test]
    fn without_capacity_nothing_is_repeated() {
        let mut history = History::new(0);
        history.note(&hash(1));
        history.note(&hash(1));
        assert!(!history.is_repeated(&hash(1)));
    }
}
