//! Tickets whose bytes something else moves: validated and outlined in pieces here, and remembered until they end.

use std::collections::HashMap;

use super::engine::{CopyRequest, MAX_QUEUED};
use super::error::CopyError;
use super::in_flight::InFlight;
use super::layout::{DescribedMemory, Geometry, HostSlots};
use super::planner::{CopyPlan, Direction, Piece};
use super::queue::Report;

/// The copies of one ticket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outline {
    /// The ticket.
    pub ticket: u64,
    /// Which way the bytes go.
    pub direction: Direction,
    /// Loads fragment by fragment, so that the first layers come first; stores run by run, so that the pieces of a run
    /// fill neighbouring slots.
    pub pieces: Vec<Piece>,
    /// Runs, after the cuts at the borders of registered memory: pieces of each fragment.
    pub num_runs: usize,
}

/// Open tickets of two memories.
#[derive(Debug)]
pub struct OutlinedTickets {
    geometry: Geometry,
    slots_per_chunk: usize,
    max_queued: usize,
    in_flight: InFlight,
    open: HashMap<u64, CopyPlan>,
}

impl OutlinedTickets {
    /// No piece will cross a multiple of `slots_per_chunk` slots of `cpu`: memory is registered in chunks, and one copy
    /// must not touch two of them.
    pub fn new(
        gpu: DescribedMemory,
        cpu: HostSlots,
        slots_per_chunk: usize,
        max_queued: usize,
    ) -> Result<Self, CopyError> {
        if !(1..=MAX_QUEUED).contains(&max_queued) {
            return Err(CopyError::config("max_queued", max_queued, format!("1 .. {MAX_QUEUED}")));
        }
        if slots_per_chunk == 0 {
            return Err(CopyError::config("slots_per_chunk", slots_per_chunk, "at least 1"));
        }
        let geometry = Geometry::new(gpu, cpu)?;
        let in_flight = InFlight::new(geometry.gpu().num_blocks(), geometry.cpu().num_blocks);
        Ok(Self { geometry, slots_per_chunk, max_queued, in_flight, open: HashMap::new() })
    }

    /// Takes all requests, or none.
    pub fn open(&mut self, requests: Vec<CopyRequest>) -> Result<Vec<Outline>, CopyError> {
        if self.open.len() + requests.len() > self.max_queued {
            return Err(CopyError::QueueFull { open: self.open.len(), max_queued: self.max_queued });
        }
        let mut outlines = Vec::with_capacity(requests.len());
        for request in requests {
            match self.open_one(request) {
                Ok(outline) => outlines.push(outline),
                Err(error) => {
                    for Outline { ticket, .. } in &outlines {
                        self.end(*ticket, true);
                    }
                    return Err(error);
                }
            }
        }
        Ok(outlines)
    }

    fn open_one(&mut self, request: CopyRequest) -> Result<Outline, CopyError> {
        let CopyRequest { ticket, direction, pairs, list } = request;
        let plan = CopyPlan::new(direction, &pairs, |_| false, &self.geometry, list)?;
        if self.open.contains_key(&ticket) {
            return Err(CopyError::TicketInUse { ticket });
        }
        if let Err(conflict) = self.in_flight.enter(&plan) {
            let others = self.open.iter().map(|(&ticket, plan)| (ticket, plan));
            return Err(conflict.describe(&plan, &pairs, list, others));
        }
        let outline = self.outline(ticket, &plan);
        self.open.insert(ticket, plan);
        Ok(outline)
    }

    fn outline(&self, ticket: u64, plan: &CopyPlan) -> Outline {
        let direction = plan.direction();
        // Per run, where it is cut: (run, first row, rows).
        let mut cuts = Vec::with_capacity(plan.runs().len());
        for (run, blocks) in plan.runs().iter().enumerate() {
            let slot = if direction == Direction::Load { blocks.source } else { blocks.destination } as usize;
            let mut row = 0;
            while row < blocks.num_blocks as usize {
                let left = self.slots_per_chunk - (slot + row) % self.slots_per_chunk;
                let num_rows = left.min(blocks.num_blocks as usize - row);
                cuts.push((run, row, num_rows));
                row += num_rows;
            }
        }
        let piece = |&(run, row, num_rows): &(usize, usize, usize), fragment: usize| {
            let mut piece = plan.piece(run, fragment, &self.geometry);
            piece.source += row * piece.source_stride;
            piece.destination += row * piece.destination_stride;
            piece.num_rows = num_rows;
            piece
        };
        let fragments = 0..self.geometry.num_fragments();
        let pieces = if direction == Direction::Load {
            fragments.flat_map(|fragment| cuts.iter().map(move |cut| piece(cut, fragment))).collect()
        } else {
            cuts.iter().flat_map(|cut| fragments.clone().map(move |fragment| piece(cut, fragment))).collect()
        };
        Outline { ticket, direction, pieces, num_runs: cuts.len() }
    }

    /// Enters the end of a ticket, with all pairs failed unless it `succeeded`; `None` for one that is not open.
    pub fn end(&mut self, ticket: u64, succeeded: bool) -> Option<Report> {
        let plan = self.open.remove(&ticket)?;
        self.in_flight.leave(&plan);
        let mut failed = if succeeded { Vec::new() } else { plan.order().to_vec() };
        failed.sort_unstable();
        Some(Report { ticket, failed })
    }

    /// Tickets that have not ended.
    pub fn num_open(&self) -> usize {
        self.open.len()
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::Fragment;
    use super::*;

    fn tickets(slots_per_chunk: usize) -> OutlinedTickets {
        let fragment = |address| Fragment { address, block_stride: 100, bytes: 64 };
        let gpu = DescribedMemory::new(vec![fragment(0x10_0000), fragment(0x20_0000)], 16).unwrap();
        let cpu = HostSlots { address: 0x100_0000, num_blocks: 16, block_bytes: 128, slot_bytes: 4096 };
        OutlinedTickets::new(gpu, cpu, slots_per_chunk, 3).unwrap()
    }

    fn request(ticket: u64, direction: Direction, pairs: &[[i32; 2]]) -> CopyRequest {
        CopyRequest { ticket, direction, pairs: pairs.to_vec(), list: "pairs" }
    }

    fn shape(pieces: &[Piece]) -> Vec<(usize, usize, usize)> {
        pieces.iter().map(|piece| (piece.source, piece.destination, piece.num_rows)).collect()
    }

    #[test]
    fn loads_go_fragment_by_fragment_and_stores_run_by_run() {
        let pairs = [[0, 5], [1, 6], [9, 1]];
        let load = tickets(16).open(vec![request(1, Direction::Load, &pairs)]).unwrap().remove(0);
        assert_eq!((load.ticket, load.num_runs), (1, 2));
        let (slot, gpu) = (|n: usize| 0x100_0000 + n * 4096, |n: usize| 0x10_0000 + n * 100);
        let next = 0x10_0000; // from a fragment to the other one, on the Gpu side; 64 bytes in a slot
        assert_eq!(
            shape(&load.pieces),
            [
                (slot(9), gpu(1), 1),
                (slot(0), gpu(5), 2),
                (slot(9) + 64, gpu(1) + next, 1),
                (slot(0) + 64, gpu(5) + next, 2)
            ]
        );
        let store = tickets(16).open(vec![request(1, Direction::Store, &pairs)]).unwrap().remove(0);
        assert_eq!(
            shape(&store.pieces),
            [
                (gpu(9), slot(1), 1),
                (gpu(9) + next, slot(1) + 64, 1),
                (gpu(0), slot(5), 2),
                (gpu(0) + next, slot(5) + 64, 2)
            ]
        );
    }

    #[test]
    fn runs_are_cut_where_a_chunk_of_slots_ends() {
        let pairs: Vec<[i32; 2]> = (0..9).map(|i| [i, i + 2]).collect();
        let store = tickets(4).open(vec![request(1, Direction::Store, &pairs)]).unwrap().remove(0);
        let rows: Vec<usize> = store.pieces.iter().step_by(2).map(|piece| piece.num_rows).collect();
        assert_eq!((store.num_runs, rows), (3, vec![2, 4, 3])); // slots 2 3 | 4 .. 7 | 8 9 10
        let load = tickets(4).open(vec![request(1, Direction::Load, &pairs)]).unwrap().remove(0);
        let rows: Vec<usize> = load.pieces[..3].iter().map(|piece| piece.num_rows).collect();
        assert_eq!((load.num_runs, rows), (3, vec![4, 4, 1])); // slots 0 .. 3 | 4 .. 7 | 8
        assert_eq!(load.pieces[1].destination, 0x10_0000 + 6 * 100);
    }

    #[test]
    fn blocks_of_open_tickets_are_refused_until_their_end() {
        let mut tickets = tickets(16);
        tickets.open(vec![request(1, Direction::Store, &[[3, 3]])]).unwrap();
        let load = || request(2, Direction::Load, &[[3, 9]]);
        match tickets.open(vec![request(5, Direction::Load, &[[8, 8]]), load()]) {
            Err(CopyError::BlockInFlight { ticket: 1, block: 3, tier: "Cpu", .. }) => {}
            other => panic!("{other:?}"),
        }
        assert_eq!(tickets.num_open(), 1, "all or none");
        assert!(matches!(tickets.open(vec![request(1, Direction::Load, &[])]), Err(CopyError::TicketInUse { .. })));
        assert_eq!(tickets.end(1, true), Some(Report { ticket: 1, failed: vec![] }));
        assert_eq!(tickets.end(1, true), None);
        tickets.open(vec![load(), request(5, Direction::Load, &[[8, 8], [1, 4]])]).unwrap();
        assert_eq!(tickets.end(5, false), Some(Report { ticket: 5, failed: vec![0, 1] }));
    }

    #[test]
    fn the_number_of_open_tickets_has_a_bound() {
        let mut tickets = tickets(16);
        tickets.open((0..3).map(|ticket| request(ticket, Direction::Load, &[])).collect()).unwrap();
        let full = tickets.open(vec![request(3, Direction::Load, &[])]);
        assert!(matches!(full, Err(CopyError::QueueFull { open: 3, max_queued: 3 })));
    }
}
