//! Registration of the arena with a device driver, chunk by chunk, through whatever plugs in as [`Registrar`].

use std::process;
use std::sync::Arc;

use super::arena::HostArena;
use super::layout::HostSlots;

/// Chunks are smaller than this: drivers refuse larger ones.
const CHUNK_LIMIT_BYTES: usize = 64 << 30;

/// What makes host memory known to a device, so that it is pinned and reachable by copy engines.
pub trait Registrar: Send + Sync {
    /// Registers `bytes` bytes at `address`; on refusal the driver's own words, and nothing is registered.
    fn register(&self, address: usize, bytes: usize) -> Result<(), String>;

    /// Takes back what `register` did with the same arguments.
    fn unregister(&self, address: usize, bytes: usize);
}

/// An arena and what was registered of it: all, or after a refusal nothing. Taken back when dropped.
pub struct Registration {
    arena: Arc<HostArena>,
    registrar: Arc<dyn Registrar>,
    chunks: Vec<(usize, usize)>,
    refusal: Option<String>,
    owner: u32,
}

impl Registration {
    /// Registers all of the arena. A refusal is no error: the memory stays usable, unpinned, and
    /// [`Registration::refusal`] says why.
    pub fn new(arena: Arc<HostArena>, registrar: Arc<dyn Registrar>) -> Self {
        let chunks = chunks(arena.slots(), CHUNK_LIMIT_BYTES);
        Self::with_chunks(arena, registrar, chunks)
    }

    fn with_chunks(
        arena: Arc<HostArena>,
        registrar: Arc<dyn Registrar>,
        chunks: Result<Vec<(usize, usize)>, String>,
    ) -> Self {
        let mut made = Self { arena, registrar, chunks: Vec::new(), refusal: None, owner: process::id() };
        let refusal = chunks.and_then(|chunks| {
            chunks.into_iter().try_for_each(|(address, bytes)| {
                made.registrar
                    .register(address, bytes)
                    .map_err(|reason| format!("{bytes} bytes at {address:#x}: {reason}"))?;
                made.chunks.push((address, bytes));
                Ok(())
            })
        });
        if let Err(reason) = refusal {
            made.take_back();
            made.refusal = Some(reason);
        }
        made
    }

    /// The memory.
    pub fn arena(&self) -> &Arc<HostArena> {
        &self.arena
    }

    /// What is registered: (address, bytes), in order, no slot in two of them.
    pub fn chunks(&self) -> &[(usize, usize)] {
        &self.chunks
    }

    /// Why nothing is registered, if nothing is.
    pub fn refusal(&self) -> Option<&str> {
        self.refusal.as_deref()
    }

    fn take_back(&mut self) {
        for (address, bytes) in self.chunks.drain(..).rev() {
            self.registrar.unregister(address, bytes);
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // The registration is the parent's: a forked child has no use of the driver, and must not end it.
        if process::id() == self.owner {
            self.take_back();
        }
    }
}

/// Cuts the slots into stretches below `limit` bytes, at borders of slots.
fn chunks(slots: HostSlots, limit: usize) -> Result<Vec<(usize, usize)>, String> {
    let slots_per_chunk = (limit - 1) / slots.slot_bytes;
    if slots_per_chunk == 0 {
        return Err(format!("a slot of {} bytes is not below the {limit} bytes of a chunk", slots.slot_bytes));
    }
    let cut = |first: usize| {
        let num_slots = slots_per_chunk.min(slots.num_blocks - first);
        (slots.address + first * slots.slot_bytes, num_slots * slots.slot_bytes)
    };
    Ok((0..slots.num_blocks).step_by(slots_per_chunk).map(cut).collect())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Counts, and refuses the call of this index.
    struct Counting {
        live: Mutex<Vec<(usize, usize)>>,
        calls: Mutex<usize>,
        refuse_at: usize,
    }

    impl Counting {
        fn new(refuse_at: usize) -> Arc<Self> {
            Arc::new(Self { live: Mutex::default(), calls: Mutex::default(), refuse_at })
        }

        fn live(&self) -> Vec<(usize, usize)> {
            self.live.lock().unwrap().clone()
        }
    }

    impl Registrar for Counting {
        fn register(&self, address: usize, bytes: usize) -> Result<(), String> {
            let mut calls = self.calls.lock().unwrap();
            *calls += 1;
            if *calls > self.refuse_at {
                return Err("out of memory".to_owned());
            }
            self.live.lock().unwrap().push((address, bytes));
            Ok(())
        }

        fn unregister(&self, address: usize, bytes: usize) {
            let mut live = self.live.lock().unwrap();
            let at = live.iter().position(|&chunk| chunk == (address, bytes)).expect("registered before");
            live.remove(at);
        }
    }

    fn register(registrar: &Arc<Counting>) -> Registration {
        let arena = Arc::new(HostArena::map(10, 5000).unwrap()); // slots of 8192 bytes
        let chunks = chunks(arena.slots(), 4 * 8192); // three slots are below it
        Registration::with_chunks(arena, Arc::clone(registrar) as Arc<dyn Registrar>, chunks)
    }

    #[test]
    fn chunks_are_below_the_limit_and_end_between_slots() {
        let registrar = Counting::new(usize::MAX);
        let registration = register(&registrar);
        let start = registration.arena().slots().address;
        let slots: Vec<_> =
            registration.chunks().iter().map(|&(address, bytes)| ((address - start) / 8192, bytes / 8192)).collect();
        assert_eq!(slots, [(0, 3), (3, 3), (6, 3), (9, 1)]);
        assert_eq!((registrar.live(), registration.refusal()), (registration.chunks().to_vec(), None));
        drop(registration);
        assert_eq!(registrar.live(), []);
    }

    #[test]
    fn a_large_pool_is_cut_below_64_gib_without_rounding() {
        let slots = HostSlots { address: 1 << 44, num_blocks: 100_001, block_bytes: 2 << 20, slot_bytes: 2 << 20 };
        let cut = chunks(slots, CHUNK_LIMIT_BYTES).unwrap();
        assert_eq!(cut.len(), 4);
        assert!(cut.iter().all(|&(_, bytes)| bytes < 64 << 30));
        assert_eq!(cut.iter().map(|&(_, bytes)| bytes).sum::<usize>(), 100_001 * (2 << 20));
        assert!(cut.windows(2).all(|two| two[0].0 + two[0].1 == two[1].0));
    }

    #[test]
    fn a_refusal_anywhere_leaves_nothing_registered_and_the_memory_usable() {
        for refuse_at in 0..4 {
            let registrar = Counting::new(refuse_at);
            let registration = register(&registrar);
            assert_eq!((registrar.live(), registration.chunks().len()), (vec![], 0));
            assert!(registration.refusal().unwrap().ends_with("out of memory"));
            assert_eq!(*registrar.calls.lock().unwrap(), refuse_at + 1, "none is tried after a refusal");
            registration.arena().touch(0, usize::MAX);
        }
    }

    #[test]
    fn a_slot_that_fits_no_chunk_is_a_refusal() {
        let slots = HostSlots { address: 1 << 44, num_blocks: 2, block_bytes: 8192, slot_bytes: 8192 };
        assert!(chunks(slots, 8192).is_err());
        assert_eq!(chunks(slots, 8193).unwrap().len(), 2);
    }

    #[test]
    fn a_forked_child_leaves_the_registration_to_the_parent() {
        let registrar = Counting::new(usize::MAX);
        let mut registration = register(&registrar);
        registration.owner += 1; // as a child sees it
        drop(registration);
        assert_eq!(registrar.live().len(), 4);
    }
}
