//! Acknowledgements: nothing becomes a hit, and nothing is let go, before every rank has spoken.

use super::{Direction, HostTable, Open};
use crate::block::CpuBlockId;
use crate::error::{Error, Result};
use crate::event::{EventKind, TierName};

impl HostTable {
    /// Takes a rank's acknowledgement of a ticket; `failed` are the indices of the pairs that did not copy there.
    /// True if it was the last rank's. A refused call changes nothing but a counter.
    pub fn complete(&mut self, ticket: u64, rank: u32, failed: &[usize]) -> Result<bool> {
        if rank >= self.ranks {
            return Err(Error::config("rank", rank, format!("0 .. {}", self.ranks - 1)));
        }
        let stale = match self.open.get(&ticket) {
            None if ticket == 0 || ticket > self.last_ticket => Some("it was never issued"),
            None => Some("it is already finished"),
            Some(open) if open.acknowledged & 1 << rank != 0 => Some("this rank has acknowledged it before"),
            Some(_) => None,
        };
        if let Some(reason) = stale {
            self.counters.num_stale_completions += 1;
            return Err(Error::StaleTicket { ticket, reason });
        }
        let Some(open) = self.open.get_mut(&ticket) else { return Ok(false) };
        if let Some(index) = failed.iter().find(|&&index| index >= open.failed.len()) {
            let limit = format!("an index of one of the ticket's {} pairs", open.failed.len());
            return Err(Error::config("failed", index, limit));
        }
        for &index in failed {
            open.failed[index] = true;
        }
        open.acknowledged |= 1 << rank;
        if open.acknowledged.count_ones() < self.ranks {
            return Ok(false);
        }
        if let Some(open) = self.open.remove(&ticket) {
            match open.direction {
                Direction::Load => self.finish_loads(&open),
                Direction::Store => self.finish_stores(&open),
            }
        }
        Ok(true)
    }

    fn finish_stores(&mut self, open: &Open) {
        let mut releases = self.tier.releases(open.blocks.len());
        let mut events = self.events.pushes();
        // Tail first: a parent becomes younger than its children, and outlives them.
        for (&block, &has_failed) in open.blocks.iter().zip(&open.failed).rev() {
            if has_failed {
                self.tier.retract(block);
                self.counters.store_failed_blocks += 1;
                continue;
            }
            let hash = self.tier.hash(block);
            releases.publish_copied(block);
            events.push(EventKind::Stored, TierName::Cpu, hash, block.index());
            self.counters.stored_blocks += 1;
        }
    }

    fn finish_loads(&mut self, open: &Open) {
        for (&block, &has_failed) in open.blocks.iter().zip(&open.failed).rev() {
            let hash = self.tier.hash(block);
            if let Some(num_loads) = self.loading.get_mut(&hash) {
                *num_loads -= 1;
                if *num_loads == 0 {
                    self.loading.remove(&hash);
                }
            }
            if has_failed {
                self.counters.load_failed_blocks += 1;
                self.withdraw(block);
            } else {
                self.counters.loaded_blocks += 1;
            }
            self.tier.releases(1).unhold(block);
        }
    }

    fn withdraw(&mut self, block: CpuBlockId) {
        let hash = self.tier.hash(block);
        // Another load of the same block may have failed before.
        if self.tier.withdraw(block) {
            self.counters.withdrawn_blocks += 1;
            self.events.pushes().push(EventKind::Removed, TierName::Cpu, hash, block.index());
        }
    }
}
