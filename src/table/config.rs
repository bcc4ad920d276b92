//! What a table is made from.

use crate::block::{MAX_BLOCKS, MAX_BLOCK_SIZE};
use crate::error::{Error, Result};
use crate::hash::Algorithm;
use crate::ticket::MAX_RANKS;

/// What a table is made from.
#[derive(Debug, Clone)]
pub struct Config {
    /// Blocks of the Gpu tier, 1 to [`MAX_BLOCKS`].
    pub gpu_blocks: usize,
    /// Blocks of the Cpu tier, up to [`MAX_BLOCKS`]; zero makes a plain prefix cache.
    pub cpu_blocks: usize,
    /// Tokens per block, 1 to [`MAX_BLOCK_SIZE`].
    pub block_size: usize,
    /// Name of the eviction policy: `lru`.
    pub policy: String,
    /// Name of the store mode: `eager`.
    pub store: String,
    /// Most stores that one step plans; none: no limit.
    pub max_store_blocks_per_step: Option<usize>,
    /// Workers that acknowledge each ticket, 1 to [`MAX_RANKS`].
    pub ranks: u32,
    /// Name of the hash function: `sha256` or `xxh3`, see [`Algorithm`].
    pub hash: String,
    /// Mixed into every block hash.
    pub root: Vec<u8>,
}

impl Config {
    /// The defaults, for the given sizes.
    pub fn new(gpu_blocks: usize, cpu_blocks: usize, block_size: usize) -> Self {
        Self {
            gpu_blocks,
            cpu_blocks,
            block_size,
            policy: "lru".into(),
            store: "eager".into(),
            max_store_blocks_per_step: None,
            ranks: 1,
            hash: "sha256".into(),
            root: Vec::new(),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        let sizes = [
            ("gpu_blocks", self.gpu_blocks, 1, MAX_BLOCKS),
            ("cpu_blocks", self.cpu_blocks, 0, MAX_BLOCKS),
            ("block_size", self.block_size, 1, MAX_BLOCK_SIZE),
            ("ranks", self.ranks as usize, 1, MAX_RANKS),
        ];
        for (name, value, low, high) in sizes {
            if !(low..=high).contains(&value) {
                return Err(Error::config(name, value, format!("{low} .. {high}")));
            }
        }
        let names: [(_, _, &[&str]); 3] = [
            ("policy", &self.policy, &["lru"]),
            ("store", &self.store, &["eager"]),
            ("hash", &self.hash, &Algorithm::NAMES),
        ];
        for (argument, name, known) in names {
            if !known.contains(&name.as_str()) {
                let known: Vec<_> = known.iter().map(|name| format!("{name:?}")).collect();
                return Err(Error::config(argument, format!("{name:?}"), format!("one of: {}", known.join(", "))));
            }
        }
        Ok(())
    }

    /// The hash function; the default where the name has not been checked.
    pub(crate) fn algorithm(&self) -> Algorithm {
        Algorithm::from_name(&self.hash).unwrap_or(Algorithm::Sha256)
    }

    /// Whether blocks of a table of `self` mean the same in a table of `other`.
    pub(crate) fn check_shareable(&self, other: &Self) -> Result<()> {
        if self.cpu_blocks != other.cpu_blocks {
            return Err(Error::config("cpu_blocks", self.cpu_blocks, format!("{}, as shared", other.cpu_blocks)));
        }
        if self.block_size != other.block_size {
            return Err(Error::config("block_size", self.block_size, format!("{}, as shared", other.block_size)));
        }
        if self.hash != other.hash {
            return Err(Error::config("hash", format!("{:?}", self.hash), format!("{:?}, as shared", other.hash)));
        }
        Ok(())
    }
}
