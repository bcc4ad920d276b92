//! From block hash to slot: two candidate buckets of eight entries, no tombstones, no relocation.
//!
//! An entry is a 32-bit tag and a slot. The tag only saves comparisons: the caller compares the full hash. Entries never
//! move, so a reader that looks at both buckets cannot miss one that is in. Removal empties the entry. When both buckets
//! are full the block stays out of the index, which costs a miss later, never an error; at the load factor of at most
//! one half that the capacity gives, this practically does not happen.
//!
//! Two threads may enter one hash at the same time. Each looks again after its entry is in: whoever sees another entry
//! of the same hash takes its own back. At least one of the two sees the other, so at most one stays; that both go costs
//! a miss later.

use crate::block::Mixed;
use crate::sync::{fence, AcqRel, Acquire, AtomicU64, Relaxed, Release, SeqCst};

/// A cache line of entries: tag in the upper half, slot plus one in the lower; zero is empty.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Bucket([AtomicU64; Self::LEN]);

impl Bucket {
    pub(crate) const LEN: usize = 8;
}

/// What became of an insertion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Inserted {
    /// The entry is in.
    Yes,
    /// Another slot has the hash, or is entering it at this moment.
    Exists,
    /// Both buckets are full.
    Full,
}

/// A view of a tier's buckets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Index<'a> {
    buckets: &'a [Bucket],
}

/// Where a hash may stand.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Place {
    tag: u64,
    buckets: [usize; 2],
}

/// Whether a bucket has an entry with a tag, and which of its entries are empty, a bit each.
#[derive(Clone, Copy)]
struct Scan {
    fits: bool,
    empty: u32,
}

fn slot_of(entry: u64) -> usize {
    (entry as u32).wrapping_sub(1) as usize
}

/// Positions of the bits that are set.
#[inline]
fn ones(mut bits: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let at = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
        bits &= bits - 1;
        Some(at)
    })
}

/// Asks the processor for a cache line that will be looked at soon.
#[inline]
pub(crate) fn prefetch<T>(line: &T) {
    #[cfg(all(target_arch = "x86_64", not(kvtier_loom), not(miri)))]
    {
        use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
        // SAFETY: a prefetch has no effect but on speed, and SSE is part of every x86-64 processor.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(line).cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(kvtier_loom), not(miri))))]
    let _ = line;
}

impl<'a> Index<'a> {
    /// A view of buckets whose number is a power of two.
    pub(crate) fn new(buckets: &'a [Bucket]) -> Self {
        debug_assert!(buckets.len().is_power_of_two());
        Self { buckets }
    }

    #[inline]
    pub(crate) fn place(self, hash: impl Into<Mixed>) -> Place {
        let Mixed(mixed) = hash.into();
        let mask = self.buckets.len() - 1;
        // The buckets come from the two ends of the mixed word, the tag from another multiplication of it.
        // An odd distance: two different ones wherever there are two, since hashes with one bucket alone would fill it.
        let a = mixed as usize & mask;
        let buckets = [a, a ^ ((mixed.rotate_left(24) | 1) as usize & mask)];
        Place { tag: mixed.wrapping_mul(0xff51_afd7_ed55_8ccd) >> 32, buckets }
    }

    /// Asks the processor for the buckets of a place that will be looked at soon.
    #[inline]
    pub(crate) fn prefetch(self, place: Place) {
        for bucket in place.buckets {
            prefetch(&self.buckets[bucket]);
        }
    }

    /// What `accept` makes of the first slot whose tag fits and that it accepts (it compares the full hash).
    #[inline]
    pub(crate) fn find<T>(self, hash: impl Into<Mixed>, accept: impl FnMut(usize) -> Option<T>) -> Option<T> {
        self.find_at(self.place(hash), accept)
    }

    /// As `find`, where the place is known.
    #[inline]
    pub(crate) fn find_at<T>(self, place: Place, mut accept: impl FnMut(usize) -> Option<T>) -> Option<T> {
        place.buckets.iter().find_map(|&bucket| {
            let entries = &self.buckets[bucket].0;
            // All eight tags at once, without a branch that the processor would have to guess. Relaxed: an entry whose
            // tag fits is read again.
            let fits = entries
                .iter()
                .enumerate()
                .fold(0_u32, |fits, (at, entry)| fits | u32::from(entry.load(Relaxed) >> 32 == place.tag) << at);
            ones(fits).find_map(|at| {
                // Acquire: the hash that the entry's slot was given before it was entered is visible.
                let entry = entries[at].load(Acquire);
                (entry != 0 && entry >> 32 == place.tag).then(|| accept(slot_of(entry))).flatten()
            })
        })
    }

    /// Enters `slot` under a hash that it already has. `is_same` compares the full hash of another slot.
    pub(crate) fn insert(self, hash: impl Into<Mixed>, slot: usize, is_same: impl Fn(usize) -> bool) -> Inserted {
        let hash = hash.into();
        match self.enter(hash, slot, &is_same) {
            Inserted::Yes => {
                Self::after_entering();
                self.confirm(hash, slot, is_same)
            }
            refused => refused,
        }
    }

    /// First half of `insert`: the entry stays only if `confirm` says so, which is called after `after_entering`. Many
    /// slots may be entered before that.
    pub(crate) fn enter(self, hash: impl Into<Mixed>, slot: usize, is_same: impl Fn(usize) -> bool) -> Inserted {
        let place = self.place(hash);
        let [a, b] = place.buckets.map(|bucket| self.scan(bucket, place.tag));
        if (a.fits | b.fits) && self.has_other(place, slot, &is_same) {
            return Inserted::Exists;
        }
        let new = Self::entry(place, slot);
        let mut order = [(place.buckets[0], a.empty), (place.buckets[1], b.empty)];
        // The emptier bucket first.
        if b.empty.count_ones() > a.empty.count_ones() {
            order.reverse();
        }
        let entered = order.into_iter().any(|(bucket, empty)| {
            ones(empty).any(|at| {
                // AcqRel: release publishes the slot's hash with the entry. Relaxed on failure: the next one is tried.
                self.buckets[bucket].0[at].compare_exchange(0, new, AcqRel, Relaxed).is_ok()
            })
        });
        if entered {
            Inserted::Yes
        } else {
            Inserted::Full
        }
    }

    /// Between `enter` and `confirm`.
    pub(crate) fn after_entering() {
        // SeqCst: our entries are in before we look for others'; with the same fence on the other side, one of two
        // threads that enter the same hash sees the other.
        fence(SeqCst);
    }

    /// Second half of `insert`: takes the entry back if another slot has been entered under the same hash.
    pub(crate) fn confirm(self, hash: impl Into<Mixed>, slot: usize, is_same: impl Fn(usize) -> bool) -> Inserted {
        let hash = hash.into();
        let place = self.place(hash);
        let new = Self::entry(place, slot);
        // Relaxed: an entry whose tag fits is read again.
        let is_rival = |entry: &AtomicU64| (entry.load(Relaxed) ^ new).wrapping_sub(1) < u64::from(u32::MAX);
        let has_rival = |bucket: usize| self.buckets[bucket].0.iter().fold(false, |any, entry| any | is_rival(entry));
        if (has_rival(place.buckets[0]) | has_rival(place.buckets[1])) && self.has_other(place, slot, is_same) {
            self.remove(hash, slot);
            return Inserted::Exists;
        }
        Inserted::Yes
    }

    fn has_other(self, place: Place, slot: usize, is_same: impl Fn(usize) -> bool) -> bool {
        self.find_at(place, |found| (found != slot && is_same(found)).then_some(())).is_some()
    }

    fn entry(place: Place, slot: usize) -> u64 {
        place.tag << 32 | (slot as u64 + 1)
    }

    #[inline]
    fn scan(self, bucket: usize, tag: u64) -> Scan {
        let mut scan = Scan { fits: false, empty: 0 };
        for (at, entry) in self.buckets[bucket].0.iter().enumerate() {
            // Relaxed: an entry whose tag fits is read again, and one that is empty is taken by an exchange.
            let entry = entry.load(Relaxed);
            scan.fits |= entry >> 32 == tag;
            scan.empty |= u32::from(entry == 0) << at;
        }
        scan
    }

    /// Empties the entry of a hash that stands at `slot`, for the slot's owner alone; false if there is none.
    pub(crate) fn remove(self, hash: impl Into<Mixed>, slot: usize) -> bool {
        let place = self.place(hash);
        let mine = Self::entry(place, slot);
        place.buckets.iter().any(|&bucket| {
            let entries = &self.buckets[bucket].0;
            // Relaxed: nobody but the slot's owner changes an entry that is not empty.
            let found =
                (0..).zip(entries).fold(0, |found, (at, entry)| found | u32::from(entry.load(Relaxed) == mine) << at);
            ones(found).next().is_some_and(|at| {
                // Release: who finds the entry empty and fills it comes after what we did to the slot.
                entries[at].store(0, Release);
                true
            })
        })
    }

    /// Number of entries; exact only while nobody changes them.
    pub(crate) fn len(self) -> usize {
        // Relaxed: a count for audits.
        self.buckets.iter().flat_map(|bucket| &bucket.0).filter(|entry| entry.load(Relaxed) != 0).count()
    }
}

#[cfg(all(test, not(kvtier_loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::block::{BlockHash, BlockId, Cpu};
    use crate::tier::Tier;

    fn hash(n: u64) -> BlockHash {
        let mut bytes = [0; 32];
        bytes[24..].copy_from_slice(&n.to_be_bytes());
        BlockHash(bytes)
    }

    fn buckets(n: usize) -> Vec<Bucket> {
        (0..n).map(|_| Bucket::default()).collect()
    }

    #[test]
    fn holds_its_capacity_of_poorly_spread_hashes() {
        for capacity in [1_usize, 7, 100, 20_000] {
            let buckets = buckets((capacity * 2).div_ceil(8).next_power_of_two());
            let index = Index::new(&buckets);
            let find = |n: usize| index.find(&hash(n as u64), |found| (found == n).then_some(found));
            for slot in 0..capacity {
                assert_eq!(index.insert(&hash(slot as u64), slot, |_| false), Inserted::Yes);
            }
            assert_eq!(index.len(), capacity);
            assert!((0..capacity).all(|slot| find(slot) == Some(slot)));
            for slot in 0..capacity {
                assert!(index.remove(&hash(slot as u64), slot) && !index.remove(&hash(slot as u64), slot));
            }
            assert_eq!(index.len(), 0);
        }
    }

    #[test]
    fn a_full_bucket_refuses_without_harm() {
        let buckets = buckets(1);
        let index = Index::new(&buckets);
        assert!((0..8).all(|n| index.insert(&hash(n), n as usize, |_| false) == Inserted::Yes));
        assert_eq!(index.insert(&hash(8), 8, |_| false), Inserted::Full);
        assert_eq!(index.insert(&hash(3), 9, |found| found == 3), Inserted::Exists);
        assert!(index.remove(&hash(3), 3));
        assert_eq!(index.insert(&hash(8), 8, |_| false), Inserted::Yes);
    }

    /// Hashes that mix to one word: the second word undoes what the first does.
    fn colliding(n: u64) -> BlockHash {
        let [first, second, third, _] = BlockHash::KEYS;
        // By Newton's method, which doubles the number of right bits: `x x = 1` modulo 8 for every odd `x`.
        let inverse =
            (0..5).fold(second, |inverse, _| inverse.wrapping_mul(2_u64.wrapping_sub(second.wrapping_mul(inverse))));
        let undone = (n ^ second).wrapping_mul(first).rotate_right(17).wrapping_mul(inverse);
        BlockHash::from_words([n, undone ^ third, 0, 0])
    }

    /// A small tier that is always in use, hashes coming and going: nothing that is published may be left out.
    #[test]
    fn a_tier_finds_room_for_every_hash_while_others_come_and_go() {
        for num_blocks in [16_usize, 64, 100, 1024] {
            let tier: Tier<Cpu> = Tier::new(num_blocks, "cpu_blocks").unwrap();
            let mut num_refused = 0;
            for n in 0..200_000 {
                let mut slots = Vec::new();
                tier.allocate(1, &mut slots, |_, _| ());
                let id = BlockId::new(slots[0] as usize);
                let published = tier.publish(id, &hash(n));
                tier.count_published(usize::from(published));
                num_refused += usize::from(!published);
                tier.releases(1).unhold(id);
            }
            assert_eq!(num_refused, 0, "of 200000 in {num_blocks} blocks");
        }
    }

    #[test]
    fn hashes_with_one_place_and_one_tag_are_told_apart() {
        let (one, two) = (colliding(1), colliding(2));
        assert!(one != two && one.mix() == two.mix());
        let tier: Tier<Cpu> = Tier::new(2, "cpu_blocks").unwrap();
        tier.allocate(2, &mut Vec::new(), |_, _| ());
        assert!(tier.publish(BlockId::new(0), &one));
        assert!(tier.find_cached(&two).is_none() && !tier.knows(two.mix(), &two));
        tier.find_each(&[two], |hit| {
            assert!(hit.is_none());
            true
        });
        assert!(tier.publish(BlockId::new(1), &two));
        tier.count_published(2);
        for (at, hash) in [one, two].iter().enumerate() {
            assert!(tier.find_cached(hash).is_some_and(|hit| hit.id == BlockId::new(at)));
        }
        tier.audit("test").unwrap();
    }

    #[test]
    fn a_hit_that_was_evicted_cannot_be_held() {
        let tier: Tier<Cpu> = Tier::new(1, "cpu_blocks").unwrap();
        tier.allocate(1, &mut Vec::new(), |_, _| ());
        let id = BlockId::new(0);
        assert!(tier.publish(id, &hash(1)));
        tier.count_published(1);
        let old = tier.find_cached(&hash(1)).unwrap();
        tier.releases(1).unhold(id);
        tier.allocate(1, &mut Vec::new(), |_, _| ());
        assert!(tier.publish(id, &hash(2)));
        tier.count_published(1);
        assert!(!tier.holds().hold(&old));
        assert_eq!(tier.word(id).num_holds(), 1);
    }

    #[test]
    fn a_slot_that_waits_for_its_copy_is_known_and_no_hit() {
        let tier: Tier<Cpu> = Tier::new(1, "cpu_blocks").unwrap();
        tier.allocate(1, &mut Vec::new(), |_, _| ());
        let id = BlockId::new(0);
        tier.set_hash(id, &hash(1));
        tier.expect_copy(id, 0);
        tier.count_expected(1);
        assert_eq!(tier.enter(id, &hash(1)), Inserted::Yes);
        assert!(tier.knows(hash(1).mix(), &hash(1)) && tier.find_cached(&hash(1)).is_none());
        tier.releases(1).publish_copied(id);
        assert!(tier.find_cached(&hash(1)).is_some());
    }
}
