//! Block ids, which tell the tiers apart by type, and block hashes.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::marker::PhantomData;

/// Most blocks that one tier can have.
pub(crate) const MAX_BLOCKS: usize = 1 << 24;

/// Most tokens that one block can have.
pub(crate) const MAX_BLOCK_SIZE: usize = 1 << 16;

/// Marks the tier of the engine's own, fast memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gpu {}

/// Marks the tier of host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cpu {}

/// Number of a block slot inside its own tier, zero-based.
///
/// The tier is part of the type: an id of one tier cannot be used for the other.
pub(crate) struct BlockId<T> {
    index: u32,
    tier: PhantomData<fn() -> T>,
}

/// Block id of the Gpu tier.
pub(crate) type GpuBlockId = BlockId<Gpu>;
/// Block id of the Cpu tier.
pub(crate) type CpuBlockId = BlockId<Cpu>;

impl<T> BlockId<T> {
    pub(crate) fn new(index: usize) -> Self {
        debug_assert!(index < MAX_BLOCKS);
        Self { index: index as u32, tier: PhantomData }
    }

    /// The id as an index into arrays of the tier.
    pub(crate) fn index(self) -> usize {
        self.index as usize
    }
}

// Written by hand: deriving would ask the same of the marker type.
impl<T> Clone for BlockId<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for BlockId<T> {}
impl<T> PartialEq for BlockId<T> {
    fn eq(&self, other: &Self) -> bool {
        self.index == other.index
    }
}
impl<T> Eq for BlockId<T> {}
impl<T> PartialOrd for BlockId<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl<T> Ord for BlockId<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.index.cmp(&other.index)
    }
}
impl<T> Hash for BlockId<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.index.hash(state);
    }
}
impl<T> fmt::Debug for BlockId<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.index)
    }
}

/// Hash of a full block and of everything before it in its sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(transparent)]
pub(crate) struct BlockHash(pub [u8; 32]);

impl BlockHash {
    /// Bytes of a block hash.
    pub(crate) const BYTES: usize = 32;

    /// Splits a buffer of concatenated hashes; `None` if its length is not a multiple of 32.
    pub(crate) fn split(bytes: &[u8]) -> Option<Vec<Self>> {
        let (chunks, rest) = bytes.as_chunks::<{ Self::BYTES }>();
        rest.is_empty().then(|| chunks.iter().copied().map(Self).collect())
    }

    /// A well-mixed 64-bit value for the index, also where the caller's digests are not.
    pub(crate) fn mix(&self) -> u64 {
        // Multiply-and-fold over the four words, the constants being odd and of full width.
        const KEYS: [u64; 4] =
            [0x9e37_79b9_7f4a_7c15, 0xc2b2_ae3d_27d4_eb4f, 0x1656_67b1_9e37_79f9, 0x27d4_eb2f_1656_67c5];
        let (words, _) = self.0.as_chunks::<8>();
        words.iter().zip(KEYS).fold(0x2545_f491_4f6c_dd1d_u64, |state, (word, key)| {
            let product = u128::from(state ^ u64::from_le_bytes(*word)) * u128::from(key);
            (product as u64) ^ ((product >> 64) as u64).rotate_left(17) ^ key
        })
    }
}
