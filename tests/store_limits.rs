//! Why blocks of the store queue are left for a later step.

// A test says what went wrong by panicking.
#![allow(clippy::unwrap_used)]

use kvtier::{BlockHash, Config, Plan, Session};

/// The plan of a step after three blocks were written.
fn plan_of_three(cpu_blocks: usize, budget: Option<usize>) -> Plan {
    let mut config = Config::new(3, cpu_blocks, 4);
    config.max_store_blocks_per_step = budget;
    let mut session = Session::new(&config).unwrap();
    let hashes = [1, 2, 3].map(|n| BlockHash([n; 32]));
    session.admit_hashed(1.into(), &hashes, 12).unwrap();
    session.commit(&1.into(), 12).unwrap();
    session.step()
}

#[test]
fn the_reason_is_the_limit_that_was_met() {
    let counts = |plan: &Plan| (plan.stores.len(), plan.num_deferred_budget, plan.num_deferred_no_cpu_slot);
    assert_eq!(counts(&plan_of_three(3, Some(1))), (1, 2, 0));
    assert_eq!(counts(&plan_of_three(1, None)), (1, 0, 2));
    assert_eq!(counts(&plan_of_three(1, Some(2))), (1, 0, 2));
    assert_eq!(counts(&plan_of_three(2, Some(2))), (2, 1, 0));
    assert_eq!(counts(&plan_of_three(3, None)), (3, 0, 0));
}
