//! `kvtier.BlockTable`.

use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use super::plan::{ids_array, Admission, Event, Plan, Swaps};
use super::session_cell::SessionCell;
use super::{args, errors};
use crate::block::{MAX_BLOCKS, MAX_BLOCK_SIZE};
use crate::{Config, Session, MAX_RANKS};

/// The block allocator of an engine, with a Gpu tier and a Cpu tier.
#[pyclass(frozen, module = "kvtier")]
pub(super) struct BlockTable {
    table: crate::BlockTable,
    session: SessionCell,
}

impl BlockTable {
    fn over(session: Session) -> Self {
        Self { table: session.table().clone(), session: SessionCell::new(session) }
    }

    /// Lets the session take note of what other threads have finished, unless it is at work: then it does so itself.
    fn settle(&self) {
        if let Some(mut session) = self.session.try_take() {
            session.settle();
        }
    }
}

type Any<'a, 'py> = &'a Bound<'py, PyAny>;

#[pymethods]
impl BlockTable {
    #[new]
    #[pyo3(signature = (
        gpu_blocks, cpu_blocks, block_size, policy = None, store = None, max_store_blocks_per_step = None, ranks = None,
        hash = None, root = None
    ), text_signature = "(gpu_blocks, cpu_blocks, block_size, policy='lru', store='eager', max_store_blocks_per_step=None, ranks=1, hash='sha256', root=b'')")]
    #[allow(clippy::too_many_arguments)] // the interface of the package
    fn new(
        py: Python<'_>,
        gpu_blocks: Any<'_, '_>,
        cpu_blocks: Any<'_, '_>,
        block_size: Any<'_, '_>,
        policy: Option<Any<'_, '_>>,
        store: Option<Any<'_, '_>>,
        max_store_blocks_per_step: Option<Any<'_, '_>>,
        ranks: Option<Any<'_, '_>>,
        hash: Option<Any<'_, '_>>,
        root: Option<Any<'_, '_>>,
    ) -> PyResult<Self> {
        let config = Config {
            gpu_blocks: args::size("gpu_blocks", gpu_blocks, 1..=MAX_BLOCKS)?,
            cpu_blocks: args::size("cpu_blocks", cpu_blocks, 0..=MAX_BLOCKS)?,
            block_size: args::size("block_size", block_size, 1..=MAX_BLOCK_SIZE)?,
            policy: args::name("policy", policy, "lru")?,
            store: args::name("store", store, "eager")?,
            max_store_blocks_per_step: max_store_blocks_per_step
                .map(|value| args::count("max_store_blocks_per_step", value))
                .transpose()?,
            ranks: ranks.map_or(Ok(1), |value| args::size("ranks", value, 1..=MAX_RANKS))? as u32,
            hash: args::name("hash", hash, "sha256")?,
            root: root.map_or_else(|| Ok(Vec::new()), |value| args::bytes("root", value))?,
        };
        let session = py.detach(|| Session::new(&config));
        Ok(Self::over(session.map_err(|error| errors::from_error(py, error))?))
    }

    #[getter]
    fn gpu_blocks(&self) -> usize {
        self.table.config().gpu_blocks
    }

    #[getter]
    fn cpu_blocks(&self) -> usize {
        self.table.config().cpu_blocks
    }

    #[getter]
    fn block_size(&self) -> usize {
        self.table.config().block_size
    }

    #[getter]
    fn ranks(&self) -> u32 {
        self.table.config().ranks
    }

    #[pyo3(signature = (request_id, token_ids, salt = None, adapter = None, media = None),
        text_signature = "(self, request_id, token_ids, salt=None, adapter=None, media=())")]
    fn admit(
        &self,
        py: Python<'_>,
        request_id: Any<'_, '_>,
        token_ids: Any<'_, '_>,
        salt: Option<Any<'_, '_>>,
        adapter: Option<Any<'_, '_>>,
        media: Option<Any<'_, '_>>,
    ) -> PyResult<Admission> {
        let (id, tokens) = (args::request_id(request_id)?, args::token_ids(token_ids)?);
        let identity = args::identity(salt, adapter, media)?;
        let admission = self.session.take(py)?.admit(id, &tokens, &identity);
        Ok(Admission::new(py, &admission.map_err(|error| errors::from_error(py, error))?))
    }

    fn admit_hashed(
        &self,
        py: Python<'_>,
        request_id: Any<'_, '_>,
        digests: Any<'_, '_>,
        num_tokens: Any<'_, '_>,
    ) -> PyResult<Admission> {
        let (id, hashes) = (args::request_id(request_id)?, args::digests(digests)?);
        let num_tokens = args::count("num_tokens", num_tokens)?;
        let admission = self.session.take(py)?.admit_hashed(id, &hashes, num_tokens);
        Ok(Admission::new(py, &admission.map_err(|error| errors::from_error(py, error))?))
    }

    fn extend(&self, py: Python<'_>, request_id: Any<'_, '_>, token_ids: Any<'_, '_>) -> PyResult<Py<PyArray1<i32>>> {
        let (id, tokens) = (args::request_id(request_id)?, args::token_ids(token_ids)?);
        let added = self.session.take(py)?.extend(&id, &tokens);
        Ok(ids_array(py, &added.map_err(|error| errors::from_error(py, error))?))
    }

    fn extend_hashed(
        &self,
        py: Python<'_>,
        request_id: Any<'_, '_>,
        digests: Any<'_, '_>,
        num_tokens: Any<'_, '_>,
    ) -> PyResult<Py<PyArray1<i32>>> {
        let (id, hashes) = (args::request_id(request_id)?, args::digests(digests)?);
        let num_tokens = args::count("num_tokens", num_tokens)?;
        let added = self.session.take(py)?.extend_hashed(&id, &hashes, num_tokens);
        Ok(ids_array(py, &added.map_err(|error| errors::from_error(py, error))?))
    }

    fn commit(&self, py: Python<'_>, request_id: Any<'_, '_>, num_tokens: Any<'_, '_>) -> PyResult<()> {
        let id = args::request_id(request_id)?;
        let num_tokens = args::count("num_tokens", num_tokens)?;
        let result = self.session.take(py)?.commit(&id, num_tokens);
        result.map_err(|error| errors::from_error(py, error))
    }

    fn is_ready(&self, py: Python<'_>, request_id: Any<'_, '_>) -> PyResult<bool> {
        let id = args::request_id(request_id)?;
        let result = self.session.take(py)?.is_ready(&id);
        result.map_err(|error| errors::from_error(py, error))
    }

    fn valid_tokens(&self, py: Python<'_>, request_id: Any<'_, '_>) -> PyResult<usize> {
        let id = args::request_id(request_id)?;
        let result = self.session.take(py)?.valid_tokens(&id);
        result.map_err(|error| errors::from_error(py, error))
    }

    fn block_ids(&self, py: Python<'_>, request_id: Any<'_, '_>) -> PyResult<Py<PyArray1<i32>>> {
        let id = args::request_id(request_id)?;
        let ids = self.session.take(py)?.block_ids(&id).map(<[_]>::to_vec);
        Ok(ids_array(py, &ids.map_err(|error| errors::from_error(py, error))?))
    }

    fn release(&self, py: Python<'_>, request_id: Any<'_, '_>) -> PyResult<()> {
        let id = args::request_id(request_id)?;
        let result = self.session.take(py)?.release(&id);
        result.map_err(|error| errors::from_error(py, error))
    }

    fn abort(&self, py: Python<'_>, request_id: Any<'_, '_>) -> PyResult<()> {
        let id = args::request_id(request_id)?;
        let result = self.session.take(py)?.abort(&id);
        result.map_err(|error| errors::from_error(py, error))
    }

    fn preempt(&self, py: Python<'_>, request_id: Any<'_, '_>) -> PyResult<()> {
        let id = args::request_id(request_id)?;
        let result = self.session.take(py)?.preempt(&id);
        result.map_err(|error| errors::from_error(py, error))
    }

    fn step(&self, py: Python<'_>) -> PyResult<Plan> {
        let plan = self.session.take(py)?.step();
        Plan::new(py, &plan)
    }

    fn get_and_reset_swaps(&self, py: Python<'_>) -> PyResult<Swaps> {
        Ok(Swaps::new(&self.session.take(py)?.step()))
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
        let last_rank = self.table.config().ranks as usize - 1;
        let rank = rank.map_or(Ok(0), |value| args::size("rank", value, 0..=last_rank))? as u32;
        let failed = failed.map_or_else(|| Ok(Vec::new()), |value| args::indices("failed", value))?;
        let result = self.table.complete(ticket, rank, &failed);
        self.settle();
        result.map_err(|error| errors::from_error(py, error))
    }

    fn open_tickets(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        Ok(self.session.take(py)?.open_tickets())
    }

    #[pyo3(signature = (token_ids, salt = None, adapter = None, media = None),
        text_signature = "(self, token_ids, salt=None, adapter=None, media=())")]
    fn lookup(
        &self,
        py: Python<'_>,
        token_ids: Any<'_, '_>,
        salt: Option<Any<'_, '_>>,
        adapter: Option<Any<'_, '_>>,
        media: Option<Any<'_, '_>>,
    ) -> PyResult<(usize, usize)> {
        let (tokens, identity) = (args::token_ids(token_ids)?, args::identity(salt, adapter, media)?);
        self.settle();
        let result = self.table.lookup(&tokens, &identity);
        result.map_err(|error| errors::from_error(py, error))
    }

    fn lookup_hashed(&self, digests: Any<'_, '_>) -> PyResult<(usize, usize)> {
        let hashes = args::digests(digests)?;
        self.settle();
        Ok(self.table.lookup_hashed(&hashes))
    }

    #[pyo3(signature = (token_ids, salt = None, adapter = None, media = None),
        text_signature = "(self, token_ids, salt=None, adapter=None, media=())")]
    fn block_hashes<'py>(
        &self,
        py: Python<'py>,
        token_ids: Any<'_, '_>,
        salt: Option<Any<'_, '_>>,
        adapter: Option<Any<'_, '_>>,
        media: Option<Any<'_, '_>>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (tokens, identity) = (args::token_ids(token_ids)?, args::identity(salt, adapter, media)?);
        let result = self.table.block_hashes(&tokens, &identity);
        let hashes = result.map_err(|error| errors::from_error(py, error))?;
        Ok(PyBytes::new(py, hashes.iter().map(|hash| hash.0).collect::<Vec<_>>().as_flattened()))
    }

    fn reset(&self, py: Python<'_>) -> PyResult<bool> {
        let mut session = self.session.take(py)?;
        Ok(py.detach(|| session.reset()))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.settle();
        let stats = self.table.stats();
        let named = PyDict::new(py);
        for (name, value) in stats.each() {
            named.set_item(name, value)?;
        }
        Ok(named)
    }

    /// A table with a Gpu tier of its own that shares this table's Cpu tier.
    fn share(&self, py: Python<'_>, gpu_blocks: Any<'_, '_>) -> PyResult<Self> {
        let gpu_blocks = args::size("gpu_blocks", gpu_blocks, 1..=MAX_BLOCKS)?;
        let config = Config { gpu_blocks, ..self.table.config().clone() };
        let session = py.detach(|| Session::sharing(&config, &self.table));
        Ok(Self::over(session.map_err(|error| errors::from_error(py, error))?))
    }

    fn events(&self) -> Vec<Event> {
        self.settle();
        let events = self.table.events();
        events.into_iter().map(Event::new).collect()
    }

    fn audit(&self, py: Python<'_>) -> PyResult<()> {
        let result = self.session.take(py)?.audit();
        result.map_err(|error| errors::from_error(py, error))
    }

    fn __repr__(&self) -> String {
        let stats = self.table.stats();
        format!(
            "BlockTable(gpu_blocks={}, cpu_blocks={}, num_requests={})",
            stats.gpu.total, stats.cpu.total, stats.num_requests
        )
    }
}
