//! What a host table counts.

macro_rules! host_counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of a host table since construction.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub struct HostCounters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl HostCounters {
            /// Name and value of each, in order of declaration.
            pub fn each(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }
    };
}

host_counters! {
    /// Calls of `lookup`.
    num_lookups,
    /// Blocks that they asked for.
    lookup_blocks,
    /// Blocks that they found.
    hit_blocks,
    /// Blocks of refused `load` calls.
    loads_lost_blocks,
    /// Loads under tickets.
    loads_planned_blocks,
    /// Loads that every rank acknowledged as copied.
    loaded_blocks,
    /// Loads that failed on some rank.
    load_failed_blocks,
    /// Blocks that were offered.
    offered_blocks,
    /// Offered blocks that the tier had or was receiving.
    known_blocks,
    /// Offered blocks beyond the budget of their call.
    over_budget_blocks,
    /// Offered blocks for which no slot could be had.
    no_slot_blocks,
    /// Offered blocks that were used only once, where that is a reason.
    first_use_blocks,
    /// Stores under tickets.
    stores_planned_blocks,
    /// Stores that every rank acknowledged as copied.
    stored_blocks,
    /// Stores that failed on some rank, or were under way at a reset.
    store_failed_blocks,
    /// Blocks that gave their slot away.
    evicted_blocks,
    /// Blocks that a failed load took out.
    withdrawn_blocks,
    /// Refused acknowledgements of tickets that were not open for that rank.
    num_stale_completions,
    /// Successful resets.
    num_resets,
    /// Events that nobody drained in time.
    events_dropped,
}
