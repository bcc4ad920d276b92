//! The copy engine: moves blocks between the engine's memory (the *Gpu* tier) and host memory (the *Cpu* tier).
//!
//! The parts, from the pure to the moving: [`layout`] describes memory, [`planner`] turns a list of block pairs into
//! runs and pieces or refuses it, [`chunk`] cuts pieces into bounded portions of work, `in_flight` knows which blocks a
//! running copy may touch, `queue` is the state behind the lock, [`engine`] the threads, [`arena`] the host memory.
//! [`outline`] plans tickets whose bytes something else moves: the CUDA extension.
//! `docs/copying.md` tells the whole story, the ownership of buffers included.

pub mod arena;
pub mod chunk;
pub mod engine;
pub mod error;
mod in_flight;
pub mod layout;
pub mod outline;
pub mod planner;
mod queue;

pub use arena::HostArena;
pub use engine::{CopyEngine, CopyOptions, CopyRequest};
pub use error::CopyError;
pub use layout::{DescribedMemory, Fragment, Geometry, HostSlots};
pub use outline::{Outline, OutlinedTickets};
pub use planner::{CopyPlan, Direction, Piece};
pub use queue::{CopyStats, Report};
