//! Results of the table's calls.

use std::vec::IntoIter;

use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::block::BlockId;
use crate::event::{EventKind, TierName};
use crate::plan;

pub(super) fn ids_array<T>(py: Python<'_>, ids: &[BlockId<T>]) -> Py<PyArray1<i32>> {
    PyArray1::from_vec(py, ids.iter().map(|id| id.index() as i32).collect()).unbind()
}

fn pairs_array<A, B>(py: Python<'_>, pairs: &[(BlockId<A>, BlockId<B>)]) -> PyResult<Py<PyArray2<i32>>> {
    let flat: Vec<i32> = pairs.iter().flat_map(|&(from, to)| [from.index() as i32, to.index() as i32]).collect();
    Ok(PyArray1::from_vec(py, flat).reshape([pairs.len(), 2])?.unbind())
}

/// What `BlockTable.admit` found and reserved.
#[pyclass(frozen, module = "kvtier")]
pub(super) struct Admission {
    #[pyo3(get)]
    block_ids: Py<PyArray1<i32>>,
    #[pyo3(get)]
    gpu_hit_blocks: usize,
    #[pyo3(get)]
    cpu_hit_blocks: usize,
    #[pyo3(get)]
    fresh_blocks: usize,
    #[pyo3(get)]
    cached_tokens: usize,
}

impl Admission {
    pub(super) fn new(py: Python<'_>, admission: &crate::Admission) -> Self {
        Self {
            block_ids: ids_array(py, &admission.block_ids),
            gpu_hit_blocks: admission.gpu_hit_blocks,
            cpu_hit_blocks: admission.cpu_hit_blocks,
            fresh_blocks: admission.fresh_blocks,
            cached_tokens: admission.cached_tokens,
        }
    }
}

#[pymethods]
impl Admission {
    fn __repr__(&self) -> String {
        let Self { gpu_hit_blocks, cpu_hit_blocks, fresh_blocks, cached_tokens, .. } = self;
        format!(
            "Admission(gpu_hit_blocks={gpu_hit_blocks}, cpu_hit_blocks={cpu_hit_blocks}, fresh_blocks={fresh_blocks}, \
             cached_tokens={cached_tokens})"
        )
    }
}

/// The copies of one step.
#[pyclass(frozen, module = "kvtier")]
pub(super) struct Plan {
    #[pyo3(get)]
    loads: Py<PyArray2<i32>>,
    #[pyo3(get)]
    stores: Py<PyArray2<i32>>,
    #[pyo3(get)]
    load_ticket: Option<u64>,
    #[pyo3(get)]
    store_ticket: Option<u64>,
    num_loads: usize,
    num_stores: usize,
    deferred: [(&'static str, usize); 2],
}

impl Plan {
    pub(super) fn new(py: Python<'_>, plan: &plan::Plan) -> PyResult<Self> {
        Ok(Self {
            loads: pairs_array(py, &plan.loads)?,
            stores: pairs_array(py, &plan.stores)?,
            load_ticket: plan.load_ticket,
            store_ticket: plan.store_ticket,
            num_loads: plan.loads.len(),
            num_stores: plan.stores.len(),
            deferred: [("budget", plan.num_deferred_budget), ("no_cpu_slot", plan.num_deferred_no_cpu_slot)],
        })
    }
}

#[pymethods]
impl Plan {
    #[getter]
    fn not_stored<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let reasons = PyDict::new(py);
        for (reason, count) in self.deferred.iter().filter(|(_, count)| *count > 0) {
            reasons.set_item(reason, count)?;
        }
        Ok(reasons)
    }

    fn __repr__(&self) -> String {
        let ticket = |ticket: Option<u64>| ticket.map_or_else(|| "None".to_owned(), |number| number.to_string());
        format!(
            "Plan(loads={}, stores={}, load_ticket={}, store_ticket={})",
            self.num_loads,
            self.num_stores,
            ticket(self.load_ticket),
            ticket(self.store_ticket)
        )
    }
}

/// The copies of one step as (blocks to swap out, blocks to swap in).
#[pyclass(frozen, sequence, module = "kvtier")]
pub(super) struct Swaps {
    swap_out: Vec<(usize, usize)>,
    swap_in: Vec<(usize, usize)>,
    #[pyo3(get)]
    store_ticket: Option<u64>,
    #[pyo3(get)]
    load_ticket: Option<u64>,
}

impl Swaps {
    pub(super) fn new(plan: &plan::Plan) -> Self {
        Self {
            swap_out: plan.stores.iter().map(|(from, to)| (from.index(), to.index())).collect(),
            swap_in: plan.loads.iter().map(|(from, to)| (from.index(), to.index())).collect(),
            store_ticket: plan.store_ticket,
            load_ticket: plan.load_ticket,
        }
    }
}

#[pymethods]
impl Swaps {
    #[getter]
    fn swap_out<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, &self.swap_out)
    }

    #[getter]
    fn swap_in<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, &self.swap_in)
    }

    #[allow(clippy::unused_self)] // the protocol asks for it
    fn __len__(&self) -> usize {
        2
    }

    fn __getitem__<'py>(&self, py: Python<'py>, index: isize) -> PyResult<Bound<'py, PyList>> {
        match index {
            0 | -2 => self.swap_out(py),
            1 | -1 => self.swap_in(py),
            _ => Err(PyIndexError::new_err("index out of range: swap out is 0, swap in is 1")),
        }
    }

    fn __iter__(&self, py: Python<'_>) -> PyResult<SwapsIterator> {
        let lists = vec![self.swap_out(py)?.unbind(), self.swap_in(py)?.unbind()];
        Ok(SwapsIterator { lists: std::sync::Mutex::new(lists.into_iter()) })
    }

    fn __repr__(&self) -> String {
        format!("Swaps(swap_out={:?}, swap_in={:?})", self.swap_out, self.swap_in)
    }
}

/// Iterator over the two lists of a `Swaps`.
#[pyclass(frozen, module = "kvtier")]
pub(super) struct SwapsIterator {
    lists: std::sync::Mutex<IntoIter<Py<PyList>>>,
}

#[pymethods]
impl SwapsIterator {
    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__(&self) -> Option<Py<PyList>> {
        self.lists.lock().unwrap_or_else(std::sync::PoisonError::into_inner).next()
    }
}

/// One change of what a tier holds.
#[pyclass(frozen, eq, module = "kvtier")]
#[derive(PartialEq, Eq)]
pub(super) struct Event(crate::event::Event);

impl Event {
    pub(super) fn new(event: crate::event::Event) -> Self {
        Self(event)
    }
}

#[pymethods]
impl Event {
    #[getter]
    fn kind(&self) -> &'static str {
        match self.0.kind {
            EventKind::Stored => "stored",
            EventKind::Removed => "removed",
        }
    }

    #[getter]
    fn tier(&self) -> &'static str {
        match self.0.tier {
            TierName::Gpu => "gpu",
            TierName::Cpu => "cpu",
        }
    }

    #[getter]
    fn block_hash<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.block_hash.0)
    }

    #[getter]
    fn block_id(&self) -> u32 {
        self.0.block_id
    }

    fn __repr__(&self) -> String {
        let [a, b, c, d, ..] = self.0.block_hash.0;
        let start = u32::from_be_bytes([a, b, c, d]);
        format!("Event({:?}, {:?}, block_id={}, block_hash={start:08x}…)", self.kind(), self.tier(), self.0.block_id)
    }
}
