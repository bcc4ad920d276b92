//! The copies of one step.

use crate::block::{CpuBlockId, GpuBlockId};

/// The copies of one step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Copies Cpu to Gpu.
    pub loads: Vec<(CpuBlockId, GpuBlockId)>,
    /// Copies Gpu to Cpu.
    pub stores: Vec<(GpuBlockId, CpuBlockId)>,
    /// Ticket of the loads, if there are any.
    pub load_ticket: Option<u64>,
    /// Ticket of the stores, if there are any.
    pub store_ticket: Option<u64>,
    /// Blocks left in the store queue for the step's budget.
    pub num_deferred_budget: usize,
    /// Blocks left in the store queue for want of a Cpu slot.
    pub num_deferred_no_cpu_slot: usize,
}

impl Plan {
    /// Empties the plan; its lists keep their memory.
    pub(crate) fn clear(&mut self) {
        let Self { loads, stores, .. } = std::mem::take(self);
        *self = Self { loads, stores, ..Self::default() };
        self.loads.clear();
        self.stores.clear();
    }
}
