//! What the benches of the table do, the same for every table that is measured.
#![allow(dead_code)] // no one bench does everything

use std::time::{Duration, Instant};

use kvtier::{BlockHash, Config, RequestId, Session};

use crate::mutex_table::MutexTable;

/// Tokens of a block in every bench.
pub(crate) const BLOCK_SIZE: usize = 16;

/// The calls of a scheduler.
pub(crate) trait Scheduler {
    /// Gpu hits and Cpu hits.
    fn admit(&mut self, id: i64, hashes: &[BlockHash], num_tokens: usize) -> (usize, usize);
    fn commit(&mut self, id: i64, num_tokens: usize);
    /// Tickets of loads and of stores.
    fn step(&mut self) -> [Option<u64>; 2];
    fn complete(&mut self, ticket: u64);
    fn release(&mut self, id: i64);
    fn lookup(&self, hashes: &[BlockHash]) -> (usize, usize);
}

impl Scheduler for Session {
    fn admit(&mut self, id: i64, hashes: &[BlockHash], num_tokens: usize) -> (usize, usize) {
        let admission = self.admit_hashed(RequestId::Int(id), hashes, num_tokens).expect("admitted");
        (admission.gpu_hit_blocks, admission.cpu_hit_blocks)
    }
    fn commit(&mut self, id: i64, num_tokens: usize) {
        Session::commit(self, &RequestId::Int(id), num_tokens).expect("committed");
    }
    fn step(&mut self) -> [Option<u64>; 2] {
        let plan = Session::step(self);
        [plan.load_ticket, plan.store_ticket]
    }
    fn complete(&mut self, ticket: u64) {
        Session::complete(self, ticket, 0, &[]).expect("completed");
    }
    fn release(&mut self, id: i64) {
        Session::release(self, &RequestId::Int(id)).expect("released");
    }
    fn lookup(&self, hashes: &[BlockHash]) -> (usize, usize) {
        self.table().lookup_hashed(hashes)
    }
}

impl Scheduler for &MutexTable {
    fn admit(&mut self, id: i64, hashes: &[BlockHash], num_tokens: usize) -> (usize, usize) {
        self.admit_hashed(id, hashes, num_tokens)
    }
    fn commit(&mut self, id: i64, num_tokens: usize) {
        MutexTable::commit(self, id, num_tokens);
    }
    fn step(&mut self) -> [Option<u64>; 2] {
        MutexTable::step(self)
    }
    fn complete(&mut self, ticket: u64) {
        MutexTable::complete(self, ticket);
    }
    fn release(&mut self, id: i64) {
        MutexTable::release(self, id);
    }
    fn lookup(&self, hashes: &[BlockHash]) -> (usize, usize) {
        self.lookup_hashed(hashes)
    }
}

pub(crate) fn session(gpu_blocks: usize, cpu_blocks: usize) -> Session {
    Session::new(&Config::new(gpu_blocks, cpu_blocks, BLOCK_SIZE)).expect("a table")
}

/// Well-mixed hashes of the blocks of document `number`, different for every document.
pub(crate) fn document(number: u64, num_blocks: usize) -> Vec<BlockHash> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31).to_le_bytes()
    };
    let hash = |()| BlockHash(std::array::from_fn::<_, 4, _>(|_| next()).concat().try_into().expect("32 bytes"));
    std::iter::repeat_n((), num_blocks).map(hash).collect()
}

/// A request is computed and stored: admit, commit, step, complete, release.
pub(crate) fn miss(table: &mut impl Scheduler, id: i64, hashes: &[BlockHash]) {
    let num_tokens = hashes.len() * BLOCK_SIZE;
    table.admit(id, hashes, num_tokens);
    table.commit(id, num_tokens);
    step_and_complete(table);
    table.release(id);
}

pub(crate) fn step_and_complete(table: &mut impl Scheduler) {
    for ticket in table.step().into_iter().flatten() {
        table.complete(ticket);
    }
}

/// Every full block of the request hits; one token is left to compute: admit, release.
pub(crate) fn hit(table: &mut impl Scheduler, id: i64, hashes: &[BlockHash]) {
    let found = table.admit(id, hashes, hashes.len() * BLOCK_SIZE + 1);
    debug_assert_eq!(found, (hashes.len(), 0));
    table.release(id);
}

/// The documents of a Gpu tier that is full of them, and a number that is in no use.
pub(crate) struct Full {
    pub(crate) documents: Vec<Vec<BlockHash>>,
    next: u64,
}

impl Full {
    /// Fills the Gpu tier with documents of `num_blocks`, all but one block. With `hold`, each is held by a request.
    pub(crate) fn fill(table: &mut impl Scheduler, gpu_blocks: usize, num_blocks: usize, hold: bool) -> Self {
        let mut documents: Vec<_> =
            (0..(gpu_blocks - 1) / num_blocks).map(|at| document(at as u64, num_blocks)).collect();
        let rest = (gpu_blocks - 1) % num_blocks;
        let filler = (rest > 0 && hold).then(|| document(u64::MAX, rest));
        for (at, hashes) in documents.iter().chain(&filler).enumerate() {
            let (id, num_tokens) = (-1 - at as i64, hashes.len() * BLOCK_SIZE);
            table.admit(id, hashes, num_tokens);
            table.commit(id, num_tokens);
            if !hold {
                table.release(id);
            }
        }
        // Not in the order of the slots.
        let mut state = 7_u64;
        for at in (1..documents.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            documents.swap(at, (state >> 33) as usize % (at + 1));
        }
        Self { documents, next: 0 }
    }

    /// The documents in turn.
    pub(crate) fn next(&mut self) -> (i64, &[BlockHash]) {
        self.next += 1;
        (self.next as i64, &self.documents[self.next as usize % self.documents.len()])
    }
}

/// Documents of `num_blocks` through the Cpu tier: a Gpu tier that holds one of them, a Cpu tier that holds eight.
pub(crate) struct Spill {
    num_blocks: usize,
    next: u64,
}

impl Spill {
    pub(crate) const DOCUMENTS: usize = 8;

    pub(crate) fn gpu_blocks(num_blocks: usize) -> usize {
        num_blocks + 1
    }

    pub(crate) fn cpu_blocks(num_blocks: usize) -> usize {
        num_blocks * Self::DOCUMENTS
    }

    pub(crate) fn new(num_blocks: usize) -> Self {
        Self { num_blocks, next: 0 }
    }

    /// A new document is computed and waits to be stored.
    pub(crate) fn prepare(&mut self, table: &mut impl Scheduler) {
        self.next += 1;
        let (id, hashes) = (self.next as i64, document(self.next, self.num_blocks));
        let num_tokens = self.num_blocks * BLOCK_SIZE;
        table.admit(id, &hashes, num_tokens);
        table.commit(id, num_tokens);
    }

    /// The document that was prepared is done with.
    pub(crate) fn finish(&mut self, table: &mut impl Scheduler) {
        table.release(self.next as i64);
    }

    /// The time of a document's store: step, complete. The Cpu tier evicts.
    pub(crate) fn store(&mut self, table: &mut impl Scheduler) -> Duration {
        self.prepare(table);
        let start = Instant::now();
        step_and_complete(table);
        let time = start.elapsed();
        self.finish(table);
        time
    }

    /// A document that only the Cpu tier has comes back; gives the time of admit, step, complete.
    pub(crate) fn hit(&mut self, table: &mut impl Scheduler, turn: u64) -> Duration {
        let oldest = self.next + 1 - Self::DOCUMENTS as u64;
        // The youngest of the eight is the one that the Gpu tier has at first.
        let hashes = document(oldest + turn % (Self::DOCUMENTS as u64 - 1), self.num_blocks);
        let id = -1 - turn as i64;
        let start = Instant::now();
        let found = table.admit(id, &hashes, hashes.len() * BLOCK_SIZE + 1);
        step_and_complete(table);
        let time = start.elapsed();
        assert_eq!(found, (0, self.num_blocks), "a hit in the Cpu tier");
        table.release(id);
        time
    }
}
