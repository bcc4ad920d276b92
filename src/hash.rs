//! From token ids to block hashes, chained per block. The byte format is stated in `docs/design.md`.

use sha2::{Digest as _, Sha256};
use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::block::BlockHash;

/// A value that becomes part of a block hash. Text is taken as its UTF-8 bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Field {
    /// Bytes or text.
    Bytes(Vec<u8>),
    /// A number; never equal to the bytes that spell it.
    Int(i128),
}

/// An item that stands behind placeholder tokens, such as an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Media {
    /// Hash of its content.
    pub hash: Field,
    /// Position of its first token in the request.
    pub offset: usize,
}

/// Which adapter (`LoRA`) a request uses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Adapter {
    /// None.
    #[default]
    Base,
    /// One field.
    One(Field),
    /// Several fields, kept apart.
    Many(Vec<Field>),
}

/// What, besides its tokens, makes a request's blocks its own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// Separates tenants.
    pub salt: Option<Field>,
    /// Separates adapters.
    pub adapter: Adapter,
    /// Media items, in any order.
    pub media: Vec<Media>,
}

/// How the text of a block becomes its hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// SHA-256, of 32 bytes.
    Sha256,
    /// XXH3 of 128 bits with a seed from the table's root: several times as fast, but who knows the seed can make two
    /// texts with one hash.
    Xxh3,
}

impl Algorithm {
    /// Names of all.
    pub const NAMES: [&str; 2] = ["sha256", "xxh3"];

    /// The algorithm of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "sha256" => Some(Self::Sha256),
            "xxh3" => Some(Self::Xxh3),
            _ => None,
        }
    }
}

fn add_field(text: &mut Vec<u8>, tag: u8, field: &Field) {
    match field {
        Field::Bytes(bytes) => {
            text.extend_from_slice(&[tag, b'b']);
            text.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
            text.extend_from_slice(bytes);
        }
        Field::Int(value) => {
            text.extend_from_slice(&[tag, b'i']);
            text.extend_from_slice(&16_u64.to_le_bytes());
            text.extend_from_slice(&value.to_le_bytes());
        }
    }
}

fn sha256(text: &[u8]) -> BlockHash {
    BlockHash(Sha256::digest(text).into())
}

/// Start of every chain of one table.
pub fn table_root(block_size: usize, root: &[u8], algorithm: Algorithm) -> BlockHash {
    let mut text = b"kvtier-root-v1".to_vec();
    text.extend_from_slice(&(block_size as u32).to_le_bytes());
    add_field(&mut text, b'r', &Field::Bytes(root.to_vec()));
    if algorithm == Algorithm::Xxh3 {
        add_field(&mut text, b'h', &Field::Bytes(b"xxh3".to_vec()));
    }
    sha256(&text)
}

/// The growing chain of one request: remembers the last full block's hash and the tokens after it.
#[derive(Debug, Clone)]
pub struct Chain {
    algorithm: Algorithm,
    /// Of `Xxh3`.
    seed: u64,
    block_size: usize,
    num_tokens: usize,
    /// Parent of the block that is not full yet, then room for its tokens, little-endian.
    text: Vec<u8>,
    /// Media items that no full block has taken up yet, by descending offset.
    media: Vec<Media>,
}

impl Chain {
    /// Starts a chain from a table's root.
    pub fn new(root: BlockHash, block_size: usize, identity: &Identity, algorithm: Algorithm) -> Self {
        let mut text = root.0.to_vec();
        if let Some(salt) = &identity.salt {
            add_field(&mut text, b's', salt);
        }
        match &identity.adapter {
            Adapter::Base => {}
            Adapter::One(field) => add_field(&mut text, b'a', field),
            Adapter::Many(fields) => {
                add_field(&mut text, b't', &Field::Int(fields.len() as i128));
                for field in fields {
                    add_field(&mut text, b'a', field);
                }
            }
        }
        if text.len() > BlockHash::BYTES {
            let parent = sha256(&text);
            text.clear();
            text.extend_from_slice(&parent.0);
        }
        let mut media = identity.media.clone();
        // Stable, so that items at one offset keep the order given; reversed, so that the next one is at the end.
        media.sort_by_key(|item| item.offset);
        media.reverse();
        text.resize(BlockHash::BYTES + 4 * block_size, 0);
        let [seed, ..] = root.to_words();
        Self { algorithm, seed, block_size, num_tokens: 0, text, media }
    }

    /// Adds tokens and appends the hash of each block that became full to `hashes`.
    pub fn extend(&mut self, token_ids: &[u32], hashes: &mut Vec<BlockHash>) {
        hashes.reserve((self.num_tokens % self.block_size + token_ids.len()) / self.block_size);
        let mut rest = token_ids;
        while !rest.is_empty() {
            let position = self.num_tokens % self.block_size;
            let (now, later) = rest.split_at((self.block_size - position).min(rest.len()));
            let (places, _) = self.text[BlockHash::BYTES + 4 * position..].as_chunks_mut::<4>();
            for (place, token) in places.iter_mut().zip(now) {
                *place = token.to_le_bytes();
            }
            self.num_tokens += now.len();
            if position + now.len() == self.block_size {
                hashes.push(self.finish_block());
            }
            rest = later;
        }
    }

    fn finish_block(&mut self) -> BlockHash {
        let start = self.num_tokens - self.block_size;
        while let Some(item) = self.media.pop_if(|item| item.offset < self.num_tokens) {
            self.text.extend_from_slice(&((item.offset - start) as u32).to_le_bytes());
            add_field(&mut self.text, b'm', &item.hash);
        }
        let hash = match self.algorithm {
            Algorithm::Sha256 => sha256(&self.text).to_words(),
            Algorithm::Xxh3 => {
                let digest = xxh3_128_with_seed(&self.text, self.seed);
                [digest as u64, (digest >> 64) as u64, 0, 0]
            }
        };
        self.text.truncate(BlockHash::BYTES + 4 * self.block_size);
        // Word by word: what is read again in wider pieces than it was written costs a stall.
        let (places, _) = self.text.as_chunks_mut::<8>();
        for (place, word) in places.iter_mut().zip(hash) {
            *place = word.to_le_bytes();
        }
        BlockHash::from_words(hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(tokens: &[u32], identity: &Identity) -> Vec<BlockHash> {
        let mut out = Vec::new();
        chain(identity, Algorithm::Sha256).extend(tokens, &mut out);
        out
    }

    fn chain(identity: &Identity, algorithm: Algorithm) -> Chain {
        Chain::new(table_root(4, b"", algorithm), 4, identity, algorithm)
    }

    #[test]
    fn splits_do_not_change_the_chain() {
        let tokens: Vec<u32> = (0..17).collect();
        for algorithm in [Algorithm::Sha256, Algorithm::Xxh3] {
            let mut whole = Vec::new();
            chain(&Identity::default(), algorithm).extend(&tokens, &mut whole);
            assert_eq!(whole.len(), 4);
            for cut in 0..17 {
                let mut out = Vec::new();
                let mut chain = chain(&Identity::default(), algorithm);
                chain.extend(&tokens[..cut], &mut out);
                chain.extend(&tokens[cut..], &mut out);
                assert_eq!(out, whole);
            }
        }
    }

    #[test]
    fn fields_keep_their_places() {
        let text = |s: &str| Field::Bytes(s.as_bytes().to_vec());
        let identities = [
            Identity::default(),
            Identity { salt: Some(text("a")), adapter: Adapter::One(text("bc")), media: vec![] },
            Identity { salt: Some(text("ab")), adapter: Adapter::One(text("c")), media: vec![] },
            Identity { salt: None, adapter: Adapter::One(text("abc")), media: vec![] },
            Identity { salt: Some(text("abc")), ..Identity::default() },
            Identity { salt: Some(Field::Int(1)), ..Identity::default() },
            Identity { salt: Some(text("1")), ..Identity::default() },
            Identity { adapter: Adapter::Many(vec![text("x"), Field::Int(1)]), ..Identity::default() },
            Identity { adapter: Adapter::Many(vec![text("x"), Field::Int(2)]), ..Identity::default() },
            Identity { adapter: Adapter::Many(vec![text("x")]), ..Identity::default() },
            Identity { adapter: Adapter::One(text("x")), ..Identity::default() },
        ];
        let firsts: std::collections::HashSet<_> = identities.iter().map(|i| hashes(&[1, 2, 3, 4], i)[0]).collect();
        assert_eq!(firsts.len(), identities.len());
    }

    #[test]
    fn media_enters_at_its_block() {
        let with = |offset| Identity { media: vec![Media { hash: Field::Int(7), offset }], ..Identity::default() };
        let tokens: Vec<u32> = (0..12).collect();
        let (plain, at5, at6) =
            (hashes(&tokens, &Identity::default()), hashes(&tokens, &with(5)), hashes(&tokens, &with(6)));
        assert_eq!(plain[0], at5[0]);
        assert!(plain[1] != at5[1] && at5[1] != at6[1] && at5[2] != plain[2]);
    }
}
