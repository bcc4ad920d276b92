//! What must hold after every call.

use std::collections::BTreeSet;

use kvtier::event::{EventKind, TierName};
use kvtier::{BlockHash, GpuBlockId, RequestId};

use super::{Cell, Harness, Pairs, BLOCK};

impl Harness {
    /// Slots handed out as new must be nobody's: no live request's, no ticket's, not published.
    pub(super) fn hand_out(&mut self, ids: &[GpuBlockId]) {
        self.note_events();
        for &id in ids {
            for live in self.live.values() {
                assert!(!live.ids.contains(&id), "slot {id:?} has two owners");
            }
            for open in self.open.values() {
                let named = match &open.pairs {
                    Pairs::Loads(pairs) => pairs.iter().any(|pair| pair.1 == id),
                    Pairs::Stores(pairs) => pairs.iter().any(|pair| pair.0 == id),
                };
                assert!(!named, "slot {id:?} given away under a ticket");
            }
            assert!(!self.published.contains_key(&(true, id.index() as u32)), "slot {id:?} is published");
            self.gpu[id.index()] = self.junk();
        }
    }

    /// What a lookup must find, by the record of events.
    pub(super) fn expected_hits(&self, hashes: &[BlockHash]) -> (usize, usize) {
        let leading = |is_gpu: bool, from: usize| {
            let known: BTreeSet<_> =
                self.published.iter().filter(|(key, _)| key.0 == is_gpu).map(|(_, hash)| *hash).collect();
            hashes[from..].iter().take_while(|&hash| known.contains(hash)).count()
        };
        let gpu_hits = leading(true, 0);
        (gpu_hits, leading(false, gpu_hits))
    }

    /// Gpu slots that a request with these Gpu hits can get, by the harness's own record of who owns what.
    pub(super) fn available_behind(&self, hits: &[BlockHash]) -> usize {
        let mut taken: BTreeSet<usize> = self.live.values().flat_map(|live| &live.ids).map(|id| id.index()).collect();
        for open in self.open.values() {
            match &open.pairs {
                Pairs::Loads(pairs) => taken.extend(pairs.iter().map(|pair| pair.1.index())),
                Pairs::Stores(pairs) => taken.extend(pairs.iter().map(|pair| pair.0.index())),
            }
        }
        for (&(is_gpu, slot), hash) in &self.published {
            if is_gpu && hits.contains(hash) {
                taken.insert(slot as usize);
            }
        }
        self.gpu.len() - taken.len()
    }

    pub(super) fn note_events(&mut self) {
        for event in self.session.table().events() {
            let key = (event.tier == TierName::Gpu, event.block_id);
            match event.kind {
                EventKind::Stored => assert!(self.published.insert(key, event.block_hash).is_none()),
                EventKind::Removed => assert_eq!(self.published.remove(&key), Some(event.block_hash)),
            }
        }
    }

    pub(super) fn check(&mut self) {
        self.session.audit().unwrap();
        self.note_events();
        for (&(is_gpu, slot), &hash) in &self.published {
            let cell = if is_gpu { self.gpu[slot as usize] } else { self.cpu[slot as usize] };
            assert_eq!(cell, Cell::Block(hash), "O2: gpu {is_gpu} slot {slot}");
        }
        let keys: BTreeSet<_> = self.published.iter().map(|(key, hash)| (key.0, hash)).collect();
        assert_eq!(keys.len(), self.published.len(), "one hash is published twice in a tier");
        for (&id, live) in &self.live {
            let key = RequestId::Int(id);
            assert_eq!(self.session.block_ids(&key).unwrap(), live.ids);
            if self.session.is_ready(&key).unwrap() {
                let valid_blocks = self.session.valid_tokens(&key).unwrap() / BLOCK;
                for (position, &hash) in live.hashes.iter().enumerate().take(valid_blocks) {
                    assert_eq!(self.gpu[live.ids[position].index()], Cell::Block(hash), "O2: valid token");
                }
            }
        }
        let stats = self.session.table().stats();
        let counters: Vec<_> = stats.counters.each().collect();
        for (old, new) in self.last_counters.iter().zip(&counters) {
            assert!(old.1 <= new.1, "O7: {} went down", old.0);
        }
        self.last_counters = counters;
        assert_eq!(stats.num_requests, self.live.len());
        assert_eq!(stats.num_tickets, self.open.len());
        for (counts, is_gpu) in [(stats.gpu, true), (stats.cpu, false)] {
            assert_eq!(counts.free + counts.claimed + counts.cached + counts.in_flight, counts.total);
            assert_eq!(counts.cached, self.published.keys().filter(|key| key.0 == is_gpu).count());
        }
    }
}
