//! Errors of the block table. Each names the argument, the value and the limit.

use crate::mutex_table::session::RequestId;

/// What a call of the table can refuse with. A refused call has changed nothing but a counter.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
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
    /// The Gpu tier cannot give all blocks that the call needs.
    #[error("needs {needed} GPU blocks, {available} of {total} are free or evictable")]
    OutOfBlocks {
        /// Blocks that the call needed.
        needed: usize,
        /// Blocks that were free or evictable for it.
        available: usize,
        /// Blocks of the tier.
        total: usize,
    },
    /// No live request has this id.
    #[error("request_id = {0}: no live request has this id")]
    UnknownRequest(RequestId),
    /// The ticket was never issued, is finished, or was acknowledged by this rank before.
    #[error("ticket = {ticket}: {reason}")]
    StaleTicket {
        /// The ticket given.
        ticket: u64,
        /// Why it is refused.
        reason: &'static str,
    },
    /// `audit` found a broken invariant: a bug of the table.
    #[error("invariant broken: {0}")]
    Invariant(String),
}

impl Error {
    pub(crate) fn config(argument: &str, value: impl std::fmt::Display, limit: impl Into<String>) -> Self {
        Self::Config { argument: argument.to_owned(), value: format!("{value}"), limit: limit.into() }
    }
}

/// Result of a call of the table.
pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;
