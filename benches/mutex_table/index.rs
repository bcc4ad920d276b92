//! From block hash to slot: two candidate buckets of eight entries, no tombstones.
//!
//! An entry is a 32-bit tag and a slot. The tag only saves comparisons: the caller compares the full hash. Removal
//! empties the entry. When both buckets are full the block stays out of the index, which costs a miss later, never an
//! error; at the load factor of at most one half that the capacity gives, this practically does not happen.

use crate::mutex_table::block::BlockHash;

const BUCKET: usize = 8;

/// A fixed-capacity hash index over the slots of one tier.
#[derive(Debug)]
pub(crate) struct Index {
    /// Buckets of eight entries: tag in the upper half, slot plus one in the lower; zero is empty.
    entries: Vec<u64>,
    mask: usize,
    len: usize,
}

/// Where a hash may stand.
struct Place {
    tag: u64,
    buckets: [usize; 2],
}

impl Index {
    pub(crate) fn new(capacity: usize) -> Self {
        let num_buckets = (capacity * 2).div_ceil(BUCKET).next_power_of_two();
        Self { entries: vec![0; num_buckets * BUCKET], mask: num_buckets - 1, len: 0 }
    }

    fn place(&self, hash: &BlockHash) -> Place {
        let mixed = hash.mix();
        // The buckets come from the two ends of the mixed word, the tag from another multiplication of it.
        let buckets = [mixed as usize & self.mask, mixed.rotate_left(24) as usize & self.mask];
        Place { tag: mixed.wrapping_mul(0xff51_afd7_ed55_8ccd) >> 32, buckets }
    }

    /// The slot of an entry whose tag fits and for which `is_same` holds (it compares the full hash).
    pub(crate) fn find(&self, hash: &BlockHash, is_same: impl Fn(usize) -> bool) -> Option<usize> {
        self.position(hash, is_same).map(|at| (self.entries[at] as u32 - 1) as usize)
    }

    fn position(&self, hash: &BlockHash, is_same: impl Fn(usize) -> bool) -> Option<usize> {
        let place = self.place(hash);
        place.buckets.iter().find_map(|bucket| {
            let start = bucket * BUCKET;
            (start..start + BUCKET).find(|&at| {
                let entry = self.entries[at];
                entry != 0 && entry >> 32 == place.tag && is_same((entry as u32 - 1) as usize)
            })
        })
    }

    /// Adds an entry; false if both buckets are full. The caller has checked that the hash is not in.
    pub(crate) fn insert(&mut self, hash: &BlockHash, slot: usize) -> bool {
        let place = self.place(hash);
        let fill = |bucket: &usize| self.entries[bucket * BUCKET..][..BUCKET].iter().filter(|&&e| e != 0).count();
        let [a, b] = place.buckets;
        let emptier = if fill(&b) < fill(&a) { b } else { a };
        let free = self.entries[emptier * BUCKET..][..BUCKET].iter_mut().find(|entry| **entry == 0);
        let Some(entry) = free else { return false };
        *entry = place.tag << 32 | (slot as u64 + 1);
        self.len += 1;
        true
    }

    /// Empties the entry of a hash that stands at `slot`; false if there is none.
    pub(crate) fn remove(&mut self, hash: &BlockHash, slot: usize) -> bool {
        let Some(at) = self.position(hash, |other| other == slot) else { return false };
        self.entries[at] = 0;
        self.len -= 1;
        true
    }
}
