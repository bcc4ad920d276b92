//! Memory: the steady state of a table allocates nothing, and its size does not depend on how much went through it.

// A test says what went wrong by panicking.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use kvtier::{Admission, BlockHash, Config, Plan, Session};

thread_local! {
    static NUM_ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counting the calls of each thread.
struct Counting;

fn count() {
    NUM_ALLOCATIONS.with(|num| num.set(num.get() + 1));
}

// SAFETY: all is passed on to the system's allocator as it came; counting touches a cell of the thread that needs neither
// construction nor destruction.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(block, layout) }
    }
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(block, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BLOCKS: usize = 8;

/// What one call after the other allocates.
#[derive(Default)]
struct Calls {
    plan: Plan,
    admission: Admission,
    num_by_call: [u64; 6],
    num_loads: usize,
    num_stores: usize,
}

impl Calls {
    const NAMES: [&'static str; 6] =
        ["admit_hashed_into", "step_into", "complete", "commit", "lookup_hashed, stats", "release"];

    fn counted<R>(&mut self, call: usize, run: impl FnOnce(&mut Self) -> R) -> R {
        let before = NUM_ALLOCATIONS.with(Cell::get);
        let result = run(self);
        self.num_by_call[call] += NUM_ALLOCATIONS.with(Cell::get) - before;
        result
    }

    /// One request from end to end, with all copies that it causes.
    fn request(&mut self, session: &mut Session, hashes: &[BlockHash]) {
        self.counted(0, |calls| {
            session.admit_hashed_into(1.into(), hashes, BLOCKS * 4 + 1, &mut calls.admission).unwrap();
        });
        assert_eq!(self.admission.block_ids.len(), BLOCKS + 1);
        self.step(session);
        self.counted(3, |_| session.commit(&1.into(), BLOCKS * 4).unwrap());
        self.step(session);
        self.counted(4, |_| {
            assert_eq!(session.table().lookup_hashed(hashes).0, BLOCKS);
            assert_eq!(session.table().stats().num_requests, 1);
        });
        self.counted(5, |_| session.release(&1.into()).unwrap());
    }

    fn step(&mut self, session: &mut Session) {
        self.counted(1, |calls| session.step_into(&mut calls.plan));
        self.num_loads += self.plan.loads.len();
        self.num_stores += self.plan.stores.len();
        for ticket in [self.plan.load_ticket, self.plan.store_ticket].into_iter().flatten() {
            self.counted(2, |_| assert!(session.complete(ticket, 0, &[]).unwrap()));
        }
    }
}

fn document(n: u64) -> [BlockHash; BLOCKS] {
    std::array::from_fn(|at| {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        bytes[8..16].copy_from_slice(&n.to_le_bytes());
        bytes[16] = at as u8;
        BlockHash(bytes)
    })
}

#[test]
fn the_steady_state_allocates_nothing() {
    let mut session = Session::new(&Config::new(12, 40, 4)).unwrap();
    let mut calls = Calls::default();
    // Every cell of the tickets is used once, so that its lists have their memory. Four documents come back from the Cpu
    // tier again and again; each fifth is new.
    let which = |n: u64| if n % 5 == 4 { 100 + n } else { n % 4 };
    for n in 0..400 {
        calls.request(&mut session, &document(which(n)));
    }
    (calls.num_by_call, calls.num_loads, calls.num_stores) = Default::default();
    for n in 400..1400 {
        calls.request(&mut session, &document(which(n)));
    }
    assert!(calls.num_loads > 1000 && calls.num_stores > 1000, "{} loads", calls.num_loads);
    for (name, num) in Calls::NAMES.iter().zip(calls.num_by_call) {
        assert_eq!(num, 0, "{name} allocated");
    }
    session.audit().unwrap();
}

/// Resident memory of this process in bytes.
#[cfg(target_os = "linux")]
fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[cfg(target_os = "linux")]
#[test]
fn documents_without_end_leave_the_resident_size_flat() {
    const LIMIT: usize = 1 << 20;
    let mut session = Session::new(&Config::new(64, 32, 4)).unwrap();
    let mut calls = Calls::default();
    // Fills the event log, which nobody drains, and the tiers.
    for n in 0..10_000 {
        calls.request(&mut session, &document(n));
    }
    let before = resident_bytes();
    for n in 10_000..110_000 {
        calls.request(&mut session, &document(n));
    }
    let grown = resident_bytes().saturating_sub(before);
    println!("{grown} bytes more after 100000 documents");
    assert!(grown <= LIMIT, "{grown} bytes more after 100000 documents");
    session.audit().unwrap();
}
