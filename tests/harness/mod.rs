//! A table with fake memory: every block that is a hit must have the bytes that its hash promises.
//!
//! The memory has one cell per slot. The harness writes cells as an engine and a copy engine would, keeps its own record
//! of who owns what, and after every call compares it with what the table says: events, statistics, audit. The random
//! test (`tests/model.rs`) and the fuzz target (`fuzz/`) drive it; a broken promise panics.

mod calls;
mod checks;
mod op;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kvtier::hash::Identity;
use kvtier::{Admission, BlockHash, Config, CpuBlockId, GpuBlockId, RequestId, Session};

use calls::identity;
pub(crate) use op::Op;

const BLOCK: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cell {
    Junk(u64),
    Block(BlockHash),
}

/// When the bytes of a copy move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// At the step that lists it.
    Early,
    /// When its last rank has acknowledged.
    Late,
}

/// What a harness is made from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) gpu_blocks: usize,
    pub(crate) cpu_blocks: usize,
    pub(crate) when: When,
    pub(crate) ranks: u32,
    pub(crate) max_stores: Option<usize>,
}

struct Live {
    tokens: Vec<u32>,
    hashes: Vec<BlockHash>,
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

pub(crate) struct Harness {
    session: Session,
    setup: Setup,
    gpu: Vec<Cell>,
    cpu: Vec<Cell>,
    live: BTreeMap<i64, Live>,
    open: BTreeMap<u64, Open>,
    published: HashMap<(bool, u32), BlockHash>,
    last_counters: Vec<(&'static str, u64)>,
    junk: u64,
    next_id: i64,
}

impl Harness {
    pub(crate) fn new(setup: Setup) -> Self {
        let mut config = Config::new(setup.gpu_blocks, setup.cpu_blocks, BLOCK);
        config.ranks = setup.ranks;
        config.max_store_blocks_per_step = setup.max_stores;
        Self {
            session: Session::new(&config).unwrap(),
            setup,
            gpu: vec![Cell::Junk(0); setup.gpu_blocks],
            cpu: vec![Cell::Junk(0); setup.cpu_blocks],
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
            for rank in 0..self.setup.ranks {
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

    pub(crate) fn apply(&mut self, op: &Op) {
        match *op {
            Op::Admit { prompt, len, salt, hashed } => self.admit(prompt, len, salt, hashed),
            Op::Repeated { prompt, len, period } => self.admit_repeated(prompt, len, period),
            Op::Extend { which, n } => self.extend(which, n),
            Op::Commit { which, part } => self.commit(which, part),
            Op::Step => self.step(),
            Op::Complete { which, rank, failed } => self.complete(which, rank, failed),
            Op::Stale => self.stale(),
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
    pub(crate) fn wind_down(&mut self) {
        while !self.live.is_empty() {
            self.end(0, 1);
            self.check();
        }
        while !self.open.is_empty() {
            for rank in 0..self.setup.ranks {
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

    /// The same calls have led to the same decisions.
    pub(crate) fn assert_same(&self, other: &Self) {
        assert_eq!(self.session.table().stats(), other.session.table().stats());
        assert_eq!(self.published, other.published);
        assert_eq!((&self.gpu, &self.cpu), (&other.gpu, &other.cpu));
        for (a, b) in self.live.values().zip(other.live.values()) {
            assert_eq!((&a.ids, &a.admission), (&b.ids, &b.admission));
        }
    }
}
