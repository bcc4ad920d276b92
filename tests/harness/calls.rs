//! The calls, each with what it must and must not do.

use std::collections::{BTreeMap, BTreeSet};

use kvtier::hash::{Field, Identity};
use kvtier::{BlockHash, Error, RequestId, Session};

use super::{Cell, Harness, Live, Open, Pairs, When, BLOCK};

/// Prompts that share prefixes: prompt p differs from prompt 0 from token 5p on.
fn tokens(prompt: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|at| if at >= 5 * prompt { at + 1000 * prompt } else { at }).collect()
}

pub(super) fn identity(salt: Option<i128>) -> Identity {
    Identity { salt: salt.map(Field::Int), ..Identity::default() }
}

pub(super) fn nth<K: Copy, V>(map: &BTreeMap<K, V>, which: usize) -> Option<K> {
    (!map.is_empty()).then(|| map.keys().nth(which % map.len()).copied()).flatten()
}

impl Harness {
    pub(super) fn admit(&mut self, variant: u32, len: usize, salt: Option<i128>, by_hash: bool) {
        let prompt = tokens(variant, len);
        let hashes = self.hashes(&prompt, salt);
        let found = self.session.table().lookup(&prompt, &identity(salt)).unwrap();
        assert_eq!(found, self.session.table().lookup_hashed(&hashes[..(len - 1) / BLOCK]));
        self.admit_with(prompt, hashes, salt, by_hash);
    }

    /// Digests of the caller's own, which name some blocks several times: equal digests promise equal bytes.
    pub(super) fn admit_repeated(&mut self, variant: u32, len: usize, period: usize) {
        let prompt = tokens(variant, len);
        let hashes = self.hashes(&prompt, None);
        let repeated = hashes.iter().cycle().take(period).cycle().take(hashes.len()).copied().collect();
        self.admit_with(prompt, repeated, None, true);
    }

    fn admit_with(&mut self, tokens: Vec<u32>, hashes: Vec<BlockHash>, salt: Option<i128>, by_hash: bool) {
        let (id, len) = (self.next_id, tokens.len());
        let found = self.session.table().lookup_hashed(&hashes[..(len - 1) / BLOCK]);
        assert_eq!(found, self.expected_hits(&hashes[..(len - 1) / BLOCK]));
        let expected_available = self.available_behind(&hashes[..found.0]);
        let before = self.session.table().stats();
        let result = if by_hash {
            self.session.admit_hashed(RequestId::Int(id), &hashes, len)
        } else {
            self.session.admit(RequestId::Int(id), &tokens, &identity(salt))
        };
        match result {
            Ok(admission) => {
                self.next_id += 1;
                assert_eq!(found, (admission.gpu_hit_blocks, admission.cpu_hit_blocks));
                assert_eq!(admission.cached_tokens, (found.0 + found.1) * BLOCK);
                assert!(admission.cached_tokens < len, "no token left to compute");
                assert_eq!(admission.block_ids.len(), len.div_ceil(BLOCK));
                assert_eq!(admission.fresh_blocks + found.0 + found.1, admission.block_ids.len());
                assert!(admission.block_ids.len() - found.0 <= expected_available);
                self.hand_out(&admission.block_ids[admission.gpu_hit_blocks..]);
                let written_blocks = admission.gpu_hit_blocks;
                let ids = admission.block_ids.clone();
                self.live.insert(id, Live { tokens, hashes, salt, hashed: by_hash, ids, admission, written_blocks });
            }
            Err(Error::OutOfBlocks { needed, available, total }) => {
                assert!(needed > available);
                let expected = (len.div_ceil(BLOCK) - found.0, expected_available, self.gpu.len());
                assert_eq!((needed, available, total), expected);
                let mut after = self.session.table().stats();
                after.counters.num_refused -= 1;
                assert_eq!(before, after);
                assert!(self.session.table().events().is_empty());
            }
            Err(other) => panic!("{other}"),
        }
    }

    pub(super) fn extend(&mut self, which: usize, n: usize) {
        let Some(id) = nth(&self.live, which) else { return };
        let live = &self.live[&id];
        let mut longer = live.tokens.clone();
        longer.extend((0..n as u32).map(|at| 500 + (live.tokens.len() as u32 + at) % 7));
        let new_hashes = self.hashes(&longer, live.salt).split_off(live.tokens.len() / BLOCK);
        let available = self.available_behind(&[]);
        let needed = longer.len().div_ceil(BLOCK) - live.ids.len();
        let result = if live.hashed {
            self.session.extend_hashed(&RequestId::Int(id), &new_hashes, n)
        } else {
            self.session.extend(&RequestId::Int(id), &longer[live.tokens.len()..])
        };
        match result {
            Ok(added) => {
                self.hand_out(&added);
                let live = self.live.get_mut(&id).unwrap();
                assert_eq!(added.len(), needed);
                live.ids.extend(added);
                live.tokens = longer;
                live.hashes.extend(new_hashes);
                assert_eq!(live.ids.len(), live.tokens.len().div_ceil(BLOCK));
            }
            Err(error) => {
                assert!(needed > available);
                assert_eq!(error, Error::OutOfBlocks { needed, available, total: self.gpu.len() });
            }
        }
    }

    /// Computes up to some token, as an engine would: writes every block from the first invalid token on.
    pub(super) fn commit(&mut self, which: usize, part: usize) {
        let Some(id) = nth(&self.live, which) else { return };
        let key = RequestId::Int(id);
        let ready = self.session.is_ready(&key).unwrap();
        let valid = self.session.valid_tokens(&key).unwrap();
        let live = &self.live[&id];
        let num_tokens = live.tokens.len() * part / 4;
        if !ready && part % 2 == 1 {
            // Computing over loads that run: what is written behind them counts only if they come through.
            // What was written so before stays: a block that a remembered commit counts is not written again.
            self.write(id, (live.admission.cached_tokens / BLOCK).max(live.written_blocks), num_tokens);
            self.session.commit(&key, num_tokens).unwrap();
            return;
        }
        if !ready || num_tokens <= valid {
            self.session.commit(&key, num_tokens.min(valid)).unwrap();
            assert_eq!(self.session.valid_tokens(&key).unwrap(), valid);
            return;
        }
        self.write(id, valid / BLOCK, num_tokens);
        self.session.commit(&key, num_tokens).unwrap();
        assert_eq!(self.session.valid_tokens(&key).unwrap(), num_tokens);
        assert!(matches!(self.session.commit(&key, usize::MAX), Err(Error::Config { .. })));
    }

    fn write(&mut self, id: i64, from_block: usize, num_tokens: usize) {
        let (ids, full, hashes) = {
            let live = &self.live[&id];
            (live.ids.clone(), num_tokens / BLOCK, live.hashes.clone())
        };
        self.note_events();
        for position in from_block..num_tokens.div_ceil(BLOCK) {
            let slot = ids[position].index();
            assert!(!self.published.contains_key(&(true, slot as u32)), "the engine would write a published block");
            self.gpu[slot] = if position < full { Cell::Block(hashes[position]) } else { self.junk() };
        }
        let live = self.live.get_mut(&id).unwrap();
        live.written_blocks = live.written_blocks.max(full);
    }

    pub(super) fn step(&mut self) {
        let plan = self.session.step();
        self.note_events();
        assert_eq!(plan.load_ticket.is_some(), !plan.loads.is_empty());
        assert_eq!(plan.store_ticket.is_some(), !plan.stores.is_empty());
        assert!(self.setup.max_stores.is_none_or(|most| plan.stores.len() <= most));
        for &(_, destination) in &plan.loads {
            assert!(self.open.values().all(|open| match &open.pairs {
                Pairs::Loads(pairs) => pairs.iter().all(|pair| pair.1 != destination),
                Pairs::Stores(pairs) => pairs.iter().all(|pair| pair.0 != destination),
            }));
        }
        for &(_, destination) in &plan.stores {
            assert!(!self.published.contains_key(&(false, destination.index() as u32)));
            assert!(self.open.values().all(|open| match &open.pairs {
                Pairs::Loads(pairs) => pairs.iter().all(|pair| pair.0 != destination),
                Pairs::Stores(pairs) => pairs.iter().all(|pair| pair.1 != destination),
            }));
        }
        for (ticket, pairs) in
            [(plan.load_ticket, Pairs::Loads(plan.loads)), (plan.store_ticket, Pairs::Stores(plan.stores))]
        {
            let Some(ticket) = ticket else { continue };
            if self.setup.when == When::Early {
                self.copy(&pairs, &BTreeSet::new());
            }
            self.open
                .insert(ticket, Open { pairs, failed: BTreeSet::new(), ranks_left: (0..self.setup.ranks).collect() });
        }
    }

    fn copy(&mut self, pairs: &Pairs, failed: &BTreeSet<usize>) {
        let len = match pairs {
            Pairs::Loads(pairs) => pairs.len(),
            Pairs::Stores(pairs) => pairs.len(),
        };
        for index in 0..len {
            let torn = failed.contains(&index).then(|| self.junk());
            match pairs {
                Pairs::Loads(pairs) => {
                    let (from, to) = pairs[index];
                    self.gpu[to.index()] = torn.unwrap_or(self.cpu[from.index()]);
                }
                Pairs::Stores(pairs) => {
                    let (from, to) = pairs[index];
                    self.cpu[to.index()] = torn.unwrap_or(self.gpu[from.index()]);
                }
            }
        }
    }

    pub(super) fn complete(&mut self, which: usize, rank: u32, failed: u64) {
        let Some(ticket) = nth(&self.open, which) else { return };
        let rank = rank % self.setup.ranks;
        let open = self.open.get_mut(&ticket).unwrap();
        let len = match &open.pairs {
            Pairs::Loads(pairs) => pairs.len(),
            Pairs::Stores(pairs) => pairs.len(),
        };
        let failed: Vec<usize> = (0..len).filter(|index| failed >> (index % 64) & 1 == 1).collect();
        assert!(matches!(
            self.session.complete(ticket, rank, &[len]),
            Err(Error::Config { .. } | Error::StaleTicket { .. })
        ));
        if !open.ranks_left.remove(&rank) {
            assert!(matches!(self.session.complete(ticket, rank, &failed), Err(Error::StaleTicket { .. })));
            return;
        }
        open.failed.extend(&failed);
        if !open.ranks_left.is_empty() {
            assert!(!self.session.complete(ticket, rank, &failed).unwrap());
            return;
        }
        let open = self.open.remove(&ticket).unwrap();
        // In early mode good pairs copied at the step; the torn ones show only now, at the latest possible moment.
        match self.setup.when {
            When::Late => self.copy(&open.pairs, &open.failed),
            When::Early => self.tear(&open),
        }
        assert!(self.session.complete(ticket, rank, &failed).unwrap());
        self.note_events();
        if let Pairs::Loads(pairs) = &open.pairs {
            for &index in &open.failed {
                let source = pairs[index].0.index() as u32;
                assert!(!self.published.contains_key(&(false, source)), "a copy that failed to load is still a hit");
            }
        }
        assert!(matches!(self.session.complete(ticket, rank, &[]), Err(Error::StaleTicket { .. })));
    }

    fn tear(&mut self, open: &Open) {
        for &index in &open.failed {
            let junk = self.junk();
            match &open.pairs {
                Pairs::Loads(pairs) => self.gpu[pairs[index].1.index()] = junk,
                Pairs::Stores(pairs) => self.cpu[pairs[index].1.index()] = junk,
            }
        }
    }

    pub(super) fn end(&mut self, which: usize, kind: u8) {
        let Some(id) = nth(&self.live, which) else { return };
        let key = RequestId::Int(id);
        let end = |session: &mut Session| match kind {
            0 => session.release(&key),
            1 => session.abort(&key),
            _ => session.preempt(&key),
        };
        end(&mut self.session).unwrap();
        assert_eq!(end(&mut self.session), Err(Error::UnknownRequest(key.clone())));
        assert!(self.session.extend(&key, &[1]).is_err() && self.session.commit(&key, 0).is_err());
        self.live.remove(&id);
    }

    pub(super) fn reset(&mut self) {
        let idle = self.live.is_empty() && self.open.is_empty();
        let before = self.session.table().stats();
        assert_eq!(self.session.reset(), idle);
        if idle {
            self.note_events();
            assert!(self.published.is_empty());
        } else {
            assert_eq!(before, self.session.table().stats());
        }
    }

    pub(super) fn stale(&mut self) {
        for never_issued in [0, u64::MAX] {
            let stale = self.session.complete(never_issued, 0, &[]);
            assert!(matches!(stale, Err(Error::StaleTicket { .. })));
        }
    }
}
