//! The live requests of a session: their blocks, hashes and progress. Places and their memory are used again.

use std::fmt;
use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

use crate::block::{BlockHash, CpuBlockId, GpuBlockId};
use crate::error::{Error, Result};
use crate::hash::Chain;

/// The caller's name of a request. A number and its decimal text are different names.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum RequestId {
    /// A number.
    Int(i64),
    /// A text.
    Text(Box<str>),
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(number) => write!(f, "{number}"),
            Self::Text(text) => write!(f, "{text:?}"),
        }
    }
}

impl From<i64> for RequestId {
    fn from(number: i64) -> Self {
        Self::Int(number)
    }
}

impl From<&str> for RequestId {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

/// How far the loads of a request are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Loads {
    /// None, or all finished.
    #[default]
    Finished,
    /// Waiting for a step; no ticket names them yet. The request holds the sources.
    Planned,
    /// Under a ticket, which holds the sources.
    Running,
}

/// A live request.
#[derive(Debug, Default)]
pub(crate) struct Request {
    /// Different for every request ever admitted: a reused id or place is told apart by it.
    pub(crate) serial: u64,
    pub(crate) block_ids: Vec<GpuBlockId>,
    /// Hashes of the full blocks.
    pub(crate) hashes: Vec<BlockHash>,
    /// Makes the hashes; none where the caller gives them.
    pub(crate) chain: Option<Chain>,
    pub(crate) num_tokens: usize,
    pub(crate) gpu_hit_blocks: usize,
    /// Cpu hits, in order; held while the loads are planned.
    pub(crate) load_sources: Vec<CpuBlockId>,
    pub(crate) loads: Loads,
    /// Leading full blocks that are hits or have been committed: every one of them is published or a private duplicate.
    pub(crate) handled_blocks: usize,
    /// Leading tokens whose KV is valid.
    pub(crate) valid_tokens: usize,
    /// A commit that waits for the loads.
    pub(crate) pending_commit: Option<usize>,
}

impl Request {
    /// Positions of the blocks that are loaded from the Cpu tier.
    pub(crate) fn load_positions(&self) -> std::ops::Range<usize> {
        self.gpu_hit_blocks..self.gpu_hit_blocks + self.load_sources.len()
    }

    fn clear(&mut self) {
        let Self { block_ids, hashes, load_sources, .. } = std::mem::take(self);
        *self = Self { block_ids, hashes, load_sources, ..Self::default() };
        self.block_ids.clear();
        self.hashes.clear();
        self.load_sources.clear();
    }
}

/// A place of a request that may have ended since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestRef {
    place: usize,
    serial: u64,
}

/// The live requests by id.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    hasher: DefaultHashBuilder,
    by_id: HashTable<usize>,
    /// Id and request by place; no id in an empty place.
    places: Vec<(Option<RequestId>, Request)>,
    empty: Vec<usize>,
    next_serial: u64,
}

impl Requests {
    fn find(&self, id: &RequestId) -> Option<usize> {
        self.by_id.find(self.hasher.hash_one(id), |&place| self.places[place].0.as_ref() == Some(id)).copied()
    }

    pub(crate) fn check_new(&self, id: &RequestId) -> Result<()> {
        if self.find(id).is_some() {
            return Err(Error::config("request_id", id, "an id that no live request has"));
        }
        Ok(())
    }

    /// An empty request that is not live yet; `insert` makes it so.
    pub(crate) fn spare(&mut self) -> &mut Request {
        if self.empty.is_empty() {
            self.empty.push(self.places.len());
            self.places.push(Default::default());
        }
        let place = self.empty[self.empty.len() - 1];
        let request = &mut self.places[place].1;
        request.clear();
        request
    }

    /// The spare request as it was left.
    pub(crate) fn spare_in_use(&mut self) -> &mut Request {
        let place = self.empty.last().copied().unwrap_or_default();
        &mut self.places[place].1
    }

    /// Makes the spare request live under an id that is new.
    pub(crate) fn insert(&mut self, id: RequestId) -> RequestRef {
        self.spare_serial();
        let place = self.empty.pop().unwrap_or_default();
        let hash = self.hasher.hash_one(&id);
        let serial = self.places[place].1.serial;
        self.places[place].0 = Some(id);
        let Self { places, hasher, .. } = self;
        let rehash = |&other: &usize| places[other].0.as_ref().map_or(0, |id| hasher.hash_one(id));
        self.by_id.insert_unique(hash, place, rehash);
        RequestRef { place, serial }
    }

    fn spare_serial(&mut self) {
        self.next_serial += 1;
        if let Some(&place) = self.empty.last() {
            self.places[place].1.serial = self.next_serial;
        }
    }

    pub(crate) fn get(&self, id: &RequestId) -> Result<&Request> {
        match self.find(id) {
            Some(place) => Ok(&self.places[place].1),
            None => Err(Error::UnknownRequest(id.clone())),
        }
    }

    pub(crate) fn get_mut(&mut self, id: &RequestId) -> Result<&mut Request> {
        match self.find(id) {
            Some(place) => Ok(&mut self.places[place].1),
            None => Err(Error::UnknownRequest(id.clone())),
        }
    }

    /// The request, if it is still the same one.
    pub(crate) fn resolve(&mut self, reference: RequestRef) -> Option<&mut Request> {
        let (id, request) = self.places.get_mut(reference.place)?;
        (id.is_some() && request.serial == reference.serial).then_some(request)
    }

    /// Takes a request out. `give_back` returns its memory.
    pub(crate) fn remove(&mut self, id: &RequestId) -> Result<(RequestRef, Request)> {
        let entry = self
            .by_id
            .find_entry(self.hasher.hash_one(id), |&place| self.places[place].0.as_ref() == Some(id))
            .map_err(|_| Error::UnknownRequest(id.clone()))?;
        let (place, _) = entry.remove();
        self.places[place].0 = None;
        let request = std::mem::take(&mut self.places[place].1);
        Ok((RequestRef { place, serial: request.serial }, request))
    }

    pub(crate) fn give_back(&mut self, reference: RequestRef, request: Request) {
        self.places[reference.place].1 = request;
        self.empty.push(reference.place);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Request> {
        self.places.iter().filter(|(id, _)| id.is_some()).map(|(_, request)| request)
    }
}
