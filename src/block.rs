//! Block ids, which tell the tiers apart by type, and block hashes.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::marker::PhantomData;

/// Most blocks that one tier can have.
pub const MAX_BLOCKS: usize = 1 << 24;

/// Most tokens that one block can have.
pub const MAX_BLOCK_SIZE: usize = 1 << 16;

/// Marks the tier of the engine's own, fast memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gpu {}

/// Marks the tier of host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cpu {}

/// Number of a block slot inside its own tier, zero-based.
///
/// The tier is part of the type: an id of one tier cannot be used for the other.
pub struct BlockId<T> {
    index: u32,
    tier: PhantomData<fn() -> T>,
}

/// Block id of the Gpu tier.
pub type GpuBlockId = BlockId<Gpu>;
/// Block id of the Cpu tier.
pub type CpuBlockId = BlockId<Cpu>;

/// A kind of tier.
pub(crate) trait TierKind {
    /// Whether one thread alone takes slots and holds, the others only releasing holds and ending copies: then a slot
    /// that nobody holds is that thread's to change.
    const HAS_ONE_TAKER: bool;
}

impl TierKind for Gpu {
    /// Its session.
    const HAS_ONE_TAKER: bool = true;
}

impl TierKind for Cpu {
    /// Sessions share it.
    const HAS_ONE_TAKER: bool = false;
}

impl<T> BlockId<T> {
    pub(crate) fn new(index: usize) -> Self {
        debug_assert!(index < MAX_BLOCKS);
        Self { index: index as u32, tier: PhantomData }
    }

    /// The id as an index into arrays of the tier.
    pub fn index(self) -> usize {
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
pub struct BlockHash(pub [u8; 32]);

impl BlockHash {
    /// Bytes of a block hash.
    pub const BYTES: usize = 32;

    /// Odd, of full width.
    pub(crate) const KEYS: [u64; 4] =
        [0x9e37_79b9_7f4a_7c15, 0xc2b2_ae3d_27d4_eb4f, 0x1656_67b1_9e37_79f9, 0x27d4_eb2f_1656_67c5];

    /// Splits a buffer of concatenated hashes; `None` if its length is not a multiple of 32.
    pub fn split(bytes: &[u8]) -> Option<Vec<Self>> {
        let (chunks, rest) = bytes.as_chunks::<{ Self::BYTES }>();
        rest.is_empty().then(|| chunks.iter().copied().map(Self).collect())
    }

    pub(crate) fn to_words(self) -> [u64; 4] {
        let (words, _) = self.0.as_chunks::<8>();
        std::array::from_fn(|at| u64::from_le_bytes(words[at]))
    }

    pub(crate) fn from_words(words: [u64; 4]) -> Self {
        let mut bytes = [0; 32];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        Self(bytes)
    }

    /// A well-mixed 64-bit value for the index, also where the caller's digests are not.
    #[inline]
    pub(crate) fn mix(&self) -> Mixed {
        // Each word is multiplied by an odd constant of full width, all four at the same time. Rotations, so that words
        // that change places do not give one sum; the last product is folded, so that all of it counts everywhere.
        let ([a, b, c, d], [first, second, third, fourth]) = (self.to_words(), Self::KEYS);
        let sum = (a ^ second).wrapping_mul(first)
            ^ (b ^ third).wrapping_mul(second).rotate_left(17)
            ^ (c ^ fourth).wrapping_mul(third).rotate_left(31)
            ^ (d ^ first).wrapping_mul(fourth).rotate_left(47);
        let product = u128::from(sum) * u128::from(first);
        Mixed(product as u64 ^ (product >> 64) as u64)
    }
}

/// What the index needs of a block hash. A call that looks a hash up more than once keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Mixed(pub(crate) u64);

impl From<&BlockHash> for Mixed {
    fn from(hash: &BlockHash) -> Self {
        hash.mix()
    }
}
