//! One tier: slots, index, free set and eviction order over one region, for any number of threads.

use std::marker::PhantomData;

use crate::block::{BlockHash, BlockId, Mixed, TierKind};
use crate::error::{Error, Result};
use crate::eviction::EvictionOrder;
use crate::free_bitmap::FreeBitmap;
use crate::index::{prefetch, Index, Inserted, Place};
use crate::region::{Gauges, Region};
use crate::slot::{Slot, State, Word};
use crate::sync::{at_least_zero, Acquire, AtomicI64, Relaxed};

/// How many slots are in each state, and how many are held or evictable.
///
/// Each number was true at some moment of the call; together they are exact while no other thread changes the tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TierCounts {
    /// Slots of the tier.
    pub total: usize,
    /// Nobody's.
    pub free: usize,
    /// Held and not published.
    pub claimed: usize,
    /// Published.
    pub cached: usize,
    /// Destination of a copy.
    pub in_flight: usize,
    /// With at least one hold.
    pub held: usize,
    /// Published with no hold.
    pub evictable: usize,
}

/// A pool of equal block slots.
#[derive(Debug)]
pub(crate) struct Tier<T> {
    region: Region,
    marker: PhantomData<fn() -> T>,
}

/// A published slot as a lookup saw it.
pub(crate) struct Hit<T> {
    pub(crate) id: BlockId<T>,
    pub(crate) generation: u32,
    pub(crate) is_idle: bool,
}

impl<T: TierKind> Tier<T> {
    /// An empty tier; `argument` names its size in errors.
    pub(crate) fn new(num_blocks: usize, argument: &str) -> Result<Self> {
        Ok(Self { region: Region::new(num_blocks, argument)?, marker: PhantomData })
    }

    pub(crate) fn len(&self) -> usize {
        self.region.slots().len()
    }

    pub(crate) fn slot(&self, id: BlockId<T>) -> &Slot {
        &self.region.slots()[id.index()]
    }

    fn index(&self) -> Index<'_> {
        Index::new(self.region.buckets())
    }

    pub(crate) fn gauges(&self) -> &Gauges {
        &self.region.header().gauges
    }

    pub(crate) fn free_bitmap(&self) -> FreeBitmap<'_> {
        FreeBitmap::new(self.region.header(), self.region.bitmap(), self.len())
    }

    pub(crate) fn order(&self) -> EvictionOrder<'_> {
        EvictionOrder::new(self.region.header(), self.region.slots(), T::HAS_ONE_TAKER)
    }

    pub(crate) fn count(gauge: &AtomicI64, change: i64) {
        // Relaxed: gauges of this kind are only read as statistics.
        gauge.fetch_add(change, Relaxed);
    }

    /// Slots that an allocation can get now; exact for the only thread that allocates and holds.
    pub(crate) fn num_available(&self) -> usize {
        // Acquire, as in `num_free`: what was counted can be found.
        let idle = self.gauges().idle.load(Acquire);
        self.free_bitmap().num_free() + at_least_zero(idle)
    }

    pub(crate) fn counts(&self) -> TierCounts {
        let gauges = self.gauges();
        // Relaxed: statistics.
        let read = |gauge: &AtomicI64| at_least_zero(gauge.load(Relaxed));
        let (total, taken, cached) = (self.len(), read(&gauges.taken), read(&gauges.cached));
        let (in_flight, evictable) = (read(&gauges.in_flight), read(&gauges.idle));
        TierCounts {
            total,
            free: total.saturating_sub(taken),
            claimed: taken.saturating_sub(cached + in_flight),
            cached,
            in_flight,
            held: taken.saturating_sub(in_flight + evictable),
            evictable,
        }
    }

    pub(crate) fn word(&self, id: BlockId<T>) -> Word {
        self.slot(id).word()
    }

    /// The hash a slot was given last; of meaning while the caller holds or owns it.
    pub(crate) fn hash(&self, id: BlockId<T>) -> BlockHash {
        self.slot(id).hash()
    }

    /// Names the hash of a slot that the caller owns and that is not published.
    pub(crate) fn set_hash(&self, id: BlockId<T>, hash: &BlockHash) {
        self.slot(id).set_hash(hash);
    }

    /// Looks `hashes` up one after another, asking memory for what comes next ahead of time, until `found` says stop.
    pub(crate) fn find_each(&self, hashes: &[BlockHash], mut found: impl FnMut(Option<Hit<T>>) -> bool) {
        // First the buckets are asked for, then, when they are here, the slot that one of their entries names.
        const BUCKETS_AHEAD: usize = 16;
        const SLOT_AHEAD: usize = 8;
        let index = self.index();
        let mut places = [Place::default(); BUCKETS_AHEAD];
        for (at, hash) in hashes.iter().enumerate().take(BUCKETS_AHEAD) {
            places[at] = index.place(hash);
            index.prefetch(places[at]);
        }
        // Slots that have probably the hash of the same number.
        let mut slots = [None; SLOT_AHEAD];
        let probable = |place| {
            let slot = index.find_at(place, Some);
            if let Some(slot) = slot {
                self.prefetch(slot);
            }
            slot
        };
        for at in 0..SLOT_AHEAD.min(hashes.len()) {
            slots[at] = probable(places[at]);
        }
        for (at, hash) in hashes.iter().enumerate() {
            let place = places[at % BUCKETS_AHEAD];
            let slot = slots[at % SLOT_AHEAD];
            if let Some(next) = hashes.get(at + BUCKETS_AHEAD) {
                places[at % BUCKETS_AHEAD] = index.place(next);
                index.prefetch(places[at % BUCKETS_AHEAD]);
            }
            if at + SLOT_AHEAD < hashes.len() {
                slots[at % SLOT_AHEAD] = probable(places[(at + SLOT_AHEAD) % BUCKETS_AHEAD]);
            }
            // No entry with the tag: a miss. Another hash with the same tag: all entries are looked at.
            let hit = slot
                .and_then(|slot| self.hit(slot, hash).or_else(|| index.find_at(place, |slot| self.hit(slot, hash))));
            if !found(hit) {
                return;
            }
        }
    }

    /// Asks the processor for a slot that will be looked at soon.
    #[inline]
    pub(crate) fn prefetch(&self, slot: usize) {
        prefetch(&self.region.slots()[slot]);
    }

    /// Asks the processor for the buckets of a hash that will be looked up soon.
    #[inline]
    pub(crate) fn prefetch_buckets(&self, hash: Mixed) {
        let index = self.index();
        index.prefetch(index.place(hash));
    }

    /// The slot that is a hit for a hash.
    #[inline]
    pub(crate) fn find_cached(&self, hash: &BlockHash) -> Option<Hit<T>> {
        self.index().find(hash, |slot| self.hit(slot, hash))
    }

    /// The slot, if it is a hit for the hash.
    #[inline]
    fn hit(&self, at: usize, hash: &BlockHash) -> Option<Hit<T>> {
        let slot = &self.region.slots()[at];
        let before = slot.word();
        if before.state() != State::Cached || !slot.has_hash(hash) {
            return None;
        }
        // A slot that was published before and after, in one generation, had this hash throughout.
        let after = slot.word();
        (after.state() == State::Cached && after.generation() == before.generation()).then(|| Hit {
            id: BlockId::new(at),
            generation: after.generation(),
            is_idle: after.num_holds() == 0,
        })
    }

    /// Whether the tier has a hash, or is receiving it.
    pub(crate) fn knows(&self, mixed: Mixed, hash: &BlockHash) -> bool {
        self.index().find(mixed, |at| self.has(at, hash).then_some(())).is_some()
    }

    /// Appends up to `n` slots, claimed: the lowest free ones, then evicted ones, all in ascending order. Each evicted
    /// slot is reported with its hash before it is reused. Takes fewer where there are fewer, or where another thread is
    /// evicting at this moment.
    pub(crate) fn allocate(
        &self,
        n: usize,
        slots: &mut Vec<u32>,
        on_evict: impl FnMut(BlockId<T>, BlockHash),
    ) -> usize {
        let start = slots.len();
        self.free_bitmap().take_lowest(n, slots);
        for &slot in &slots[start..] {
            let claim = |word: Word| word.with_state(State::Claimed).with_holds(1).renewed();
            self.region.slots()[slot as usize].update_owned(claim);
        }
        let num_free = slots.len() - start;
        if num_free < n {
            if let Some(evictor) = self.order().try_take() {
                evictor.evict(n - num_free, slots);
                evictor.count_evicted(slots.len() - start - num_free);
            }
            self.remove_evicted(&slots[start + num_free..], on_evict);
            Self::count(&self.gauges().cached, num_free as i64 + start as i64 - slots.len() as i64);
            slots[start..].sort_unstable();
        }
        slots.len() - start
    }

    fn remove_evicted(&self, evicted: &[u32], mut on_evict: impl FnMut(BlockId<T>, BlockHash)) {
        const AHEAD: usize = 8;
        let hash_of = |slot: u32| self.region.slots()[slot as usize].hash();
        let mut mixed = [Mixed::default(); AHEAD];
        for at in 0..evicted.len() + AHEAD {
            let soon = &mut mixed[at % AHEAD];
            // Of the slot whose turn it is, before that of a later one takes its place.
            let now = *soon;
            if let Some(&slot) = evicted.get(at) {
                *soon = hash_of(slot).mix();
                self.prefetch_buckets(*soon);
            }
            let Some(&slot) = at.checked_sub(AHEAD).and_then(|at| evicted.get(at)) else { continue };
            self.index().remove(now, slot as usize);
            on_evict(BlockId::new(slot as usize), hash_of(slot));
        }
    }

    /// Enters a slot that the caller owns into the index under the hash that it was given.
    pub(crate) fn enter(&self, id: BlockId<T>, hash: &BlockHash) -> Inserted {
        self.index().insert(hash, id.index(), |at| self.has(at, hash))
    }

    /// First half of `enter`: the entry stays only if `confirm` says so. Any number of slots may be entered first, and
    /// then confirmed after one `after_entering`, which costs as much as entering several.
    pub(crate) fn enter_first(&self, id: BlockId<T>, mixed: Mixed, hash: &BlockHash) -> bool {
        self.index().enter(mixed, id.index(), |at| self.has(at, hash)) == Inserted::Yes
    }

    /// Second half of `enter`.
    pub(crate) fn confirm(&self, id: BlockId<T>, mixed: Mixed, hash: &BlockHash) -> bool {
        self.index().confirm(mixed, id.index(), |at| self.has(at, hash)) == Inserted::Yes
    }

    /// Whether a slot that is not free has a hash.
    fn has(&self, at: usize, hash: &BlockHash) -> bool {
        let slot = &self.region.slots()[at];
        slot.word().state() != State::Free && slot.has_hash(hash)
    }

    /// Makes a claimed slot a hit under `hash`, its hold staying; false, and nothing changed, if the index has the hash
    /// or no room. The caller counts what is published, see `count_published`.
    pub(crate) fn publish(&self, id: BlockId<T>, hash: &BlockHash) -> bool {
        self.set_hash(id, hash);
        let is_entered = self.enter(id, hash) == Inserted::Yes;
        if is_entered {
            self.publish_entered(id);
        }
        is_entered
    }

    /// Second half of `publish`: makes a claimed slot a hit that has been entered and confirmed.
    pub(crate) fn publish_entered(&self, id: BlockId<T>) {
        self.slot(id).update_owned(|word| {
            debug_assert_eq!(word.state(), State::Claimed);
            word.with_state(State::Cached)
        });
    }

    /// Counts claimed slots that were published.
    pub(crate) fn count_published(&self, num_published: usize) {
        Self::count(&self.gauges().cached, num_published as i64);
    }

    /// Makes a claimed slot the destination of a copy; `num_holds` is one if a request waits for it, else zero. The
    /// caller counts the slots, see `count_expected`, before anybody can end a copy.
    pub(crate) fn expect_copy(&self, id: BlockId<T>, num_holds: u32) {
        self.slot(id).update_owned(|word| word.with_state(State::InFlight).with_holds(num_holds));
    }

    /// Counts slots that became destinations of copies.
    pub(crate) fn count_expected(&self, num_expected: usize) {
        Self::count(&self.gauges().in_flight, num_expected as i64);
    }

    /// Ends the copy to an in-flight slot without publishing: the slot is claimed by the request that waits for it, or
    /// free if none does.
    pub(crate) fn end_copy(&self, id: BlockId<T>) {
        let result = self.slot(id).update(|word| {
            debug_assert_eq!(word.state(), State::InFlight);
            Some(word.with_state(if word.num_holds() > 0 { State::Claimed } else { State::Free }))
        });
        Self::count(&self.gauges().in_flight, -1);
        if result.is_ok_and(|(_, new)| new.state() == State::Free) {
            self.free_bitmap().put([id.index()]);
        }
    }

    /// Takes back an in-flight slot that was entered into the index.
    pub(crate) fn retract(&self, id: BlockId<T>) {
        self.index().remove(&self.hash(id), id.index());
        self.end_copy(id);
    }

    /// The request that waits for an in-flight slot goes; false if the copy has ended, the slot being the request's.
    pub(crate) fn abandon_copy(&self, id: BlockId<T>) -> bool {
        self.slot(id).update(|word| (word.state() == State::InFlight).then(|| word.with_holds(0))).is_ok()
    }

    /// Takes a hit that the caller holds out of the index: free when its last hold goes. False if another thread did.
    pub(crate) fn withdraw(&self, id: BlockId<T>) -> bool {
        let claim = |word: Word| (word.state() == State::Cached).then(|| word.with_state(State::Claimed));
        if self.slot(id).update(claim).is_err() {
            return false;
        }
        self.index().remove(&self.hash(id), id.index());
        Self::count(&self.gauges().cached, -1);
        true
    }

    /// Frees every hit that nobody holds, by ascending id; each is reported.
    pub(crate) fn clear(&self, mut on_remove: impl FnMut(BlockId<T>, BlockHash)) {
        for (at, slot) in self.region.slots().iter().enumerate() {
            let hash = slot.hash();
            let claim = |word: Word| word.is_idle().then(|| word.with_state(State::Claimed).with_holds(1).renewed());
            if slot.update(claim).is_err() {
                continue;
            }
            on_remove(BlockId::new(at), hash);
            self.index().remove(&hash, at);
            Self::count(&self.gauges().cached, -1);
            Self::count(&self.gauges().idle, -1);
            self.releases(1).unhold(BlockId::new(at));
        }
    }

    /// Compares everything with everything; exact only while no other thread changes the tier.
    pub(crate) fn audit(&self, name: &str) -> Result<()> {
        let invariant = |what: String| Error::Invariant(format!("{name}: {what}"));
        if !self.region.is_intact() {
            return Err(invariant("the header is damaged".to_owned()));
        }
        let order = self.audit_order(name)?;
        let mut counts = TierCounts { total: self.len(), ..TierCounts::default() };
        let mut num_indexed = 0;
        for (at, slot) in self.region.slots().iter().enumerate() {
            let (id, word) = (BlockId::new(at), slot.word());
            let broken = |what: &str| Err(invariant(format!("slot {at} ({word:?}): {what}")));
            match word.state() {
                State::Free => counts.free += 1,
                State::Claimed => counts.claimed += 1,
                State::Cached => counts.cached += 1,
                State::InFlight => counts.in_flight += 1,
            }
            counts.held += usize::from(word.num_holds() > 0 && word.state() != State::InFlight);
            counts.evictable += usize::from(word.is_idle());
            if (word.state() == State::Free) != self.free_bitmap().is_free(at) {
                return broken("O1: state and free set disagree");
            }
            if word.is_idle() && !order.contains(&at) {
                return broken("O1: evictable and not in the eviction order");
            }
            let holds_fit = match word.state() {
                State::Free => word.num_holds() == 0,
                State::Claimed => word.num_holds() > 0,
                State::InFlight => word.num_holds() < 2,
                State::Cached => true,
            };
            if !holds_fit {
                return broken("O1: hold count does not fit the state");
            }
            let is_indexed = self.index().find(&slot.hash(), |found| (found == at).then_some(())).is_some();
            num_indexed += usize::from(is_indexed);
            if word.state() == State::Cached && self.find_cached(&slot.hash()).is_none_or(|hit| hit.id != id) {
                return broken("O2: published and not found under its hash");
            }
            if is_indexed && matches!(word.state(), State::Free | State::Claimed) {
                return broken("O2: indexed and not published");
            }
        }
        if counts != self.counts() {
            return Err(invariant(format!("counted {counts:?}, kept {:?}", self.counts())));
        }
        if num_indexed != self.index().len() {
            return Err(invariant(format!("{num_indexed} indexed slots, {} entries", self.index().len())));
        }
        Ok(())
    }

    /// The slots of the eviction order, which must be a list by stamp of slots that are there once.
    pub(crate) fn audit_order(&self, name: &str) -> Result<std::collections::HashSet<usize>> {
        let broken = |what: String| Error::Invariant(format!("{name}: {what}"));
        let evictor = self.order().try_take().ok_or_else(|| broken("another thread is evicting".to_owned()))?;
        let mut seen = std::collections::HashSet::new();
        let mut last = 0;
        for slot in evictor.iter() {
            if !seen.insert(slot) {
                return Err(broken(format!("slot {slot} is twice in the eviction order")));
            }
            let place = &self.region.slots()[slot];
            if place.word().is_idle() {
                if place.stamp() <= last {
                    return Err(broken(format!("slot {slot} is out of order in the eviction order")));
                }
                last = place.stamp();
            }
        }
        Ok(seen)
    }
}
