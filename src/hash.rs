//! From token ids to block hashes: SHA-256, chained per block. The byte format is stated in `docs/design.md`.

use sha2::{Digest as _, Sha256};

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

fn update_field(hasher: &mut Sha256, tag: u8, field: &Field) {
    match field {
        Field::Bytes(bytes) => {
            hasher.update([tag, b'b']);
            hasher.update((bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        }
        Field::Int(value) => {
            hasher.update([tag, b'i']);
            hasher.update(16_u64.to_le_bytes());
            hasher.update(value.to_le_bytes());
        }
    }
}

/// Start of every chain of one table.
pub fn table_root(block_size: usize, root: &[u8]) -> BlockHash {
    let mut hasher = Sha256::new();
    hasher.update(b"kvtier-root-v1");
    hasher.update((block_size as u32).to_le_bytes());
    update_field(&mut hasher, b'r', &Field::Bytes(root.to_vec()));
    BlockHash(hasher.finalize().into())
}

/// The growing chain of one request: remembers the last full block's hash and the tokens after it.
#[derive(Debug, Clone)]
pub struct Chain {
    block_size: usize,
    parent: BlockHash,
    num_tokens: usize,
    /// Tokens of the block that is not full yet, little-endian.
    partial: Vec<u8>,
    /// Media items that no full block has taken up yet, by descending offset.
    media: Vec<Media>,
}

impl Chain {
    /// Starts a chain from a table's root.
    pub fn new(root: BlockHash, block_size: usize, identity: &Identity) -> Self {
        let parent = if identity.salt.is_none() && identity.adapter == Adapter::Base {
            root
        } else {
            let mut hasher = Sha256::new();
            hasher.update(root.0);
            if let Some(salt) = &identity.salt {
                update_field(&mut hasher, b's', salt);
            }
            match &identity.adapter {
                Adapter::Base => {}
                Adapter::One(field) => update_field(&mut hasher, b'a', field),
                Adapter::Many(fields) => {
                    update_field(&mut hasher, b't', &Field::Int(fields.len() as i128));
                    for field in fields {
                        update_field(&mut hasher, b'a', field);
                    }
                }
            }
            BlockHash(hasher.finalize().into())
        };
        let mut media = identity.media.clone();
        // Stable, so that items at one offset keep the order given; reversed, so that the next one is at the end.
        media.sort_by_key(|item| item.offset);
        media.reverse();
        Self { block_size, parent, num_tokens: 0, partial: Vec::new(), media }
    }

    /// Adds tokens and appends the hash of each block that became full to `hashes`.
    pub fn extend(&mut self, token_ids: &[u32], hashes: &mut Vec<BlockHash>) {
        for &token in token_ids {
            self.partial.extend_from_slice(&token.to_le_bytes());
            self.num_tokens += 1;
            if self.num_tokens.is_multiple_of(self.block_size) {
                self.finish_block();
                hashes.push(self.parent);
            }
        }
    }

    fn finish_block(&mut self) {
        let mut hasher = Sha256::new();
        hasher.update(self.parent.0);
        hasher.update(&self.partial);
        let start = self.num_tokens - self.block_size;
        while let Some(item) = self.media.pop_if(|item| item.offset < self.num_tokens) {
            hasher.update(((item.offset - start) as u32).to_le_bytes());
            update_field(&mut hasher, b'm', &item.hash);
        }
        self.parent = BlockHash(hasher.finalize().into());
        self.partial.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(tokens: &[u32], identity: &Identity) -> Vec<BlockHash> {
        let mut out = Vec::new();
        Chain::new(table_root(4, b""), 4, identity).extend(tokens, &mut out);
        out
    }

    #[test]
    fn splits_do_not_change_the_chain() {
        let tokens: Vec<u32> = (0..17).collect();
        let whole = hashes(&tokens, &Identity::default());
        assert_eq!(whole.len(), 4);
        for cut in 0..17 {
            let mut out = Vec::new();
            let mut chain = Chain::new(table_root(4, b""), 4, &Identity::default());
            chain.extend(&tokens[..cut], &mut out);
            chain.extend(&tokens[cut..], &mut out);
            assert_eq!(out, whole);
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
