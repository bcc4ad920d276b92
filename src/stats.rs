//! Counters of the table, which never go down, and gauges read off its tiers.

use crate::sync::{AtomicU64, Relaxed};
use crate::tier::TierCounts;

/// A number that only grows.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: usize) {
        if n > 0 {
            // Relaxed: a statistic.
            self.0.fetch_add(n as u64, Relaxed);
        }
    }

    pub(crate) fn get(&self) -> u64 {
        // Relaxed: a statistic.
        self.0.load(Relaxed)
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters since construction.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// The counters where several threads count.
        #[derive(Debug, Default)]
        pub(crate) struct SharedCounters {
            $(pub(crate) $name: Counter,)*
        }

        impl SharedCounters {
            pub(crate) fn read(&self) -> Counters {
                Counters { $($name: self.$name.get(),)* }
            }
        }

        impl Counters {
            /// Name and value of each, in order of declaration.
            pub fn each(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }
    };
}

counters! {
    /// Requests admitted.
    num_admitted,
    /// `admit` and `extend` calls refused for want of blocks.
    num_refused,
    /// Requests ended by `release`.
    num_released,
    /// Requests ended by `abort`.
    num_aborted,
    /// Requests ended by `preempt`.
    num_preempted,
    /// Successful `reset` calls.
    num_resets,
    /// Refused `complete` calls: ticket unknown, finished, or acknowledged before.
    num_stale_completions,
    /// Tokens of admitted requests.
    prompt_tokens,
    /// Blocks that admitted requests found in the Gpu tier.
    gpu_hit_blocks,
    /// Blocks that admitted requests found in the Cpu tier.
    cpu_hit_blocks,
    /// Tokens of `gpu_hit_blocks`.
    gpu_hit_tokens,
    /// Tokens of `cpu_hit_blocks`.
    cpu_hit_tokens,
    /// Blocks given out with nothing in them.
    fresh_blocks,
    /// Loads listed by `step`.
    loads_planned_blocks,
    /// Loads acknowledged as copied.
    loaded_blocks,
    /// Loads acknowledged as failed.
    load_failed_blocks,
    /// Loads that were never listed, because their request ended first.
    loads_cancelled_blocks,
    /// Stores listed by `step`.
    stores_planned_blocks,
    /// Stores acknowledged as copied.
    stored_blocks,
    /// Stores acknowledged as failed; the blocks are offered again.
    store_failed_blocks,
    /// Blocks left in the store queue by a step for its budget, counted per step.
    stores_deferred_budget_blocks,
    /// Blocks left in the store queue by a step for want of a Cpu slot, counted per step.
    stores_deferred_no_cpu_slot_blocks,
    /// Blocks that left the store queue by eviction.
    stores_lost_blocks,
    /// Cached blocks of the Gpu tier that gave their slot away.
    gpu_evicted_blocks,
    /// Cached blocks of the Cpu tier that gave their slot away.
    cpu_evicted_blocks,
    /// Cached blocks of the Cpu tier that a failed load took out.
    cpu_withdrawn_blocks,
    /// Events that nobody drained in time.
    events_dropped,
}

/// Counters, and what the table looks like now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stats {
    /// Slots of the Gpu tier.
    pub gpu: TierCounts,
    /// Slots of the Cpu tier.
    pub cpu: TierCounts,
    /// Live requests.
    pub num_requests: usize,
    /// Tickets that wait for an acknowledgement.
    pub num_tickets: usize,
    /// Blocks that wait to be stored.
    pub store_queue_blocks: usize,
    /// Since construction.
    pub counters: Counters,
}

impl Stats {
    /// Name and value of everything, gauges first.
    pub fn each(&self) -> impl Iterator<Item = (String, u64)> + '_ {
        let tier = |name: &'static str, counts: TierCounts| {
            [
                ("blocks", counts.total),
                ("free_blocks", counts.free),
                ("claimed_blocks", counts.claimed),
                ("cached_blocks", counts.cached),
                ("in_flight_blocks", counts.in_flight),
                ("held_blocks", counts.held),
                ("evictable_blocks", counts.evictable),
            ]
            .map(|(what, value)| (format!("{name}_{what}"), value as u64))
        };
        let gauges = [
            ("num_requests", self.num_requests),
            ("num_tickets", self.num_tickets),
            ("store_queue_blocks", self.store_queue_blocks),
        ];
        tier("gpu", self.gpu)
            .into_iter()
            .chain(tier("cpu", self.cpu))
            .chain(gauges.map(|(name, value)| (name.to_owned(), value as u64)))
            .chain(self.counters.each().map(|(name, value)| (name.to_owned(), value)))
    }
}
