//! From Rust errors to the exception classes of `kvtier.errors`, which have more than one base class each.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;
use pyo3::BoundObject;

use crate::error::Error;
use crate::session::RequestId;

static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

pub(super) fn raise<'py>(py: Python<'py>, class: &str, args: impl IntoPyObject<'py, Target = PyTuple>) -> PyErr {
    let build = || -> PyResult<PyErr> {
        let module = MODULE.get_or_try_init(py, || PyModule::import(py, "kvtier.errors").map(Bound::unbind))?;
        let args = args.into_pyobject(py).map_err(Into::into)?;
        Ok(PyErr::from_value(module.bind(py).getattr(class)?.call1(args.into_bound())?))
    };
    build().unwrap_or_else(|error| error)
}

/// `ConfigError` for an argument that never reached the table.
pub(super) fn config(py: Python<'_>, argument: &str, value: &str, limit: &str) -> PyErr {
    raise(py, "ConfigError", (argument, value, limit))
}

/// The exception for an error of the table.
pub(super) fn from_error(py: Python<'_>, error: Error) -> PyErr {
    match error {
        Error::Config { argument, value, limit } => raise(py, "ConfigError", (argument, value, limit)),
        Error::OutOfBlocks { needed, available, total } => raise(py, "OutOfBlocksError", (needed, available, total)),
        Error::UnknownRequest(RequestId::Int(id)) => raise(py, "UnknownRequestError", (id,)),
        Error::UnknownRequest(RequestId::Text(id)) => raise(py, "UnknownRequestError", (&*id,)),
        Error::StaleTicket { ticket, reason } => raise(py, "StaleTicketError", (ticket, reason)),
        Error::SessionInUse => raise(py, "SessionInUseError", ()),
        Error::Invariant(what) => raise(py, "InvariantError", (what,)),
    }
}

/// `StaleTicketError` for a number that no ticket can have.
pub(super) fn never_issued(ticket: &Bound<'_, PyAny>) -> PyErr {
    raise(ticket.py(), "StaleTicketError", (ticket, "it was never issued"))
}
