//! One slot of a tier: a cache line with its state word, its hash, and its place in the eviction order.

use crate::block::BlockHash;
use crate::sync::{AcqRel, Acquire, AtomicU32, AtomicU64, Relaxed, Release};

/// What a slot is at the moment; exactly one of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// Nobody's.
    Free,
    /// Held and not published.
    Claimed,
    /// Published: a hit for whoever looks its hash up.
    Cached,
    /// Destination of a planned or running copy. Its only hold is that of the request that waits for it.
    InFlight,
}

/// State, hold count and generation of a slot, changed together by compare-and-swap.
///
/// Bits 0-1: state. Bit 2: the slot is in the inbox of the eviction order. Bits 3-31: holds. Bits 32-63: generation,
/// one more with each new owner, so that whoever remembers an old one can tell.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word(u64);

impl Word {
    const STATES: [State; 4] = [State::Free, State::Claimed, State::Cached, State::InFlight];
    const INBOX: u64 = 1 << 2;
    const HOLDS: u64 = 0xffff_fff8;

    pub(crate) fn state(self) -> State {
        Self::STATES[(self.0 & 3) as usize]
    }
    pub(crate) fn num_holds(self) -> u32 {
        ((self.0 & Self::HOLDS) >> 3) as u32
    }
    pub(crate) fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
    pub(crate) fn is_in_inbox(self) -> bool {
        self.0 & Self::INBOX != 0
    }
    /// A hit that nobody holds.
    pub(crate) fn is_idle(self) -> bool {
        self.state() == State::Cached && self.num_holds() == 0
    }
    pub(crate) fn with_state(self, state: State) -> Self {
        Self(self.0 & !3 | state as u64)
    }
    pub(crate) fn with_holds(self, num_holds: u32) -> Self {
        debug_assert!(num_holds < 1 << 29);
        Self(self.0 & !Self::HOLDS | (u64::from(num_holds) << 3))
    }
    pub(crate) fn with_inbox(self) -> Self {
        Self(self.0 | Self::INBOX)
    }
    pub(crate) fn without_inbox(self) -> Self {
        Self(self.0 & !Self::INBOX)
    }
    /// For the next owner.
    pub(crate) fn renewed(self) -> Self {
        Self(self.0.wrapping_add(1 << 32))
    }
}

impl std::fmt::Debug for Word {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let inbox = if self.is_in_inbox() { ", in inbox" } else { "" };
        write!(f, "{:?}, {} holds, generation {}{inbox}", self.state(), self.num_holds(), self.generation())
    }
}

/// One cache line per slot: a hit touches this line and its index bucket, nothing else.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Slot {
    word: AtomicU64,
    /// When the last hold was released: the eviction order is ascending by it.
    stamp: AtomicU64,
    hash: [AtomicU64; 4],
    /// Links of the eviction order; see `eviction`.
    pub(crate) inbox_next: AtomicU32,
    pub(crate) older: AtomicU32,
    pub(crate) younger: AtomicU32,
    unused: AtomicU32,
}

impl Slot {
    pub(crate) fn word(&self) -> Word {
        // Acquire: what the one who made the slot what it is wrote before (hash, stamp) is visible with it.
        Word(self.word.load(Acquire))
    }

    /// Replaces the word by what `change` makes of it; `None` from `change` leaves it and fails. Gives old and new.
    ///
    /// Lock-free: a retry means that another thread's change went through.
    pub(crate) fn update(&self, mut change: impl FnMut(Word) -> Option<Word>) -> Result<(Word, Word), Word> {
        // Relaxed: only a first guess, the exchange decides.
        let mut old = Word(self.word.load(Relaxed));
        loop {
            let Some(new) = change(old) else {
                // Acquire: the caller acts on what it saw.
                let seen = self.word();
                if seen == old {
                    return Err(old);
                }
                old = seen;
                continue;
            };
            // AcqRel: release publishes the hash and stamp written before; acquire takes over the slot from the
            // thread whose change came before. Acquire on failure, since `change` looks at what it got.
            match self.word.compare_exchange_weak(old.0, new.0, AcqRel, Acquire) {
                Ok(_) => return Ok((old, new)),
                Err(seen) => old = Word(seen),
            }
        }
    }

    /// Replaces the word of a slot that the caller owns: nobody else changes it, but for clearing the inbox bit.
    pub(crate) fn update_owned(&self, change: impl Fn(Word) -> Word) {
        // Relaxed: the owner's own last change, or the one that it took the slot over by.
        let old = Word(self.word.load(Relaxed));
        if old.is_in_inbox() {
            // The holder of the token may clear the bit at this moment.
            let _ = self.update(|word| Some(change(word)));
        } else {
            self.set_word(change(old));
        }
    }

    /// Replaces a word that nobody else can change at this moment, and that the caller has just read.
    pub(crate) fn set_word(&self, word: Word) {
        // Release: publishes the hash and stamp written before.
        self.word.store(word.0, Release);
    }

    /// Says that the inbox has been emptied of this slot, and gives the word as it was.
    pub(crate) fn leave_inbox(&self) -> Word {
        // AcqRel: a release of a hold that saw the bit set came before in the word's order, so its stamp is visible;
        // one that comes later sees the bit cleared and puts the slot into the inbox again.
        Word(self.word.fetch_and(!Word::INBOX, AcqRel))
    }

    pub(crate) fn stamp(&self) -> u64 {
        // Acquire: who then reads the word sees the hold that the stamp was written under, or what came after.
        self.stamp.load(Acquire)
    }

    pub(crate) fn set_stamp(&self, stamp: u64) {
        // Release: see `stamp`.
        self.stamp.store(stamp, Release);
    }

    pub(crate) fn hash(&self) -> BlockHash {
        // Relaxed: read between two looks at the word, which tell whether it was the same slot throughout.
        BlockHash::from_words(std::array::from_fn(|at| self.hash[at].load(Relaxed)))
    }

    /// Only for the slot's owner while it is not published.
    pub(crate) fn set_hash(&self, hash: &BlockHash) {
        for (place, word) in self.hash.iter().zip(hash.to_words()) {
            // Relaxed: published by the index entry (release) and the word that follow.
            place.store(word, Relaxed);
        }
    }

    pub(crate) fn has_hash(&self, hash: &BlockHash) -> bool {
        // Relaxed: as in `hash`.
        self.hash.iter().zip(hash.to_words()).all(|(place, word)| place.load(Relaxed) == word)
    }
}
