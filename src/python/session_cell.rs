//! The scheduler's side of a table, where the language does not keep a second thread away.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;

use super::errors;
use crate::{Error, Session};

/// A session that one thread uses at a time. Taking it never waits: a second scheduler thread is a mistake, and is told.
pub(super) struct SessionCell {
    in_use: AtomicBool,
    session: UnsafeCell<Session>,
}

// SAFETY: the session is reached only through `Taken`, of which there is at most one at a time.
unsafe impl Sync for SessionCell {}

/// The session, until dropped.
pub(super) struct Taken<'a>(&'a SessionCell);

impl SessionCell {
    pub(super) fn new(session: Session) -> Self {
        Self { in_use: AtomicBool::new(false), session: UnsafeCell::new(session) }
    }

    pub(super) fn try_take(&self) -> Option<Taken<'_>> {
        // Acquire: what the last user did is visible. Relaxed on failure: nothing is read.
        let taken = self.in_use.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        taken.is_ok().then_some(Taken(self))
    }

    pub(super) fn take(&self, py: Python<'_>) -> PyResult<Taken<'_>> {
        self.try_take().ok_or_else(|| errors::from_error(py, Error::SessionInUse))
    }
}

impl Deref for Taken<'_> {
    type Target = Session;
    fn deref(&self) -> &Session {
        // SAFETY: this is the only `Taken`, and it is borrowed.
        unsafe { &*self.0.session.get() }
    }
}

impl DerefMut for Taken<'_> {
    fn deref_mut(&mut self) -> &mut Session {
        // SAFETY: this is the only `Taken`, and it is borrowed mutably.
        unsafe { &mut *self.0.session.get() }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        // Release: the next user sees what we did.
        self.0.in_use.store(false, Ordering::Release);
    }
}
