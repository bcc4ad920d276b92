//! `kvtier._core.HostTable`.

use std::sync::{Mutex, MutexGuard};

use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::plan::Event;
use super::{args, errors};
use crate::block::MAX_BLOCKS;
use crate::host::{HostPlan, Stores};
use crate::{Error, MAX_RANKS};

type Any<'a, 'py> = &'a Bound<'py, PyAny>;
type Pairs = Py<PyArray2<i32>>;

/// The Cpu tier of an engine that owns its Gpu blocks itself.
#[pyclass(frozen, module = "kvtier._core")]
pub(super) struct HostTable {
    table: Mutex<crate::HostTable>,
    cpu_blocks: usize,
    ranks: u32,
}

impl HostTable {
    /// The table; a second thread is a mistake, and is told.
    fn take(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, crate::HostTable>> {
        self.table.try_lock().map_err(|_| errors::from_error(py, Error::SessionInUse))
    }
}

fn gpu_ids(value: Any<'_, '_>) -> PyResult<Vec<u32>> {
    let ids = args::indices("gpu_ids", value)?;
    match ids.iter().find(|&&id| id >= MAX_BLOCKS) {
        None => Ok(ids.into_iter().map(|id| id as u32).collect()),
        Some(id) => Err(errors::config(value.py(), "gpu_ids", &id.to_string(), &format!("0 .. {}", MAX_BLOCKS - 1))),
    }
}

fn pairs(py: Python<'_>, plan: Option<&HostPlan>, cpu_first: bool) -> PyResult<Pairs> {
    let rows = plan.map_or(&[][..], |plan| &plan.pairs);
    let order = |cpu: i32, gpu: i32| if cpu_first { [cpu, gpu] } else { [gpu, cpu] };
    let flat: Vec<i32> = rows.iter().flat_map(|&(cpu, gpu)| order(cpu.index() as i32, gpu as i32)).collect();
    Ok(PyArray1::from_vec(py, flat).reshape([rows.len(), 2])?.unbind())
}

#[pymethods]
impl HostTable {
    #[new]
    #[pyo3(signature = (cpu_blocks, ranks = None, history_blocks = None),
        text_signature = "(cpu_blocks, ranks=1, history_blocks=0)")]
    fn new(
        py: Python<'_>,
        cpu_blocks: Any<'_, '_>,
        ranks: Option<Any<'_, '_>>,
        history_blocks: Option<Any<'_, '_>>,
    ) -> PyResult<Self> {
        let cpu_blocks = args::size("cpu_blocks", cpu_blocks, 1..=MAX_BLOCKS)?;
        let ranks = ranks.map_or(Ok(1), |value| args::size("ranks", value, 1..=MAX_RANKS))? as u32;
        let history = history_blocks.map_or(Ok(0), |value| args::size("history_blocks", value, 0..=4 * MAX_BLOCKS))?;
        let table = crate::HostTable::new(cpu_blocks, ranks).map_err(|error| errors::from_error(py, error))?;
        let table = table.with_history(history);
        Ok(Self { table: Mutex::new(table), cpu_blocks, ranks })
    }

    #[getter]
    fn cpu_blocks(&self) -> usize {
        self.cpu_blocks
    }

    #[getter]
    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn lookup(&self, py: Python<'_>, digests: Any<'_, '_>) -> PyResult<(usize, bool)> {
        let hashes = args::digests(digests)?;
        let hits = self.take(py)?.lookup(&hashes);
        Ok((hits.num_blocks, hits.is_loading))
    }

    #[pyo3(name = "load")]
    fn plan_load(&self, py: Python<'_>, digests: Any<'_, '_>, gpu_ids: Any<'_, '_>) -> PyResult<Option<(u64, Pairs)>> {
        let (hashes, ids) = (args::digests(digests)?, self::gpu_ids(gpu_ids)?);
        let plan = self.take(py)?.load(&hashes, &ids).map_err(|error| errors::from_error(py, error))?;
        plan.map(|plan| Ok((plan.ticket, pairs(py, Some(&plan), true)?))).transpose()
    }

    fn note_use(&self, py: Python<'_>, digests: Any<'_, '_>) -> PyResult<()> {
        let hashes = args::digests(digests)?;
        self.take(py)?.note_use(&hashes);
        Ok(())
    }

    #[pyo3(signature = (digests, gpu_ids, max_blocks = None, only_repeated = false),
        text_signature = "(self, digests, gpu_ids, max_blocks=None, only_repeated=False)")]
    fn offer(
        &self,
        py: Python<'_>,
        digests: Any<'_, '_>,
        gpu_ids: Any<'_, '_>,
        max_blocks: Option<Any<'_, '_>>,
        only_repeated: bool,
    ) -> PyResult<(Option<u64>, Pairs)> {
        let (hashes, ids) = (args::digests(digests)?, self::gpu_ids(gpu_ids)?);
        let budget = max_blocks.map_or(Ok(usize::MAX), |value| args::count("max_blocks", value))?;
        let which = if only_repeated { Stores::Repeated } else { Stores::All };
        let offer =
            self.take(py)?.offer(&hashes, &ids, budget, which).map_err(|error| errors::from_error(py, error))?;
        Ok((offer.plan.as_ref().map(|plan| plan.ticket), pairs(py, offer.plan.as_ref(), false)?))
    }

    #[pyo3(signature = (ticket, rank = None, failed = None), text_signature = "(self, ticket, rank=0, failed=())")]
    fn complete(
        &self,
        py: Python<'_>,
        ticket: Any<'_, '_>,
        rank: Option<Any<'_, '_>>,
        failed: Option<Any<'_, '_>>,
    ) -> PyResult<bool> {
        let ticket = args::ticket(ticket)?;
        let rank = rank.map_or(Ok(0), |value| args::size("rank", value, 0..=self.ranks as usize - 1))? as u32;
        let failed = failed.map_or_else(|| Ok(Vec::new()), |value| args::indices("failed", value))?;
        self.take(py)?.complete(ticket, rank, &failed).map_err(|error| errors::from_error(py, error))
    }

    fn open_tickets(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        Ok(self.take(py)?.open_tickets())
    }

    fn reset(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.take(py)?.reset())
    }

    fn events(&self, py: Python<'_>) -> PyResult<Vec<Event>> {
        Ok(self.take(py)?.events().into_iter().map(Event::new).collect())
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let table = self.take(py)?;
        let (counts, named) = (table.counts(), PyDict::new(py));
        for (name, value) in [
            ("cpu_blocks", counts.total),
            ("cpu_free_blocks", counts.free),
            ("cpu_cached_blocks", counts.cached),
            ("cpu_in_flight_blocks", counts.in_flight),
            ("cpu_held_blocks", counts.held),
            ("cpu_evictable_blocks", counts.evictable),
            ("num_tickets", table.open_tickets().len()),
        ] {
            named.set_item(name, value)?;
        }
        for (name, value) in table.counters().each() {
            named.set_item(name, value)?;
        }
        Ok(named)
    }

    fn audit(&self, py: Python<'_>) -> PyResult<()> {
        self.take(py)?.audit().map_err(|error| errors::from_error(py, error))
    }

    fn __repr__(&self) -> String {
        format!("HostTable(cpu_blocks={}, ranks={})", self.cpu_blocks, self.ranks)
    }
}
