//! The copy engine in Python: thin classes that `kvtier.memory` and `kvtier.copy` wrap.

use std::ffi::c_int;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use numpy::{PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::PyDict;

use super::{args, errors};
use crate::copy::engine::{CopyOptions, DROP_TIMEOUT, MAX_QUEUED, MAX_THREADS};
use crate::copy::layout::MAX_BLOCKS;
use crate::copy::{layout, CopyEngine, CopyError, CopyRequest, Direction, Fragment, Report};

/// How long a wait goes on before it looks for signals.
const SIGNAL_SLICE: Duration = Duration::from_millis(50);
/// Longest wait that can be asked for.
const MAX_TIMEOUT_S: f64 = 86_400.0;

type Reports = Vec<(u64, Vec<u32>)>;
pub(super) type PairArray<'py> = PyReadonlyArray2<'py, i32>;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<DescribedMemory>()?;
    module.add_class::<HostArena>()?;
    module.add_class::<CopyWorkers>()?;
    Ok(())
}

pub(super) fn raise(py: Python<'_>, error: CopyError) -> PyErr {
    match error {
        CopyError::Config { argument, value, limit } => errors::config(py, &argument, &value, &limit),
        CopyError::TicketInUse { ticket } => {
            errors::config(py, "ticket", &ticket.to_string(), "a ticket that is not in the engine, or was collected")
        }
        other => errors::raise(py, "TransferError", (other.to_string(),)),
    }
}

fn timeout(value: &Bound<'_, PyAny>) -> PyResult<Duration> {
    let seconds: f64 = value.extract().map_err(|_| args::type_error("timeout_s", "a number of seconds", value))?;
    if (0.0..=MAX_TIMEOUT_S).contains(&seconds) {
        return Ok(Duration::from_secs_f64(seconds));
    }
    Err(errors::config(value.py(), "timeout_s", &seconds.to_string(), &format!("0 .. {MAX_TIMEOUT_S} seconds")))
}

fn direction(value: &Bound<'_, PyAny>) -> PyResult<Direction> {
    match value.extract::<PyBackedStr>().as_deref() {
        Ok("load") => Ok(Direction::Load),
        Ok("store") => Ok(Direction::Store),
        _ => {
            let limit = "\"load\" (Cpu to Gpu) or \"store\" (Gpu to Cpu)";
            Err(errors::config(value.py(), "direction", &args::text(value), limit))
        }
    }
}

/// The pairs of an array of shape (n, 2); empty arrays may have any second dimension.
fn pairs(list: &'static str, array: &PairArray<'_>) -> PyResult<Vec<[i32; 2]>> {
    let shape = array.shape();
    if shape[0] > 0 && shape[1] != 2 {
        let limit = "shape (n, 2): (source block id, destination block id)";
        return Err(errors::config(array.py(), list, &format!("shape ({}, {})", shape[0], shape[1]), limit));
    }
    Ok(array.as_array().rows().into_iter().map(|row| [row[0], row[1]]).collect())
}

/// One list under a ticket.
pub(super) fn pairs_request(
    ticket: &Bound<'_, PyAny>,
    direction_name: &Bound<'_, PyAny>,
    list: &PairArray<'_>,
) -> PyResult<CopyRequest> {
    let ticket = args::count("ticket", ticket)? as u64;
    let direction = direction(direction_name)?;
    Ok(CopyRequest { ticket, direction, pairs: pairs("pairs", list)?, list: "pairs" })
}

/// The lists of a plan that have a ticket; a list without one has to be empty.
pub(super) fn plan_requests(
    py: Python<'_>,
    (load_ticket, loads): (Option<Bound<'_, PyAny>>, PairArray<'_>),
    (store_ticket, stores): (Option<Bound<'_, PyAny>>, PairArray<'_>),
) -> PyResult<Vec<CopyRequest>> {
    let mut requests = Vec::with_capacity(2);
    for (ticket, argument, direction, list, array) in [
        (load_ticket, "load_ticket", Direction::Load, "loads", loads),
        (store_ticket, "store_ticket", Direction::Store, "stores", stores),
    ] {
        let pairs = pairs(list, &array)?;
        match ticket {
            Some(ticket) => {
                let ticket = args::count(argument, &ticket)? as u64;
                requests.push(CopyRequest { ticket, direction, pairs, list });
            }
            None if pairs.is_empty() => {}
            None => {
                let limit = format!("a ticket for the {} pairs of {list}", pairs.len());
                return Err(errors::config(py, argument, "None", &limit));
            }
        }
    }
    Ok(requests)
}

/// Where the blocks of the engine's memory are.
#[pyclass(frozen, module = "kvtier._core")]
pub(super) struct DescribedMemory {
    pub(super) inner: layout::DescribedMemory,
}

#[pymethods]
impl DescribedMemory {
    #[new]
    fn new(
        fragments: Vec<(Bound<'_, PyAny>, Bound<'_, PyAny>, Bound<'_, PyAny>)>,
        num_blocks: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let py = num_blocks.py();
        let num_blocks = args::size("num_blocks", num_blocks, 1..=MAX_BLOCKS)?;
        let fragments = fragments
            .into_iter()
            .enumerate()
            .map(|(index, (address, block_stride, bytes))| {
                let count = |field, value| args::count(&format!("fragments[{index}].{field}"), value);
                Ok(Fragment {
                    address: count("address", &address)?,
                    block_stride: count("block_stride", &block_stride)?,
                    bytes: count("bytes", &bytes)?,
                })
            })
            .collect::<PyResult<Vec<_>>>()?;
        let inner = layout::DescribedMemory::new(fragments, num_blocks).map_err(|error| raise(py, error))?;
        Ok(Self { inner })
    }

    #[getter]
    fn num_blocks(&self) -> usize {
        self.inner.num_blocks()
    }

    #[getter]
    fn block_bytes(&self) -> usize {
        self.inner.block_bytes()
    }

    #[getter]
    fn fragments(&self) -> Vec<(usize, usize, usize)> {
        self.inner.fragments().iter().map(|part| (part.address, part.block_stride, part.bytes)).collect()
    }
}

/// Host memory; a writable buffer of all its bytes.
#[pyclass(frozen, module = "kvtier._core")]
pub(super) struct HostArena {
    pub(super) inner: Arc<crate::copy::HostArena>,
}

#[pymethods]
impl HostArena {
    #[new]
    fn new(num_blocks: &Bound<'_, PyAny>, block_bytes: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = num_blocks.py();
        let num_blocks = args::size("num_blocks", num_blocks, 1..=MAX_BLOCKS)?;
        let block_bytes = args::size("block_bytes", block_bytes, 1..=usize::MAX)?;
        let arena = crate::copy::HostArena::map(num_blocks, block_bytes).map_err(|error| raise(py, error))?;
        Ok(Self { inner: Arc::new(arena) })
    }

    /// Sizes of one slot and of all, in bytes, without making an arena.
    #[staticmethod]
    fn sizes(num_blocks: &Bound<'_, PyAny>, block_bytes: &Bound<'_, PyAny>) -> PyResult<(usize, usize)> {
        let py = num_blocks.py();
        let num_blocks = args::size("num_blocks", num_blocks, 1..=MAX_BLOCKS)?;
        let block_bytes = args::size("block_bytes", block_bytes, 1..=usize::MAX)?;
        layout::HostSlots::sizes(num_blocks, block_bytes).map_err(|error| raise(py, error))
    }

    /// Puts zeroed pages behind all bytes, in slices, so that a signal is noticed between them.
    fn touch(&self, py: Python<'_>) -> PyResult<()> {
        const SLICE_BYTES: usize = 256 << 20;
        for start in (0..self.inner.total_bytes()).step_by(SLICE_BYTES) {
            py.check_signals()?;
            py.detach(|| self.inner.touch(start, start + SLICE_BYTES));
        }
        Ok(())
    }

    #[getter]
    fn num_blocks(&self) -> usize {
        self.inner.slots().num_blocks
    }

    #[getter]
    fn block_bytes(&self) -> usize {
        self.inner.slots().block_bytes
    }

    #[getter]
    fn slot_bytes(&self) -> usize {
        self.inner.slots().slot_bytes
    }

    #[getter]
    fn address(&self) -> usize {
        self.inner.slots().address
    }

    /// # Safety
    /// Called by the interpreter with a `Py_buffer` to fill.
    #[allow(clippy::needless_pass_by_value)] // the protocol asks for it
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no view to fill"));
        }
        let arena = &slf.get().inner;
        let start = ptr::with_exposed_provenance_mut(arena.slots().address);
        // SAFETY: `view` is the interpreter's, to be filled; the bytes are the arena's, which the view keeps alive
        // through its reference to `slf`. A size within isize was checked when the arena was mapped.
        let status =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, arena.total_bytes() as isize, 0, flags) };
        if status == 0 {
            Ok(())
        } else {
            Err(PyErr::fetch(slf.py()))
        }
    }
}

/// The copy engine and what keeps the engine's memory alive while its threads can touch it.
#[pyclass(frozen, weakref, module = "kvtier._core")]
struct CopyWorkers {
    engine: CopyEngine,
    /// Dropped only after the threads have ended.
    owner: Mutex<Option<Py<PyAny>>>,
}

impl CopyWorkers {
    fn submit_all(&self, py: Python<'_>, requests: Vec<CopyRequest>) -> PyResult<()> {
        py.detach(|| self.engine.submit(requests)).map_err(|error| raise(py, error))
    }

    /// Calls `attempt` with slices of the time left until it is done or the time is over; signals raise in between.
    fn in_slices(
        py: Python<'_>,
        limit: Duration,
        attempt: impl Fn(Duration) -> Result<bool, CopyError> + Sync,
    ) -> PyResult<bool> {
        let end = Instant::now() + limit;
        loop {
            py.check_signals()?;
            let left = end.saturating_duration_since(Instant::now());
            let done = py.detach(|| attempt(left.min(SIGNAL_SLICE))).map_err(|error| raise(py, error))?;
            if done || left.is_zero() {
                return Ok(done);
            }
        }
    }

    /// Stops the threads and lets go of the memory; the memory of threads that do not end is never let go.
    fn stop_and_release(&self) -> Option<Py<PyAny>> {
        let ended = self.engine.stop(DROP_TIMEOUT);
        let owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner).take();
        if ended {
            return owner;
        }
        std::mem::forget(owner);
        None
    }
}

#[pymethods]
impl CopyWorkers {
    /// `owner` is whatever keeps the described memory allocated.
    #[new]
    fn new(
        gpu: &DescribedMemory,
        owner: Py<PyAny>,
        cpu: &HostArena,
        num_threads: &Bound<'_, PyAny>,
        max_queued: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let py = num_threads.py();
        let options = CopyOptions {
            num_threads: args::size("num_threads", num_threads, 1..=MAX_THREADS)?,
            max_queued: args::size("max_queued", max_queued, 1..=MAX_QUEUED)?,
        };
        // SAFETY: `owner` keeps the described memory and is dropped only after `stop` returned true, else never.
        let engine = unsafe { CopyEngine::start(gpu.inner.clone(), Arc::clone(&cpu.inner), options) };
        Ok(Self { engine: engine.map_err(|error| raise(py, error))?, owner: Mutex::new(Some(owner)) })
    }

    fn submit(
        &self,
        ticket: &Bound<'_, PyAny>,
        direction_name: &Bound<'_, PyAny>,
        list: PairArray<'_>,
    ) -> PyResult<()> {
        let py = list.py();
        let request = pairs_request(ticket, direction_name, &list)?;
        drop(list);
        self.submit_all(py, vec![request])
    }

    fn submit_plan(
        &self,
        py: Python<'_>,
        load_ticket: Option<Bound<'_, PyAny>>,
        loads: PairArray<'_>,
        store_ticket: Option<Bound<'_, PyAny>>,
        stores: PairArray<'_>,
    ) -> PyResult<()> {
        let requests = plan_requests(py, (load_ticket, loads), (store_ticket, stores))?;
        if requests.is_empty() {
            return Ok(());
        }
        self.submit_all(py, requests)
    }

    fn poll(&self, py: Python<'_>) -> PyResult<Reports> {
        self.engine.poll().map(as_tuples).map_err(|error| raise(py, error))
    }

    fn wait(&self, py: Python<'_>, timeout_s: &Bound<'_, PyAny>) -> PyResult<Reports> {
        let reports = Mutex::new(Vec::new());
        Self::in_slices(py, timeout(timeout_s)?, |left| {
            let new = self.engine.wait(left)?;
            let done = !new.is_empty() || self.engine.is_finished()?;
            *reports.lock().unwrap_or_else(PoisonError::into_inner) = new;
            Ok(done)
        })?;
        Ok(as_tuples(reports.into_inner().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Refuses new tickets, lets the queued ones finish for at most `timeout_s`, then stops the threads.
    fn close(&self, py: Python<'_>, timeout_s: &Bound<'_, PyAny>) -> PyResult<()> {
        let limit = timeout(timeout_s)?;
        if self.engine.refuse_new().is_err() {
            return Ok(()); // a forked child has nothing to close
        }
        let drained = Self::in_slices(py, limit, |left| self.engine.wait_idle(left));
        let ended = py.detach(|| self.engine.stop(DROP_TIMEOUT));
        drained?;
        if ended {
            return Ok(());
        }
        let text = format!("copy threads did not end within {} s; they keep their memory", DROP_TIMEOUT.as_secs());
        Err(errors::raise(py, "TransferError", (text,)))
    }

    /// Tells the threads to end, without waiting.
    fn request_stop(&self) {
        self.engine.request_stop();
    }

    /// Tells the threads to end and waits for it, at most `timeout_s`; returns whether they have.
    fn stop(&self, py: Python<'_>, timeout_s: &Bound<'_, PyAny>) -> PyResult<bool> {
        let limit = timeout(timeout_s)?;
        Ok(py.detach(|| self.engine.stop(limit)))
    }

    fn inject_failures(
        &self,
        py: Python<'_>,
        direction_name: &Bound<'_, PyAny>,
        pairs: Option<Vec<Bound<'_, PyAny>>>,
        num_tickets: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let direction = direction(direction_name)?;
        let num_tickets = args::count("num_tickets", num_tickets)?;
        let index = |(position, value): (usize, Bound<'_, PyAny>)| {
            args::size(&format!("pairs[{position}]"), &value, 0..=MAX_BLOCKS - 1).map(|index| index as u32)
        };
        let pairs = pairs.map(|list| list.into_iter().enumerate().map(index).collect()).transpose()?;
        self.engine.inject_failures(direction, pairs, num_tickets).map_err(|error| raise(py, error))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.engine.stats().map_err(|error| raise(py, error))?;
        let dict = PyDict::new(py);
        for (name, value) in [
            ("num_tickets", stats.num_tickets),
            ("num_finished_tickets", stats.num_finished_tickets),
            ("num_refused_tickets", stats.num_refused_tickets),
            ("num_pairs", stats.num_pairs),
            ("num_failed_pairs", stats.num_failed_pairs),
            ("num_pieces", stats.num_pieces),
            ("load_bytes", stats.load_bytes),
            ("store_bytes", stats.store_bytes),
            ("num_panics", stats.num_panics),
            ("queue_depth", stats.queue_depth as u64),
            ("num_uncollected", stats.num_uncollected as u64),
        ] {
            dict.set_item(name, value)?;
        }
        dict.set_item("load_seconds", stats.load_time.as_secs_f64())?;
        dict.set_item("store_seconds", stats.store_time.as_secs_f64())?;
        Ok(dict)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self.owner.try_lock() {
            Ok(owner) => visit.call(&*owner),
            Err(_) => Ok(()), // being let go
        }
    }

    fn __clear__(&self) {
        drop(self.stop_and_release());
    }
}

impl Drop for CopyWorkers {
    fn drop(&mut self) {
        drop(self.stop_and_release());
    }
}

fn as_tuples(reports: Vec<Report>) -> Reports {
    reports.into_iter().map(|report| (report.ticket, report.failed)).collect()
}
