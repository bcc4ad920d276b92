//! Real threads on one small table: two schedulers with a shared Cpu tier, two completers, two readers. Memory is one
//! atomic cell per slot; every hit and every valid block must have the content of its hash.
//! `KVTIER_STRESS_SECONDS` says how long (default 2).

// A test says what went wrong by panicking.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::Mutex;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use kvtier::{BlockHash, BlockTable, Config, Plan, RequestId, Session};

const GPU: usize = 12;
const CPU: usize = 10;

fn hash(document: u64, at: u64) -> BlockHash {
    let mut bytes = [0; 32];
    bytes[0] = 1;
    bytes[8..16].copy_from_slice(&document.to_le_bytes());
    bytes[16..24].copy_from_slice(&at.to_le_bytes());
    BlockHash(bytes)
}

/// What the cell of a block with this hash must contain.
fn content(hash: &BlockHash) -> u64 {
    u64::from(hash.0[8]) << 8 | u64::from(hash.0[16]) | 1 << 32
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }
}

fn cells(n: usize) -> Vec<AtomicU64> {
    (0..n).map(|_| AtomicU64::new(0)).collect()
}

#[derive(Default)]
struct World {
    gpu: [Vec<AtomicU64>; 2],
    cpu: Vec<AtomicU64>,
    /// Plans that were not carried out yet, by engine.
    plans: Mutex<VecDeque<(usize, Plan)>>,
    schedulers_over: [AtomicBool; 2],
    over: AtomicBool,
}

/// Lets the other threads end, also when this one panics.
struct SayOver<'a>(&'a AtomicBool);

impl Drop for SayOver<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

fn schedule(world: &World, engine: usize, session: &mut Session, end: Instant) -> u64 {
    let _say_over = SayOver(&world.schedulers_over[engine]);
    let mut random = Random(0x9e37_79b9 + engine as u64);
    let mut live: Vec<(RequestId, Vec<BlockHash>, Vec<usize>)> = Vec::new();
    let (mut next, mut num_checked) = (0, 0);
    let cell = |id: usize| &world.gpu[engine][id];
    while Instant::now() < end || !live.is_empty() {
        assert!(Instant::now() < end + Duration::from_secs(60), "requests do not end");
        if Instant::now() < end && live.len() < 3 {
            let (document, len) = (random.below(6), 1 + random.below(4));
            let hashes: Vec<_> = (0..len).map(|at| hash(document, at)).collect();
            next += 1;
            let id = RequestId::Int(next);
            if let Ok(admission) = session.admit_hashed(id.clone(), &hashes, len as usize) {
                let ids: Vec<_> = admission.block_ids.iter().map(|id| id.index()).collect();
                for (hash, &id) in hashes.iter().zip(&ids).take(admission.gpu_hit_blocks) {
                    assert_eq!(cell(id).load(SeqCst), content(hash), "a hit of engine {engine} has other content");
                    num_checked += 1;
                }
                live.push((id, hashes, ids));
            }
        }
        let plan = session.step();
        if plan.load_ticket.is_some() || plan.store_ticket.is_some() {
            world.plans.lock().unwrap().push_back((engine, plan));
        }
        if live.is_empty() {
            continue;
        }
        let at = random.below(live.len() as u64) as usize;
        let (id, hashes, ids) = &live[at];
        if session.is_ready(id).unwrap() {
            let valid = session.valid_tokens(id).unwrap();
            for (at, (hash, &id)) in hashes.iter().zip(ids).enumerate() {
                if at < valid {
                    assert_eq!(cell(id).load(SeqCst), content(hash), "a valid block has other content");
                    num_checked += 1;
                } else {
                    cell(id).store(content(hash), SeqCst);
                }
            }
            session.commit(id, hashes.len()).unwrap();
        } else if random.below(4) > 0 {
            continue;
        }
        let (id, ..) = live.swap_remove(at);
        match random.below(3) {
            0 => session.release(&id).unwrap(),
            1 => session.abort(&id).unwrap(),
            _ => session.preempt(&id).unwrap(),
        }
    }
    num_checked
}

/// Carries plans out, a part of them badly; both ranks of a ticket acknowledge from one thread, and then once too often.
fn complete(world: &World, tables: &[BlockTable; 2], seed: u64) -> u64 {
    let mut random = Random(seed);
    let mut num_done = 0;
    loop {
        // First, so that what a scheduler pushed before it was over is seen.
        let no_more = world.schedulers_over.iter().all(|over| over.load(SeqCst));
        let Some((engine, plan)) = world.plans.lock().unwrap().pop_front() else {
            if no_more {
                return num_done;
            }
            std::thread::yield_now();
            continue;
        };
        let table = &tables[engine];
        for (ticket, pairs, is_load) in
            [(plan.load_ticket, pairs(&plan.loads), true), (plan.store_ticket, pairs(&plan.stores), false)]
        {
            let Some(ticket) = ticket else { continue };
            let mut failed = Vec::new();
            for (at, &(source, destination)) in pairs.iter().enumerate() {
                let gpu = &world.gpu[engine];
                let (from, to) = if is_load { (&world.cpu, gpu) } else { (gpu, &world.cpu) };
                if random.below(8) == 0 {
                    to[destination].store(u64::MAX, SeqCst);
                    failed.push(at);
                } else {
                    to[destination].store(from[source].load(SeqCst), SeqCst);
                }
            }
            assert!(table.complete(ticket, 7, &[]).is_err(), "a rank that is not there");
            assert!(table.complete(ticket, 0, &[pairs.len()]).is_err(), "a pair that is not there");
            let last = [0, 1].map(|rank| table.complete(ticket, rank, &failed).unwrap());
            assert_eq!(last, [false, true]);
            assert!(table.complete(ticket, 0, &[]).is_err(), "a duplicate");
            num_done += 1;
        }
    }
}

fn pairs<A: Copy, B: Copy>(pairs: &[(kvtier::BlockId<A>, kvtier::BlockId<B>)]) -> Vec<(usize, usize)> {
    pairs.iter().map(|(a, b)| (a.index(), b.index())).collect()
}

fn read(world: &World, table: &BlockTable) {
    while !world.over.load(SeqCst) {
        for document in 0..6 {
            let hashes: Vec<_> = (0..4).map(|at| hash(document, at)).collect();
            let (gpu, cpu) = table.lookup_hashed(&hashes);
            assert!(gpu + cpu <= hashes.len());
        }
        let stats = table.stats();
        assert!(stats.gpu.cached <= stats.gpu.total + 1 && stats.cpu.total == CPU);
        table.events();
    }
}

#[test]
fn threads_that_collide_never_see_wrong_content() {
    let seconds = std::env::var("KVTIER_STRESS_SECONDS").map_or(2, |value| value.parse().unwrap());
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut config = Config::new(GPU, CPU, 1);
    config.ranks = 2;
    let mut first = Session::new(&config).unwrap();
    let mut second = Session::sharing(&config, first.table()).unwrap();
    let tables = [first.table().clone(), second.table().clone()];
    let world = World { gpu: [cells(GPU), cells(GPU)], cpu: cells(CPU), ..World::default() };
    let (num_checked, num_done) = std::thread::scope(|scope| {
        let (world, tables) = (&world, &tables);
        let say_over = SayOver(&world.over);
        let schedulers =
            [scope.spawn(|| schedule(world, 0, &mut first, end)), scope.spawn(|| schedule(world, 1, &mut second, end))];
        let completers = [1, 2].map(|seed| scope.spawn(move || complete(world, tables, seed)));
        for table in tables {
            scope.spawn(move || read(world, table));
        }
        let num_checked: u64 = schedulers.map(ScopedJoinHandle::join).into_iter().map(Result::unwrap).sum();
        let num_done: u64 = completers.map(ScopedJoinHandle::join).into_iter().map(Result::unwrap).sum();
        drop(say_over);
        (num_checked, num_done)
    });
    println!("{num_checked} contents checked, {num_done} tickets completed");
    assert!(num_checked > 0 && num_done > 0);
    first.audit().unwrap();
    second.audit().unwrap();
}
