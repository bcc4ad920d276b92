//! kvtier: a second tier for the KV cache of LLM engines.
//!
//! [`BlockTable`] hands out the blocks of an engine's paged memory, remembers which blocks hold which tokens, and plans
//! the copies between the engine's memory (the *Gpu* tier) and host memory (the *Cpu* tier). It never touches the bytes.
//! `docs/design.md` has every decision it takes.

pub mod block;
pub mod copy;
pub mod error;
pub mod event;
mod free_bitmap;
pub mod hash;
mod index;
pub mod plan;
#[cfg(feature = "python")]
mod python;
pub mod session;
mod slot_list;
pub mod stats;
pub mod table;
mod tier;

pub use block::{BlockHash, BlockId, Cpu, CpuBlockId, Gpu, GpuBlockId};
pub use error::{Error, Result};
pub use plan::Plan;
pub use session::RequestId;
pub use table::{Admission, BlockTable, Config};
pub use tier::TierCounts;
