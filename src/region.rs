//! One contiguous, versioned, pointer-free region per tier: a header and flat arrays at fixed offsets.
//!
//! All-zero memory is an empty tier, so a region costs nothing until it is used. Only this file turns offsets into
//! references. Under loom, whose atomics are not plain memory, the same arrays are ordinary boxes.

#[cfg(not(kvtier_loom))]
use crate::error::Error;
use crate::error::Result;
use crate::index::Bucket;
use crate::slot::Slot;
use crate::sync::{AtomicI64, AtomicU32, AtomicU64};

/// Says that a region is one of ours: "kvtier" and the byte order.
const MAGIC: u64 = u64::from_le_bytes(*b"kvtier\0\x01");
/// Changes with every change of the layout below or of what its words mean.
const VERSION: u32 = 1;

/// The start of a region. Lines apart where different threads write.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Header {
    magic: u64,
    version: u32,
    num_blocks: u32,
    /// Stamps given out so far.
    pub(crate) clock: AtomicU64,
    pub(crate) inbox: Inbox,
    pub(crate) order: OrderEnds,
    pub(crate) gauges: Gauges,
}

/// Slots whose last hold was released and that are not in the eviction order yet.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Inbox {
    pub(crate) head: AtomicU32,
}

/// The ends of the eviction order, and the token of the one thread that may touch it.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct OrderEnds {
    pub(crate) token: AtomicU32,
    pub(crate) oldest: AtomicU32,
    pub(crate) youngest: AtomicU32,
    /// No word of the free bitmap before this one is known to have a free slot.
    pub(crate) first_free_word: AtomicU32,
}

/// How many slots are what. Signed, since an increase may be seen after the decrease that undoes it.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Gauges {
    pub(crate) taken: AtomicI64,
    pub(crate) cached: AtomicI64,
    pub(crate) in_flight: AtomicI64,
    /// Cached without a hold, and to be found in the eviction order or its inbox.
    pub(crate) idle: AtomicI64,
}

pub(crate) use imp::Region;

fn num_buckets(num_blocks: usize) -> usize {
    (num_blocks * 2).div_ceil(Bucket::LEN).next_power_of_two()
}

#[cfg(not(kvtier_loom))]
mod imp {
    use std::alloc::{alloc_zeroed, dealloc, Layout};
    use std::ptr::NonNull;

    use super::{num_buckets, AtomicU64, Bucket, Error, Header, Result, Slot, MAGIC, VERSION};

    /// Memory of one tier.
    #[derive(Debug)]
    pub(crate) struct Region {
        start: NonNull<u8>,
        layout: Layout,
        num_blocks: usize,
        slots_at: usize,
        buckets_at: usize,
        bitmap_at: usize,
    }

    // SAFETY: the region owns its memory, and everything in it that is ever written after construction is atomic.
    unsafe impl Send for Region {}
    // SAFETY: as above; no method gives a mutable reference.
    unsafe impl Sync for Region {}

    impl Region {
        /// An empty tier of `num_blocks` slots; `argument` names the size in the error when memory does not suffice.
        pub(crate) fn new(num_blocks: usize, argument: &str) -> Result<Self> {
            let too_large = || Error::config(argument, num_blocks, "a tier whose table fits memory");
            let plan = || {
                let header = Layout::new::<Header>();
                let (layout, slots_at) = header.extend(Layout::array::<Slot>(num_blocks)?)?;
                let (layout, buckets_at) = layout.extend(Layout::array::<Bucket>(num_buckets(num_blocks))?)?;
                let (layout, bitmap_at) = layout.extend(Layout::array::<AtomicU64>(num_blocks.div_ceil(64))?)?;
                Ok::<_, std::alloc::LayoutError>((layout.pad_to_align(), slots_at, buckets_at, bitmap_at))
            };
            let (layout, slots_at, buckets_at, bitmap_at) = plan().map_err(|_| too_large())?;
            // SAFETY: the layout has a size above zero, since it contains the header.
            let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(too_large)?;
            let header = Header { magic: MAGIC, version: VERSION, num_blocks: num_blocks as u32, ..Header::default() };
            // SAFETY: the region is large enough and aligned for its header, and nobody else has it yet.
            unsafe { start.cast::<Header>().write(header) };
            Ok(Self { start, layout, num_blocks, slots_at, buckets_at, bitmap_at })
        }

        pub(crate) fn header(&self) -> &Header {
            // SAFETY: written at construction, lives as long as `self`, and only its atomics change.
            unsafe { self.start.cast::<Header>().as_ref() }
        }

        /// `len` values of `T` at byte `at`.
        ///
        /// # Safety
        /// The layout has `len` values of `T` there, `T` is made of atomics, and zero bytes are a valid `T`.
        unsafe fn array<T>(&self, at: usize, len: usize) -> &[T] {
            // SAFETY: by the caller's promise the memory is inside the region, aligned, initialised (zeroed), alive as
            // long as `self`, and changed only through atomics.
            unsafe { std::slice::from_raw_parts(self.start.add(at).cast::<T>().as_ptr(), len) }
        }

        pub(crate) fn slots(&self) -> &[Slot] {
            // SAFETY: the layout has `num_blocks` slots there; a slot is atomics, for which zero is valid.
            unsafe { self.array(self.slots_at, self.num_blocks) }
        }

        pub(crate) fn buckets(&self) -> &[Bucket] {
            // SAFETY: the layout has so many buckets there; a bucket is atomics, for which zero is valid.
            unsafe { self.array(self.buckets_at, num_buckets(self.num_blocks)) }
        }

        /// A bit per slot that is taken.
        pub(crate) fn bitmap(&self) -> &[AtomicU64] {
            // SAFETY: the layout has so many words there; zero is a valid atomic.
            unsafe { self.array(self.bitmap_at, self.num_blocks.div_ceil(64)) }
        }

        pub(crate) fn is_intact(&self) -> bool {
            let header = self.header();
            (header.magic, header.version, header.num_blocks as usize) == (MAGIC, VERSION, self.num_blocks)
        }
    }

    impl Drop for Region {
        fn drop(&mut self) {
            // SAFETY: allocated with this layout in `new`, and no reference outlives `self`. Atomics need no drop.
            unsafe { dealloc(self.start.as_ptr(), self.layout) };
        }
    }
}

#[cfg(kvtier_loom)]
mod imp {
    use super::{num_buckets, AtomicU64, Bucket, Header, Result, Slot, MAGIC, VERSION};

    /// The arrays of one tier, as boxes.
    #[derive(Debug)]
    pub(crate) struct Region {
        header: Header,
        slots: Box<[Slot]>,
        buckets: Box<[Bucket]>,
        bitmap: Box<[AtomicU64]>,
    }

    impl Region {
        #[allow(clippy::unnecessary_wraps)] // as the real one
        pub(crate) fn new(num_blocks: usize, _argument: &str) -> Result<Self> {
            let header = Header { magic: MAGIC, version: VERSION, num_blocks: num_blocks as u32, ..Header::default() };
            Ok(Self {
                header,
                slots: (0..num_blocks).map(|_| Slot::default()).collect(),
                buckets: (0..num_buckets(num_blocks)).map(|_| Bucket::default()).collect(),
                bitmap: (0..num_blocks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            })
        }
        pub(crate) fn header(&self) -> &Header {
            &self.header
        }
        pub(crate) fn slots(&self) -> &[Slot] {
            &self.slots
        }
        pub(crate) fn buckets(&self) -> &[Bucket] {
            &self.buckets
        }
        pub(crate) fn bitmap(&self) -> &[AtomicU64] {
            &self.bitmap
        }
        pub(crate) fn is_intact(&self) -> bool {
            self.header.magic == MAGIC && self.header.version == VERSION
        }
    }
}
