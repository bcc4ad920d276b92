//! Which slots are taken: one bit each. The lowest free ones go first, so that a request's blocks come out as runs.

use crate::region::Header;
use crate::sync::{at_least_zero, AcqRel, Acquire, AtomicU64, Relaxed, Release};

/// A view of a tier's free slots.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FreeBitmap<'a> {
    header: &'a Header,
    words: &'a [AtomicU64],
    num_blocks: usize,
}

impl<'a> FreeBitmap<'a> {
    pub(crate) fn new(header: &'a Header, words: &'a [AtomicU64], num_blocks: usize) -> Self {
        Self { header, words, num_blocks }
    }

    /// Slots that are free; never more than can be taken.
    pub(crate) fn num_free(self) -> usize {
        // Acquire: what was given back before it was counted can be taken.
        let taken = self.header.gauges.taken.load(Acquire);
        self.num_blocks.saturating_sub(at_least_zero(taken))
    }

    pub(crate) fn is_free(self, slot: usize) -> bool {
        // Acquire: who sees a slot given back sees what its last owner did.
        self.words[slot / 64].load(Acquire) & 1 << (slot % 64) == 0
    }

    /// Bits of word `at` that stand for slots.
    fn mask(self, at: usize) -> u64 {
        match self.num_blocks - at * 64 {
            rest @ ..64 => (1 << rest) - 1,
            _ => u64::MAX,
        }
    }

    /// Takes up to `n` free slots, the lowest first, and appends them in ascending order.
    pub(crate) fn take_lowest(self, n: usize, slots: &mut Vec<u32>) {
        let goal = slots.len() + n;
        let first = &self.header.order.first_free_word;
        // Relaxed: a hint. Where it is too high, the second round begins at zero.
        let start = first.load(Relaxed) as usize;
        let before = slots.len();
        let reached = self.take_from(start, goal, slots);
        if slots.len() < goal && start > 0 && self.num_free() > slots.len() - before {
            self.take_from(0, goal, slots);
            slots[before..].sort_unstable();
        }
        // Relaxed: a hint; exact where one thread does all.
        let _ = first.compare_exchange(start as u32, reached as u32, Relaxed, Relaxed);
        // Relaxed: a decrease of what is free, seen early, only makes others refuse.
        self.header.gauges.taken.fetch_add((slots.len() - before) as i64, Relaxed);
    }

    fn take_from(self, start: usize, goal: usize, slots: &mut Vec<u32>) -> usize {
        for at in start..self.words.len() {
            if slots.len() == goal {
                return at;
            }
            // Relaxed: a first guess.
            let mut word = self.words[at].load(Relaxed);
            loop {
                let free = !word & self.mask(at);
                let wanted = lowest_bits(free, goal - slots.len());
                if wanted == 0 {
                    break;
                }
                // AcqRel: acquire takes over the slots from who gave them back. Relaxed on failure: a guess.
                match self.words[at].compare_exchange_weak(word, word | wanted, AcqRel, Relaxed) {
                    Ok(_) => {
                        slots.extend(bits(wanted).map(|bit| (at * 64 + bit) as u32));
                        if wanted != free {
                            return at;
                        }
                        break;
                    }
                    Err(seen) => word = seen,
                }
            }
        }
        self.words.len()
    }

    /// Gives back slots whose words say free.
    pub(crate) fn put(self, slots: impl IntoIterator<Item = usize>) {
        let mut num_put = 0;
        let mut lowest = usize::MAX;
        for slot in slots {
            // AcqRel: what we did to the slot comes before its next owner.
            let old = self.words[slot / 64].fetch_and(!(1 << (slot % 64)), AcqRel);
            debug_assert!(old & 1 << (slot % 64) != 0, "slot {slot} given back twice");
            num_put += 1;
            lowest = lowest.min(slot / 64);
        }
        if num_put > 0 {
            // Relaxed: a hint.
            self.header.order.first_free_word.fetch_min(lowest as u32, Relaxed);
            // Release: counted after it was given back.
            self.header.gauges.taken.fetch_sub(num_put, Release);
        }
    }
}

fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| word.trailing_zeros() as usize)?;
        word &= word - 1;
        Some(bit)
    })
}

/// The lowest `n` bits that are set.
fn lowest_bits(word: u64, n: usize) -> u64 {
    if n >= word.count_ones() as usize {
        return word;
    }
    bits(word).take(n).fold(0, |taken, bit| taken | 1 << bit)
}

#[cfg(all(test, not(kvtier_loom)))]
mod tests {
    use super::*;

    #[test]
    fn gives_the_lowest_first_and_each_once() {
        for len in [1_usize, 63, 64, 65, 200] {
            let header = Header::default();
            let words: Vec<AtomicU64> = (0..len.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
            let free = FreeBitmap::new(&header, &words, len);
            let mut got = Vec::new();
            free.take_lowest(len + 5, &mut got);
            assert_eq!(got, (0..len as u32).collect::<Vec<_>>());
            assert_eq!(free.num_free(), 0);
            free.put((0..len).step_by(3));
            assert_eq!(free.num_free(), len.div_ceil(3));
            got.clear();
            free.take_lowest(2, &mut got);
            assert_eq!(got, (0..len as u32).step_by(3).take(2).collect::<Vec<_>>());
            assert!(!free.is_free(0) && (len < 2 || !free.is_free(1)));
        }
    }
}
