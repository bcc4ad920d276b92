use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::copy::layout::Fragment;

const BLOCK: usize = 64 << 10;
const LONG: Duration = Duration::from_secs(20);

/// An engine over a buffer that lives as long as the test.
struct Rig {
    engine: CopyEngine,
    gpu: Vec<u8>,
}

fn rig(num_blocks: usize, num_threads: usize) -> Rig {
    let mut gpu = vec![0; num_blocks * BLOCK];
    for (index, byte) in gpu.iter_mut().enumerate() {
        *byte = (index / BLOCK + index % 251) as u8;
    }
    let address = gpu.as_mut_ptr().expose_provenance();
    let memory =
        DescribedMemory::new(vec![Fragment { address, block_stride: BLOCK, bytes: BLOCK }], num_blocks).unwrap();
    let arena = Arc::new(HostArena::map(num_blocks, BLOCK).unwrap());
    // SAFETY: the buffer is in the rig behind the engine, which stops its threads when it is dropped; it is not moved.
    let engine = unsafe { CopyEngine::start(memory, arena, CopyOptions { num_threads, max_queued: 64 }) }.unwrap();
    Rig { engine, gpu }
}

fn request(ticket: u64, blocks: std::ops::Range<i32>) -> CopyRequest {
    let pairs = blocks.map(|block| [block, block]).collect();
    CopyRequest { ticket, direction: Direction::Store, pairs, list: "stores" }
}

fn hook(engine: &CopyEngine, before: fn(u64)) {
    *engine.shared.before_chunk.lock().unwrap() = Some(before);
}

fn all_reports(engine: &CopyEngine, num_tickets: usize) -> Vec<Report> {
    let mut reports = Vec::new();
    while reports.len() < num_tickets {
        let more = engine.wait(LONG).unwrap();
        assert!(!more.is_empty(), "a ticket was lost: {reports:?}");
        reports.extend(more);
    }
    reports.sort_by_key(|report| report.ticket);
    reports
}

#[test]
fn a_panic_in_a_thread_loses_no_ticket_and_no_thread() {
    for num_threads in [1, 3] {
        let rig = rig(256, num_threads); // 16 MiB: eight chunks
        hook(&rig.engine, |ticket| assert!(ticket != 2, "this panic is part of the test"));
        let requests = vec![request(1, 0..4), request(2, 4..204), request(3, 204..256)];
        rig.engine.submit(requests).unwrap();
        let reports = all_reports(&rig.engine, 3);
        assert!(reports[0].failed.is_empty());
        assert_eq!(reports[1].failed, (0..200).collect::<Vec<u32>>());
        assert!(reports[2].failed.is_empty());
        assert!(rig.engine.stats().unwrap().num_panics >= 1);
        assert_eq!(rig.engine.shared.lock().live_threads, num_threads);
        hook(&rig.engine, |_| {});
        rig.engine.submit(vec![request(2, 4..204)]).unwrap();
        assert_eq!(all_reports(&rig.engine, 1), [Report { ticket: 2, failed: vec![] }]);
    }
}

#[test]
fn threads_share_one_job() {
    static INSIDE: AtomicUsize = AtomicUsize::new(0);
    static MOST: AtomicUsize = AtomicUsize::new(0);
    let rig = rig(256, 2);
    hook(&rig.engine, |_| {
        // SeqCst: a test, where nothing is gained by less.
        MOST.fetch_max(INSIDE.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        thread::sleep(Duration::from_millis(20));
        INSIDE.fetch_sub(1, Ordering::SeqCst); // SeqCst: as above
    });
    rig.engine.submit(vec![request(1, 0..256)]).unwrap();
    assert!(all_reports(&rig.engine, 1)[0].failed.is_empty());
    assert_eq!(MOST.load(Ordering::SeqCst), 2); // SeqCst: as above
}

#[test]
fn stopping_takes_one_chunk_and_reports_all() {
    let rig = rig(256, 1);
    hook(&rig.engine, |_| thread::sleep(Duration::from_millis(50)));
    rig.engine.submit(vec![request(1, 0..128), request(2, 128..256)]).unwrap();
    thread::sleep(Duration::from_millis(10)); // let it begin
    let start = Instant::now();
    assert!(rig.engine.stop(LONG));
    assert!(start.elapsed() < Duration::from_secs(2), "four chunks of each would be enough to notice");
    let reports = all_reports(&rig.engine, 2);
    assert!(reports.iter().all(|report| report.failed.len() == 128), "{reports:?}");
    assert_eq!(rig.engine.submit(vec![request(3, 0..1)]), Err(CopyError::Closed));
    assert_eq!(rig.engine.wait(LONG).unwrap(), [], "nothing left to wait for");
    assert!(rig.engine.stop(LONG), "stopping again is no fault");
}

#[test]
fn a_stop_that_cannot_be_in_time_says_so() {
    let rig = rig(1, 1);
    hook(&rig.engine, |_| thread::sleep(Duration::from_millis(500)));
    rig.engine.submit(vec![request(1, 0..1)]).unwrap();
    thread::sleep(Duration::from_millis(50));
    assert!(!rig.engine.stop(Duration::from_millis(1)));
    assert!(rig.engine.stop(LONG));
}

#[test]
fn what_was_queued_before_a_refusal_is_finished() {
    let rig = rig(256, 1);
    rig.engine.submit(vec![request(1, 0..128), request(2, 128..256)]).unwrap();
    rig.engine.refuse_new().unwrap();
    assert_eq!(rig.engine.submit(vec![request(3, 0..1)]), Err(CopyError::Closed));
    assert!(rig.engine.wait_idle(LONG).unwrap());
    assert!(all_reports(&rig.engine, 2).iter().all(|report| report.failed.is_empty()));
}

#[test]
fn waiting_ends_at_its_bound() {
    let rig = rig(1, 1);
    let start = Instant::now();
    assert_eq!(rig.engine.wait(Duration::from_millis(30)).unwrap(), []);
    assert!((30..5000).contains(&start.elapsed().as_millis()));
    assert_eq!(rig.engine.poll().unwrap(), []);
}

#[test]
fn an_empty_list_is_reported_to_one_who_waits_already() {
    let rig = rig(1, 1);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| rig.engine.wait(LONG).unwrap());
        thread::sleep(Duration::from_millis(50));
        rig.engine.submit(vec![request(9, 0..0)]).unwrap();
        assert_eq!(waiter.join().unwrap(), [Report { ticket: 9, failed: vec![] }]);
    });
}

#[test]
fn options_are_refused_by_name() {
    for (num_threads, max_queued, expected) in [
        (0, 1, "num_threads"),
        (MAX_THREADS + 1, 1, "num_threads"),
        (1, 0, "max_queued"),
        (1, MAX_QUEUED + 1, "max_queued"),
    ] {
        let memory = DescribedMemory::new(vec![Fragment { address: 64, block_stride: 8, bytes: 8 }], 1).unwrap();
        let arena = Arc::new(HostArena::map(1, 8).unwrap());
        // SAFETY: the description is of no memory, but nothing is ever submitted.
        match unsafe { CopyEngine::start(memory, arena, CopyOptions { num_threads, max_queued }) } {
            Err(CopyError::Config { argument, .. }) => assert_eq!(argument, expected),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn dropping_ends_the_threads_and_frees_the_arena() {
    let rig = rig(256, 2);
    let shared = Arc::downgrade(&rig.engine.shared);
    rig.engine.submit(vec![request(1, 0..256)]).unwrap();
    drop(rig.engine);
    assert!(shared.upgrade().is_none());
    drop(rig.gpu);
}

#[test]
fn a_forked_child_is_refused_and_does_not_hang() {
    let mut rig = rig(256, 2);
    rig.engine.submit(vec![request(1, 0..256)]).unwrap();
    // What a child sees: another process id. (A real fork is tested from Python.)
    rig.engine.owner += 1;
    let held = rig.engine.shared.lock(); // as a thread that the child does not have may
    assert!(matches!(rig.engine.poll(), Err(CopyError::Forked { .. })));
    assert!(matches!(rig.engine.wait(LONG), Err(CopyError::Forked { .. })));
    assert!(matches!(rig.engine.submit(vec![]), Err(CopyError::Forked { .. })));
    assert!(matches!(rig.engine.stats(), Err(CopyError::Forked { .. })));
    assert!(rig.engine.stop(LONG));
    drop(held);
    rig.engine.owner -= 1;
    assert!(all_reports(&rig.engine, 1)[0].failed.is_empty());
}
