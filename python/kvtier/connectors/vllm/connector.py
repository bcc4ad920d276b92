"""vLLM's connector: hands each call to the scheduler's or the worker's side."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.connectors.vllm.events import KvEvents
from kvtier.connectors.vllm.metadata import Acknowledgements, StepPlan
from kvtier.connectors.vllm.options import Options, local_replicas
from kvtier.connectors.vllm.refusals import check_supported
from kvtier.connectors.vllm.scheduler import SchedulerSide
from kvtier.connectors.vllm.stats import PromStats, Stats
from kvtier.connectors.vllm.worker import WorkerSide

__all__ = ["KvtierConnector"]

logger = init_logger("vllm.kvtier")

KVConnectorMetadata.register(StepPlan)
KVConnectorWorkerMetadata.register(Acknowledgements)


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps what falls out of vLLM's KV cache in host memory, and brings it back; see docs/vllm.md.

    Raises:
        ConfigError: An option is outside its limits, or the model or configuration is not supported.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_supported(vllm_config, kv_cache_config)
        self._options = Options.parse(self._kv_transfer_config.kv_connector_extra_config)
        parallel = vllm_config.parallel_config
        group = kv_cache_config.kv_cache_groups[0]
        self._block_bytes = group.kv_cache_spec.page_size_bytes * len(group.layer_names)
        local_ranks = min(parallel.world_size, getattr(parallel, "local_world_size", parallel.world_size))
        replicas = local_replicas(self._options, parallel, self._kv_transfer_config.engine_id)
        self._num_cpu_blocks = self._options.num_cpu_blocks(self._block_bytes, local_ranks * replicas)
        self._rank = parallel.rank
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._stats = Stats()
        self._has_told = False
        if role == KVConnectorRole.SCHEDULER:
            block_size = group.kv_cache_spec.block_size
            events = vllm_config.kv_events_config
            self._scheduler = SchedulerSide(
                self._options,
                block_size,
                self._num_cpu_blocks,
                parallel.world_size,
                self._block_bytes,
                lazy_window=2 * -(-vllm_config.scheduler_config.max_num_batched_tokens // block_size),
                can_wait_in_step=vllm_config.max_concurrent_batches == 1,
                events=KvEvents(block_size) if events is not None and events.enable_kv_cache_events else None,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that was not stored is a miss later, and no more."""
        return False

    # The worker's side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Describe vLLM's memory, take host memory, start the copy threads."""
        threads = self._options.copy_threads
        self._worker = WorkerSide(kv_caches.values(), self._num_cpu_blocks, self._block_bytes, threads, self._rank)
        logger.info("kvtier: %d blocks of %d bytes in host memory", self._num_cpu_blocks, self._block_bytes)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Queue the step's loads, and wait for those that the step needs itself."""
        if self._worker is not None:
            self._worker.begin_loads(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads have ended before the step, or their requests wait in the scheduler."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: whole blocks are stored after the step."""

    def wait_for_save(self) -> None:
        """Queue the step's stores, now that their sources are written."""
        if self._worker is not None:
            self._worker.begin_stores(self._plan)

    @property
    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads have ended, well or not."""
        if self._worker is None:
            return None, None
        received = self._worker.collect(self.has_connector_metadata() and self._plan.is_idle)
        if self._worker.death is not None and not self._has_told:
            self._has_told = True
            logger.error("kvtier: no second tier from now on, rank %d: %s", self._rank, self._worker.death)
        return None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM has to compute after all."""
        return self._worker.take_bad_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> Acknowledgements | None:
        """Tickets that this rank has finished, and what it measured."""
        return self._worker.take_acknowledgements() if self._worker is not None else None

    def shutdown(self) -> None:
        """End the copy threads and give the host memory back."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    # The scheduler's side

    @property
    def _tables(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the pool through which the sources of stores are held."""
        self._tables.bind(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """Take note of a request."""
        self._tables.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded; None while another request is loading them."""
        return self._tables.find(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load."""
        self._tables.plan_load(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """The copies that begin with this step."""
        return self._tables.plan_step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Carry the workers' acknowledgements into the table."""
        acknowledgements = connector_output.kv_connector_worker_meta
        if isinstance(acknowledgements, Acknowledgements):
            self._tables.take(acknowledgements)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; vLLM may free its blocks at once, since stores hold their sources themselves."""
        self._tables.drop(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        self._tables.drop(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether steps are needed although there may be nothing to compute."""
        return self._tables.has_open_tickets

    def has_pending_block_frees(self) -> bool:
        """Whether waiting gives blocks back sooner than a preemption would."""
        return self._tables.has_open_stores

    def reset_cache(self) -> bool:
        """Forget every block of the Cpu tier, and what is being stored; false while a load is under way."""
        return self._tables.reset()

    def take_events(self) -> list[Any]:
        """KV events of the host tier since the last call."""
        if self._tables.events is None:
            return []
        return self._tables.events.take(self._tables.table.events())

    # Statistics

    def get_kv_connector_stats(self) -> Stats | None:
        """What has changed since the last call; from the scheduler's side only."""
        if self._scheduler is None or not self._options.metrics:
            return None
        return self._stats.difference(self._scheduler.stats())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Statistics from what has crossed a process boundary."""
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromStats:
        """Declare every metric."""
        return PromStats(vllm_config, metric_types, labelnames, per_engine_labelvalues)
