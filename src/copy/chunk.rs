//! Cutting a plan into chunks: bounded portions of work, so that several threads share a job and stopping is prompt.
//!
//! A plan is read as one sequence: run by run, in each run fragment by fragment, in each fragment row by row. A chunk
//! is a stretch of that sequence. Nothing is stored per piece: a cursor and the plan say it all.

use std::ops::Range;

use super::layout::Geometry;
use super::planner::{CopyPlan, Piece};

/// Most bytes of a chunk.
pub const CHUNK_BYTES: usize = 2 << 20;

/// A position in the sequence of a plan's bytes. The default is its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cursor {
    /// Run.
    pub run: usize,
    fragment: usize,
    row: usize,
    /// Bytes into the row.
    offset: usize,
}

impl Cursor {
    /// The end of a plan.
    pub fn end(plan: &CopyPlan) -> Self {
        Self { run: plan.runs().len(), ..Self::default() }
    }

    /// Whether nothing is left.
    pub fn is_at_end(&self, plan: &CopyPlan) -> bool {
        self.run >= plan.runs().len()
    }
}

/// Rows of one piece, or a part of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Where the bytes are; `row_bytes` is less than the fragment's for a part of a row.
    pub piece: Piece,
    run: usize,
    row: usize,
}

impl Segment {
    /// Positions in [`CopyPlan::order`] of the pairs that the segment belongs to.
    pub fn positions(&self, plan: &CopyPlan) -> Range<usize> {
        let first = plan.runs()[self.run].first as usize + self.row;
        first..first + self.piece.num_rows
    }
}

/// The segments of one chunk, from a cursor on. Afterwards the cursor is the next chunk's.
#[derive(Debug)]
pub struct Segments<'a> {
    plan: &'a CopyPlan,
    geometry: &'a Geometry,
    cursor: Cursor,
    limit: usize,
    left: usize,
}

impl<'a> Segments<'a> {
    /// At most `limit` bytes from `cursor` on, cut within a row only if the row alone is longer than that.
    pub fn new(plan: &'a CopyPlan, geometry: &'a Geometry, cursor: Cursor, limit: usize) -> Self {
        Self { plan, geometry, cursor, limit, left: limit }
    }

    /// Where the next segment starts.
    pub fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// Bytes given out so far.
    pub fn bytes(&self) -> usize {
        self.limit - self.left
    }
}

impl Iterator for Segments<'_> {
    type Item = Segment;

    fn next(&mut self) -> Option<Segment> {
        if self.left == 0 || self.cursor.is_at_end(self.plan) {
            return None;
        }
        let Cursor { run, fragment, row, offset } = self.cursor;
        let whole = self.plan.piece(run, fragment, self.geometry);
        let (num_rows, row_bytes) = if offset > 0 || whole.row_bytes > self.limit {
            (1, (whole.row_bytes - offset).min(self.left))
        } else {
            ((whole.num_rows - row).min(self.left / whole.row_bytes), whole.row_bytes)
        };
        // A row that is cut starts a chunk of its own, so that the cuts stay at multiples of the limit.
        if num_rows == 0 || (whole.row_bytes > self.limit && offset == 0 && self.left < self.limit) {
            return None;
        }
        let piece = Piece {
            source: whole.source + row * whole.source_stride + offset,
            destination: whole.destination + row * whole.destination_stride + offset,
            row_bytes,
            num_rows,
            ..whole
        };
        self.left -= row_bytes * num_rows;
        self.cursor.offset += row_bytes;
        if self.cursor.offset >= whole.row_bytes {
            self.cursor.offset = 0;
            self.cursor.row += num_rows;
        }
        if self.cursor.row == whole.num_rows {
            self.cursor.row = 0;
            self.cursor.fragment += 1;
        }
        if self.cursor.fragment == self.geometry.num_fragments() {
            self.cursor.fragment = 0;
            self.cursor.run += 1;
        }
        Some(Segment { piece, run, row })
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::{DescribedMemory, Fragment, HostSlots};
    use super::super::planner::Direction;
    use super::*;
    use proptest::prelude::*;

    /// All (row, byte) stretches that a plan must copy, against those that its chunks give, one byte at a time.
    fn check(fragment_bytes: &[usize], pairs: &[[i32; 2]], limit: usize) {
        let block_bytes: usize = fragment_bytes.iter().sum();
        let fragments = fragment_bytes
            .iter()
            .enumerate()
            .map(|(i, &bytes)| Fragment { address: 0x1000 + i * 0x10_0000, block_stride: bytes + 3, bytes })
            .collect();
        let slots = HostSlots { address: 0x1000_0000, num_blocks: 16, block_bytes, slot_bytes: 4096 };
        let geometry = Geometry::new(DescribedMemory::new(fragments, 16).unwrap(), slots).unwrap();
        let plan = CopyPlan::new(Direction::Store, pairs, |_| false, &geometry, "pairs").unwrap();

        let mut expected = Vec::new();
        for (index, &[source, destination]) in pairs.iter().enumerate() {
            let [source, destination] = [source, destination].map(i32::unsigned_abs);
            for (fragment, &bytes) in fragment_bytes.iter().enumerate() {
                let (from, to) = (geometry.gpu_part(fragment, source).0, geometry.cpu_part(fragment, destination).0);
                expected.extend((0..bytes).map(|byte| (from + byte, to + byte, index as u32)));
            }
        }
        let mut got = Vec::new();
        let mut cursor = Cursor::default();
        while !cursor.is_at_end(&plan) {
            let mut segments = Segments::new(&plan, &geometry, cursor, limit);
            for segment in segments.by_ref() {
                for (row, position) in segment.positions(&plan).enumerate() {
                    let from = segment.piece.source + row * segment.piece.source_stride;
                    let to = segment.piece.destination + row * segment.piece.destination_stride;
                    got.extend(
                        (0..segment.piece.row_bytes).map(|byte| (from + byte, to + byte, plan.order()[position])),
                    );
                }
            }
            assert!((1..=limit).contains(&segments.bytes()), "a chunk moves something, and no more than its limit");
            cursor = segments.cursor();
        }
        expected.sort_unstable();
        got.sort_unstable();
        assert_eq!(got, expected);
    }

    #[test]
    fn an_empty_plan_is_at_its_end() {
        let slots = HostSlots { address: 0x1000_0000, num_blocks: 1, block_bytes: 8, slot_bytes: 4096 };
        let memory = DescribedMemory::new(vec![Fragment { address: 64, block_stride: 8, bytes: 8 }], 1).unwrap();
        let geometry = Geometry::new(memory, slots).unwrap();
        let plan = CopyPlan::new(Direction::Load, &[], |_| false, &geometry, "pairs").unwrap();
        assert!(Cursor::default().is_at_end(&plan));
        assert_eq!(Segments::new(&plan, &geometry, Cursor::default(), 8).next(), None);
    }

    #[test]
    fn long_rows_are_cut_at_multiples_of_the_limit() {
        check(&[5, 64, 7], &[[0, 0], [1, 1], [4, 7]], 16);
    }

    proptest! {
        #[test]
        fn chunks_cover_every_byte_once(
            fragments in prop::collection::vec(1_usize..40, 1..4),
            destinations in Just((0..16).collect::<Vec<i32>>()).prop_shuffle(),
            sources in prop::collection::vec(0_i32..16, 0..17),
            limit in 1_usize..120,
        ) {
            let pairs: Vec<[i32; 2]> = sources.into_iter().zip(destinations).map(|(a, b)| [a, b]).collect();
            check(&fragments, &pairs, limit);
        }
    }
}
