//! Admission where a caller's own digests name one block several times.

// A test says what went wrong by panicking.
#![allow(clippy::unwrap_used)]

use kvtier::{BlockHash, Config, Error, Session};

const HASH: BlockHash = BlockHash([7; 32]);

/// A table whose Gpu tier of so many blocks has one hit, which nobody holds.
fn with_one_hit(gpu_blocks: usize) -> Session {
    let mut session = Session::new(&Config::new(gpu_blocks, 0, 4)).unwrap();
    session.admit_hashed(1.into(), &[HASH], 4).unwrap();
    session.commit(&1.into(), 4).unwrap();
    session.release(&1.into()).unwrap();
    session
}

#[test]
fn a_block_that_is_named_twice_is_not_available_once_more() {
    let mut session = with_one_hit(1);
    let refused = session.admit_hashed(2.into(), &[HASH, HASH], 9);
    assert_eq!(refused, Err(Error::OutOfBlocks { needed: 1, available: 0, total: 1 }));
    session.audit().unwrap();
}

#[test]
fn a_block_that_is_named_twice_is_taken_from_what_is_available_once() {
    let mut session = with_one_hit(2);
    let admission = session.admit_hashed(2.into(), &[HASH, HASH], 9).unwrap();
    assert_eq!((admission.gpu_hit_blocks, admission.fresh_blocks), (2, 1));
    assert_eq!(admission.block_ids[0], admission.block_ids[1]);
    session.audit().unwrap();
    session.release(&2.into()).unwrap();
    session.audit().unwrap();
}
