//! The copy engine against a naive model of bytes: random layouts, random plans, guards around everything.

// The configuration allows it in tests, but does not see that their helpers are part of them.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use kvtier::copy::{
    CopyEngine, CopyError, CopyOptions, CopyRequest, DescribedMemory, Direction, Fragment, HostArena, Report,
};
use proptest::prelude::*;

const LONG: Duration = Duration::from_secs(30);
const GUARD: usize = 64;

/// Where a fragment is in the buffer that plays the engine's memory.
#[derive(Debug, Clone, Copy)]
struct Part {
    start: usize,
    stride: usize,
    bytes: usize,
}

#[derive(Debug, Clone)]
struct Layout {
    parts: Vec<Part>,
    gpu_bytes: usize,
    gpu_blocks: usize,
    cpu_blocks: usize,
}

impl Layout {
    fn block_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.bytes).sum()
    }
}

/// Separate tensors, each with its own row bytes and padding, or one tensor whose blocks hold all parts; with gaps.
fn layouts() -> impl Strategy<Value = Layout> {
    let parts = prop::collection::vec((1_usize..700, 0_usize..80, 0_usize..100), 1..5);
    (parts, any::<bool>(), 1_usize..20, 1_usize..20).prop_map(|(parts, interleaved, gpu_blocks, cpu_blocks)| {
        let mut start = GUARD;
        let mut list = Vec::new();
        if interleaved {
            let stride = parts.iter().map(|(bytes, padding, _)| bytes + padding).sum();
            for &(bytes, padding, _) in &parts {
                list.push(Part { start, stride, bytes });
                start += bytes + padding;
            }
            start += stride * gpu_blocks;
        } else {
            for &(bytes, padding, gap) in &parts {
                list.push(Part { start, stride: bytes + padding, bytes });
                start += (bytes + padding) * gpu_blocks + gap;
            }
        }
        Layout { parts: list, gpu_bytes: start + GUARD, gpu_blocks, cpu_blocks }
    })
}

/// Distinct destinations of one side, any sources of the other.
fn pairs(sources: usize, destinations: usize) -> impl Strategy<Value = Vec<[i32; 2]>> {
    let ids: Vec<usize> = (0..destinations).collect();
    (
        prop::sample::subsequence(ids, 0..=destinations).prop_shuffle(),
        prop::collection::vec(0..sources, destinations),
        any::<bool>(),
    )
        .prop_map(move |(destinations, sources_of, rising)| {
            let pair = |(index, destination): (usize, usize)| {
                let source = if rising { (sources_of[0] + index) % sources } else { sources_of[index] };
                [source as i32, destination as i32]
            };
            destinations.into_iter().enumerate().map(pair).collect()
        })
}

type Plans = Vec<(Direction, Vec<[i32; 2]>)>;

/// A layout, plans for it, and a number of threads.
fn plans() -> impl Strategy<Value = (Layout, Plans, usize)> {
    layouts().prop_flat_map(|layout| {
        let (gpu, cpu) = (layout.gpu_blocks, layout.cpu_blocks);
        let plan = prop_oneof![
            pairs(gpu, cpu).prop_map(|pairs| (Direction::Store, pairs)),
            pairs(cpu, gpu).prop_map(|pairs| (Direction::Load, pairs)),
        ];
        (Just(layout), prop::collection::vec(plan, 1..6), 1_usize..4)
    })
}

/// The two memories as the model sees them, and the naive copy: pair by pair, part by part, byte by byte.
#[derive(Clone, PartialEq)]
struct Model {
    gpu: Vec<u8>,
    cpu: Vec<u8>,
    slot_bytes: usize,
}

impl Model {
    fn copy(&mut self, layout: &Layout, direction: Direction, pairs: &[[i32; 2]]) {
        for pair in pairs {
            let [source, destination] = pair.map(|id| usize::try_from(id).unwrap());
            let (gpu_block, cpu_block) = match direction {
                Direction::Load => (destination, source),
                Direction::Store => (source, destination),
            };
            let mut at = cpu_block * self.slot_bytes;
            for part in &layout.parts {
                for byte in 0..part.bytes {
                    let gpu = &mut self.gpu[part.start + gpu_block * part.stride + byte];
                    match direction {
                        Direction::Load => *gpu = self.cpu[at],
                        Direction::Store => self.cpu[at] = *gpu,
                    }
                    at += 1;
                }
            }
        }
    }
}

/// An engine over a buffer and an arena, both filled with noise.
struct Rig {
    engine: CopyEngine, // first: its threads end before the buffer goes
    arena: Arc<HostArena>,
    gpu: Vec<u8>,
}

impl Rig {
    fn new(layout: &Layout, num_threads: usize) -> Self {
        let mut gpu: Vec<u8> = (0..layout.gpu_bytes).map(|i| (i * 131 + i / 251) as u8).collect();
        let base = gpu.as_mut_ptr().expose_provenance();
        let fragment =
            |part: &Part| Fragment { address: base + part.start, block_stride: part.stride, bytes: part.bytes };
        let memory = DescribedMemory::new(layout.parts.iter().map(fragment).collect(), layout.gpu_blocks).unwrap();
        let arena = Arc::new(HostArena::map(layout.cpu_blocks, layout.block_bytes()).unwrap());
        arena.touch(0, usize::MAX);
        for offset in 0..arena.total_bytes() {
            // SAFETY: inside the arena, which no thread uses yet.
            unsafe { Self::host_byte(&arena, offset).write((offset * 37 + offset / 4096) as u8) };
        }
        let options = CopyOptions { num_threads, max_queued: 16 };
        // SAFETY: the buffer outlives the engine in this struct and is read only between reports.
        let engine = unsafe { CopyEngine::start(memory, Arc::clone(&arena), options) }.unwrap();
        Self { engine, arena, gpu }
    }

    fn host_byte(arena: &HostArena, offset: usize) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(arena.slots().address + offset)
    }

    /// Both memories as they are.
    fn snapshot(&self) -> Model {
        // SAFETY: volatile, since other threads wrote the bytes; none does now.
        let gpu = (0..self.gpu.len()).map(|i| unsafe { self.gpu.as_ptr().add(i).read_volatile() }).collect();
        let total = self.arena.total_bytes();
        // SAFETY: as above.
        let cpu = (0..total).map(|i| unsafe { Self::host_byte(&self.arena, i).read_volatile() }).collect();
        Model { gpu, cpu, slot_bytes: self.arena.slots().slot_bytes }
    }

    fn run(&self, ticket: u64, direction: Direction, pairs: &[[i32; 2]]) -> Report {
        let request = CopyRequest { ticket, direction, pairs: pairs.to_vec(), list: "pairs" };
        self.engine.submit(vec![request]).unwrap();
        let mut reports = self.engine.wait(LONG).unwrap();
        assert_eq!(reports.len(), 1, "reported within {LONG:?}, once");
        reports.remove(0)
    }
}

/// Runs of the naive kind: sorted by destination, broken wherever one side does not rise by one.
fn num_runs(pairs: &[[i32; 2]]) -> usize {
    let mut sorted = pairs.to_vec();
    sorted.sort_unstable_by_key(|pair| pair[1]);
    let breaks = sorted.windows(2).filter(|two| two[1] != [two[0][0] + 1, two[0][1] + 1]).count();
    breaks + usize::from(!sorted.is_empty())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_is_where_the_naive_copy_puts_it((layout, plans, num_threads) in plans()) {
        let rig = Rig::new(&layout, num_threads);
        let mut model = rig.snapshot();
        let mut num_pieces = 0;
        for (ticket, (direction, pairs)) in plans.iter().enumerate() {
            let report = rig.run(ticket as u64, *direction, pairs);
            prop_assert_eq!(report, Report { ticket: ticket as u64, failed: vec![] });
            model.copy(&layout, *direction, pairs);
            prop_assert!(rig.snapshot() == model, "bytes differ after {:?} {:?}", direction, pairs);
            num_pieces += num_runs(pairs) * rig.engine.geometry().num_fragments();
        }
        prop_assert!(rig.engine.geometry().num_fragments() <= layout.parts.len());
        prop_assert_eq!(rig.engine.stats().unwrap().num_pieces, num_pieces as u64);
    }

    #[test]
    fn a_bad_list_is_refused_whole(
        (layout, plans, num_threads) in plans(),
        spot in any::<prop::sample::Index>(),
        kind in 0..4,
    ) {
        let rig = Rig::new(&layout, num_threads);
        let before = rig.snapshot();
        let (direction, mut pairs) = plans[0].clone();
        let (sources, destinations) = match direction {
            Direction::Load => (layout.cpu_blocks, layout.gpu_blocks),
            Direction::Store => (layout.gpu_blocks, layout.cpu_blocks),
        };
        pairs.push([0, 0]);
        let index = spot.index(pairs.len());
        match kind {
            0 => pairs[index] = [sources as i32, 0],
            1 => pairs[index] = [0, destinations as i32],
            2 => pairs[index] = [-1, 0],
            _ => pairs.push([0, pairs[index][1]]),
        }
        let good = CopyRequest { ticket: 1, direction, pairs: vec![[0, 0]], list: "good" };
        let bad = CopyRequest { ticket: 2, direction, pairs, list: "bad" };
        match rig.engine.submit(vec![good, bad]) {
            Err(CopyError::Config { argument, .. }) => prop_assert!(argument.starts_with("bad"), "{}", argument),
            other => prop_assert!(false, "{:?}", other),
        }
        prop_assert!(rig.engine.wait_idle(Duration::ZERO).unwrap());
        prop_assert_eq!(rig.engine.poll().unwrap(), []);
        prop_assert!(rig.snapshot() == before);
    }

    #[test]
    fn failed_pairs_keep_their_destination_and_the_others_arrive(
        (layout, plans, num_threads) in plans(),
        failing in prop::collection::btree_set(0_u32..20, 0..8),
    ) {
        let rig = Rig::new(&layout, num_threads);
        let mut model = rig.snapshot();
        let (direction, pairs) = &plans[0];
        rig.engine.inject_failures(*direction, Some(failing.iter().copied().collect()), 1).unwrap();
        let report = rig.run(7, *direction, pairs);
        let fails = |index: &usize| failing.contains(&(*index as u32));
        let expected: Vec<u32> = (0..pairs.len()).filter(fails).map(|index| index as u32).collect();
        prop_assert_eq!(report, Report { ticket: 7, failed: expected });
        let copied: Vec<[i32; 2]> = (0..pairs.len()).filter(|index| !fails(index)).map(|index| pairs[index]).collect();
        model.copy(&layout, *direction, &copied);
        prop_assert!(rig.snapshot() == model);
    }
}

/// Blocks that are longer than a chunk, and tickets that run at the same time on several threads.
#[test]
fn long_blocks_and_many_tickets_at_once() {
    let bytes = (5 << 20) + 4097; // two cuts and an odd rest
    let parts = vec![
        Part { start: GUARD + 1, stride: bytes + 33, bytes },
        Part { start: GUARD + 1 + 6 * (bytes + 33), stride: 100, bytes: 100 },
    ];
    let layout = Layout { parts, gpu_bytes: 2 * GUARD + 6 * (bytes + 33) + 600, gpu_blocks: 6, cpu_blocks: 8 };
    let rig = Rig::new(&layout, 3);
    let mut model = rig.snapshot();
    let requests: Vec<CopyRequest> = [vec![[0, 3], [1, 4]], vec![[5, 0]], vec![[0, 7], [2, 1]], vec![]]
        .into_iter()
        .enumerate()
        .map(|(index, pairs)| CopyRequest { ticket: index as u64, direction: Direction::Store, pairs, list: "stores" })
        .collect();
    for request in &requests {
        model.copy(&layout, request.direction, &request.pairs);
    }
    rig.engine.submit(requests).unwrap();
    let mut tickets = Vec::new();
    while tickets.len() < 4 {
        for report in rig.engine.wait(LONG).unwrap() {
            assert!(report.failed.is_empty());
            tickets.push(report.ticket);
        }
    }
    tickets.sort_unstable();
    assert_eq!(tickets, [0, 1, 2, 3]);
    assert!(rig.snapshot() == model);
}
