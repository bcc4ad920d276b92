//! The planner: from a list of block pairs to runs and pieces, or a refusal. Pure: it touches no memory.

use super::error::CopyError;
use super::layout::Geometry;

/// Which way the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Cpu to Gpu.
    Load,
    /// Gpu to Cpu.
    Store,
}

impl Direction {
    /// Tiers of source and destination.
    pub fn tiers(self) -> (&'static str, &'static str) {
        match self {
            Self::Load => ("Cpu", "Gpu"),
            Self::Store => ("Gpu", "Cpu"),
        }
    }
}

/// Pairs whose block ids rise by one on both sides: copied fragment by fragment, not block by block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// First source block.
    pub source: u32,
    /// First destination block.
    pub destination: u32,
    /// Blocks.
    pub num_blocks: u32,
    /// Where the run's pairs start in [`CopyPlan::order`].
    pub first: u32,
}

/// One fragment of one run: equal rows at a constant distance on either side, one row per block.
///
/// Rows never include padding. Where neither side has any between the rows, the piece is *flat*: one stretch of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Address of the first row at the source.
    pub source: usize,
    /// Address of the first row at the destination.
    pub destination: usize,
    /// Bytes from row to row at the source.
    pub source_stride: usize,
    /// Bytes from row to row at the destination.
    pub destination_stride: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// Rows.
    pub num_rows: usize,
}

impl Piece {
    /// Whether the rows follow each other without a gap on both sides.
    pub fn is_flat(&self) -> bool {
        self.num_rows == 1 || (self.source_stride == self.row_bytes && self.destination_stride == self.row_bytes)
    }
}

/// A validated list of pairs, sorted by destination and merged into runs.
#[derive(Debug, Clone)]
pub struct CopyPlan {
    direction: Direction,
    runs: Vec<Run>,
    order: Vec<u32>,
    skipped: Vec<u32>,
}

impl CopyPlan {
    /// Validates and merges pairs of (source block id, destination block id).
    ///
    /// `list` is the caller's name of the list, for errors. Pairs whose index is in `skip` are validated, but not
    /// copied: they are reported as failed.
    ///
    /// Refused: an id outside its side, a destination twice. A block cannot be source and destination at once, since
    /// the two are on different sides. A source may occur more than once.
    pub fn new(
        direction: Direction,
        pairs: &[[i32; 2]],
        skip: impl Fn(usize) -> bool,
        geometry: &Geometry,
        list: &'static str,
    ) -> Result<Self, CopyError> {
        let (gpu_blocks, cpu_blocks) = (geometry.gpu().num_blocks(), geometry.cpu().num_blocks);
        let (sources, destinations) = match direction {
            Direction::Load => (cpu_blocks, gpu_blocks),
            Direction::Store => (gpu_blocks, cpu_blocks),
        };
        let (source_tier, destination_tier) = direction.tiers();
        if pairs.len() > destinations {
            let limit = format!("at most one pair per {destination_tier} block, {destinations}");
            return Err(CopyError::config(list, format!("{} pairs", pairs.len()), limit));
        }
        // Destination in the high half, index in the low half: sorting these brings equal destinations together.
        let mut keys = Vec::with_capacity(pairs.len());
        for (index, &[source, destination]) in pairs.iter().enumerate() {
            for (id, limit, role, tier) in
                [(source, sources, "source", source_tier), (destination, destinations, "destination", destination_tier)]
            {
                if usize::try_from(id).is_ok_and(|id| id < limit) {
                    continue;
                }
                let limit = format!("the {role} is a {tier} block id, 0 .. {}", limit - 1);
                return Err(pair_error(list, index, pairs[index], limit));
            }
            keys.push((u64::from(destination.unsigned_abs()) << 32) | index as u64);
        }
        keys.sort_unstable();
        for two in keys.windows(2) {
            if two[0] >> 32 == two[1] >> 32 {
                let (first, second) = (two[0] as u32 as usize, two[1] as u32 as usize);
                let limit = format!("each destination once; {list}[{first}] has {} too", pairs[second][1]);
                return Err(pair_error(list, second, pairs[second], limit));
            }
        }
        Ok(Self::merge(direction, pairs, &keys, skip))
    }

    fn merge(direction: Direction, pairs: &[[i32; 2]], keys: &[u64], skip: impl Fn(usize) -> bool) -> Self {
        let mut plan =
            Self { direction, runs: Vec::new(), order: Vec::with_capacity(pairs.len()), skipped: Vec::new() };
        for index in keys.iter().map(|&key| key as u32) {
            if skip(index as usize) {
                plan.skipped.push(index);
                continue;
            }
            let [source, destination] = pairs[index as usize].map(i32::unsigned_abs);
            let first = plan.order.len() as u32;
            plan.order.push(index);
            match plan.runs.last_mut() {
                Some(run)
                    if run.source + run.num_blocks == source && run.destination + run.num_blocks == destination =>
                {
                    run.num_blocks += 1;
                }
                _ => plan.runs.push(Run { source, destination, num_blocks: 1, first }),
            }
        }
        plan
    }

    /// Which way the bytes go.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// The runs, by destination.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Indices into the caller's list, in the order of the runs.
    pub fn order(&self) -> &[u32] {
        &self.order
    }

    /// Indices of the pairs that are not copied.
    pub fn skipped(&self) -> &[u32] {
        &self.skipped
    }

    /// Pieces that the plan is copied in: runs times fragments.
    pub fn num_pieces(&self, geometry: &Geometry) -> usize {
        self.runs.len() * geometry.num_fragments()
    }

    /// One fragment of one run.
    pub fn piece(&self, run: usize, fragment: usize, geometry: &Geometry) -> Piece {
        let run = self.runs[run];
        let ((source, source_stride), (destination, destination_stride)) = match self.direction {
            Direction::Load => (geometry.cpu_part(fragment, run.source), geometry.gpu_part(fragment, run.destination)),
            Direction::Store => (geometry.gpu_part(fragment, run.source), geometry.cpu_part(fragment, run.destination)),
        };
        Piece {
            source,
            destination,
            source_stride,
            destination_stride,
            row_bytes: geometry.fragment_bytes(fragment),
            num_rows: run.num_blocks as usize,
        }
    }
}

fn pair_error(list: &str, index: usize, [source, destination]: [i32; 2], limit: String) -> CopyError {
    CopyError::config(format!("{list}[{index}]"), format!("({source}, {destination})"), limit)
}

#[cfg(test)]
mod tests {
    use super::super::layout::{DescribedMemory, Fragment, HostSlots};
    use super::*;

    /// (address, block stride, bytes)
    type Parts<'a> = &'a [(usize, usize, usize)];

    fn geometry(fragments: Parts<'_>, block_bytes: usize) -> Geometry {
        let fragments =
            fragments.iter().map(|&(address, block_stride, bytes)| Fragment { address, block_stride, bytes }).collect();
        let slot_bytes = block_bytes.next_multiple_of(4096);
        let slots = HostSlots { address: 0x1000_0000, num_blocks: 12, block_bytes, slot_bytes };
        Geometry::new(DescribedMemory::new(fragments, 16).unwrap(), slots).unwrap()
    }

    fn plan(direction: Direction, pairs: &[[i32; 2]], geometry: &Geometry) -> Result<CopyPlan, CopyError> {
        CopyPlan::new(direction, pairs, |_| false, geometry, "pairs")
    }

    fn runs(plan: &CopyPlan) -> Vec<(u32, u32, u32)> {
        plan.runs().iter().map(|run| (run.source, run.destination, run.num_blocks)).collect()
    }

    #[test]
    fn merges_what_rises_on_both_sides_in_any_order() {
        let geometry = geometry(&[(0x1000, 4096, 4096)], 4096);
        let plan = plan(Direction::Store, &[[2, 7], [9, 1], [0, 5], [4, 4], [1, 6]], &geometry).unwrap();
        assert_eq!(runs(&plan), [(9, 1, 1), (4, 4, 1), (0, 5, 3)]);
        assert_eq!(plan.order(), [1, 3, 2, 4, 0]);
        assert_eq!(plan.num_pieces(&geometry), 3);
    }

    #[test]
    fn one_source_may_feed_two_runs() {
        let geometry = geometry(&[(0x1000, 4096, 4096)], 4096);
        let plan = plan(Direction::Load, &[[3, 0], [3, 8], [4, 1], [4, 9]], &geometry).unwrap();
        assert_eq!(runs(&plan), [(3, 0, 2), (3, 8, 2)]);
    }

    #[test]
    fn descending_pairs_are_no_run() {
        let geometry = geometry(&[(0x1000, 4096, 4096)], 4096);
        assert_eq!(plan(Direction::Store, &[[5, 0], [4, 1], [3, 2]], &geometry).unwrap().runs().len(), 3);
    }

    #[test]
    fn pieces_are_flat_only_without_padding_on_both_sides() {
        let cases: [(Parts<'_>, usize, bool); 5] = [
            (&[(0x1000, 4096, 4096)], 4096, true),
            (&[(0x1000, 8192, 4096)], 4096, false), // padding on the Gpu side
            (&[(0x1000, 576, 576)], 576, false),    // padding on the Cpu side
            (&[(0x1000, 640, 576)], 576, false),    // both, unequal
            (&[(0x1000, 4096, 4096), (0x20_0000, 4096, 4096)], 8192, false), // the other fragment in between
        ];
        for (fragments, block_bytes, flat) in cases {
            let geometry = geometry(fragments, block_bytes);
            let plan = plan(Direction::Store, &[[0, 5], [1, 6]], &geometry).unwrap();
            assert_eq!(plan.num_pieces(&geometry), fragments.len());
            assert_eq!(plan.piece(0, 0, &geometry).is_flat(), flat, "{fragments:?}");
        }
    }

    #[test]
    fn a_piece_says_where_its_rows_are() {
        let geometry = geometry(&[(0x1000, 640, 576), (0x20_0000, 64, 64)], 640);
        let store = plan(Direction::Store, &[[2, 5], [3, 6]], &geometry).unwrap();
        let expected = Piece {
            source: 0x20_0000 + 2 * 64,
            destination: 0x1000_0000 + 5 * 4096 + 576,
            source_stride: 64,
            destination_stride: 4096,
            row_bytes: 64,
            num_rows: 2,
        };
        assert_eq!(store.piece(0, 1, &geometry), expected);
        let load = plan(Direction::Load, &[[5, 2], [6, 3]], &geometry).unwrap();
        let piece = load.piece(0, 1, &geometry);
        assert_eq!((piece.source, piece.destination), (expected.destination, expected.source));
        assert_eq!((piece.source_stride, piece.destination_stride), (4096, 64));
    }

    #[test]
    fn refuses_bad_lists_by_name() {
        let geometry = geometry(&[(0x1000, 4096, 4096)], 4096); // 16 Gpu blocks, 12 Cpu slots
        let cases: [(Direction, &[[i32; 2]], &str); 7] = [
            (Direction::Store, &[[0, 1], [16, 2]], "pairs[1]"),
            (Direction::Store, &[[0, 12]], "pairs[0]"),
            (Direction::Load, &[[12, 0]], "pairs[0]"),
            (Direction::Load, &[[0, 0], [1, 16]], "pairs[1]"),
            (Direction::Load, &[[-1, 0]], "pairs[0]"),
            (Direction::Store, &[[0, i32::MIN]], "pairs[0]"),
            (Direction::Store, &[[0, 3], [1, 4], [2, 3]], "pairs[2]"),
        ];
        for (direction, pairs, expected) in cases {
            match plan(direction, pairs, &geometry) {
                Err(CopyError::Config { argument, .. }) => assert_eq!(argument, expected, "{pairs:?}"),
                other => panic!("{pairs:?}: {other:?}"),
            }
        }
        let many: Vec<[i32; 2]> = (0..13).map(|id| [id, id % 12]).collect();
        assert!(
            matches!(plan(Direction::Store, &many, &geometry), Err(CopyError::Config { argument, .. }) if argument == "pairs")
        );
    }

    #[test]
    fn skipped_pairs_are_checked_but_not_copied() {
        let geometry = geometry(&[(0x1000, 4096, 4096)], 4096);
        let pairs = [[0, 0], [1, 1], [2, 2]];
        let plan = CopyPlan::new(Direction::Store, &pairs, |index| index == 1, &geometry, "pairs").unwrap();
        assert_eq!(runs(&plan), [(0, 0, 1), (2, 2, 1)]);
        assert_eq!((plan.order(), plan.skipped()), (&[0, 2][..], &[1][..]));
        let pairs = [[0, 0], [1, 99]];
        assert!(CopyPlan::new(Direction::Store, &pairs, |index| index == 1, &geometry, "pairs").is_err());
    }
}
