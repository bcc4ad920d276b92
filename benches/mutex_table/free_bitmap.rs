//! Which slots are free: one bit each, lowest first, so that a request's blocks come out as runs.

/// A set of free slots.
#[derive(Debug)]
pub(crate) struct FreeBitmap {
    words: Vec<u64>,
    num_free: usize,
    /// No word before this one has a free slot.
    first: usize,
}

impl FreeBitmap {
    /// All of `len` slots free.
    pub(crate) fn new(len: usize) -> Self {
        let mut words = vec![u64::MAX; len.div_ceil(64)];
        if let (Some(last), rest @ 1..) = (words.last_mut(), len % 64) {
            *last = (1 << rest) - 1;
        }
        Self { words, num_free: len, first: 0 }
    }

    pub(crate) fn num_free(&self) -> usize {
        self.num_free
    }

    pub(crate) fn contains(&self, slot: usize) -> bool {
        self.words[slot / 64] & (1 << (slot % 64)) != 0
    }

    /// Takes the lowest `n` free slots, or all where there are fewer, in ascending order.
    pub(crate) fn take_lowest(&mut self, n: usize, mut take: impl FnMut(usize)) -> usize {
        let mut taken = 0;
        while taken < n && self.first < self.words.len() {
            let word = &mut self.words[self.first];
            while *word != 0 && taken < n {
                take(self.first * 64 + word.trailing_zeros() as usize);
                *word &= *word - 1;
                taken += 1;
            }
            if *word == 0 {
                self.first += 1;
            }
        }
        self.num_free -= taken;
        taken
    }

    /// Gives a slot back.
    pub(crate) fn put(&mut self, slot: usize) {
        debug_assert!(!self.contains(slot));
        self.words[slot / 64] |= 1 << (slot % 64);
        self.num_free += 1;
        self.first = self.first.min(slot / 64);
    }
}
