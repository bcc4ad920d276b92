//! The harness of `tests/model.rs`, driven by the bytes of a coverage-guided fuzzer.
#![no_main]
// A broken promise is a crash.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../../tests/harness/mod.rs"]
mod harness;

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;

use harness::{Harness, Op, Setup, When};

/// Most calls of one run: the harness proves every invariant after each, so longer runs find less per second.
const MAX_OPS: usize = 300;

fn setup(u: &mut Unstructured) -> Result<Setup> {
    Ok(Setup {
        gpu_blocks: u.int_in_range(1..=20)?,
        cpu_blocks: u.int_in_range(0..=20)?,
        when: if u.arbitrary()? { When::Early } else { When::Late },
        ranks: u.int_in_range(1..=3)?,
        max_stores: if u.arbitrary()? { Some(u.int_in_range(0..=5)?) } else { None },
    })
}

fn op(u: &mut Unstructured) -> Result<Op> {
    let prompt = |u: &mut Unstructured| u.int_in_range(0..=3_u32);
    let len = |u: &mut Unstructured| u.int_in_range(1..=40_usize);
    // A small number suffices to choose among a few live requests or open tickets.
    let which = |u: &mut Unstructured| u.arbitrary::<u8>().map(usize::from);
    let failed = |u: &mut Unstructured| u.arbitrary::<u16>().map(u64::from);
    Ok(match u.int_in_range(0..=11_u8)? {
        0 => {
            let salt = if u.arbitrary()? { Some(u.int_in_range(0..=1)?) } else { None };
            Op::Admit { prompt: prompt(u)?, len: len(u)?, salt, hashed: u.arbitrary()? }
        }
        1 => Op::Extend { which: which(u)?, n: u.int_in_range(1..=8)? },
        2 => Op::Commit { which: which(u)?, part: u.int_in_range(0..=4)? },
        3 => Op::Step,
        4 => {
            let failed = if u.arbitrary()? { failed(u)? } else { 0 };
            Op::Complete { which: which(u)?, rank: u.int_in_range(0..=2)?, failed }
        }
        5 => Op::Stale,
        6 => Op::End { which: which(u)?, kind: u.int_in_range(0..=2)? },
        7 => Op::Reset,
        8 => Op::Full { prompt: prompt(u)?, len: len(u)?, store: u.arbitrary()? },
        9 => Op::Wipe,
        10 => Op::Repeated { prompt: prompt(u)?, len: len(u)?, period: u.int_in_range(1..=3)? },
        _ => Op::Return { prompt: prompt(u)?, len: len(u)?, failed: failed(u)? },
    })
}

fn run(u: &mut Unstructured) -> Result<()> {
    let setup = setup(u)?;
    let mut harness = Harness::new(setup);
    let mut twin = u.ratio(1, 8)?.then(|| Harness::new(setup));
    for _ in 0..MAX_OPS {
        if u.is_empty() {
            break;
        }
        let op = op(u)?;
        harness.apply(&op);
        if let Some(twin) = &mut twin {
            twin.apply(&op);
            twin.assert_same(&harness);
        }
    }
    harness.wind_down();
    Ok(())
}

fuzz_target!(|bytes: &[u8]| {
    // Too few bytes for a setup: nothing to run.
    let _ = run(&mut Unstructured::new(bytes));
});
