//! Random calls against a host table with fake memory: whatever is a hit must have the bytes that its hash promises, on
//! every rank, and nothing that is being copied may be given to anybody else.

// A test says what went wrong by panicking.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::{BTreeMap, HashSet};

use kvtier::event::EventKind;
use kvtier::{BlockHash, Error, HostTable, Stores};
use proptest::prelude::*;

const SLOTS: usize = 6;
const RANKS: u32 = 2;

fn hash(name: u8) -> BlockHash {
    let mut bytes = [0; 32];
    bytes[7] = name; // within the first eight, by which uses are remembered
    BlockHash(bytes)
}

#[derive(Debug, Clone)]
enum Call {
    Offer(Vec<u8>, usize),
    /// A request uses these, and what was used twice is offered.
    Use(Vec<u8>),
    Load(Vec<u8>),
    Acknowledge {
        pick: usize,
        rank: u32,
        failed: Option<usize>,
    },
    Reset,
}

struct Open {
    is_store: bool,
    pairs: Vec<(usize, BlockHash)>,
    ranks_left: Vec<u32>,
    failed: HashSet<usize>,
}

struct Harness {
    table: HostTable,
    /// Per rank, what is in each slot.
    memory: Vec<Vec<Option<BlockHash>>>,
    hits: BTreeMap<BlockHash, usize>,
    open: BTreeMap<u64, Open>,
    uses: BTreeMap<u8, usize>,
}

impl Harness {
    fn new() -> Self {
        let memory = vec![vec![None; SLOTS]; RANKS as usize];
        let table = HostTable::new(SLOTS, RANKS).unwrap().with_history(64);
        Self { table, memory, hits: BTreeMap::new(), open: BTreeMap::new(), uses: BTreeMap::new() }
    }

    fn call(&mut self, call: Call) {
        match call {
            Call::Offer(names, budget) => self.offer(&names, budget, Stores::All),
            Call::Load(names) => self.load(&names),
            Call::Acknowledge { pick, rank, failed } => self.acknowledge(pick, rank, failed),
            Call::Use(names) => self.use_blocks(&names),
            Call::Reset => self.reset(),
        }
        for event in self.table.events() {
            match event.kind {
                EventKind::Stored => {
                    assert!(self.hits.insert(event.block_hash, event.block_id as usize).is_none());
                }
                EventKind::Removed => assert_eq!(self.hits.remove(&event.block_hash), Some(event.block_id as usize)),
            }
        }
        for (hash, &slot) in &self.hits {
            for rank in &self.memory {
                assert_eq!(rank[slot], Some(*hash), "slot {slot} is a hit without its bytes");
            }
        }
        self.table.audit().unwrap();
        assert_eq!(self.table.counts().cached, self.hits.len());
    }

    fn busy(&self, wants_store: bool) -> HashSet<usize> {
        let open = self.open.values().filter(|open| open.is_store == wants_store);
        open.flat_map(|open| open.pairs.iter().map(|pair| pair.0)).collect()
    }

    fn use_blocks(&mut self, names: &[u8]) {
        let hashes: Vec<_> = names.iter().map(|&name| hash(name)).collect();
        self.table.note_use(&hashes);
        for &name in names {
            *self.uses.entry(name).or_default() += 1;
        }
        self.offer(names, usize::MAX, Stores::Repeated);
    }

    fn reset(&mut self) {
        let has_loads = self.open.values().any(|open| !open.is_store);
        assert_eq!(self.table.reset(), !has_loads);
        if !has_loads {
            // What is being stored was computed before the reset, and must not be found after it.
            for open in self.open.values_mut() {
                open.failed.extend(0..open.pairs.len());
            }
            self.uses.clear();
        }
    }

    fn offer(&mut self, names: &[u8], budget: usize, which: Stores) {
        let hashes: Vec<_> = names.iter().map(|&name| hash(name)).collect();
        let gpu: Vec<u32> = names.iter().map(|&name| u32::from(name) + 100).collect();
        let before: HashSet<usize> = self.busy(true).union(&self.busy(false)).copied().collect();
        let offer = self.table.offer(&hashes, &gpu, budget, which).unwrap();
        let planned = offer.plan.as_ref().map_or(0, |plan| plan.pairs.len());
        let left_out = offer.num_known + offer.num_over_budget + offer.num_no_slot + offer.num_first_use;
        assert_eq!(planned + left_out, names.len());
        assert!(planned <= budget);
        let Some(plan) = offer.plan else { return };
        let pairs: Vec<_> = plan.pairs.iter().map(|&(cpu, gpu)| (cpu.index(), hash((gpu - 100) as u8))).collect();
        for (slot, stored) in &pairs {
            let is_first = which == Stores::Repeated && self.uses[&stored.0[7]] < 2;
            assert!(!is_first, "a block that was used once is stored");
            assert!(!before.contains(slot), "slot {slot} is part of another copy");
            assert!(!self.hits.contains_key(stored), "a hit is stored again");
            for rank in &mut self.memory {
                rank[*slot] = None;
            }
        }
        let slots: HashSet<_> = pairs.iter().map(|pair| pair.0).collect();
        assert_eq!(slots.len(), pairs.len());
        let open = Open { is_store: true, pairs, ranks_left: (0..RANKS).collect(), failed: HashSet::new() };
        assert!(self.open.insert(plan.ticket, open).is_none());
    }

    fn load(&mut self, names: &[u8]) {
        let hashes: Vec<_> = names.iter().map(|&name| hash(name)).collect();
        let loading: HashSet<_> = self
            .open
            .values()
            .filter(|open| !open.is_store)
            .flat_map(|open| open.pairs.iter().map(|pair| pair.1))
            .collect();
        let found = self.table.lookup(&hashes);
        let is_hit = |hash: &&BlockHash| self.hits.contains_key(hash) && !loading.contains(hash);
        assert_eq!(found.num_blocks, hashes.iter().take_while(is_hit).count());
        assert_eq!(found.is_loading, hashes.get(found.num_blocks).is_some_and(|next| loading.contains(next)));
        let all_hit = !hashes.is_empty() && hashes.iter().all(|hash| self.hits.contains_key(hash));
        let gpu: Vec<u32> = (0..hashes.len() as u32).collect();
        let plan = self.table.load(&hashes, &gpu).unwrap();
        assert_eq!(plan.is_some(), all_hit);
        let Some(plan) = plan else { return };
        let pairs: Vec<_> = plan.pairs.iter().zip(&hashes).map(|(pair, hash)| (pair.0.index(), *hash)).collect();
        let open = Open { is_store: false, pairs, ranks_left: (0..RANKS).collect(), failed: HashSet::new() };
        assert!(self.open.insert(plan.ticket, open).is_none());
    }

    fn acknowledge(&mut self, pick: usize, rank: u32, failed: Option<usize>) {
        let Some(&ticket) = self.open.keys().nth(pick % self.open.len().max(1)) else { return };
        let Some(open) = self.open.get_mut(&ticket) else { return };
        let failed: Vec<usize> = failed.filter(|&index| index < open.pairs.len()).into_iter().collect();
        if !open.ranks_left.contains(&rank) {
            let refused = self.table.complete(ticket, rank, &failed);
            assert!(matches!(refused, Err(Error::StaleTicket { .. })), "{refused:?}");
            return;
        }
        open.ranks_left.retain(|&left| left != rank);
        open.failed.extend(&failed);
        for (index, (slot, hash)) in open.pairs.iter().enumerate() {
            let cell = &mut self.memory[rank as usize][*slot];
            if open.is_store {
                *cell = (!failed.contains(&index)).then_some(*hash);
            } else {
                assert_eq!(*cell, Some(*hash), "a load reads something else");
            }
        }
        let is_last = open.ranks_left.is_empty();
        assert_eq!(self.table.complete(ticket, rank, &failed).unwrap(), is_last);
        if is_last {
            self.open.remove(&ticket);
        }
    }
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let names = || prop::collection::vec(0_u8..12, 0..5);
    prop::collection::vec(
        prop_oneof![
            3 => (names(), 0_usize..6).prop_map(|(names, budget)| Call::Offer(names, budget)),
            2 => names().prop_map(Call::Use),
            3 => names().prop_map(|mut names| { names.sort_unstable(); names.dedup(); Call::Load(names) }),
            8 => (0_usize..4, 0..RANKS, prop::option::weighted(0.2, 0_usize..5))
                .prop_map(|(pick, rank, failed)| Call::Acknowledge { pick, rank, failed }),
            1 => Just(Call::Reset),
        ],
        0..80,
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn hits_have_their_bytes(calls in calls()) {
        let mut harness = Harness::new();
        for call in calls {
            harness.call(call);
        }
    }
}

#[test]
fn refusals_name_the_argument() {
    assert!(matches!(HostTable::new(0, 1), Err(Error::Config { argument, .. }) if argument == "cpu_blocks"));
    assert!(matches!(HostTable::new(1, 33), Err(Error::Config { argument, .. }) if argument == "ranks"));
    let mut table = HostTable::new(2, 1).unwrap();
    let uneven = table.offer(&[hash(1)], &[], 1, Stores::All);
    assert!(matches!(uneven, Err(Error::Config { argument, .. }) if argument == "gpu_ids"));
    assert!(matches!(table.complete(1, 0, &[]), Err(Error::StaleTicket { .. })));
    let ticket = table.offer(&[hash(1)], &[4], 1, Stores::All).unwrap().plan.unwrap().ticket;
    assert!(matches!(table.complete(ticket, 1, &[]), Err(Error::Config { argument, .. }) if argument == "rank"));
    assert!(matches!(table.complete(ticket, 0, &[1]), Err(Error::Config { argument, .. }) if argument == "failed"));
    assert!(table.complete(ticket, 0, &[]).unwrap());
    assert!(matches!(table.complete(ticket, 0, &[]), Err(Error::StaleTicket { .. })));
}
