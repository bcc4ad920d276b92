//! Random calls against a table with fake memory: every block that is a hit must have the bytes that its hash promises.
//!
//! The memory has one cell per slot. The harness writes cells as an engine and a copy engine would, keeps its own record
//! of who owns what, and after every call compares it with what the table says: events, statistics, audit.

// A test says what went wrong by panicking.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kvtier::event::{EventKind, TierName};
use kvtier::hash::{Field, Identity};
use kvtier::{Admission, BlockHash, Config, CpuBlockId, Error, GpuBlockId, RequestId, Session};
use proptest::prelude::*;

const BLOCK: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cell {
    Junk(u64),
    Block(BlockHash),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    Early,
    Late,
}

struct Live {
    tokens: Vec<u32>,
    salt: Option<i128>,
    hashed: bool,
    ids: Vec<GpuBlockId>,
    admission: Admission,
    /// Blocks that the harness has seen written or loaded.
    written_blocks: usize,
}

enum Pairs {
    Loads(Vec<(CpuBlockId, GpuBlockId)>),
    Stores(Vec<(GpuBlockId, CpuBlockId)>),
}

struct Open {
    pairs: Pairs,
    failed: BTreeSet<usize>,
    ranks_left: BTreeSet<u32>,
}

struct Harness {
    session: Session,
    when: When,
    ranks: u32,
    max_stores: Option<usize>,
    gpu: Vec<Cell>,
    cpu: Vec<Cell>,
    live: BTreeMap<i64, Live>,
    open: BTreeMap<u64, Open>,
    published: HashMap<(bool, u32), BlockHash>,
    last_counters: Vec<(&'static str, u64)>,
    junk: u64,
    next_id: i64,
}

#[derive(Debug, Clone)]
enum Op {
    Admit {
        prompt: u32,
        len: usize,
        salt: Option<i128>,
        hashed: bool,
    },
    Extend {
        which: usize,
        n: usize,
    },
    Commit {
        which: usize,
        part: usize,
    },
    Step,
    Complete {
        which: usize,
        rank: u32,
        failed: u64,
    },
    Stale,
    End {
        which: usize,
        kind: u8,
    },
    Reset,
    /// A whole request: admit, load, compute, step (its stores may stay in flight), release.
    Full {
        prompt: u32,
        len: usize,
        store: bool,
    },
    /// A stored prefix comes back by loads, some of which fail; the request stays live.
    Return {
        prompt: u32,
        len: usize,
        failed: u64,
    },
    /// Pushes every idle block out of the Gpu tier.
    Wipe,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => (0..4_u32, 1..30_usize, prop::option::weighted(0.2, 0..2_i128), any::<bool>())
            .prop_map(|(prompt, len, salt, hashed)| Op::Admit { prompt, len, salt, hashed }),
        3 => (any::<usize>(), 1..9_usize).prop_map(|(which, n)| Op::Extend { which, n }),
        6 => (any::<usize>(), 0..5_usize).prop_map(|(which, part)| Op::Commit { which, part }),
        5 => Just(Op::Step),
        6 => (any::<usize>(), 0..2_u32, prop_oneof![4 => Just(0), 1 => any::<u64>()])
            .prop_map(|(which, rank, failed)| Op::Complete { which, rank, failed }),
        1 => Just(Op::Stale),
        4 => (any::<usize>(), 0..3_u8).prop_map(|(which, kind)| Op::End { which, kind }),
        1 => Just(Op::Reset),
        3 => (0..4_u32, 1..30_usize, any::<bool>())
            .prop_map(|(prompt, len, store)| Op::Full { prompt, len, store }),
        3 => Just(Op::Wipe),
        2 => (0..4_u32, 9..30_usize, any::<u64>())
            .prop_map(|(prompt, len, failed)| Op::Return { prompt, len, failed }),
    ]
}

/// Prompts that share prefixes: prompt p differs from prompt 0 from token 5p on.
fn tokens(prompt: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|at| if at >= 5 * prompt { at + 1000 * prompt } else { at }).collect()
}

fn identity(salt: Option<i128>) -> Identity {
    Identity { salt: salt.map(Field::Int), ..Identity::default() }
}

fn nth<K: Copy, V>(map: &BTreeMap<K, V>, which: usize) -> Option<K> {
    (!map.is_empty()).then(|| map.keys().nth(which % map.len()).copied()).flatten()
}

impl Harness {
    fn new(gpu: usize, cpu: usize, when: When, ranks: u32, max_stores: Option<usize>) -> Self {
        let mut config = Config::new(gpu, cpu, BLOCK);
        config.ranks = ranks;
        config.max_store_blocks_per_step = max_stores;
        Self {
            session: Session::new(&config).unwrap(),
            when,
            ranks,
            max_stores,
            gpu: vec![Cell::Junk(0); gpu],
            cpu: vec![Cell::Junk(0); cpu],
            live: BTreeMap::new(),
            open: BTreeMap::new(),
            published: HashMap::new(),
            last_counters: Vec::new(),
            junk: 1,
            next_id: 0,
        }
    }

    fn junk(&mut self) -> Cell {
        self.junk += 1;
        Cell::Junk(self.junk)
    }

    fn hashes(&self, tokens: &[u32], salt: Option<i128>) -> Vec<BlockHash> {
        self.session.table().block_hashes(tokens, &identity(salt)).unwrap()
    }

    /// Slots handed out as new must be nobody's: no live request's, no ticket's, not published.
    fn hand_out(&mut self, ids: &[GpuBlockId]) {
        self.note_events();
        for &id in ids {
            for live in self.live.values() {
                assert!(!live.ids.contains(&id), "slot {id:?} has two owners");
            }
            for open in self.open.values() {
                let named = match &open.pairs {
                    Pairs::Loads(pairs) => pairs.iter().any(|pair| pair.1 == id),
                    Pairs::Stores(pairs) => pairs.iter().any(|pair| pair.0 == id),
                };
                assert!(!named, "slot {id:?} given away under a ticket");
            }
            assert!(!self.published.contains_key(&(true, id.index() as u32)), "slot {id:?} is published");
            self.gpu[id.index()] = self.junk();
        }
    }

    fn admit(&mut self, variant: u32, len: usize, salt: Option<i128>, by_hash: bool) {
        let (id, prompt) = (self.next_id, tokens(variant, len));
        let hashes = self.hashes(&prompt, salt);
        let found = self.session.table().lookup(&prompt, &identity(salt)).unwrap();
        let before = self.session.table().stats();
        let result = if by_hash {
            self.session.admit_hashed(RequestId::Int(id), &hashes, len)
        } else {
            self.session.admit(RequestId::Int(id), &prompt, &identity(salt))
        };
        match result {
            Ok(admission) => {
                self.next_id += 1;
                assert_eq!(found, (admission.gpu_hit_blocks, admission.cpu_hit_blocks));
                assert!(admission.cached_tokens < len, "no token left to compute");
                assert_eq!(admission.block_ids.len(), len.div_ceil(BLOCK));
                self.hand_out(&admission.block_ids[admission.gpu_hit_blocks..]);
                let written_blocks = admission.gpu_hit_blocks;
                let ids = admission.block_ids.clone();
                self.live.insert(id, Live { tokens: prompt, salt, hashed: by_hash, ids, admission, written_blocks });
            }
            Err(Error::OutOfBlocks { needed, available, .. }) => {
                assert!(needed > available && needed <= len.div_ceil(BLOCK));
                let mut after = self.session.table().stats();
                after.counters.num_refused -= 1;
                assert_eq!(before, after);
                assert!(self.session.table().events().is_empty());
            }
            Err(other) => panic!("{other}"),
        }
    }

    fn extend(&mut self, which: usize, n: usize) {
        let Some(id) = nth(&self.live, which) else { return };
        let live = &self.live[&id];
        let mut longer = live.tokens.clone();
        longer.extend((0..n as u32).map(|at| 500 + (live.tokens.len() as u32 + at) % 7));
        let new_hashes = self.hashes(&longer, live.salt).split_off(live.tokens.len() / BLOCK);
        let result = if live.hashed {
            self.session.extend_hashed(&RequestId::Int(id), &new_hashes, n)
        } else {
            self.session.extend(&RequestId::Int(id), &longer[live.tokens.len()..])
        };
        match result {
            Ok(added) => {
                self.hand_out(&added);
                let live = self.live.get_mut(&id).unwrap();
                live.ids.extend(added);
                live.tokens = longer;
                assert_eq!(live.ids.len(), live.tokens.len().div_ceil(BLOCK));
            }
            Err(Error::OutOfBlocks { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }

    /// Computes up to some token, as an engine would: writes every block from the first invalid token on.
    fn commit(&mut self, which: usize, part: usize) {
        let Some(id) = nth(&self.live, which) else { return };
        let key = RequestId::Int(id);
        let ready = self.session.is_ready(&key).unwrap();
        let valid = self.session.valid_tokens(&key).unwrap();
        let live = &self.live[&id];
        let num_tokens = live.tokens.len() * part / 4;
        if !ready && part % 2 == 1 {
            // Computing over loads that run: what is written behind them counts only if they come through.
            // What was written so before stays: a block that a remembered commit counts is not written again.
            self.write(id, (live.admission.cached_tokens / BLOCK).max(live.written_blocks), num_tokens);
            self.session.commit(&key, num_tokens).unwrap();
            return;
        }
        if !ready || num_tokens <= valid {
            self.session.commit(&key, num_tokens.min(valid)).unwrap();
            assert_eq!(self.session.valid_tokens(&key).unwrap(), valid);
            return;
        }
        self.write(id, valid / BLOCK, num_tokens);
        self.session.commit(&key, num_tokens).unwrap();
        assert_eq!(self.session.valid_tokens(&key).unwrap(), num_tokens);
        assert!(matches!(self.session.commit(&key, usize::MAX), Err(Error::Config { .. })));
    }

    fn write(&mut self, id: i64, from_block: usize, num_tokens: usize) {
        let (ids, full, hashes) = {
            let live = &self.live[&id];
            (live.ids.clone(), num_tokens / BLOCK, self.hashes(&live.tokens, live.salt))
        };
        self.note_events();
        for position in from_block..num_tokens.div_ceil(BLOCK) {
            let slot = ids[position].index();
            assert!(!self.published.contains_key(&(true, slot as u32)), "the engine would write a published block");
            self.gpu[slot] = if position < full { Cell::Block(hashes[position]) } else { self.junk() };
        }
        let live = self.live.get_mut(&id).unwrap();
        live.written_blocks = live.written_blocks.max(full);
    }

    fn step(&mut self) {
        let plan = self.session.step();
        self.note_events();
        assert_eq!(plan.load_ticket.is_some(), !plan.loads.is_empty());
        assert_eq!(plan.store_ticket.is_some(), !plan.stores.is_empty());
        assert!(self.max_stores.is_none_or(|most| plan.stores.len() <= most));
        for &(_, destination) in &plan.loads {
            assert!(self.open.values().all(|open| match &open.pairs {
                Pairs::Loads(pairs) => pairs.iter().all(|pair| pair.1 != destination),
                Pairs::Stores(pairs) => pairs.iter().all(|pair| pair.0 != destination),
            }));
        }
        for &(_, destination) in &plan.stores {
            assert!(!self.published.contains_key(&(false, destination.index() as u32)));
            assert!(self.open.values().all(|open| match &open.pairs {
                Pairs::Loads(pairs) => pairs.iter().all(|pair| pair.0 != destination),
                Pairs::Stores(pairs) => pairs.iter().all(|pair| pair.1 != destination),
            }));
        }
        for (ticket, pairs) in
            [(plan.load_ticket, Pairs::Loads(plan.loads)), (plan.store_ticket, Pairs::Stores(plan.stores))]
        {
            let Some(ticket) = ticket else { continue };
            if self.when == When::Early {
                self.copy(&pairs, &BTreeSet::new());
            }
            self.open.insert(ticket, Open { pairs, failed: BTreeSet::new(), ranks_left: (0..self.ranks).collect() });
        }
    }

    fn copy(&mut self, pairs: &Pairs, failed: &BTreeSet<usize>) {
        let len = match pairs {
            Pairs::Loads(pairs) => pairs.len(),
            Pairs::Stores(pairs) => pairs.len(),
        };
        for index in 0..len {
            let torn = failed.contains(&index).then(|| self.junk());
            match pairs {
                Pairs::Loads(pairs) => {
                    let (from, to) = pairs[index];
                    self.gpu[to.index()] = torn.unwrap_or(self.cpu[from.index()]);
                }
                Pairs::Stores(pairs) => {
                    let (from, to) = pairs[index];
                    self.cpu[to.index()] = torn.unwrap_or(self.gpu[from.index()]);
                }
            }
        }
    }

    fn complete(&mut self, which: usize, rank: u32, failed: u64) {
        let Some(ticket) = nth(&self.open, which) else { return };
        let rank = rank % self.ranks;
        let open = self.open.get_mut(&ticket).unwrap();
        let len = match &open.pairs {
            Pairs::Loads(pairs) => pairs.len(),
            Pairs::Stores(pairs) => pairs.len(),
        };
        let failed: Vec<usize> = (0..len).filter(|index| failed >> (index % 64) & 1 == 1).collect();
        assert!(matches!(
            self.session.complete(ticket, rank, &[len]),
            Err(Error::Config { .. } | Error::StaleTicket { .. })
        ));
        if !open.ranks_left.remove(&rank) {
            assert!(matches!(self.session.complete(ticket, rank, &failed), Err(Error::StaleTicket { .. })));
            return;
        }
        open.failed.extend(&failed);
        if !open.ranks_left.is_empty() {
            assert!(!self.session.complete(ticket, rank, &failed).unwrap());
            return;
        }
        let open = self.open.remove(&ticket).unwrap();
        // In early mode good pairs copied at the step; the torn ones show only now, at the latest possible moment.
        match self.when {
            When::Late => self.copy(&open.pairs, &open.failed),
            When::Early => self.tear(&open),
        }
        assert!(self.session.complete(ticket, rank, &failed).unwrap());
        assert!(matches!(self.session.complete(ticket, rank, &[]), Err(Error::StaleTicket { .. })));
    }

    fn tear(&mut self, open: &Open) {
        for &index in &open.failed {
            let junk = self.junk();
            match &open.pairs {
                Pairs::Loads(pairs) => self.gpu[pairs[index].1.index()] = junk,
                Pairs::Stores(pairs) => self.cpu[pairs[index].1.index()] = junk,
            }
        }
    }

    fn end(&mut self, which: usize, kind: u8) {
        let Some(id) = nth(&self.live, which) else { return };
        let key = RequestId::Int(id);
        let end = |session: &mut Session| match kind {
            0 => session.release(&key),
            1 => session.abort(&key),
            _ => session.preempt(&key),
        };
        end(&mut self.session).unwrap();
        assert_eq!(end(&mut self.session), Err(Error::UnknownRequest(key.clone())));
        assert!(self.session.extend(&key, &[1]).is_err() && self.session.commit(&key, 0).is_err());
        self.live.remove(&id);
    }

    fn reset(&mut self) {
        let idle = self.live.is_empty() && self.open.is_empty();
        let before = self.session.table().stats();
        assert_eq!(self.session.reset(), idle);
        if idle {
            self.note_events();
            assert!(self.published.is_empty());
        } else {
            assert_eq!(before, self.session.table().stats());
        }
    }

    fn full(&mut self, prompt: u32, len: usize, store: bool) {
        let before = self.next_id;
        self.admit(prompt, len, None, false);
        if self.next_id == before {
            return;
        }
        let tickets: BTreeSet<u64> = self.open.keys().copied().collect();
        self.step();
        self.complete_since(&tickets, 0);
        let last = self.live.len() - 1;
        self.commit(last, 4);
        self.check();
        self.step();
        if store {
            self.complete_since(&tickets, 0);
        }
        self.end(last, 0);
    }

    /// Completes every ticket that was not open before.
    fn complete_since(&mut self, before: &BTreeSet<u64>, failed: u64) {
        while let Some(at) = self.open.keys().position(|ticket| !before.contains(ticket)) {
            for rank in 0..self.ranks {
                self.complete(at, rank, failed);
                self.check();
            }
        }
    }

    fn wipe(&mut self) {
        let stats = self.session.table().stats();
        let num_tokens = (stats.gpu.free + stats.gpu.evictable) * BLOCK;
        if num_tokens > 0 {
            let filler: Vec<u32> = (0..num_tokens).map(|token| 800_000 + token as u32).collect();
            let id = RequestId::Int(-2);
            let admission = self.session.admit(id.clone(), &filler, &Identity::default()).unwrap();
            self.hand_out(&admission.block_ids);
            self.session.abort(&id).unwrap();
        }
    }

    fn note_events(&mut self) {
        for event in self.session.table().events() {
            let key = (event.tier == TierName::Gpu, event.block_id);
            match event.kind {
                EventKind::Stored => assert!(self.published.insert(key, event.block_hash).is_none()),
                EventKind::Removed => assert_eq!(self.published.remove(&key), Some(event.block_hash)),
            }
        }
    }

    fn check(&mut self) {
        self.session.audit().unwrap();
        self.note_events();
        for (&(is_gpu, slot), &hash) in &self.published {
            let cell = if is_gpu { self.gpu[slot as usize] } else { self.cpu[slot as usize] };
            assert_eq!(cell, Cell::Block(hash), "O2: gpu {is_gpu} slot {slot}");
        }
        let keys: BTreeSet<_> = self.published.iter().map(|(key, hash)| (key.0, hash)).collect();
        assert_eq!(keys.len(), self.published.len(), "one hash is published twice in a tier");
        for (&id, live) in &self.live {
            let key = RequestId::Int(id);
            assert_eq!(self.session.block_ids(&key).unwrap(), live.ids);
            if self.session.is_ready(&key).unwrap() {
                let hashes = self.hashes(&live.tokens, live.salt);
                let valid_blocks = self.session.valid_tokens(&key).unwrap() / BLOCK;
                for (position, &hash) in hashes.iter().enumerate().take(valid_blocks) {
                    assert_eq!(self.gpu[live.ids[position].index()], Cell::Block(hash), "O2: valid token");
                }
            }
        }
        let stats = self.session.table().stats();
        let counters: Vec<_> = stats.counters.each().collect();
        for (old, new) in self.last_counters.iter().zip(&counters) {
            assert!(old.1 <= new.1, "O7: {} went down", old.0);
        }
        self.last_counters = counters;
        assert_eq!(stats.num_requests, self.live.len());
        assert_eq!(stats.num_tickets, self.open.len());
        for (counts, is_gpu) in [(stats.gpu, true), (stats.cpu, false)] {
            assert_eq!(counts.free + counts.claimed + counts.cached + counts.in_flight, counts.total);
            assert_eq!(counts.cached, self.published.keys().filter(|key| key.0 == is_gpu).count());
        }
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Admit { prompt, len, salt, hashed } => self.admit(prompt, len, salt, hashed),
            Op::Extend { which, n } => self.extend(which, n),
            Op::Commit { which, part } => self.commit(which, part),
            Op::Step => self.step(),
            Op::Complete { which, rank, failed } => self.complete(which, rank, failed),
            Op::Stale => {
                let stale = self.session.complete(u64::MAX, 0, &[]);
                assert!(matches!(stale, Err(Error::StaleTicket { .. })));
            }
            Op::End { which, kind } => self.end(which, kind),
            Op::Reset => self.reset(),
            Op::Full { prompt, len, store } => self.full(prompt, len, store),
            Op::Wipe => self.wipe(),
            Op::Return { prompt, len, failed } => {
                self.full(prompt, len, true);
                self.wipe();
                let tickets = self.open.keys().copied().collect();
                self.admit(prompt, len, None, false);
                self.step();
                self.complete_since(&tickets, failed);
            }
        }
        self.check();
    }

    /// O3: with no requests and no tickets nothing is held, and one request can have the whole Gpu tier.
    fn wind_down(&mut self) {
        while !self.live.is_empty() {
            self.end(0, 1);
            self.check();
        }
        while !self.open.is_empty() {
            for rank in 0..self.ranks {
                self.complete(0, rank, 0);
                self.check();
            }
        }
        let stats = self.session.table().stats();
        assert_eq!((stats.gpu.held, stats.cpu.held, stats.gpu.in_flight, stats.cpu.in_flight), (0, 0, 0, 0));
        let filler: Vec<u32> = (0..self.gpu.len() * BLOCK).map(|token| 900_000 + token as u32).collect();
        let admission = self.session.admit(RequestId::Int(-1), &filler, &Identity::default()).unwrap();
        assert_eq!(admission.fresh_blocks, self.gpu.len());
        self.session.abort(&RequestId::Int(-1)).unwrap();
        self.check();
    }
}

proptest! {
    // 48 runs of 100 to 400 calls: over 10,000 whatever the seed.
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn published_blocks_are_what_they_promise(
        gpu in 1..14_usize,
        cpu in 0..14_usize,
        early in any::<bool>(),
        ranks in 1..3_u32,
        max_stores in prop::option::of(0..5_usize),
        ops in prop::collection::vec(op(), 220..400),
    ) {
        let when = if early { When::Early } else { When::Late };
        let mut harness = Harness::new(gpu, cpu, when, ranks, max_stores);
        for op in &ops {
            harness.apply(op);
        }
        harness.wind_down();
    }

    #[test]
    fn the_same_calls_give_the_same_decisions(ops in prop::collection::vec(op(), 100..200)) {
        let mut tables = [Harness::new(9, 7, When::Late, 1, Some(3)), Harness::new(9, 7, When::Late, 1, Some(3))];
        for op in &ops {
            for harness in &mut tables {
                harness.apply(op);
            }
            let [one, two] = &tables;
            prop_assert_eq!(one.session.table().stats(), two.session.table().stats());
            prop_assert_eq!(&one.published, &two.published);
            for (a, b) in one.live.values().zip(two.live.values()) {
                prop_assert_eq!(&a.ids, &b.ids);
                prop_assert_eq!(&a.admission, &b.admission);
            }
        }
    }
}
