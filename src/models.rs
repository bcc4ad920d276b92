//! Models of the protocols, run by loom through every interleaving within the preemption bound (`make loom`).

use loom::sync::Arc;
use loom::thread;

use crate::block::{BlockHash, BlockId, Cpu, Gpu, TierKind};
use crate::free_bitmap::FreeBitmap;
use crate::index::{Bucket, Index, Inserted};
use crate::region::Region;
use crate::session::Session;
use crate::slot::State;
use crate::table::{Config, Shared};
use crate::ticket::{Store, Tickets};
use crate::tier::Tier;

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(builder.preemption_bound.unwrap_or(2));
    builder.max_branches = 20_000;
    builder.check(model);
}

fn hash(n: u8) -> BlockHash {
    BlockHash([n; 32])
}

fn tier(num_blocks: usize) -> Arc<Tier<Cpu>> {
    Arc::new(Tier::new(num_blocks, "cpu_blocks").unwrap())
}

/// A tier in which one thread alone takes slots and holds.
fn gpu_tier(num_blocks: usize) -> Arc<Tier<Gpu>> {
    Arc::new(Tier::new(num_blocks, "gpu_blocks").unwrap())
}

/// Claims one slot and publishes it under a hash, held once.
fn cached<T: TierKind>(tier: &Tier<T>, n: u8) -> BlockId<T> {
    let mut slots = Vec::new();
    assert_eq!(tier.allocate(1, &mut slots, |_, _| ()), 1);
    let id = BlockId::new(slots[0] as usize);
    assert!(tier.publish(id, &hash(n)));
    tier.count_published(1);
    id
}

fn idle(tier: &Tier<Cpu>, n: u8) -> BlockId<Cpu> {
    let id = cached(tier, n);
    tier.releases(1).unhold(id);
    id
}

#[test]
fn two_takers_and_a_giver_share_each_free_slot_once() {
    check(|| {
        let region = Arc::new(Region::new(2, "blocks").unwrap());
        let free = |region: &Region, n: usize| {
            let mut slots = Vec::new();
            FreeBitmap::new(region.header(), region.bitmap(), 2).take_lowest(n, &mut slots);
            slots
        };
        assert_eq!(free(&region, 1), [0]);
        let taker = |region: Arc<Region>| thread::spawn(move || free(&region, 1));
        let (a, b) = (taker(region.clone()), taker(region.clone()));
        FreeBitmap::new(region.header(), region.bitmap(), 2).put([0]);
        let (a, b) = (a.join().unwrap(), b.join().unwrap());
        assert!(a.is_empty() || a != b, "both took {a:?}");
        let bitmap = FreeBitmap::new(region.header(), region.bitmap(), 2);
        assert_eq!(bitmap.num_free(), 2 - a.len() - b.len());
    });
}

#[test]
fn a_hold_and_an_eviction_exclude_each_other() {
    check(|| {
        let tier = tier(1);
        let id = idle(&tier, 1);
        let evictor = {
            let tier = tier.clone();
            thread::spawn(move || {
                let mut slots = Vec::new();
                tier.allocate(1, &mut slots, |_, hit| assert_eq!(hit, hash(1))) == 1
            })
        };
        let held = tier.find_cached(&hash(1)).is_some_and(|hit| tier.holds().hold(&hit));
        let evicted = evictor.join().unwrap();
        assert!(held != evicted, "held {held}, evicted {evicted}");
        assert_eq!(tier.word(id).num_holds(), 1);
        assert_eq!(tier.word(id).state(), if held { State::Cached } else { State::Claimed });
    });
}

#[test]
fn a_hit_on_a_slot_that_changes_owner_holds_the_right_hash() {
    check(|| {
        let tier = tier(1);
        idle(&tier, 1);
        let other = {
            let tier = tier.clone();
            thread::spawn(move || {
                let mut slots = Vec::new();
                if tier.allocate(1, &mut slots, |_, _| ()) == 1 {
                    assert!(tier.publish(BlockId::new(0), &hash(2)));
                    tier.count_published(1);
                }
            })
        };
        for n in [2, 1] {
            if let Some(hit) = tier.find_cached(&hash(n)) {
                if tier.holds().hold(&hit) {
                    assert_eq!(tier.hash(hit.id), hash(n));
                    assert_eq!(tier.word(hit.id).state(), State::Cached);
                }
            }
        }
        other.join().unwrap();
    });
}

#[test]
fn of_two_insertions_of_one_hash_at_most_one_stays() {
    check(|| {
        let tier = tier(2);
        let mut slots = Vec::new();
        assert_eq!(tier.allocate(2, &mut slots, |_, _| ()), 2);
        for at in 0..2 {
            tier.set_hash(BlockId::new(at), &hash(7));
        }
        let other = {
            let tier = tier.clone();
            thread::spawn(move || tier.enter(BlockId::new(1), &hash(7)) == Inserted::Yes)
        };
        let mine = tier.enter(BlockId::new(0), &hash(7)) == Inserted::Yes;
        assert!(!(mine && other.join().unwrap()), "both stayed");
    });
}

/// One of the two may still see an entry full that the other has emptied, so that they fill different entries: here only
/// the fence between entering and looking again makes one see the other.
#[test]
fn two_insertions_into_different_entries_do_not_miss_each_other() {
    check(|| {
        let buckets = Arc::new([Bucket::default()]);
        assert_eq!(Index::new(&*buckets).insert(&hash(1), 2, |_| true), Inserted::Yes);
        let other = {
            let buckets = buckets.clone();
            thread::spawn(move || Index::new(&*buckets).insert(&hash(7), 1, |_| true) == Inserted::Yes)
        };
        assert!(Index::new(&*buckets).remove(&hash(1), 2));
        let mine = Index::new(&*buckets).insert(&hash(7), 0, |_| true) == Inserted::Yes;
        assert!(!(mine && other.join().unwrap()), "both stayed");
    });
}

/// The taker changes slots that nobody holds, or that it alone holds, without exchanges.
#[test]
fn a_taker_and_a_completion_lose_nothing_of_each_other() {
    check(|| {
        let tier = gpu_tier(2);
        let (a, b) = (cached(&tier, 1), cached(&tier, 2));
        // The hold of a store's ticket, besides the request's.
        tier.holds().hold_cached(a);
        let completer = {
            let tier = tier.clone();
            thread::spawn(move || tier.releases(1).unhold(a))
        };
        tier.releases(1).unhold_own(b);
        tier.releases(1).unhold_own(a);
        // Both are hits still, whatever the completion has done.
        for n in [1, 2] {
            let hit = tier.find_cached(&hash(n)).unwrap();
            assert!(tier.holds().hold(&hit));
            tier.releases(1).unhold_own(hit.id);
        }
        let promised = tier.num_available();
        let mut slots = Vec::new();
        assert_eq!(tier.allocate(promised, &mut slots, |_, _| ()), promised);
        completer.join().unwrap();
        tier.audit("model").unwrap();
        assert_eq!(tier.num_available(), 2 - promised);
        assert_eq!(tier.allocate(2, &mut slots, |_, _| ()), 2 - promised);
    });
}

#[test]
fn an_abort_and_a_completion_leave_the_slot_to_one_of_them() {
    for published in [true, false] {
        check(move || {
            let tier = gpu_tier(1);
            let mut slots = Vec::new();
            tier.allocate(1, &mut slots, |_, _| ());
            let id = BlockId::new(0);
            tier.set_hash(id, &hash(1));
            tier.expect_copy(id, 1);
            tier.count_expected(1);
            if published {
                assert_eq!(tier.enter(id, &hash(1)), Inserted::Yes);
            }
            let completer = {
                let tier = tier.clone();
                thread::spawn(move || {
                    if published {
                        tier.releases(1).publish_copied(id);
                    } else {
                        tier.end_copy(id);
                    }
                })
            };
            if !tier.abandon_copy(id) {
                tier.releases(1).unhold_own(id);
            }
            completer.join().unwrap();
            assert_eq!(tier.word(id).num_holds(), 0);
            assert_eq!(tier.word(id).state(), if published { State::Cached } else { State::Free });
            assert_eq!(tier.num_available(), 1);
            tier.audit("model").unwrap();
        });
    }
}

#[test]
fn what_is_counted_as_available_can_be_allocated() {
    check(|| {
        let tier = tier(2);
        let (a, b) = (cached(&tier, 1), cached(&tier, 2));
        let completer = {
            let tier = tier.clone();
            thread::spawn(move || {
                tier.releases(1).unhold(a);
                tier.releases(1).unhold(b);
            })
        };
        let promised = tier.num_available();
        let mut slots = Vec::new();
        assert_eq!(tier.allocate(promised, &mut slots, |_, _| ()), promised);
        completer.join().unwrap();
        tier.audit("model").unwrap();
    });
}

#[test]
fn a_refresh_does_not_touch_the_stamp_of_the_next_owner() {
    check(|| {
        let tier = tier(2);
        let (a, b) = (idle(&tier, 1), idle(&tier, 2));
        let refresher = {
            let tier = tier.clone();
            thread::spawn(move || tier.releases(1).refresh(a))
        };
        let mut slots = Vec::new();
        if tier.allocate(1, &mut slots, |_, _| ()) == 1 {
            let id = BlockId::new(slots[0] as usize);
            // Another slot takes a stamp between the refresher's and the next owner's.
            tier.releases(1).refresh(b);
            assert!(tier.publish(id, &hash(3)));
            tier.count_published(1);
            tier.releases(1).unhold(id);
            // Brings it into the order, under the stamp that it has now. The audit itself is exact only at rest.
            let _ = tier.audit_order("model");
        }
        refresher.join().unwrap();
        tier.audit("model").unwrap();
    });
}

#[test]
fn the_last_of_two_ranks_sees_the_failures_of_both() {
    check(|| {
        let tickets = Arc::new(Tickets::new(2, 2));
        let store = Store { source: BlockId::new(0), generation: 0, destination: BlockId::new(0) };
        let number = tickets.issue(|_, copies| copies.stores.extend([store, store])).unwrap();
        let acknowledge = move |tickets: &Tickets, rank: u32| {
            let outcome = tickets.acknowledge(number, rank, &[rank as usize]).unwrap();
            outcome.is_some_and(|outcome| {
                outcome.copies(|copies| assert!(copies.has_failed(0) && copies.has_failed(1)));
                outcome.finish();
                true
            })
        };
        let other = {
            let tickets = tickets.clone();
            thread::spawn(move || acknowledge(&tickets, 1))
        };
        let mine = acknowledge(&tickets, 0);
        assert!(mine != other.join().unwrap(), "exactly one is last");
        assert!(tickets.collect(number, |copies| assert_eq!(copies.len(), 2)));
    });
}

#[test]
fn a_late_duplicate_does_not_acknowledge_the_next_ticket_of_the_cell() {
    check(|| {
        let tickets = Arc::new(Tickets::new(1, 2));
        let store = Store { source: BlockId::new(0), generation: 0, destination: BlockId::new(0) };
        let issue = move |tickets: &Tickets| tickets.issue(|_, copies| copies.stores.push(store)).unwrap();
        let number = issue(&tickets);
        let late = {
            let tickets = tickets.clone();
            thread::spawn(move || match tickets.acknowledge(number, 0, &[]) {
                Ok(Some(outcome)) => {
                    outcome.finish();
                    1
                }
                _ => 0,
            })
        };
        let mut num_last = 0;
        if let Ok(Some(outcome)) = tickets.acknowledge(number, 0, &[]) {
            outcome.finish();
            num_last = 1;
        }
        if tickets.collect(number, |_| ()) {
            // The second one is in the cell of the first.
            let next = [issue(&tickets), issue(&tickets)];
            let mut opened = 0;
            for number in next {
                let outcome = tickets.acknowledge(number, 0, &[0]).unwrap().unwrap();
                outcome.copies(|copies| assert!(copies.has_failed(0)));
                outcome.finish();
                opened += 1;
            }
            assert_eq!(opened, 2);
        }
        assert_eq!(num_last + late.join().unwrap(), 1);
    });
}

#[test]
fn a_reset_and_new_activity_exclude_each_other() {
    check(|| {
        let shared = Arc::new(Shared::new(&Config::new(1, 1, 1), None).unwrap());
        let tokens = Arc::new(loom::cell::UnsafeCell::new(0));
        let other = {
            let (shared, tokens) = (shared.clone(), tokens.clone());
            thread::spawn(move || {
                if shared.host.begin_activity(1) {
                    // SAFETY: the model's question: loom fails where both sides are in at once.
                    tokens.with_mut(|tokens| unsafe { *tokens += 1 });
                    shared.host.end_activity(1);
                }
            })
        };
        if shared.host.begin_reset() {
            // SAFETY: as above.
            tokens.with_mut(|tokens| unsafe { *tokens += 1 });
            shared.host.end_reset();
        }
        other.join().unwrap();
        assert!(shared.host.begin_reset(), "nothing is left counted");
    });
}

#[test]
fn a_release_under_an_older_stamp_keeps_the_order() {
    check(|| {
        let tier = tier(3);
        let (a, b, c) = (cached(&tier, 1), cached(&tier, 2), cached(&tier, 3));
        // Stamped first, released last.
        let mut slow = tier.releases(1);
        tier.releases(1).unhold(b);
        tier.audit_order("model").unwrap();
        let other = {
            let tier = tier.clone();
            thread::spawn(move || {
                if tier.find_cached(&hash(2)).is_some_and(|hit| tier.holds().hold(&hit)) {
                    tier.releases(1).unhold(b);
                }
                tier.releases(1).unhold(c);
            })
        };
        slow.unhold(a);
        drop(slow);
        // Brings what has come in into the order; exact only at rest.
        let _ = tier.audit_order("model");
        other.join().unwrap();
        tier.audit("model").unwrap();
        let mut evicted = Vec::new();
        let mut slots = Vec::new();
        tier.allocate(3, &mut slots, |id, _| evicted.push(id));
        assert_eq!(evicted, [a, b, c], "by stamp");
    });
}

#[test]
fn what_is_counted_can_be_allocated_when_holds_and_releases_are_counted_together() {
    check(|| {
        let tier = tier(3);
        let (a, b, c) = (cached(&tier, 1), cached(&tier, 2), cached(&tier, 3));
        let completer = {
            let tier = tier.clone();
            thread::spawn(move || {
                let mut releases = tier.releases(3);
                for id in [a, b, c] {
                    releases.unhold(id);
                }
            })
        };
        // As an admission does that hits `a`.
        let counted = tier.num_available();
        let hit = tier.find_cached(&hash(1)).unwrap();
        let promised = counted.saturating_sub(usize::from(hit.is_idle));
        assert!(tier.holds().hold(&hit));
        let mut slots = Vec::new();
        assert_eq!(tier.allocate(promised, &mut slots, |_, _| ()), promised);
        completer.join().unwrap();
        tier.audit("model").unwrap();
    });
}

/// A session that stores one block of a request that has ended: only the ticket holds the block.
fn storing() -> (Session, u64) {
    let mut session = Session::new(&Config::new(2, 1, 1)).unwrap();
    session.admit_hashed(1.into(), &[hash(1)], 1).unwrap();
    session.commit(&1.into(), 1).unwrap();
    let ticket = session.step().store_ticket.unwrap();
    session.release(&1.into()).unwrap();
    (session, ticket)
}

#[test]
fn an_admission_does_not_promise_a_hit_that_a_completion_releases() {
    check(|| {
        let (mut session, ticket) = storing();
        let table = session.table().clone();
        let completer = thread::spawn(move || assert!(table.complete(ticket, 0, &[]).unwrap()));
        // One hit, two more blocks: one too many, whenever the hit is released.
        assert!(session.admit_hashed(2.into(), &[hash(1), hash(2), hash(3)], 3).is_err());
        completer.join().unwrap();
        session.audit().unwrap();
    });
}

#[test]
fn a_reset_and_a_completion_leave_nothing_behind() {
    check(|| {
        let (mut session, ticket) = storing();
        let table = session.table().clone();
        let completer = thread::spawn(move || assert!(table.complete(ticket, 0, &[]).unwrap()));
        if session.reset() {
            assert_eq!(session.table().lookup_hashed(&[hash(1)]), (0, 0));
            session.audit().unwrap();
        }
        completer.join().unwrap();
        assert!(session.reset());
        assert_eq!(session.table().stats().cpu.free, 1);
        session.audit().unwrap();
    });
}
