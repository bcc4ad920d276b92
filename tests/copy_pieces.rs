//! How many pieces the table's own allocation makes of the long-document workload: what a copy costs where each piece
//! is a call. Documents of 20,480 tokens, a Gpu tier of ten of them, a Cpu tier of forty.

// A test says what went wrong by panicking.
#![allow(clippy::unwrap_used)]

use kvtier::copy::{CopyPlan, DescribedMemory, Direction, Fragment, Geometry, HostSlots};
use kvtier::{BlockHash, Config, Plan, Session};

const BLOCK_TOKENS: usize = 16;
const DOCUMENT_BLOCKS: usize = 1280;
const GPU_BLOCKS: usize = 10 * DOCUMENT_BLOCKS;
const CPU_BLOCKS: usize = 40 * DOCUMENT_BLOCKS;
const BLOCK_BYTES: usize = 32 << 10;
const NUM_LAYERS: usize = 32;
/// Least blocks per piece where both tiers are full of what random requests left.
const CACHED_DIVISOR: f64 = 1.7;

/// A block-first layout has one fragment; per-layer tensors have one for each layer. No memory is behind the addresses.
fn geometry(num_fragments: usize) -> Geometry {
    let bytes = BLOCK_BYTES / num_fragments;
    let fragments = (0..num_fragments)
        .map(|layer| Fragment { address: (1 << 40) + layer * (bytes * GPU_BLOCKS + 4096), block_stride: bytes, bytes })
        .collect();
    let slots =
        HostSlots { address: 1 << 44, num_blocks: CPU_BLOCKS, block_bytes: BLOCK_BYTES, slot_bytes: BLOCK_BYTES };
    Geometry::new(DescribedMemory::new(fragments, GPU_BLOCKS).unwrap(), slots).unwrap()
}

/// Blocks, runs and pieces of all plans of a direction.
#[derive(Debug, Default, Clone, Copy)]
struct Count {
    blocks: usize,
    runs: usize,
    pieces: usize,
}

impl Count {
    fn add(&mut self, direction: Direction, pairs: &[[i32; 2]], geometry: &Geometry) {
        let plan = CopyPlan::new(direction, pairs, |_| false, geometry, "pairs").unwrap();
        self.blocks += pairs.len();
        self.runs += plan.runs().len();
        self.pieces += plan.num_pieces(geometry);
    }

    /// Checks that pieces per block are at most 1/divisor, and says the figure.
    fn check(&self, what: &str, divisor: f64) {
        let blocks_per_piece = self.blocks as f64 / self.pieces.max(1) as f64;
        println!("{what}: {} pieces for {} blocks, 1/{blocks_per_piece:.2}", self.pieces, self.blocks);
        assert!(self.blocks >= DOCUMENT_BLOCKS, "{what}: too little was copied to count, {self:?}");
        assert!(blocks_per_piece >= divisor, "{what}: {self:?}, at most 1/{divisor}");
    }
}

struct Workload {
    session: Session,
    geometry: Geometry,
    next_request: i64,
    loads: Count,
    stores: Count,
}

impl Workload {
    fn new(num_fragments: usize) -> Self {
        Self {
            session: Session::new(&Config::new(GPU_BLOCKS, CPU_BLOCKS, BLOCK_TOKENS)).unwrap(),
            geometry: geometry(num_fragments),
            next_request: 0,
            loads: Count::default(),
            stores: Count::default(),
        }
    }

    /// Starts a request of whole blocks, loads what it hits on the Cpu tier, writes the rest.
    fn start(&mut self, hashes: &[BlockHash]) -> i64 {
        let id = self.next_request;
        self.next_request += 1;
        self.session.admit_hashed(id.into(), hashes, hashes.len() * BLOCK_TOKENS).unwrap();
        self.step();
        self.session.commit(&id.into(), hashes.len() * BLOCK_TOKENS).unwrap();
        self.step();
        id
    }

    /// Starts a request that writes nothing: its blocks are free again when it ends.
    fn reserve(&mut self, hashes: &[BlockHash]) -> i64 {
        let id = self.next_request;
        self.next_request += 1;
        self.session.admit_hashed(id.into(), hashes, hashes.len() * BLOCK_TOKENS).unwrap();
        id
    }

    fn end(&mut self, id: i64) {
        self.session.release(&id.into()).unwrap();
    }

    fn ask(&mut self, document: u32) {
        let id = self.start(&hashes(document, DOCUMENT_BLOCKS));
        self.end(id);
    }

    fn step(&mut self) {
        let Plan { loads, stores, load_ticket, store_ticket, .. } = self.session.step();
        let loads: Vec<_> = loads.iter().map(|&(from, to)| [from.index() as i32, to.index() as i32]).collect();
        let stores: Vec<_> = stores.iter().map(|&(from, to)| [from.index() as i32, to.index() as i32]).collect();
        self.loads.add(Direction::Load, &loads, &self.geometry);
        self.stores.add(Direction::Store, &stores, &self.geometry);
        for ticket in [load_ticket, store_ticket].into_iter().flatten() {
            self.session.complete(ticket, 0, &[]).unwrap();
        }
    }

    /// Sets both counts to zero and returns what they were.
    fn take(&mut self) -> [Count; 2] {
        [std::mem::take(&mut self.loads), std::mem::take(&mut self.stores)]
    }
}

fn hashes(document: u32, num_blocks: usize) -> Vec<BlockHash> {
    (0..num_blocks as u32)
        .map(|block| {
            let mut hash = [0; 32];
            hash[..4].copy_from_slice(&document.wrapping_mul(0x9e37_79b9).to_le_bytes());
            hash[4..8].copy_from_slice(&block.wrapping_mul(0x85eb_ca6b).to_le_bytes());
            hash[8..12].copy_from_slice(&document.to_le_bytes());
            hash[12..16].copy_from_slice(&block.to_le_bytes());
            BlockHash(hash)
        })
        .collect()
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % limit
    }
}

#[test]
fn a_cold_pool_makes_long_runs() {
    let mut workload = Workload::new(1);
    for document in 0..20 {
        workload.ask(document);
    }
    for document in 0..20 {
        workload.ask(document);
    }
    let [loads, stores] = workload.take();
    loads.check("cold pool, loads", 16.0);
    stores.check("cold pool, stores", 16.0);
}

/// 10,000 random allocations of 1 to 64 blocks, freed in random order while at most three quarters of the Gpu tier are
/// held; about half of it still is at the end. With `cached`, what is freed stays in both tiers until it is evicted.
fn churn(workload: &mut Workload, cached: bool) {
    let mut random = Random(7);
    let mut live: Vec<(i64, usize)> = Vec::new();
    let (mut live_blocks, mut allocations) = (0, 0);
    while allocations < 10_000 {
        let num_blocks = 1 + random.below(64);
        if live_blocks + num_blocks <= GPU_BLOCKS * 3 / 4 {
            let hashes = hashes(1_000 + allocations, num_blocks);
            let id = if cached { workload.start(&hashes) } else { workload.reserve(&hashes) };
            live.push((id, num_blocks));
            live_blocks += num_blocks;
            allocations += 1;
        }
        if live_blocks > GPU_BLOCKS / 2 {
            let (id, num_blocks) = live.swap_remove(random.below(live.len()));
            live_blocks -= num_blocks;
            workload.end(id);
        }
    }
    assert!(live_blocks > GPU_BLOCKS / 3, "the Gpu tier is to stay fragmented, {live_blocks} blocks are held");
    workload.session.audit().unwrap();
    workload.take();
    for document in (0..20).chain(0..20) {
        workload.ask(document);
    }
}

#[test]
fn random_allocations_and_frees_leave_runs() {
    let mut workload = Workload::new(1);
    churn(&mut workload, false);
    let [loads, stores] = workload.take();
    loads.check("after 10,000 random allocations and frees, loads", 2.0);
    stores.check("after 10,000 random allocations and frees, stores", 2.0);
}

/// Two blocks per piece are the aim and not reached here. The bound keeps it from getting worse.
#[test]
fn random_requests_that_stay_cached_leave_fewer_runs() {
    let mut workload = Workload::new(1);
    churn(&mut workload, true);
    let [loads, stores] = workload.take();
    loads.check("both tiers full of random requests, loads", CACHED_DIVISOR);
    stores.check("both tiers full of random requests, stores", CACHED_DIVISOR);
}

#[test]
fn tensors_per_layer_make_one_piece_per_run_and_layer() {
    let mut workload = Workload::new(NUM_LAYERS);
    for document in (0..12).chain(0..12) {
        workload.ask(document);
    }
    for count in workload.take() {
        assert!(count.runs > 0);
        assert_eq!(count.pieces, count.runs * NUM_LAYERS);
        assert!(count.runs * 16 <= count.blocks, "{count:?}");
    }
}
