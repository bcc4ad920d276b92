//! Counters of the table, which never go down.

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters since construction.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub(crate) struct Counters {
            $($(#[$doc])* pub $name: u64,)*
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
