//! Described memory: where the bytes of a block are, on either side. Nothing here touches memory.

use super::error::CopyError;

/// Host slots start at multiples of this.
pub const SLOT_ALIGN_BYTES: usize = 4096;
/// Most blocks of one side.
pub const MAX_BLOCKS: usize = 1 << 24;
/// Most fragments that one block can be scattered over.
pub const MAX_FRAGMENTS: usize = 1 << 12;

/// One part of every block: `bytes` bytes at `address + block id * block_stride`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fragment {
    /// Address of the part in block 0.
    pub address: usize,
    /// Bytes from one block's part to the next one's.
    pub block_stride: usize,
    /// Bytes of the part; the rest of the stride is padding or belongs to something else, and is never touched.
    pub bytes: usize,
}

impl Fragment {
    fn span(&self, num_blocks: usize) -> (usize, usize) {
        (self.address, self.address + (num_blocks - 1) * self.block_stride + self.bytes)
    }

    /// Whether a byte belongs to both fragments. Both strides are at least the fragment's bytes.
    fn overlaps(&self, other: &Self, num_blocks: usize) -> bool {
        let (mut i, mut j) = (0, 0);
        if self.block_stride == other.block_stride {
            // Equal strides: only the distance of the starts modulo the stride matters, as long as both still have
            // blocks there; the first block of the one that starts later meets at most two blocks of the other.
            let (low, high) = if self.address <= other.address { (self, other) } else { (other, self) };
            let (distance, stride) = (high.address - low.address, self.block_stride);
            let (blocks, rest) = (distance / stride, distance % stride);
            return (blocks < num_blocks && rest < low.bytes)
                || (blocks + 1 < num_blocks && rest + high.bytes > stride);
        }
        while i < num_blocks && j < num_blocks {
            let (a, b) = (self.address + i * self.block_stride, other.address + j * other.block_stride);
            if a + self.bytes <= b {
                i += 1;
            } else if b + other.bytes <= a {
                j += 1;
            } else {
                return true;
            }
        }
        false
    }
}

/// The engine's paged memory: the fragments of a block, in the order in which the host side keeps them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DescribedMemory {
    fragments: Vec<Fragment>,
    num_blocks: usize,
}

impl DescribedMemory {
    /// Checks the description: every fragment within its stride and the address space, no byte in two places.
    ///
    /// Fragments that follow each other without a gap in every block, as the layers of a block-first tensor do when
    /// they are given one by one, are joined: they are copied as one.
    pub fn new(mut fragments: Vec<Fragment>, num_blocks: usize) -> Result<Self, CopyError> {
        check_num_blocks(num_blocks)?;
        if fragments.is_empty() || fragments.len() > MAX_FRAGMENTS {
            return Err(CopyError::config(
                "fragments",
                format!("a list of {}", fragments.len()),
                format!("1 .. {MAX_FRAGMENTS} fragments"),
            ));
        }
        for (index, fragment) in fragments.iter_mut().enumerate() {
            if num_blocks == 1 {
                fragment.block_stride = fragment.bytes; // the stride of a single block has no meaning
            }
            check_fragment(index, fragment, num_blocks)?;
        }
        check_overlaps(&fragments, num_blocks)?;
        fragments.dedup_by(|next, joined| {
            let follows = next.block_stride == joined.block_stride
                && joined.address.checked_add(joined.bytes) == Some(next.address);
            if follows {
                joined.bytes += next.bytes;
            }
            follows
        });
        Ok(Self { fragments, num_blocks })
    }

    /// The fragments, after joining.
    pub fn fragments(&self) -> &[Fragment] {
        &self.fragments
    }

    /// Blocks that the memory has.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Bytes of one block, all fragments together, padding not counted.
    pub fn block_bytes(&self) -> usize {
        self.fragments.iter().map(|fragment| fragment.bytes).sum()
    }
}

fn check_num_blocks(num_blocks: usize) -> Result<(), CopyError> {
    if (1..=MAX_BLOCKS).contains(&num_blocks) {
        return Ok(());
    }
    Err(CopyError::config("num_blocks", num_blocks, format!("1 .. {MAX_BLOCKS}")))
}

fn check_fragment(index: usize, fragment: &Fragment, num_blocks: usize) -> Result<(), CopyError> {
    let refuse = |value: usize, field: &str, limit: String| {
        Err(CopyError::config(format!("fragments[{index}].{field}"), value, limit))
    };
    if fragment.address == 0 {
        return refuse(0, "address", "the address of memory".into());
    }
    if fragment.bytes == 0 {
        return refuse(0, "bytes", "at least 1".into());
    }
    if fragment.block_stride < fragment.bytes {
        let limit = format!("at least the fragment's {} bytes, or blocks overlap", fragment.bytes);
        return refuse(fragment.block_stride, "block_stride", limit);
    }
    let end = fragment
        .block_stride
        .checked_mul(num_blocks - 1)
        .and_then(|start| start.checked_add(fragment.bytes))
        .and_then(|bytes| fragment.address.checked_add(bytes));
    if end.is_none_or(|end| isize::try_from(end).is_err()) {
        return refuse(fragment.address, "address", "all blocks within the address space".into());
    }
    Ok(())
}

fn check_overlaps(fragments: &[Fragment], num_blocks: usize) -> Result<(), CopyError> {
    let mut order: Vec<usize> = (0..fragments.len()).collect();
    order.sort_unstable_by_key(|&index| fragments[index].address);
    for (position, &first) in order.iter().enumerate() {
        let (_, end) = fragments[first].span(num_blocks);
        for &second in order[position + 1..].iter().take_while(|&&index| fragments[index].address < end) {
            if fragments[first].overlaps(&fragments[second], num_blocks) {
                let (early, late) = (first.min(second), first.max(second));
                return Err(CopyError::config(
                    format!("fragments[{late}]"),
                    format!("{:?}", fragments[late]),
                    format!("no byte in common with fragments[{early}] ({:?})", fragments[early]),
                ));
            }
        }
    }
    Ok(())
}

/// The host side: block-first, all fragments of a block without gaps, slots rounded up to [`SLOT_ALIGN_BYTES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostSlots {
    /// Address of slot 0.
    pub address: usize,
    /// Slots.
    pub num_blocks: usize,
    /// Bytes of a block; the rest of its slot is padding.
    pub block_bytes: usize,
    /// Bytes from one slot to the next.
    pub slot_bytes: usize,
}

impl HostSlots {
    /// Bytes of a slot, and of all slots; refused if the address space cannot hold them.
    pub fn sizes(num_blocks: usize, block_bytes: usize) -> Result<(usize, usize), CopyError> {
        check_num_blocks(num_blocks)?;
        let slot_bytes = block_bytes.checked_next_multiple_of(SLOT_ALIGN_BYTES).filter(|_| block_bytes > 0);
        let total = slot_bytes.and_then(|bytes| bytes.checked_mul(num_blocks));
        match (slot_bytes, total) {
            (Some(slot_bytes), Some(total)) if isize::try_from(total).is_ok() => Ok((slot_bytes, total)),
            _ => Err(CopyError::config(
                "block_bytes",
                block_bytes,
                format!("at least 1, and {num_blocks} slots within the address space"),
            )),
        }
    }
}

/// Both sides of a copy engine, checked against each other.
#[derive(Debug, Clone)]
pub struct Geometry {
    gpu: DescribedMemory,
    cpu: HostSlots,
    offsets: Vec<usize>,
}

impl Geometry {
    /// Refuses sides whose blocks differ in bytes, or that share memory.
    pub fn new(gpu: DescribedMemory, cpu: HostSlots) -> Result<Self, CopyError> {
        if gpu.block_bytes() != cpu.block_bytes {
            return Err(CopyError::config(
                "cpu.block_bytes",
                cpu.block_bytes,
                format!("{} bytes, as the blocks of gpu", gpu.block_bytes()),
            ));
        }
        let host = (cpu.address, cpu.address + cpu.num_blocks * cpu.slot_bytes);
        for fragment in &gpu.fragments {
            let (start, end) = fragment.span(gpu.num_blocks);
            if start < host.1 && host.0 < end {
                return Err(CopyError::config("gpu", format!("{fragment:?}"), "memory apart from that of cpu"));
            }
        }
        let mut offset = 0;
        let offsets = gpu
            .fragments
            .iter()
            .map(|fragment| {
                offset += fragment.bytes;
                offset - fragment.bytes
            })
            .collect();
        Ok(Self { gpu, cpu, offsets })
    }

    /// The engine's memory.
    pub fn gpu(&self) -> &DescribedMemory {
        &self.gpu
    }

    /// Host memory.
    pub fn cpu(&self) -> &HostSlots {
        &self.cpu
    }

    /// Address of a fragment in a Gpu block, and the bytes to the same fragment in the next block.
    pub(super) fn gpu_part(&self, fragment: usize, block: u32) -> (usize, usize) {
        let part = &self.gpu.fragments[fragment];
        (part.address + block as usize * part.block_stride, part.block_stride)
    }

    /// Address of a fragment in a Cpu block, and the bytes to the same fragment in the next block.
    pub(super) fn cpu_part(&self, fragment: usize, block: u32) -> (usize, usize) {
        let slot = self.cpu.address + block as usize * self.cpu.slot_bytes;
        (slot + self.offsets[fragment], self.cpu.slot_bytes)
    }

    /// Bytes of a fragment in one block.
    pub(super) fn fragment_bytes(&self, fragment: usize) -> usize {
        self.gpu.fragments[fragment].bytes
    }

    /// Fragments of a block.
    pub fn num_fragments(&self) -> usize {
        self.gpu.fragments.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fragment(address: usize, block_stride: usize, bytes: usize) -> Fragment {
        Fragment { address, block_stride, bytes }
    }

    #[test]
    fn refuses_what_it_cannot_address() {
        let cases = [
            (vec![], 4, "fragments"),
            (vec![fragment(64, 8, 8)], 0, "num_blocks"),
            (vec![fragment(64, 8, 8)], MAX_BLOCKS + 1, "num_blocks"),
            (vec![fragment(0, 8, 8)], 4, "fragments[0].address"),
            (vec![fragment(64, 8, 8), fragment(1000, 8, 0)], 4, "fragments[1].bytes"),
            (vec![fragment(64, 7, 8)], 4, "fragments[0].block_stride"),
            (vec![fragment(64, 0, 8)], 4, "fragments[0].block_stride"),
            (vec![fragment(64, usize::MAX / 2, 8)], 4, "fragments[0].address"),
            (vec![fragment(usize::MAX - 8, 8, 8)], 4, "fragments[0].address"),
            (vec![fragment(64, 8, 8), fragment(64, 8, 8)], 4, "fragments[1]"),
            (vec![fragment(80, 8, 8), fragment(64, 16, 4)], 4, "fragments[1]"),
        ];
        for (fragments, num_blocks, expected) in cases {
            let text = format!("{fragments:?}");
            match DescribedMemory::new(fragments, num_blocks) {
                Err(CopyError::Config { argument, .. }) => assert_eq!(argument, expected, "{text}"),
                other => panic!("{text}: {other:?}"),
            }
        }
    }

    #[test]
    fn the_stride_of_a_single_block_has_no_meaning() {
        let memory = DescribedMemory::new(vec![fragment(64, 0, 8)], 1).unwrap();
        assert_eq!(memory.fragments(), [fragment(64, 8, 8)]);
    }

    #[test]
    fn joins_fragments_that_follow_each_other_in_every_block() {
        let memory =
            DescribedMemory::new(vec![fragment(64, 40, 8), fragment(72, 40, 16), fragment(96, 40, 8)], 3).unwrap();
        assert_eq!(memory.fragments(), [fragment(64, 40, 24), fragment(96, 40, 8)]);
        assert_eq!(memory.block_bytes(), 32);
    }

    #[test]
    fn host_slots_are_rounded_up() {
        assert_eq!(HostSlots::sizes(3, 1).unwrap(), (4096, 3 * 4096));
        assert_eq!(HostSlots::sizes(3, 4096).unwrap(), (4096, 3 * 4096));
        assert_eq!(HostSlots::sizes(3, 4097).unwrap(), (8192, 3 * 8192));
        for (num_blocks, block_bytes) in [(0, 8), (1, 0), (MAX_BLOCKS, usize::MAX / 8), (1, usize::MAX)] {
            assert!(HostSlots::sizes(num_blocks, block_bytes).is_err(), "{num_blocks} {block_bytes}");
        }
    }

    #[test]
    fn both_sides_must_agree_and_be_apart() {
        let gpu = DescribedMemory::new(vec![fragment(0x10_0000, 64, 64)], 4).unwrap();
        let slots = |address, block_bytes| HostSlots { address, num_blocks: 2, block_bytes, slot_bytes: 4096 };
        assert!(Geometry::new(gpu.clone(), slots(0x20_0000, 64)).is_ok());
        assert!(Geometry::new(gpu.clone(), slots(0x20_0000, 65)).is_err());
        assert!(Geometry::new(gpu, slots(0x10_0000 - 4096, 64)).is_err());
    }

    proptest! {
        #[test]
        fn overlap_agrees_with_counting_bytes(
            num_blocks in 1_usize..7,
            a in (1_usize..60, 0_usize..9, 1_usize..8),
            b in (1_usize..60, 0_usize..9, 1_usize..8),
            same_stride: bool,
        ) {
            let first = fragment(a.0, a.1 + a.2, a.2);
            let stride = if same_stride { first.block_stride.max(b.2) } else { b.1 + b.2 };
            let second = fragment(b.0, stride, b.2);
            let mut owners = [0_u8; 200];
            for part in [first, second] {
                for block in 0..num_blocks {
                    let start = part.address + block * part.block_stride;
                    owners[start..start + part.bytes].iter_mut().for_each(|owner| *owner += 1);
                }
            }
            let expected = owners.iter().any(|&count| count > 1);
            prop_assert_eq!(first.overlaps(&second, num_blocks), expected);
            prop_assert_eq!(second.overlaps(&first, num_blocks), expected);
            prop_assert_eq!(check_overlaps(&[second, first], num_blocks).is_err(), expected);
        }
    }
}
