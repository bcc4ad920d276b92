//! The table as it was before it became lock-free, behind one mutex: what the lock-free one is measured against.
//!
//! The same decisions with plain data structures; only what is measured is kept.
#![allow(dead_code)] // no one bench calls everything

mod block;
mod error;
mod event;
mod free_bitmap;
mod index;
mod plan;
mod session;
mod slot_list;
mod stats;
mod table;
mod tier;

use std::sync::{Mutex, MutexGuard, PoisonError};

use block::{BlockHash, Cpu, Gpu};
use session::RequestId;
pub(crate) use table::BlockTable;

/// A table that any thread may call, one at a time.
pub(crate) struct MutexTable(Mutex<BlockTable>);

impl MutexTable {
    pub(crate) fn new(gpu_blocks: usize, cpu_blocks: usize, block_size: usize) -> Self {
        Self(Mutex::new(BlockTable::new(gpu_blocks, cpu_blocks, block_size)))
    }

    fn lock(&self) -> MutexGuard<'_, BlockTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gpu hits and Cpu hits; panics where the pool is too small.
    pub(crate) fn admit_hashed(&self, id: i64, hashes: &[kvtier::BlockHash], num_tokens: usize) -> (usize, usize) {
        let own = own_hashes(hashes);
        let admission = self.lock().admit_hashed(RequestId::Int(id), own, num_tokens).expect("admitted");
        (admission.gpu_hit_blocks, admission.cpu_hit_blocks)
    }

    pub(crate) fn lookup_hashed(&self, hashes: &[kvtier::BlockHash]) -> (usize, usize) {
        self.lock().lookup_hashed(own_hashes(hashes))
    }

    pub(crate) fn commit(&self, id: i64, num_tokens: usize) {
        self.lock().commit(&RequestId::Int(id), num_tokens).expect("committed");
    }

    /// Tickets of the loads and of the stores.
    pub(crate) fn step(&self) -> [Option<u64>; 2] {
        let plan = self.lock().step();
        [plan.load_ticket, plan.store_ticket]
    }

    pub(crate) fn complete(&self, ticket: u64) {
        self.lock().complete(ticket, 0, &[]).expect("completed");
    }

    pub(crate) fn release(&self, id: i64) {
        self.lock().release(&RequestId::Int(id)).expect("released");
    }
}

/// The same bytes as this table's own type.
fn own_hashes(hashes: &[kvtier::BlockHash]) -> &[BlockHash] {
    // SAFETY: both types are transparent over 32 bytes.
    unsafe { std::slice::from_raw_parts(hashes.as_ptr().cast(), hashes.len()) }
}
