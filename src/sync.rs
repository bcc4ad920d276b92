//! The atomics of the table: the real ones, or loom's when its model checker runs the tests (`--cfg kvtier_loom`).

#[cfg(kvtier_loom)]
pub(crate) use loom::sync::atomic::{fence, AtomicI64, AtomicU32, AtomicU64};
#[cfg(not(kvtier_loom))]
pub(crate) use std::sync::atomic::{fence, AtomicI64, AtomicU32, AtomicU64};

pub(crate) use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};

/// A gauge's value. Below zero, for a moment, where an increase is seen after the decrease that undoes it.
pub(crate) fn at_least_zero(gauge: i64) -> usize {
    usize::try_from(gauge).unwrap_or(0)
}

/// A cell whose accesses are ordered by atomics beside it.
#[derive(Debug, Default)]
pub(crate) struct OrderedCell<T>(imp::UnsafeCell<T>);

// SAFETY: `with` and `with_mut` are unsafe, and their callers promise to order conflicting accesses.
unsafe impl<T: Send + Sync> Sync for OrderedCell<T> {}

impl<T> OrderedCell<T> {
    /// Reads the content.
    ///
    /// # Safety
    /// No `with_mut` runs at the same time, and every earlier one happens before this call.
    pub(crate) unsafe fn with<R>(&self, read: impl FnOnce(&T) -> R) -> R {
        // SAFETY: by the caller's promise there is no mutable reference now.
        imp::with(&self.0, |content| read(unsafe { &*content }))
    }

    /// Changes the content.
    ///
    /// # Safety
    /// No other access runs at the same time, and every earlier one happens before this call.
    pub(crate) unsafe fn with_mut<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: by the caller's promise there is no other reference now.
        imp::with_mut(&self.0, |content| change(unsafe { &mut *content }))
    }
}

#[cfg(not(kvtier_loom))]
mod imp {
    pub(super) use std::cell::UnsafeCell;

    pub(super) fn with<T, R>(cell: &UnsafeCell<T>, read: impl FnOnce(*const T) -> R) -> R {
        read(cell.get())
    }
    pub(super) fn with_mut<T, R>(cell: &UnsafeCell<T>, change: impl FnOnce(*mut T) -> R) -> R {
        change(cell.get())
    }
}

#[cfg(kvtier_loom)]
mod imp {
    pub(super) use loom::cell::UnsafeCell;

    pub(super) fn with<T, R>(cell: &UnsafeCell<T>, read: impl FnOnce(*const T) -> R) -> R {
        cell.with(read)
    }
    pub(super) fn with_mut<T, R>(cell: &UnsafeCell<T>, change: impl FnOnce(*mut T) -> R) -> R {
        cell.with_mut(change)
    }
}
