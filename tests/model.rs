//! Random calls against the harness.

// A test says what went wrong by panicking.
#![allow(clippy::unwrap_used, clippy::panic)]

mod harness;

use proptest::prelude::*;

use harness::{Harness, Op, Setup, When};

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => (0..4_u32, 1..30_usize, prop::option::weighted(0.2, 0..2_i128), any::<bool>())
            .prop_map(|(prompt, len, salt, hashed)| Op::Admit { prompt, len, salt, hashed }),
        1 => (0..4_u32, 9..30_usize, 1..4_usize)
            .prop_map(|(prompt, len, period)| Op::Repeated { prompt, len, period }),
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

proptest! {
    // 48 runs of 100 to 400 calls: over 10,000 whatever the seed.
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn published_blocks_are_what_they_promise(
        gpu_blocks in 1..14_usize,
        cpu_blocks in 0..14_usize,
        early in any::<bool>(),
        ranks in 1..3_u32,
        max_stores in prop::option::of(0..5_usize),
        ops in prop::collection::vec(op(), 220..400),
    ) {
        let when = if early { When::Early } else { When::Late };
        let mut harness = Harness::new(Setup { gpu_blocks, cpu_blocks, when, ranks, max_stores });
        for op in &ops {
            harness.apply(op);
        }
        harness.wind_down();
    }

    #[test]
    fn the_same_calls_give_the_same_decisions(ops in prop::collection::vec(op(), 100..200)) {
        let setup = Setup { gpu_blocks: 9, cpu_blocks: 7, when: When::Late, ranks: 1, max_stores: Some(3) };
        let mut tables = [Harness::new(setup), Harness::new(setup)];
        for op in &ops {
            for harness in &mut tables {
                harness.apply(op);
            }
            let [one, two] = &tables;
            one.assert_same(two);
        }
    }
}
