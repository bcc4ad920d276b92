//! Tickets that the CUDA extension copies: `kvtier.cuda` wraps this.

use std::sync::{Mutex, PoisonError};

use numpy::{IntoPyArray, PyArray2, PyArrayMethods};
use pyo3::prelude::*;

use super::args;
use super::copy::{pairs_request, plan_requests, raise, DescribedMemory, HostArena, PairArray};
use crate::copy::engine::MAX_QUEUED;
use crate::copy::layout::MAX_BLOCKS;
use crate::copy::{CopyRequest, Direction, Outline};

/// Numbers of a piece, in the order of `kvtier_piece` in csrc.
const PIECE_FIELDS: usize = 6;

/// A ticket, whether it loads, and its pieces.
type OutlineTuple<'py> = (u64, bool, Bound<'py, PyArray2<u64>>);

/// Open tickets: validated, planned, and apart from each other.
#[pyclass(frozen, module = "kvtier._core")]
pub(super) struct OutlinedTickets {
    inner: Mutex<crate::copy::OutlinedTickets>,
}

#[pymethods]
impl OutlinedTickets {
    #[new]
    fn new(
        gpu: &DescribedMemory,
        cpu: &HostArena,
        slots_per_chunk: &Bound<'_, PyAny>,
        max_queued: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let slots = cpu.inner.slots();
        let slots_per_chunk = args::size("slots_per_chunk", slots_per_chunk, 1..=MAX_BLOCKS)?;
        let max_queued_value = args::size("max_queued", max_queued, 1..=MAX_QUEUED)?;
        let inner = crate::copy::OutlinedTickets::new(gpu.inner.clone(), slots, slots_per_chunk, max_queued_value)
            .map_err(|error| raise(max_queued.py(), error))?;
        Ok(Self { inner: Mutex::new(inner) })
    }

    fn open<'py>(
        &self,
        py: Python<'py>,
        load_ticket: Option<Bound<'py, PyAny>>,
        loads: PairArray<'py>,
        store_ticket: Option<Bound<'py, PyAny>>,
        stores: PairArray<'py>,
    ) -> PyResult<Vec<OutlineTuple<'py>>> {
        self.open_all(py, plan_requests(py, (load_ticket, loads), (store_ticket, stores))?)
    }

    fn open_pairs<'py>(
        &self,
        ticket: &Bound<'py, PyAny>,
        direction_name: &Bound<'py, PyAny>,
        list: PairArray<'py>,
    ) -> PyResult<Vec<OutlineTuple<'py>>> {
        let request = pairs_request(ticket, direction_name, &list)?;
        let py = list.py();
        drop(list);
        self.open_all(py, vec![request])
    }

    fn end(&self, py: Python<'_>, ticket: u64, succeeded: bool) -> Option<Vec<u32>> {
        self.with(py, |inner| inner.end(ticket, succeeded)).map(|report| report.failed)
    }

    #[getter]
    fn num_open(&self, py: Python<'_>) -> usize {
        self.with(py, |inner| inner.num_open())
    }
}

impl OutlinedTickets {
    fn open_all<'py>(&self, py: Python<'py>, requests: Vec<CopyRequest>) -> PyResult<Vec<OutlineTuple<'py>>> {
        let outlines = self.with(py, |inner| inner.open(requests)).map_err(|error| raise(py, error))?;
        outlines.into_iter().map(|outline| as_tuple(py, &outline)).collect()
    }

    /// Without the interpreter lock: two threads that hold one of the locks and want the other would never go on.
    fn with<R: Send>(&self, py: Python<'_>, body: impl FnOnce(&mut crate::copy::OutlinedTickets) -> R + Send) -> R {
        py.detach(|| body(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

fn as_tuple<'py>(py: Python<'py>, outline: &Outline) -> PyResult<OutlineTuple<'py>> {
    let mut numbers = Vec::with_capacity(outline.pieces.len() * PIECE_FIELDS);
    for piece in &outline.pieces {
        let fields = [
            piece.source,
            piece.destination,
            piece.source_stride,
            piece.destination_stride,
            piece.row_bytes,
            piece.num_rows,
        ];
        numbers.extend(fields.map(|field| field as u64));
    }
    let pieces = numbers.into_pyarray(py).reshape([outline.pieces.len(), PIECE_FIELDS])?;
    Ok((outline.ticket, outline.direction == Direction::Load, pieces))
}
