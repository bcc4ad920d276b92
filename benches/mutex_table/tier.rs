//! One tier: its slots, their index, the free set and the eviction order, all flat arrays addressed by slot.

use std::marker::PhantomData;

use crate::mutex_table::block::{BlockHash, BlockId};
use crate::mutex_table::free_bitmap::FreeBitmap;
use crate::mutex_table::index::Index;
use crate::mutex_table::slot_list::SlotList;

/// What a slot is at the moment; exactly one of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// Nobody's.
    Free,
    /// Held and not published.
    Claimed,
    /// Published: a hit for whoever looks its hash up.
    Cached,
    /// Destination of a planned or running copy.
    InFlight,
}

/// State, hold count and generation of a slot in one word.
#[derive(Debug, Clone, Copy)]
struct SlotWord(u64);

impl SlotWord {
    const STATES: [State; 4] = [State::Free, State::Claimed, State::Cached, State::InFlight];

    fn new(state: State, num_holds: u32, generation: u32) -> Self {
        debug_assert!(num_holds < 1 << 30);
        Self(state as u64 | u64::from(num_holds) << 2 | u64::from(generation) << 32)
    }
    fn state(self) -> State {
        Self::STATES[(self.0 & 3) as usize]
    }
    fn num_holds(self) -> u32 {
        (self.0 as u32) >> 2
    }
    fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// A pool of equal block slots.
#[derive(Debug)]
pub(crate) struct Tier<T> {
    words: Vec<SlotWord>,
    hashes: Vec<BlockHash>,
    index: Index,
    free: FreeBitmap,
    /// Cached slots without a hold, least recently released first.
    order: SlotList,
    /// Slots by `State as usize`.
    num_in_state: [usize; 4],
    num_held: usize,
    marker: PhantomData<fn() -> T>,
}

impl<T> Tier<T> {
    pub(crate) fn new(num_blocks: usize) -> Self {
        Self {
            words: vec![SlotWord::new(State::Free, 0, 0); num_blocks],
            hashes: vec![BlockHash::default(); num_blocks],
            index: Index::new(num_blocks),
            free: FreeBitmap::new(num_blocks),
            order: SlotList::new(num_blocks),
            num_in_state: [num_blocks, 0, 0, 0],
            num_held: 0,
            marker: PhantomData,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.words.len()
    }

    /// Slots that an allocation can get now.
    pub(crate) fn num_available(&self) -> usize {
        self.free.num_free() + self.order.len()
    }

    pub(crate) fn state(&self, id: BlockId<T>) -> State {
        self.words[id.index()].state()
    }

    pub(crate) fn num_holds(&self, id: BlockId<T>) -> u32 {
        self.words[id.index()].num_holds()
    }

    pub(crate) fn hash(&self, id: BlockId<T>) -> BlockHash {
        self.hashes[id.index()]
    }

    /// The slot indexed under a hash: cached, or in flight in the Cpu tier.
    pub(crate) fn find(&self, hash: &BlockHash) -> Option<BlockId<T>> {
        self.index.find(hash, |slot| self.hashes[slot] == *hash).map(BlockId::new)
    }

    /// The slot that is a hit for a hash.
    pub(crate) fn find_cached(&self, hash: &BlockHash) -> Option<BlockId<T>> {
        self.find(hash).filter(|&id| self.state(id) == State::Cached)
    }

    fn set(&mut self, slot: usize, state: State, num_holds: u32) {
        let old = self.words[slot];
        self.num_in_state[old.state() as usize] -= 1;
        self.num_in_state[state as usize] += 1;
        self.num_held -= usize::from(old.num_holds() > 0);
        self.num_held += usize::from(num_holds > 0);
        // A new generation with each new owner: whoever remembers the old one can tell.
        let renewed = old.state() == State::Free && state != State::Free;
        let generation = old.generation().wrapping_add(u32::from(renewed));
        self.words[slot] = SlotWord::new(state, num_holds, generation);
    }

    /// Takes one hold more on a cached slot.
    pub(crate) fn hold(&mut self, id: BlockId<T>) {
        let slot = id.index();
        debug_assert_eq!(self.state(id), State::Cached);
        self.order.remove(slot);
        self.set(slot, State::Cached, self.num_holds(id) + 1);
    }

    /// Drops one hold. At zero a cached slot becomes evictable, the youngest; a claimed one becomes free.
    pub(crate) fn unhold(&mut self, id: BlockId<T>) {
        let slot = id.index();
        let (state, rest) = (self.state(id), self.num_holds(id).saturating_sub(1));
        debug_assert!(self.num_holds(id) > 0);
        self.set(slot, state, rest);
        if rest == 0 {
            match state {
                State::Cached => self.order.push_young(slot),
                State::Claimed => self.free(id),
                State::Free | State::InFlight => debug_assert!(false, "hold on a slot that cannot have one"),
            }
        }
    }

    /// Moves a cached slot without holds to the young end; any other stays as it is.
    pub(crate) fn refresh(&mut self, id: BlockId<T>) {
        if self.order.remove(id.index()) {
            self.order.push_young(id.index());
        }
    }

    /// Takes `n` slots, which the caller knows to be available: the lowest free ones, then evicted ones, ascending.
    /// Each evicted slot is reported with its hash before it is reused.
    pub(crate) fn allocate(
        &mut self,
        n: usize,
        state: State,
        mut on_evict: impl FnMut(BlockId<T>, BlockHash),
    ) -> Vec<BlockId<T>> {
        let mut slots = Vec::with_capacity(n);
        self.free.take_lowest(n, |slot| slots.push(slot));
        while slots.len() < n {
            let Some(slot) = self.order.pop_old() else {
                debug_assert!(false, "allocation beyond what is available");
                break;
            };
            on_evict(BlockId::new(slot), self.hashes[slot]);
            self.index.remove(&self.hashes[slot], slot);
            self.set(slot, State::Free, 0);
            slots.push(slot);
        }
        slots.sort_unstable();
        for &slot in &slots {
            self.set(slot, state, u32::from(state == State::Claimed));
        }
        slots.into_iter().map(BlockId::new).collect()
    }

    /// Enters a hash for a slot that is still in flight, so that it is not copied twice; false if the index is full.
    pub(crate) fn announce(&mut self, id: BlockId<T>, hash: BlockHash) -> bool {
        debug_assert_eq!(self.state(id), State::InFlight);
        self.hashes[id.index()] = hash;
        self.index.insert(&hash, id.index())
    }

    /// Makes a slot a hit under `hash`; false, and nothing changed, if the index has the hash or is full.
    pub(crate) fn publish(&mut self, id: BlockId<T>, hash: BlockHash, num_holds: u32) -> bool {
        if self.find(&hash).is_some() || !self.index.insert(&hash, id.index()) {
            return false;
        }
        self.hashes[id.index()] = hash;
        self.make_cached(id, num_holds);
        true
    }

    /// Makes an announced slot a hit.
    pub(crate) fn publish_announced(&mut self, id: BlockId<T>) {
        debug_assert_eq!(self.state(id), State::InFlight);
        self.make_cached(id, 0);
    }

    fn make_cached(&mut self, id: BlockId<T>, num_holds: u32) {
        self.set(id.index(), State::Cached, num_holds);
        if num_holds == 0 {
            self.order.push_young(id.index());
        }
    }

    /// Makes a claimed slot the destination of a copy.
    pub(crate) fn expect_copy(&mut self, id: BlockId<T>) {
        debug_assert_eq!(self.state(id), State::Claimed);
        self.set(id.index(), State::InFlight, 0);
    }

    /// Makes an in-flight slot one that its request holds and will write.
    pub(crate) fn claim(&mut self, id: BlockId<T>) {
        debug_assert_eq!(self.state(id), State::InFlight);
        self.set(id.index(), State::Claimed, 1);
    }

    /// Takes a cached, held slot out of the index: no hit any more, free when its last hold goes.
    pub(crate) fn withdraw(&mut self, id: BlockId<T>) {
        debug_assert!(self.state(id) == State::Cached && self.num_holds(id) > 0);
        let slot = id.index();
        self.index.remove(&self.hashes[slot], slot);
        self.set(slot, State::Claimed, self.num_holds(id));
    }

    /// Takes an in-flight slot that was announced back.
    pub(crate) fn retract(&mut self, id: BlockId<T>) {
        self.index.remove(&self.hashes[id.index()], id.index());
        self.free(id);
    }

    /// Frees a claimed or in-flight slot that is not in the index.
    pub(crate) fn free(&mut self, id: BlockId<T>) {
        debug_assert!(matches!(self.state(id), State::Claimed | State::InFlight));
        self.set(id.index(), State::Free, 0);
        self.free.put(id.index());
    }
}
