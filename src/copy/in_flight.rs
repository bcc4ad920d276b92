//! Which blocks unfinished copies read and write, so that no copy can meet another on the same bytes.

use super::error::CopyError;
use super::planner::{CopyPlan, Direction, Run};

const WRITTEN: u32 = u32::MAX;

/// A block that a new plan wants and an unfinished one has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Conflict {
    /// Position in [`CopyPlan::order`] of the new plan's pair.
    pub(super) position: usize,
    /// Whether it is the pair's destination (else its source) that is taken.
    pub(super) at_destination: bool,
    /// Whether the other copy writes it (else reads it).
    pub(super) written: bool,
}

impl Conflict {
    /// The refusal: which pair of `pairs`, and which of the `others` (ticket, plan) has its block.
    pub(super) fn describe<'a>(
        &self,
        plan: &CopyPlan,
        pairs: &[[i32; 2]],
        list: &'static str,
        others: impl Iterator<Item = (u64, &'a CopyPlan)>,
    ) -> CopyError {
        let index = plan.order()[self.position] as usize;
        let [source_id, destination_id] = pairs[index].map(i32::unsigned_abs);
        let (source_tier, destination_tier) = plan.direction().tiers();
        let (tier, block) =
            if self.at_destination { (destination_tier, destination_id) } else { (source_tier, source_id) };
        let names = |other: &CopyPlan| {
            let (source_tier, destination_tier) = other.direction().tiers();
            other.runs().iter().any(|run| {
                let (start, its_tier) =
                    if self.written { (run.destination, destination_tier) } else { (run.source, source_tier) };
                its_tier == tier && (start..start + run.num_blocks).contains(&block)
            })
        };
        let ticket = others.filter(|(_, plan)| names(plan)).map(|(ticket, _)| ticket).min();
        CopyError::BlockInFlight {
            list,
            index,
            source_id,
            destination_id,
            tier,
            block,
            role: if self.written { "the destination" } else { "the source" },
            ticket: ticket.unwrap_or_default(), // whoever marked the block is among those searched
        }
    }
}

/// Per side and block: `WRITTEN`, or by how many copies it is read.
#[derive(Debug)]
pub(super) struct InFlight {
    gpu: Vec<u32>,
    cpu: Vec<u32>,
}

impl InFlight {
    pub(super) fn new(gpu_blocks: usize, cpu_blocks: usize) -> Self {
        Self { gpu: vec![0; gpu_blocks], cpu: vec![0; cpu_blocks] }
    }

    fn sides(&mut self, direction: Direction) -> (&mut [u32], &mut [u32]) {
        match direction {
            Direction::Load => (&mut self.cpu, &mut self.gpu),
            Direction::Store => (&mut self.gpu, &mut self.cpu),
        }
    }

    /// Enters the blocks of a plan, all or none.
    pub(super) fn enter(&mut self, plan: &CopyPlan) -> Result<(), Conflict> {
        let (sources, destinations) = self.sides(plan.direction());
        for (position, (source, destination)) in blocks(plan.runs()).enumerate() {
            if sources[source] == WRITTEN {
                return Err(Conflict { position, at_destination: false, written: true });
            }
            if destinations[destination] > 0 {
                let written = destinations[destination] == WRITTEN;
                return Err(Conflict { position, at_destination: true, written });
            }
        }
        for (source, destination) in blocks(plan.runs()) {
            sources[source] += 1;
            destinations[destination] = WRITTEN;
        }
        Ok(())
    }

    /// Takes out the blocks of a plan that was entered.
    pub(super) fn leave(&mut self, plan: &CopyPlan) {
        let (sources, destinations) = self.sides(plan.direction());
        for (source, destination) in blocks(plan.runs()) {
            sources[source] -= 1;
            destinations[destination] = 0;
        }
    }
}

/// (source, destination) of every pair of the runs, in order.
pub(super) fn blocks(runs: &[Run]) -> impl Iterator<Item = (usize, usize)> + '_ {
    runs.iter().flat_map(|run| (0..run.num_blocks).map(|i| ((run.source + i) as usize, (run.destination + i) as usize)))
}

#[cfg(test)]
mod tests {
    use super::super::layout::{DescribedMemory, Fragment, Geometry, HostSlots};
    use super::*;

    fn plan(direction: Direction, pairs: &[[i32; 2]]) -> CopyPlan {
        let slots = HostSlots { address: 0x1000_0000, num_blocks: 8, block_bytes: 8, slot_bytes: 4096 };
        let memory = DescribedMemory::new(vec![Fragment { address: 64, block_stride: 8, bytes: 8 }], 8).unwrap();
        CopyPlan::new(direction, pairs, |_| false, &Geometry::new(memory, slots).unwrap(), "pairs").unwrap()
    }

    #[test]
    fn readers_share_and_writers_do_not() {
        let mut in_flight = InFlight::new(8, 8);
        let first = plan(Direction::Store, &[[0, 0], [0, 1]]);
        let same_source = plan(Direction::Store, &[[0, 2]]);
        in_flight.enter(&first).unwrap();
        in_flight.enter(&same_source).unwrap();

        let same_destination = plan(Direction::Store, &[[5, 1]]);
        let conflict = Conflict { position: 0, at_destination: true, written: true };
        assert_eq!(in_flight.enter(&same_destination), Err(conflict));
        let reads_what_is_written = plan(Direction::Load, &[[7, 7], [2, 5]]);
        let conflict = Conflict { position: 0, at_destination: false, written: true };
        assert_eq!(in_flight.enter(&reads_what_is_written), Err(conflict));
        let writes_what_is_read = plan(Direction::Load, &[[7, 0]]);
        let conflict = Conflict { position: 0, at_destination: true, written: false };
        assert_eq!(in_flight.enter(&writes_what_is_read), Err(conflict));

        in_flight.leave(&same_source);
        assert!(in_flight.enter(&writes_what_is_read).is_err(), "the other reader is still there");
        in_flight.leave(&first);
        in_flight.enter(&writes_what_is_read).unwrap();
        in_flight.leave(&writes_what_is_read);
        assert!(in_flight.gpu.iter().chain(&in_flight.cpu).all(|&state| state == 0));
    }

    #[test]
    fn a_refused_plan_enters_nothing() {
        let mut in_flight = InFlight::new(8, 8);
        in_flight.enter(&plan(Direction::Store, &[[0, 5]])).unwrap();
        assert!(in_flight.enter(&plan(Direction::Store, &[[1, 1], [2, 2], [3, 5]])).is_err());
        in_flight.enter(&plan(Direction::Load, &[[1, 1], [2, 2]])).unwrap();
    }
}
