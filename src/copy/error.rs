//! Errors of the copy engine. A refused call has moved no byte and queued nothing.

use std::fmt;

/// What a call of the copy engine can refuse with.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CopyError {
    /// An argument is outside its limits.
    #[error("{argument} = {value}: {limit}")]
    Config {
        /// Name of the argument, as the caller knows it.
        argument: String,
        /// The value given.
        value: String,
        /// What would have been accepted.
        limit: String,
    },
    /// A block of the list is part of a copy that has not finished.
    #[error("{list}[{index}] = ({source_id}, {destination_id}): {tier} block {block} is {role} of ticket {ticket}, still in flight")]
    BlockInFlight {
        /// Name of the list, as the caller knows it.
        list: &'static str,
        /// Index of the pair in the list.
        index: usize,
        /// Source block id of the pair.
        source_id: u32,
        /// Destination block id of the pair.
        destination_id: u32,
        /// Tier of the block that is taken: `"Gpu"` or `"Cpu"`.
        tier: &'static str,
        /// The block that is taken.
        block: u32,
        /// What the other ticket does with it: `"the source"` or `"the destination"`.
        role: &'static str,
        /// The other ticket.
        ticket: u64,
    },
    /// The ticket is already in the engine: not finished, or its report not collected.
    #[error("ticket = {ticket}: already submitted, and its report not collected yet")]
    TicketInUse {
        /// The ticket given.
        ticket: u64,
    },
    /// The queue has no room for the tickets of the call.
    #[error("the queue is full: {open} tickets run, wait or are not collected by poll() or wait() yet; max_queued = {max_queued}")]
    QueueFull {
        /// Tickets in the engine.
        open: usize,
        /// The bound.
        max_queued: usize,
    },
    /// The engine was closed.
    #[error("the copy engine is closed")]
    Closed,
    /// The process was forked after the engine was made: its threads exist in the parent only.
    #[error("the copy engine belongs to process {owner}; process {current} was forked from it and must make its own")]
    Forked {
        /// Process that made the engine.
        owner: u32,
        /// Process that calls.
        current: u32,
    },
    /// The system refused to start a thread.
    #[error("cannot start copy thread {index} of {num_threads}: {reason}")]
    Spawn {
        /// Index of the thread.
        index: usize,
        /// Threads asked for.
        num_threads: usize,
        /// What the system said.
        reason: String,
    },
}

impl CopyError {
    pub(crate) fn config(argument: impl Into<String>, value: impl fmt::Display, limit: impl Into<String>) -> Self {
        Self::Config { argument: argument.into(), value: value.to_string(), limit: limit.into() }
    }
}
