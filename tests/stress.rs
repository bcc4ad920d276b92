//! Real threads on one small table: two schedulers with a shared Cpu tier, two completers, two readers. Memory is one
//! atomic cell per slot; every hit and every valid block must have the content of its hash. Copies fail and come late, the
//! two ranks of a ticket race, requests grow, sessions reset. The work is done in phases; between them all is at rest and
//! audited. `KVTIER_STRESS_SECONDS` says how long (default 2).

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
    /// The other rank's acknowledgements: engine, ticket, pairs that failed there.
    second_ranks: Mutex<VecDeque<(usize, u64, Vec<usize>)>>,
    num_completed: AtomicU64,
    num_resets: AtomicU64,
    num_extends: AtomicU64,
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

fn schedule(world: &World, engine: usize, session: &mut Session, seed: u64, end: Instant) -> u64 {
    let _say_over = SayOver(&world.schedulers_over[engine]);
    let mut random = Random(seed);
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
        if random.below(16) == 0 && session.reset() {
            world.num_resets.fetch_add(1, SeqCst);
        }
        let plan = session.step();
        if plan.load_ticket.is_some() || plan.store_ticket.is_some() {
            world.plans.lock().unwrap().push_back((engine, plan));
        }
        if live.is_empty() {
            continue;
        }
        let at = random.below(live.len() as u64) as usize;
        let (id, hashes, ids) = &mut live[at];
        if random.below(3) == 0 {
            // One more block of the same document.
            let more = hash(u64::from(hashes[0].0[8]), hashes.len() as u64);
            if let Ok(added) = session.extend_hashed(id, &[more], 1) {
                hashes.push(more);
                ids.extend(added.iter().map(|id| id.index()));
                world.num_extends.fetch_add(1, SeqCst);
            }
        }
        assert_eq!(session.block_ids(id).unwrap().iter().map(|id| id.index()).collect::<Vec<_>>(), *ids);
        if session.is_ready(id).unwrap() {
            let valid = session.valid_tokens(id).unwrap();
            for (at, (hash, &id)) in hashes.iter().zip(ids.iter()).enumerate() {
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

/// Carries plans out, a part of them badly, some later than others; the second rank of a ticket is often acknowledged by
/// the other thread, and once too often.
fn complete(world: &World, tables: &[BlockTable; 2], seed: u64) {
    let mut random = Random(seed);
    let acknowledge = |engine: usize, ticket: u64, rank: u32, failed: &[usize]| {
        let was_last = tables[engine].complete(ticket, rank, failed).unwrap();
        world.num_completed.fetch_add(u64::from(was_last), SeqCst);
        assert!(tables[engine].complete(ticket, rank, &[]).is_err(), "a duplicate");
    };
    loop {
        // First, so that what a scheduler pushed before it was over is seen.
        let no_more = world.schedulers_over.iter().all(|over| over.load(SeqCst));
        let second = world.second_ranks.lock().unwrap().pop_front();
        if let Some((engine, ticket, failed)) = second {
            acknowledge(engine, ticket, 1, &failed);
        }
        let plan = {
            let mut plans = world.plans.lock().unwrap();
            // Late: others that came after it go first.
            match random.below(4) {
                0 => plans.pop_back(),
                _ => plans.pop_front(),
            }
        };
        let Some((engine, plan)) = plan else {
            if no_more && world.second_ranks.lock().unwrap().is_empty() {
                return;
            }
            std::thread::yield_now();
            continue;
        };
        let table = &tables[engine];
        for (ticket, pairs, is_load) in
            [(plan.load_ticket, pairs(&plan.loads), true), (plan.store_ticket, pairs(&plan.stores), false)]
        {
            let Some(ticket) = ticket else { continue };
            let mut failed = [Vec::new(), Vec::new()];
            for (at, &(source, destination)) in pairs.iter().enumerate() {
                let gpu = &world.gpu[engine];
                let (from, to) = if is_load { (&world.cpu, gpu) } else { (gpu, &world.cpu) };
                if random.below(8) == 0 {
                    to[destination].store(u64::MAX, SeqCst);
                    failed[random.below(2) as usize].push(at);
                } else {
                    to[destination].store(from[source].load(SeqCst), SeqCst);
                }
            }
            assert!(table.complete(ticket, 7, &[]).is_err(), "a rank that is not there");
            assert!(table.complete(ticket, 0, &[pairs.len()]).is_err(), "a pair that is not there");
            let [first, second] = failed;
            // Before the first rank's: the other thread may be faster.
            world.second_ranks.lock().unwrap().push_back((engine, ticket, second));
            acknowledge(engine, ticket, 0, &first);
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

/// At rest, compares every Gpu hit and, by the step's loads, every Cpu hit behind one.
fn check_hits(world: &World, engine: usize, session: &mut Session) -> u64 {
    let mut num_checked = 0;
    for document in 0..6 {
        let hashes: Vec<_> = (0..8).map(|at| hash(document, at)).collect();
        let id = RequestId::Int(-1);
        let admission = session.admit_hashed(id.clone(), &hashes, 8).unwrap();
        for (hash, block) in hashes.iter().zip(&admission.block_ids).take(admission.gpu_hit_blocks) {
            assert_eq!(world.gpu[engine][block.index()].load(SeqCst), content(hash), "a hit at rest");
            num_checked += 1;
        }
        let plan = session.step();
        for (hash, (source, _)) in hashes[admission.gpu_hit_blocks..].iter().zip(&plan.loads) {
            assert_eq!(world.cpu[source.index()].load(SeqCst), content(hash), "a Cpu hit at rest");
            num_checked += 1;
        }
        // Nothing was copied.
        for (ticket, num_pairs) in [(plan.load_ticket, plan.loads.len()), (plan.store_ticket, plan.stores.len())] {
            let Some(ticket) = ticket else { continue };
            let failed: Vec<_> = (0..num_pairs).collect();
            assert!(!session.complete(ticket, 1, &failed).unwrap() && session.complete(ticket, 0, &[]).unwrap());
        }
        session.abort(&id).unwrap();
    }
    session.audit().unwrap();
    num_checked
}

/// Until `end`; gives how many contents were checked. Afterwards no request is live and no ticket is open.
fn phase(sessions: &mut [Session; 2], tables: &[BlockTable; 2], world: &World, seed: u64, end: Instant) -> u64 {
    for over in world.schedulers_over.iter().chain([&world.over]) {
        over.store(false, SeqCst);
    }
    let [first, second] = sessions;
    std::thread::scope(|scope| {
        let say_over = SayOver(&world.over);
        let schedulers = [
            scope.spawn(move || schedule(world, 0, first, seed * 2, end)),
            scope.spawn(move || schedule(world, 1, second, seed * 2 + 1, end)),
        ];
        let completers = [1, 2].map(|n| scope.spawn(move || complete(world, tables, seed * 2 + n)));
        for table in tables {
            scope.spawn(move || read(world, table));
        }
        let num_checked = schedulers.map(ScopedJoinHandle::join).into_iter().map(Result::unwrap).sum();
        for completer in completers {
            completer.join().unwrap();
        }
        drop(say_over);
        num_checked
    })
}

#[test]
fn threads_that_collide_never_see_wrong_content() {
    let seconds = std::env::var("KVTIER_STRESS_SECONDS").map_or(2, |value| value.parse().unwrap());
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut config = Config::new(GPU, CPU, 1);
    config.ranks = 2;
    let first = Session::new(&config).unwrap();
    let second = Session::sharing(&config, first.table()).unwrap();
    let mut sessions = [first, second];
    let tables = [0, 1].map(|at: usize| sessions[at].table().clone());
    let world = World { gpu: [cells(GPU), cells(GPU)], cpu: cells(CPU), ..World::default() };
    let (mut num_checked, mut num_phases) = (0, 0);
    while Instant::now() < end {
        num_phases += 1;
        let phase_end = end.min(Instant::now() + Duration::from_millis(500));
        num_checked += phase(&mut sessions, &tables, &world, num_phases * 7919, phase_end);
        for session in &mut sessions {
            session.audit().unwrap();
            let stats = session.table().stats();
            assert_eq!((stats.num_requests, stats.num_tickets, stats.gpu.held, stats.cpu.held), (0, 0, 0, 0));
            assert_eq!((stats.gpu.in_flight, stats.cpu.in_flight), (0, 0));
        }
        for (engine, session) in sessions.iter_mut().enumerate() {
            num_checked += check_hits(&world, engine, session);
        }
        if num_phases % 4 == 0 {
            assert!(sessions[0].reset() && sessions[1].reset(), "nothing is live, so a reset goes");
        }
    }
    let [num_completed, num_resets, num_extends] =
        [&world.num_completed, &world.num_resets, &world.num_extends].map(|num| num.load(SeqCst));
    println!(
        "{num_phases} phases: {num_checked} contents checked, {num_completed} tickets completed, \
         {num_resets} resets, {num_extends} extensions"
    );
    assert!(num_checked > 0 && num_completed > 0 && num_extends > 0);
}
