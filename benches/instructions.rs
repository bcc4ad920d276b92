//! Fixed work for callgrind, which counts instructions: `instructions SCENARIO [ROUNDS]`. See `scripts/instructions.py`.
//!
//! Only what runs inside `measured` is counted.

#![allow(clippy::expect_used, clippy::cast_sign_loss)] // a bench that fails must stop; times are positive

mod mutex_table;
mod workload;

use kvtier::Session;
use workload::{document, hit, miss, session, Full, Scheduler, Spill};

const BLOCKS: usize = 2_000;

/// What callgrind counts. Not inlined, so that it has a name.
#[inline(never)]
fn measured<T>(run: impl FnOnce() -> T) -> T {
    std::hint::black_box(run())
}

fn hits(table: &mut Session, rounds: u64, num_blocks: usize) {
    let mut full = Full::fill(table, BLOCKS, num_blocks, false);
    for _ in 0..rounds {
        let (id, hashes) = full.next();
        measured(|| hit(table, id, hashes));
    }
}

fn misses(table: &mut Session, rounds: u64, num_blocks: usize) {
    // Both tiers are full before anything is counted.
    let before = (4 * BLOCKS / num_blocks) as u64;
    for number in 0..before + rounds {
        let hashes = document(number, num_blocks);
        if number < before {
            miss(table, number as i64, &hashes);
        } else {
            measured(|| miss(table, number as i64, &hashes));
        }
    }
}

/// Stores, or hits, of 256-block documents through a Cpu tier, each side in turn as an engine makes them.
fn spill(table: &mut Session, rounds: u64, stores: bool) {
    let mut spill = Spill::new(256);
    for _ in 0..2 * Spill::DOCUMENTS {
        spill.store(table);
    }
    for turn in 0..rounds {
        if stores {
            // What is in the Cpu tier was released since it was stored, but the document that the Gpu tier has.
            for at in 0..7 {
                spill.hit(table, 7 * turn + at);
            }
            spill.prepare(table);
            measured(|| workload::step_and_complete(table));
            spill.finish(table);
            for _ in 1..Spill::DOCUMENTS {
                spill.store(table);
            }
        } else {
            measured(|| spill.hit(table, turn));
        }
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with("--"));
    let scenario = arguments.next().unwrap_or_default();
    let rounds = arguments.next().map_or(4, |rounds| rounds.parse().expect("a number of rounds"));
    let mut spilling = session(Spill::gpu_blocks(256), Spill::cpu_blocks(256));
    match scenario.as_str() {
        "hit_256" => hits(&mut session(BLOCKS, 0), rounds, 256),
        "hit_3" => hits(&mut session(BLOCKS, 0), rounds, 3),
        "miss_256" => misses(&mut session(BLOCKS, 2 * BLOCKS), rounds, 256),
        "miss_3" => misses(&mut session(BLOCKS, 2 * BLOCKS), rounds, 3),
        "store_side_256" => spill(&mut spilling, rounds, true),
        "hit_side_256" => spill(&mut spilling, rounds, false),
        "lookup_256" => {
            let mut table = session(BLOCKS, 0);
            let mut full = Full::fill(&mut table, BLOCKS, 256, false);
            for _ in 0..rounds {
                measured(|| table.lookup(full.next().1));
            }
        }
        // `cargo bench` runs every bench without arguments.
        _ => println!("scenarios: hit_256 hit_3 miss_256 miss_3 store_side_256 hit_side_256 lookup_256"),
    }
}
