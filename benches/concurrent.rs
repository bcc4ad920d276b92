//! What a scheduler feels of other threads: the p99 of its calls alone, beside lookups, and beside lookups and
//! completions. Our table and the one-mutex variant in turn; a JSON object per line of standard input.

#![allow(clippy::expect_used, clippy::cast_sign_loss)] // a bench that fails must stop; times are positive

mod mutex_table;
mod workload;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use kvtier::{BlockHash, BlockTable};
use mutex_table::MutexTable;
use workload::{document, session, Scheduler, BLOCK_SIZE};

const BLOCKS: usize = 20_000;
const DOCUMENTS: u64 = 60;
const ROUND: Duration = Duration::from_millis(400);
/// Tickets that may wait for the completer; an engine, too, is only so far ahead of its copies.
const MAX_WAITING: usize = 4;

/// What any thread may call.
trait AnyThread: Sync {
    fn lookup(&self, hashes: &[BlockHash]) -> (usize, usize);
    fn complete(&self, ticket: u64);
}

impl AnyThread for BlockTable {
    fn lookup(&self, hashes: &[BlockHash]) -> (usize, usize) {
        self.lookup_hashed(hashes)
    }
    fn complete(&self, ticket: u64) {
        BlockTable::complete(self, ticket, 0, &[]).expect("completed");
    }
}

impl AnyThread for &MutexTable {
    fn lookup(&self, hashes: &[BlockHash]) -> (usize, usize) {
        self.lookup_hashed(hashes)
    }
    fn complete(&self, ticket: u64) {
        MutexTable::complete(self, ticket);
    }
}

fn timed<T>(times: &mut Vec<u32>, call: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = call();
    times.push(start.elapsed().as_nanos() as u32);
    result
}

/// Ends the readers, also where the scheduler panics.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        // Relaxed: only an end.
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A new 256-block document and three known ones; every call of the scheduler is timed. Tickets go to `completer`, or
/// are completed at once; neither that nor waiting for the completer is timed.
fn schedule(
    table: &mut impl Scheduler,
    number: &mut u64,
    known: &[Vec<BlockHash>],
    complete: &mut impl FnMut(&mut dyn FnMut(u64), u64),
    times: &mut Vec<u32>,
) {
    *number += 1;
    let (id, hashes) = (*number as i64, document(*number, 256));
    timed(times, || table.admit(id, &hashes, 256 * BLOCK_SIZE));
    timed(times, || table.commit(id, 256 * BLOCK_SIZE));
    for ticket in timed(times, || table.step()).into_iter().flatten() {
        complete(&mut |ticket| table.complete(ticket), ticket);
    }
    timed(times, || table.release(id));
    for at in 0..3 {
        let hashes = &known[(*number as usize * 3 + at) % known.len()];
        timed(times, || table.admit(-1, hashes, 256 * BLOCK_SIZE + 1));
        timed(times, || table.release(-1));
    }
}

struct System<S, A> {
    scheduler: S,
    any_thread: A,
    number: u64,
    known: Vec<Vec<BlockHash>>,
}

impl<S: Scheduler, A: AnyThread> System<S, A> {
    fn new(mut scheduler: S, any_thread: A) -> Self {
        let known: Vec<_> = (0..DOCUMENTS).map(|number| document(u64::MAX - number, 256)).collect();
        for (at, hashes) in known.iter().enumerate() {
            workload::miss(&mut scheduler, at as i64, hashes);
        }
        Self { scheduler, any_thread, number: 1000, known }
    }

    /// Sorted times of the scheduler's calls, in nanoseconds.
    fn round(&mut self, num_readers: usize, with_completer: bool) -> Vec<u32> {
        let Self { scheduler, any_thread, number, known } = self;
        let (any_thread, known) = (&*any_thread, &*known);
        let (stop, waiting) = (AtomicBool::new(false), AtomicUsize::new(0));
        let mut times = Vec::with_capacity(1 << 20);
        let (sender, receiver) = channel();
        std::thread::scope(|threads| {
            for reader in 0..num_readers {
                let stop = &stop;
                threads.spawn(move || {
                    // Relaxed: only an end.
                    for turn in (0..).take_while(|_| !stop.load(Ordering::Relaxed)) {
                        std::hint::black_box(any_thread.lookup(&known[(turn * 7 + reader) % known.len()]));
                    }
                });
            }
            if with_completer {
                let waiting = &waiting;
                threads.spawn(move || {
                    for ticket in receiver {
                        any_thread.complete(ticket);
                        // Release: counted when it is complete.
                        waiting.fetch_sub(1, Ordering::Release);
                    }
                });
            }
            let _stop = Stop(&stop);
            // Dropped at the end, which ends the completer.
            let sender = sender;
            let mut complete = |at_once: &mut dyn FnMut(u64), ticket| {
                if !with_completer {
                    return at_once(ticket);
                }
                // Acquire: as the completer's release.
                while waiting.load(Ordering::Acquire) >= MAX_WAITING {
                    std::thread::yield_now();
                }
                // Relaxed: the channel orders it.
                waiting.fetch_add(1, Ordering::Relaxed);
                sender.send(ticket).expect("the completer lives");
            };
            let start = Instant::now();
            while start.elapsed() < ROUND {
                schedule(scheduler, number, known, &mut complete, &mut times);
            }
        });
        times.sort_unstable();
        times
    }
}

fn figures(name: &str, rounds: &mut impl FnMut(usize, bool) -> Vec<u32>, out: &mut Vec<String>) {
    let cases =
        [(0, false, "alone"), (1, false, "1 reader"), (2, false, "2 readers"), (2, true, "2 readers, completer")];
    for (num_readers, with_completer, case) in cases {
        let times = rounds(num_readers, with_completer);
        for (what, share) in [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)] {
            let time = f64::from(times[(times.len() as f64 * share) as usize]) / 1e3;
            out.push(format!("\"{name}: {what}, {case}\": {time:.2}"));
        }
    }
}

fn main() {
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    let scheduler = session(BLOCKS, 2 * BLOCKS);
    let table = scheduler.table().clone();
    let mut ours = System::new(scheduler, table);
    let mutex = &*Box::leak(Box::new(MutexTable::new(BLOCKS, 2 * BLOCKS, BLOCK_SIZE)));
    let mut mutex = System::new(mutex, mutex);
    for _line in std::io::stdin().lines() {
        let mut out = Vec::new();
        figures("kvtier", &mut |readers, completer| ours.round(readers, completer), &mut out);
        figures("mutex", &mut |readers, completer| mutex.round(readers, completer), &mut out);
        println!("{{{}}}", out.join(", "));
    }
}
