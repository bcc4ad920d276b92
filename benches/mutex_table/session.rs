//! The live requests of one scheduler: their blocks, hashes and progress.

use std::collections::HashMap;
use std::fmt;

use crate::mutex_table::block::{BlockHash, CpuBlockId, GpuBlockId};
use crate::mutex_table::error::{Error, Result};

/// The caller's name of a request. A number and its decimal text are different names.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum RequestId {
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Loads {
    /// None, or all finished.
    Finished,
    /// Waiting for the next step, which no ticket names yet. Holds the sources.
    Planned(Vec<CpuBlockId>),
    /// Under a ticket, which holds the sources.
    Running(u64),
}

/// A live request.
#[derive(Debug)]
pub(crate) struct Request {
    /// Different for every request ever admitted: a reused id or place is told apart by it.
    pub(crate) serial: u64,
    pub(crate) block_ids: Vec<GpuBlockId>,
    /// Hashes of the full blocks.
    pub(crate) hashes: Vec<BlockHash>,
    pub(crate) num_tokens: usize,
    pub(crate) gpu_hit_blocks: usize,
    pub(crate) cpu_hit_blocks: usize,
    /// Leading full blocks that are hits or have been committed: every one of them is published or a private duplicate.
    pub(crate) handled_blocks: usize,
    /// Leading tokens whose KV is valid.
    pub(crate) valid_tokens: usize,
    /// A commit that waits for the loads.
    pub(crate) pending_commit: Option<usize>,
    pub(crate) loads: Loads,
}

impl Request {
    /// Positions of the blocks that are loaded from the Cpu tier.
    pub(crate) fn load_positions(&self) -> std::ops::Range<usize> {
        self.gpu_hit_blocks..self.gpu_hit_blocks + self.cpu_hit_blocks
    }
}

/// The live requests by id.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    by_id: HashMap<RequestId, usize>,
    places: Vec<Option<Request>>,
    empty: Vec<usize>,
    next_serial: u64,
}

/// A place of a request that may have ended since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestRef {
    place: usize,
    serial: u64,
}

impl RequestRef {
    /// Different for every request ever admitted.
    pub(crate) fn key(self) -> u64 {
        self.serial
    }
}

impl Requests {
    pub(crate) fn check_new(&self, id: &RequestId) -> Result<()> {
        if self.by_id.contains_key(id) {
            return Err(Error::config("request_id", id, "an id that no live request has"));
        }
        Ok(())
    }

    pub(crate) fn insert(&mut self, id: RequestId, mut request: Request) -> RequestRef {
        request.serial = self.next_serial;
        self.next_serial += 1;
        let reference = RequestRef { place: self.empty.pop().unwrap_or(self.places.len()), serial: request.serial };
        if reference.place == self.places.len() {
            self.places.push(None);
        }
        self.places[reference.place] = Some(request);
        self.by_id.insert(id, reference.place);
        reference
    }

    pub(crate) fn get(&self, id: &RequestId) -> Result<&Request> {
        self.by_id
            .get(id)
            .and_then(|&place| self.places[place].as_ref())
            .ok_or_else(|| Error::UnknownRequest(id.clone()))
    }

    pub(crate) fn get_mut(&mut self, id: &RequestId) -> Result<&mut Request> {
        match self.by_id.get(id).and_then(|&place| self.places[place].as_mut()) {
            Some(request) => Ok(request),
            None => Err(Error::UnknownRequest(id.clone())),
        }
    }

    /// The request, if it is still the same one.
    pub(crate) fn resolve(&mut self, reference: RequestRef) -> Option<&mut Request> {
        self.places.get_mut(reference.place)?.as_mut().filter(|request| request.serial == reference.serial)
    }

    pub(crate) fn remove(&mut self, id: &RequestId) -> Result<(RequestRef, Request)> {
        let unknown = || Error::UnknownRequest(id.clone());
        let place = self.by_id.remove(id).ok_or_else(unknown)?;
        let request = self.places[place].take().ok_or_else(unknown)?;
        self.empty.push(place);
        Ok((RequestRef { place, serial: request.serial }, request))
    }
}
