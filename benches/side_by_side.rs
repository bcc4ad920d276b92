//! One round of every measurement for our table and for the one-mutex variant, per line of standard input.
//!
//! Answers each line with a JSON object: name to microseconds. `bench_side_by_side.py` calls it round by round, between
//! the other systems. The boundary is the Rust call: no Python, hashes given.

#![allow(clippy::expect_used, clippy::cast_sign_loss)] // a bench that fails must stop; times are positive

mod mutex_table;
mod workload;

use std::collections::BTreeMap;
use std::io::BufRead;
use std::time::{Duration, Instant};

use kvtier::hash::Identity;
use kvtier::{Config, Session};
use mutex_table::MutexTable;
use workload::{document, hit, miss, session, Full, Scheduler, Spill, BLOCK_SIZE};

type Figures = BTreeMap<String, f64>;

const SIZES: [(usize, &str); 4] = [(1_000, "1k"), (20_000, "20k"), (100_000, "100k"), (1_000_000, "1M")];
const DOCUMENT: usize = 1280;

fn mean(times: impl Iterator<Item = Duration>) -> f64 {
    let (sum, n) = times.fold((0.0, 0), |(sum, n), time| (sum + time.as_secs_f64(), n + 1));
    sum / f64::from(n) * 1e6
}

fn time<T>(run: impl FnOnce() -> T) -> Duration {
    let start = Instant::now();
    std::hint::black_box(run());
    start.elapsed()
}

/// One system with tables in every state that is measured.
struct Tables<T> {
    name: &'static str,
    full: Vec<(String, T, Full)>,
    small: (T, u64),
    misses: (T, u64),
    spill: (T, Spill),
    turn: u64,
}

impl<T: Scheduler> Tables<T> {
    fn new(name: &'static str, make: impl Fn(usize, usize) -> T) -> Self {
        let mut full = Vec::new();
        for (gpu_blocks, size) in SIZES {
            for (hold, suffix) in [(false, ""), (true, ", all but one held")] {
                let mut table = make(gpu_blocks, 0);
                let documents = Full::fill(&mut table, gpu_blocks, 256, hold);
                full.push((format!("hit 256, {size} blocks{suffix}"), table, documents));
            }
        }
        let mut spill = (make(Spill::gpu_blocks(DOCUMENT), Spill::cpu_blocks(DOCUMENT)), Spill::new(DOCUMENT));
        for _ in 0..Spill::DOCUMENTS {
            spill.1.store(&mut spill.0);
        }
        let mut tables =
            Self { name, full, small: (make(20_000, 40_000), 0), misses: (make(20_000, 40_000), 0), spill, turn: 0 };
        tables.miss(200, 256);
        tables
    }

    /// Microseconds of a 256-block miss in full tiers: both evict.
    fn miss(&mut self, n: u64, num_blocks: usize) -> f64 {
        let (table, next) = if num_blocks == 256 { &mut self.misses } else { &mut self.small };
        mean((0..n).map(|_| {
            *next += 1;
            let hashes = document(*next, num_blocks);
            time(|| miss(table, *next as i64, &hashes))
        }))
    }

    fn round(&mut self, figures: &mut Figures) {
        let name = self.name;
        let mut note = |what: &str, value: f64| {
            figures.insert(format!("{name}: {what}"), value);
        };
        for (what, table, documents) in &mut self.full {
            let each = mean((0..200).map(|_| {
                let (id, hashes) = documents.next();
                time(|| hit(table, id, hashes))
            }));
            note(what, each);
            let lookup = mean((0..200).map(|_| {
                let (_, hashes) = documents.next();
                time(|| table.lookup(hashes))
            }));
            note(&what.replace("hit", "lookup"), lookup);
        }
        note("miss 256, 20k + 40k blocks", self.miss(100, 256));
        let three = document(u64::MAX, 3);
        miss(&mut self.small.0, 0, &three);
        note("miss 3", self.miss(500, 3));
        note("hit 3", mean((0..1000).map(|_| time(|| hit(&mut self.small.0, 0, &three)))));
        let (table, spill) = &mut self.spill;
        note("store side 1280", mean((0..10).map(|_| spill.store(table))));
        let turns = self.turn..self.turn + 14;
        self.turn = turns.end;
        note("hit side 1280", mean(turns.map(|turn| spill.hit(table, turn))));
    }
}

fn main() {
    if std::env::args().any(|arg| arg == "--test") {
        return;
    }
    let mut ours = Tables::<Session>::new("kvtier", session);
    // Leaked: they live as long as the process.
    let make = |gpu_blocks, cpu_blocks| &*Box::leak(Box::new(MutexTable::new(gpu_blocks, cpu_blocks, BLOCK_SIZE)));
    let mut mutex = Tables::<&MutexTable>::new("mutex", make);
    let hashers = [("kvtier: hash 256", "sha256"), ("kvtier: xxh3 256", "xxh3")].map(|(figure, hash)| {
        let config = Config { hash: hash.into(), ..Config::new(1, 1, BLOCK_SIZE) };
        (figure, Session::new(&config).expect("a table").table().clone())
    });
    let tokens: Vec<u32> = (0..256 * BLOCK_SIZE as u32).collect();
    for _line in std::io::stdin().lock().lines() {
        let mut figures = Figures::new();
        ours.round(&mut figures);
        mutex.round(&mut figures);
        for (figure, table) in &hashers {
            let hash = mean((0..50).map(|_| time(|| table.block_hashes(&tokens, &Identity::default()))));
            figures.insert((*figure).into(), hash);
        }
        let shown: Vec<_> = figures.iter().map(|(name, value)| format!("{name:?}: {value:.3}")).collect();
        println!("{{{}}}", shown.join(", "));
    }
}
