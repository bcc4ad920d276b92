//! The extension module `kvtier._core`.

mod args;
mod copy;
mod errors;
mod host;
mod outline;
mod plan;
mod session_cell;
mod table;

use pyo3::prelude::*;

/// Free-threaded Python need not switch its lock on: a session takes one thread at a time and refuses a second, and all
/// else is for any thread.
#[pymodule(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("__build__", if cfg!(debug_assertions) { "debug" } else { "release" })?;
    module.add_class::<table::BlockTable>()?;
    module.add_class::<plan::Admission>()?;
    module.add_class::<plan::Plan>()?;
    module.add_class::<plan::Swaps>()?;
    module.add_class::<plan::Event>()?;
    module.add_class::<host::HostTable>()?;
    copy::register(module)?;
    module.add_class::<outline::OutlinedTickets>()?;
    Ok(())
}
