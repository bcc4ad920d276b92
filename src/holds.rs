//! Taking and dropping holds on a tier's slots: those of one call share a range of stamps and are counted together.

use crate::block::{BlockId, TierKind};
use crate::eviction::Releases;
use crate::slot::{State, Word};
use crate::tier::{Hit, Tier};

impl<T: TierKind> Tier<T> {
    /// Starts to take holds.
    pub(crate) fn holds(&self) -> TierHolds<'_, T> {
        TierHolds { tier: self, num_idle: 0 }
    }

    /// Starts up to `n` releases and refreshes.
    pub(crate) fn releases(&self, n: usize) -> TierReleases<'_, T> {
        TierReleases { tier: self, holds: self.holds(), releases: self.order().releases(n), num_published: 0 }
    }
}

/// Holds of one call on a tier. They are taken at once and counted together: until then others may count on idle slots
/// that have gone, and then find fewer than they counted on, which an allocation in a shared tier allows for.
pub(crate) struct TierHolds<'a, T: TierKind> {
    tier: &'a Tier<T>,
    /// Slots that were idle before.
    num_idle: i64,
}

impl<T: TierKind> TierHolds<'_, T> {
    /// Takes a hold on a hit; false if it has ceased to be one.
    #[inline]
    pub(crate) fn hold(&mut self, hit: &Hit<T>) -> bool {
        self.hold_if(hit.id, |word| word.generation() == hit.generation)
    }

    /// Takes a hold on a slot that the caller knows to be cached, since nobody else evicts from this tier.
    #[inline]
    pub(crate) fn hold_cached(&mut self, id: BlockId<T>) {
        let held = self.hold_if(id, |_| true);
        debug_assert!(held, "slot {id:?} is not cached");
    }

    #[inline]
    fn hold_if(&mut self, id: BlockId<T>, may: impl Fn(Word) -> bool) -> bool {
        let slot = self.tier.slot(id);
        let held =
            |word: Word| (word.state() == State::Cached && may(word)).then(|| word.with_holds(word.num_holds() + 1));
        if T::HAS_ONE_TAKER {
            let word = slot.word();
            if word.is_idle() {
                // The caller is the taker: nobody else changes the word of an idle slot.
                let Some(new) = held(word) else { return false };
                slot.set_word(new);
                self.num_idle += 1;
                return true;
            }
        }
        let result = slot.update(held);
        self.num_idle += i64::from(result.is_ok_and(|(old, _)| old.num_holds() == 0));
        result.is_ok()
    }
}

impl<T: TierKind> Drop for TierHolds<'_, T> {
    fn drop(&mut self) {
        if self.num_idle > 0 {
            Tier::<T>::count(&self.tier.gauges().idle, -self.num_idle);
        }
    }
}

/// Releases of one call on a tier.
pub(crate) struct TierReleases<'a, T: TierKind> {
    tier: &'a Tier<T>,
    /// Holds of refreshes. Counted before the releases, so that no slot is counted as idle twice.
    holds: TierHolds<'a, T>,
    releases: Releases<'a>,
    /// In-flight slots that were published, counted together at the end.
    num_published: i64,
}

impl<T: TierKind> TierReleases<'_, T> {
    /// Drops a hold. At zero a cached slot becomes evictable, the youngest; a claimed one becomes free.
    pub(crate) fn unhold(&mut self, id: BlockId<T>) {
        if self.releases.unhold(id.index()).state() == State::Free {
            self.tier.free_bitmap().put([id.index()]);
        }
    }

    /// As `unhold`, for a hold of the one thread that takes holds in this tier.
    pub(crate) fn unhold_own(&mut self, id: BlockId<T>) {
        if self.releases.unhold_own(id.index()).state() == State::Free {
            self.tier.free_bitmap().put([id.index()]);
        }
    }

    /// Makes an in-flight slot whose hash is in the index a hit, held by the request that waits for it; where none does,
    /// it is evictable, the youngest.
    pub(crate) fn publish_copied(&mut self, id: BlockId<T>) {
        self.num_published += 1;
        self.releases.publish_copied(id.index());
    }

    /// Makes a hit that nobody holds the youngest; any other stays as it is.
    ///
    /// By a hold of its own: without one, another thread could evict the slot before it is stamped, and the stamp would
    /// fall on the next owner's.
    pub(crate) fn refresh(&mut self, id: BlockId<T>) {
        if self.holds.hold_if(id, Word::is_idle) {
            self.unhold_own(id);
        }
    }
}

impl<T: TierKind> Drop for TierReleases<'_, T> {
    fn drop(&mut self) {
        if self.num_published > 0 {
            let gauges = self.tier.gauges();
            Tier::<T>::count(&gauges.in_flight, -self.num_published);
            Tier::<T>::count(&gauges.cached, self.num_published);
        }
    }
}
