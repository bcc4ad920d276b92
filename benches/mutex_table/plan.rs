//! Copies: the plan of a step, and the tickets that wait for acknowledgement.

use std::collections::BTreeMap;

use crate::mutex_table::block::{CpuBlockId, GpuBlockId};
use crate::mutex_table::error::{Error, Result};
use crate::mutex_table::session::RequestRef;

/// Most ranks that a ticket can wait for.
pub(crate) const MAX_RANKS: usize = 64;

/// The copies of one step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Copies Cpu to Gpu.
    pub(crate) loads: Vec<(CpuBlockId, GpuBlockId)>,
    /// Copies Gpu to Cpu.
    pub(crate) stores: Vec<(GpuBlockId, CpuBlockId)>,
    /// Ticket of the loads, if there are any.
    pub(crate) load_ticket: Option<u64>,
    /// Ticket of the stores, if there are any.
    pub(crate) store_ticket: Option<u64>,
    /// Blocks left in the store queue for the step's budget.
    pub(crate) num_deferred_budget: usize,
    /// Blocks left in the store queue for want of a Cpu slot.
    pub(crate) num_deferred_no_cpu_slot: usize,
}

/// One load under a ticket.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load {
    pub(crate) source: CpuBlockId,
    pub(crate) destination: GpuBlockId,
    pub(crate) owner: RequestRef,
    /// Position of the block in its request.
    pub(crate) position: usize,
}

/// The copies under one ticket.
#[derive(Debug)]
pub(crate) enum Copies {
    Loads(Vec<Load>),
    Stores(Vec<(GpuBlockId, CpuBlockId)>),
}

impl Copies {
    fn len(&self) -> usize {
        match self {
            Self::Loads(loads) => loads.len(),
            Self::Stores(stores) => stores.len(),
        }
    }
}

/// A copy in flight.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) copies: Copies,
    /// Which pairs failed on any rank so far.
    pub(crate) failed: Vec<bool>,
    /// Bit per rank that has acknowledged.
    acknowledged: u64,
}

/// Tickets that wait for an acknowledgement, by number.
#[derive(Debug)]
pub(crate) struct Tickets {
    open: BTreeMap<u64, Ticket>,
    next: u64,
    ranks: u32,
}

impl Tickets {
    pub(crate) fn new(ranks: u32) -> Self {
        Self { open: BTreeMap::new(), next: 1, ranks }
    }

    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    /// Number that the next ticket will get.
    pub(crate) fn next_number(&self) -> u64 {
        self.next
    }

    pub(crate) fn issue(&mut self, copies: Copies) -> u64 {
        let number = self.next;
        self.next += 1;
        let failed = vec![false; copies.len()];
        self.open.insert(number, Ticket { copies, failed, acknowledged: 0 });
        number
    }

    /// Notes what a rank says; the ticket itself once all ranks have spoken.
    pub(crate) fn acknowledge(&mut self, number: u64, rank: u32, failed: &[usize]) -> Result<Option<Ticket>> {
        if rank >= self.ranks {
            return Err(Error::config("rank", rank, format!("0 .. {}", self.ranks - 1)));
        }
        let Some(ticket) = self.open.get_mut(&number) else {
            let reason =
                if (1..self.next).contains(&number) { "it is already finished" } else { "it was never issued" };
            return Err(Error::StaleTicket { ticket: number, reason });
        };
        if ticket.acknowledged & (1 << rank) != 0 {
            return Err(Error::StaleTicket { ticket: number, reason: "this rank has acknowledged it before" });
        }
        if let Some(index) = failed.iter().find(|&&index| index >= ticket.failed.len()) {
            let limit = format!("an index of one of the ticket's {} pairs", ticket.failed.len());
            return Err(Error::config("failed", index, limit));
        }
        for &index in failed {
            ticket.failed[index] = true;
        }
        ticket.acknowledged |= 1 << rank;
        if ticket.acknowledged.count_ones() < self.ranks {
            return Ok(None);
        }
        Ok(self.open.remove(&number))
    }
}
