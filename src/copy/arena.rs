//! Host memory for the Cpu tier: one anonymous mapping, page-aligned, zeroed, touched before its first use.

use std::io;
use std::ptr;
use std::thread;

use super::error::CopyError;
use super::layout::HostSlots;

/// Every page has at least this many bytes.
const PAGE_BYTES: usize = 4096;
/// Most threads that touch pages: the kernel's zeroing is bound by memory well before that.
const MAX_TOUCH_THREADS: usize = 8;

/// The slots of the Cpu tier and the memory they are in, unmapped when dropped.
#[derive(Debug)]
pub struct HostArena {
    slots: HostSlots,
    total_bytes: usize,
}

impl HostArena {
    /// Maps address space for the slots. No page is there yet: see [`HostArena::touch`].
    ///
    /// Whether the machine has the memory is for the caller to ask before.
    pub fn map(num_blocks: usize, block_bytes: usize) -> Result<Self, CopyError> {
        let (slot_bytes, total_bytes) = HostSlots::sizes(num_blocks, block_bytes)?;
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing memory.
        let mapping = unsafe {
            libc::mmap(
                ptr::null_mut(),
                total_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if mapping == libc::MAP_FAILED {
            let reason = io::Error::last_os_error();
            let value = format!("{num_blocks} blocks of {slot_bytes} bytes");
            return Err(CopyError::config("num_blocks", value, format!("what the system maps: {reason}")));
        }
        // SAFETY: the range is the mapping just made. The advice may be refused; then pages are small.
        unsafe { libc::madvise(mapping, total_bytes, libc::MADV_HUGEPAGE) };
        let address = mapping.expose_provenance();
        Ok(Self { slots: HostSlots { address, num_blocks, block_bytes, slot_bytes }, total_bytes })
    }

    /// Has the kernel put zeroed pages behind bytes `start .. end` of the arena, with several threads.
    ///
    /// Bytes beyond the arena's end are left out. To be called before the memory is used: it writes zeros.
    pub fn touch(&self, start: usize, end: usize) {
        let (start, end) = (start.next_multiple_of(PAGE_BYTES), end.min(self.total_bytes));
        let num_threads = thread::available_parallelism().map_or(1, usize::from).min(MAX_TOUCH_THREADS);
        let share = (end.saturating_sub(start)).div_ceil(num_threads).next_multiple_of(PAGE_BYTES).max(PAGE_BYTES);
        thread::scope(|scope| {
            for from in (start..end).step_by(share) {
                let to = (from + share).min(end);
                // Without a thread to be had, this one does the work.
                if thread::Builder::new().spawn_scoped(scope, move || self.touch_share(from, to)).is_err() {
                    self.touch_share(from, to);
                }
            }
        });
    }

    fn touch_share(&self, start: usize, end: usize) {
        for offset in (start..end).step_by(PAGE_BYTES) {
            // SAFETY: the byte is inside the mapping, which lives as long as self; shares of threads are disjoint, and
            // nobody else uses the memory before it is touched.
            unsafe { ptr::with_exposed_provenance_mut::<u8>(self.slots.address + offset).write_volatile(0) };
        }
    }

    /// Where the slots are.
    pub fn slots(&self) -> HostSlots {
        self.slots
    }

    /// Bytes of all slots.
    pub fn total_bytes(&self) -> usize {
        self.total_bytes
    }
}

impl Drop for HostArena {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map`, and every user of the memory holds the arena.
        unsafe { libc::munmap(ptr::with_exposed_provenance_mut(self.slots.address), self.total_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_aligned_zeroed_and_writable_to_the_last_byte() {
        let arena = HostArena::map(3, 5000).unwrap();
        arena.touch(0, usize::MAX);
        let slots = arena.slots();
        assert_eq!((slots.address % PAGE_BYTES, slots.slot_bytes, arena.total_bytes()), (0, 8192, 24576));
        let start = ptr::with_exposed_provenance_mut::<u8>(slots.address);
        // SAFETY: the arena has this many bytes, and nobody else has its address.
        let bytes = unsafe { std::slice::from_raw_parts_mut(start, arena.total_bytes()) };
        assert!(bytes.iter().all(|&byte| byte == 0));
        bytes.fill(7);
    }

    #[test]
    fn sizes_are_refused_by_name() {
        for (num_blocks, block_bytes, expected) in [
            (0, 1, "num_blocks"),
            (1, 0, "block_bytes"),
            (1 << 24, 1 << 40, "block_bytes"),
            (1 << 24, 1 << 38, "num_blocks"),
        ] {
            match HostArena::map(num_blocks, block_bytes) {
                Err(CopyError::Config { argument, .. }) => assert_eq!(argument, expected),
                other => panic!("{num_blocks} {block_bytes}: {other:?}"),
            }
        }
    }
}
