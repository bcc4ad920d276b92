//! kvtier: a second tier for the KV cache of LLM engines.
//!
//! [`BlockTable`] hands out the blocks of an engine's paged memory, remembers which blocks hold which tokens, and plans
//! the copies between the engine's memory (the *Gpu* tier) and host memory (the *Cpu* tier). It never touches the bytes.
//! `docs/design.md` has every decision it takes.

pub mod block;
pub mod copy;
pub mod error;
pub mod event;
mod eviction;
mod free_bitmap;
pub mod hash;
mod holds;
pub mod host;
mod index;
#[cfg(all(test, kvtier_loom))]
#[allow(clippy::unwrap_used)]
mod models;
pub mod plan;
#[cfg(feature = "python")]
mod python;
mod region;
pub mod session;
mod slot;
mod slot_list;
pub mod stats;
mod sync;
pub mod table;
mod ticket;
mod tier;

pub use block::{BlockHash, BlockId, Cpu, CpuBlockId, Gpu, GpuBlockId};
pub use error::{Error, Result};
pub use host::{HostTable, Stores};
pub use plan::Plan;
pub use session::{Admission, RequestId, Session};
pub use table::{BlockTable, Config};
pub use ticket::MAX_RANKS;
pub use tier::TierCounts;
