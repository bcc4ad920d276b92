//! Which block gives its slot away: the one whose last hold was released longest ago.

// A test says what went wrong by panicking.
#![allow(clippy::unwrap_used)]

use kvtier::event::EventKind;
use kvtier::{BlockHash, Config, Session};

fn hash(n: u8) -> BlockHash {
    BlockHash([n; 32])
}

/// Admits a request of one block, which is written.
fn open(session: &mut Session, id: i64, n: u8) {
    session.admit_hashed(id.into(), &[hash(n)], 4).unwrap();
    session.commit(&id.into(), 4).unwrap();
}

fn removed(session: &Session) -> Vec<BlockHash> {
    let events = session.table().events();
    events.iter().filter(|event| event.kind == EventKind::Removed).map(|event| event.block_hash).collect()
}

#[test]
fn the_block_released_longest_ago_goes_first() {
    let mut session = Session::new(&Config::new(3, 0, 4)).unwrap();
    for n in [1, 2, 3] {
        open(&mut session, n.into(), n);
    }
    for id in [2, 1, 3] {
        session.release(&id.into()).unwrap();
    }
    for (id, oldest) in [(4, 2), (5, 1), (6, 3)] {
        session.admit_hashed(id.into(), &[], 1).unwrap();
        assert_eq!(removed(&session), [hash(oldest)]);
    }
}

#[test]
fn the_end_of_a_private_duplicate_makes_the_published_block_young() {
    let mut session = Session::new(&Config::new(3, 0, 4)).unwrap();
    for (id, n) in [(1, 1), (2, 1), (3, 2)] {
        open(&mut session, id, n);
    }
    for id in [1, 3, 2] {
        session.release(&id.into()).unwrap();
    }
    session.admit_hashed(4.into(), &[hash(3)], 5).unwrap();
    assert_eq!(removed(&session), [hash(2)]);
}
