//! The eviction order of a tier: exact least-recently-released, in constant time, without locks.
//!
//! Releasing is for any thread: it stamps the slot, changes its word, and puts it into the *inbox*, a stack linked
//! through the slots that is only pushed to and emptied whole (so it has no ABA problem). A slot is in the inbox at most
//! once, which its word says. The *order* itself is a doubly linked list through the slots, old to young; only the
//! holder of the token touches it. The holder first empties the inbox into the order, by stamp. A slot that is held
//! again keeps its old place in the order until somebody meets it there or it comes through the inbox again: places in
//! the order are hints, and the slot's word decides. So no list is ever longer than the tier.
//!
//! The token is taken or not taken, never waited for. The Gpu tier has one taker, its session. In a shared Cpu tier a
//! session that finds it taken stores its blocks at a later step.

use crate::index::prefetch;
use crate::region::Header;
use crate::slot::{Slot, State, Word};
use crate::sync::{AcqRel, Acquire, AtomicU32, Relaxed, Release};

// Links are slots plus two; zeroed memory is a list with nothing in it.
/// Link of a slot that is in no list.
const ABSENT: u32 = 0;
/// Link at an end of the list.
const END: u32 = 1;

/// How far ahead slots are asked for. Blocks that follow each other are released tail first, so from old to young the
/// order mostly runs towards lower slots.
const AHEAD: usize = 8;

fn link(slot: usize) -> u32 {
    slot as u32 + 2
}

fn slot_at(link: u32) -> Option<usize> {
    link.checked_sub(2).map(|slot| slot as usize)
}

/// A view of a tier's eviction order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EvictionOrder<'a> {
    header: &'a Header,
    slots: &'a [Slot],
    /// See `TierKind`: then the taker is the only one to take the token, too.
    has_one_taker: bool,
}

/// Releases of one call: they share one range of stamps and enter the inbox together.
#[derive(Debug)]
pub(crate) struct Releases<'a> {
    order: EvictionOrder<'a>,
    next_stamp: u64,
    last_stamp: u64,
    /// Slots made idle, linked young to old.
    youngest: u32,
    oldest: u32,
    num_idle: i64,
}

impl<'a> EvictionOrder<'a> {
    pub(crate) fn new(header: &'a Header, slots: &'a [Slot], has_one_taker: bool) -> Self {
        Self { header, slots, has_one_taker }
    }

    /// Starts up to `n` releases, refreshes and publications.
    pub(crate) fn releases(self, n: usize) -> Releases<'a> {
        // Relaxed: stamps only have to differ and to grow; the slots' words order everything else.
        let next_stamp = self.header.clock.fetch_add(n as u64, Relaxed) + 1;
        Releases {
            order: self,
            next_stamp,
            last_stamp: next_stamp + n as u64,
            youngest: ABSENT,
            oldest: ABSENT,
            num_idle: 0,
        }
    }

    /// Takes the token, unless another thread has it.
    pub(crate) fn try_take(self) -> Option<Evictor<'a>> {
        let token = &self.header.order.token;
        // Acquire: what the last holder did to the list is visible. Relaxed on failure: nothing is read.
        token.compare_exchange(0, 1, Acquire, Relaxed).ok()?;
        Some(Evictor { order: self })
    }
}

impl Releases<'_> {
    /// Drops a hold; gives the word after it. At zero, a cached slot becomes idle, younger than all before; a claimed
    /// one becomes free, and the caller must give it back to the free set.
    pub(crate) fn unhold(&mut self, slot: usize) -> Word {
        let place = &self.order.slots[slot];
        let stamp = self.take_stamp();
        match place.update(|word| Self::released(place, word, stamp)) {
            Ok((old, new)) => self.note(slot, old, new),
            Err(seen) => seen,
        }
    }

    /// As `unhold`, for a hold of the one thread that takes holds in this tier.
    pub(crate) fn unhold_own(&mut self, slot: usize) -> Word {
        let place = &self.order.slots[slot];
        let word = place.word();
        // Ours is the last hold, and no copy is about to end: nobody else changes the word.
        let is_alone = word.num_holds() == 1 && matches!(word.state(), State::Cached | State::Claimed);
        if !(self.order.has_one_taker && is_alone) {
            return self.unhold(slot);
        }
        let stamp = self.take_stamp();
        let Some(new) = Self::released(place, word, stamp) else { return word };
        place.set_word(new);
        self.note(slot, word, new)
    }

    /// What a word becomes when a hold is dropped; stamps the slot that becomes idle.
    fn released(place: &Slot, word: Word, stamp: u64) -> Option<Word> {
        debug_assert!(word.num_holds() > 0, "release of a slot that is not held: {word:?}");
        let rest = word.with_holds(word.num_holds().checked_sub(1)?);
        if rest.num_holds() > 0 {
            return Some(rest);
        }
        match rest.state() {
            State::Cached => {
                place.set_stamp(stamp);
                Some(rest.with_inbox())
            }
            State::Claimed => Some(rest.with_state(State::Free)),
            State::Free | State::InFlight => Some(rest),
        }
    }

    /// Takes note of a change that may have made a slot idle; gives the new word.
    fn note(&mut self, slot: usize, old: Word, new: Word) -> Word {
        if new.is_idle() {
            self.num_idle += 1;
            if !old.is_in_inbox() {
                self.chain(slot);
            }
        }
        new
    }

    /// Makes an in-flight slot a hit with the holds that it has: without one it is idle, younger than all before.
    pub(crate) fn publish_copied(&mut self, slot: usize) {
        let place = &self.order.slots[slot];
        let stamp = self.take_stamp();
        let published = |word: Word| {
            debug_assert_eq!(word.state(), State::InFlight);
            let cached = word.with_state(State::Cached);
            if cached.num_holds() > 0 {
                return cached;
            }
            place.set_stamp(stamp);
            cached.with_inbox()
        };
        let word = place.word();
        if word.num_holds() == 0 && !word.is_in_inbox() {
            // No request waits for the slot: it is the copy's alone.
            let new = published(word);
            place.set_word(new);
            self.note(slot, word, new);
        } else if let Ok((old, new)) = place.update(|word| Some(published(word))) {
            self.note(slot, old, new);
        }
    }

    fn take_stamp(&mut self) -> u64 {
        self.next_stamp += 1;
        debug_assert!(self.next_stamp <= self.last_stamp, "more releases than announced");
        self.next_stamp - 1
    }

    fn chain(&mut self, slot: usize) {
        // Relaxed: the slot's link is ours alone from setting the inbox bit until the push publishes it.
        self.order.slots[slot].inbox_next.store(self.youngest, Relaxed);
        self.youngest = link(slot);
        if self.oldest == ABSENT {
            self.oldest = self.youngest;
        }
    }
}

impl Drop for Releases<'_> {
    /// Enters the slots into the inbox, and only then counts them: who counts on an idle slot will find it.
    fn drop(&mut self) {
        let header = self.order.header;
        if let Some(oldest) = slot_at(self.oldest) {
            let head = &header.inbox.head;
            // Relaxed: a first guess.
            let mut old = head.load(Relaxed);
            loop {
                // Relaxed: published by the exchange.
                self.order.slots[oldest].inbox_next.store(old, Relaxed);
                // Release: the links of the chain are visible to who empties the inbox. Relaxed on failure: a guess.
                match head.compare_exchange_weak(old, self.youngest, Release, Relaxed) {
                    Ok(_) => break,
                    Err(seen) => old = seen,
                }
            }
        }
        if self.num_idle != 0 {
            // Release: comes after the push.
            header.gauges.idle.fetch_add(self.num_idle, Release);
        }
    }
}

/// The one thread that may change the order now; gives the token back when dropped.
#[derive(Debug)]
pub(crate) struct Evictor<'a> {
    order: EvictionOrder<'a>,
}

impl Evictor<'_> {
    /// Takes up to `n` slots out of circulation, those that were released longest ago: they are the caller's, claimed,
    /// with a new generation. Their index entries are still there, and it is the caller who counts them, see
    /// `count_evicted`.
    pub(crate) fn evict(&self, n: usize, evicted: &mut Vec<u32>) {
        let end = evicted.len() + n;
        self.empty_inbox();
        self.evict_oldest(end, evicted);
        // Slots may have come in since.
        while evicted.len() < end && self.empty_inbox() {
            self.evict_oldest(end, evicted);
        }
    }

    /// Takes the oldest slots off the order until `evicted` has `end`, or none is left.
    fn evict_oldest(&self, end: usize, evicted: &mut Vec<u32>) {
        let slots = self.order.slots;
        // Relaxed: ordered by the token.
        let mut oldest = self.oldest().load(Relaxed);
        while let (Some(at), true) = (slot_at(oldest), evicted.len() < end) {
            let slot = &slots[at];
            if let Some(next) = slots.get(at.wrapping_sub(AHEAD)) {
                prefetch(next);
            }
            // Relaxed: ordered by the token, as below.
            oldest = slot.younger.load(Relaxed);
            slot.older.store(ABSENT, Relaxed);
            slot.younger.store(ABSENT, Relaxed);
            if self.claim(slot) {
                evicted.push(at as u32);
            }
        }
        // Relaxed: ordered by the token.
        slot_at(oldest).map_or(self.youngest(), |at| &slots[at].older).store(END, Relaxed);
        self.oldest().store(oldest.max(END), Relaxed);
    }

    /// Makes an idle slot the caller's.
    fn claim(&self, slot: &Slot) -> bool {
        let claimed = |word: Word| {
            // In the inbox: released again since it got this place.
            (word.is_idle() && !word.is_in_inbox()).then(|| word.with_state(State::Claimed).with_holds(1).renewed())
        };
        if !self.order.has_one_taker {
            return slot.update(claimed).is_ok();
        }
        // The caller is the taker: nobody else changes the word of an idle slot.
        claimed(slot.word()).is_some_and(|word| {
            slot.set_word(word);
            true
        })
    }

    /// Says that the inbox has been emptied of a slot; gives the word as it was.
    fn leave_inbox(&self, slot: &Slot) -> Word {
        let word = slot.word();
        if self.order.has_one_taker && word.is_idle() {
            // As in `claim`.
            slot.set_word(word.without_inbox());
            word
        } else {
            slot.leave_inbox()
        }
    }

    /// Counts slots that were evicted.
    pub(crate) fn count_evicted(&self, num_evicted: usize) {
        // Relaxed: until it is seen, others who share the tier count on slots that have gone, and find fewer.
        self.order.header.gauges.idle.fetch_sub(num_evicted as i64, Relaxed);
    }

    /// Moves what the inbox has into the order, by stamp. True if it had something.
    fn empty_inbox(&self) -> bool {
        let slots = self.order.slots;
        let inbox = &self.order.header.inbox.head;
        // Relaxed: an empty inbox is left alone.
        if inbox.load(Relaxed) == ABSENT {
            return false;
        }
        // AcqRel: the links that the pushing threads wrote are visible, and later pushes come after this.
        let mut next = inbox.swap(ABSENT, AcqRel);
        // From young to old to old to young, in place. Relaxed: the chain is ours.
        let mut reversed = ABSENT;
        while let Some(slot) = slot_at(next) {
            // As in `evict_oldest`, from young to old.
            if let Some(later) = slots.get(slot + AHEAD) {
                prefetch(later);
            }
            let place = &slots[slot].inbox_next;
            (next, reversed) = {
                let after = place.load(Relaxed);
                // Relaxed, and no exchange, which would cost more.
                place.store(reversed, Relaxed);
                (after, link(slot))
            };
            // All leave their old places before the first gets its new one: at their old places, with their new stamps,
            // every insertion would have to walk past those that are still to come.
            self.unlink(slot);
        }
        while let Some(slot) = slot_at(reversed) {
            // Relaxed: the chain is ours until the slot leaves the inbox, so its link is read first.
            reversed = slots[slot].inbox_next.load(Relaxed);
            if self.leave_inbox(&slots[slot]).is_idle() {
                self.insert(slot);
            }
        }
        true
    }

    // The links of the order are touched by the holder of the token alone, whose acquire and release order them: every
    // access below is relaxed.

    fn oldest(&self) -> &AtomicU32 {
        &self.order.header.order.oldest
    }

    fn youngest(&self) -> &AtomicU32 {
        &self.order.header.order.youngest
    }

    /// Links a slot in behind the youngest one that is older: usually at the young end.
    fn insert(&self, slot: usize) {
        let slots = self.order.slots;
        let stamp = slots[slot].stamp();
        // Relaxed: ordered by the token.
        let mut older = self.youngest().load(Relaxed).max(END);
        let mut younger = END;
        while let Some(at) = slot_at(older) {
            // The stamp before the word: a stamp written since the slot got its place is seen with the hold it was
            // written under, or with what came after.
            let its_stamp = slots[at].stamp();
            let word = slots[at].word();
            let next = slots[at].older.load(Relaxed);
            if !word.is_idle() || word.is_in_inbox() {
                // Its stamp is no longer that of its place. It comes back through the inbox.
                self.unlink(at);
            } else if its_stamp > stamp {
                younger = older;
            } else {
                break;
            }
            older = next;
        }
        // Relaxed: ordered by the token.
        slots[slot].older.store(older, Relaxed);
        slots[slot].younger.store(younger, Relaxed);
        slot_at(older).map_or(self.oldest(), |at| &slots[at].younger).store(link(slot), Relaxed);
        slot_at(younger).map_or(self.youngest(), |at| &slots[at].older).store(link(slot), Relaxed);
    }

    fn unlink(&self, slot: usize) {
        let slots = self.order.slots;
        // Relaxed: ordered by the token.
        let (older, younger) = (slots[slot].older.load(Relaxed), slots[slot].younger.load(Relaxed));
        if older == ABSENT {
            return;
        }
        slot_at(older).map_or(self.oldest(), |at| &slots[at].younger).store(younger, Relaxed);
        slot_at(younger).map_or(self.youngest(), |at| &slots[at].older).store(older, Relaxed);
        slots[slot].older.store(ABSENT, Relaxed);
        slots[slot].younger.store(ABSENT, Relaxed);
    }

    /// Slots in the order, old to young, those included that were held since.
    pub(crate) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.empty_inbox();
        // Relaxed: ordered by the token.
        let first = slot_at(self.oldest().load(Relaxed));
        std::iter::successors(first, |&slot| slot_at(self.order.slots[slot].younger.load(Relaxed)))
    }
}

impl Drop for Evictor<'_> {
    fn drop(&mut self) {
        // Release: what we did to the list is visible to the next holder.
        self.order.header.order.token.store(0, Release);
    }
}

#[cfg(all(test, not(kvtier_loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::block::{BlockHash, BlockId, Cpu};
    use crate::tier::Tier;

    #[test]
    fn a_slot_released_under_an_older_stamp_does_not_mislead_insertions() {
        let tier: Tier<Cpu> = Tier::new(3, "cpu_blocks").unwrap();
        tier.allocate(3, &mut Vec::new(), |_, _| ());
        let [x, y, z] = [0, 1, 2].map(BlockId::new);
        for (n, id) in (0..).zip([x, y, z]) {
            assert!(tier.publish(id, &BlockHash([n; 32])));
            tier.count_published(1);
        }
        // Two slow calls, which took their stamps before the fast ones.
        let (mut slowest, mut slow) = (tier.releases(1), tier.releases(1));
        tier.releases(1).unhold(z);
        tier.releases(1).unhold(y);
        tier.audit_order("test").unwrap();
        assert!(tier.holds().hold(&tier.find_cached(&BlockHash([1; 32])).unwrap()));
        slowest.unhold(y);
        slow.unhold(x);
        drop(slow);
        // Brings `x` into the order while `y` is on its way to a new place.
        let _ = tier.audit_order("test");
        drop(slowest);
        tier.audit_order("test").unwrap();
        let mut evicted = Vec::new();
        tier.allocate(3, &mut Vec::new(), |id, _| evicted.push(id));
        assert_eq!(evicted, [y, x, z], "by stamp");
    }

    #[test]
    fn a_slot_released_again_does_not_go_by_its_old_place() {
        let tier: Tier<Cpu> = Tier::new(2, "cpu_blocks").unwrap();
        tier.allocate(2, &mut Vec::new(), |_, _| ());
        let [a, b] = [0, 1].map(BlockId::new);
        for (n, id) in (0..).zip([a, b]) {
            assert!(tier.publish(id, &BlockHash([n; 32])));
            tier.count_published(1);
            tier.releases(1).unhold(id);
        }
        tier.audit_order("test").unwrap();
        assert!(tier.holds().hold(&tier.find_cached(&BlockHash([0; 32])).unwrap()));
        let mut releases = tier.releases(1);
        releases.unhold(a);
        // `a` is idle again, and has not come through the inbox yet.
        let mut evicted = Vec::new();
        tier.allocate(1, &mut Vec::new(), |id, _| evicted.push(id));
        drop(releases);
        tier.allocate(1, &mut Vec::new(), |id, _| evicted.push(id));
        assert_eq!(evicted, [b, a]);
    }
}
