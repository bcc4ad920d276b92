"""One engine in a process of its own: a line in is a job, a line out its figures. Started by `bench_vllm.py`."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

CONNECTORS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "kvtier": {"kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier.connectors.vllm"},
    "simple": {"kv_connector": "RivalConnector", "kv_connector_module_path": "rival_offload"},
}
SCHEDULER_CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
    "take_events",
    "get_kv_connector_stats",
)
WORKER_CALLS = (
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
)


def tokens_of(seed: int, num_tokens: int) -> list[int]:
    """A document."""
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(num_tokens)]


def make_model(path: str, max_tokens: int) -> None:
    """A small Llama with seeded random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=max_tokens,
        initializer_range=0.08,  # the default makes every output the same
    )
    LlamaForCausalLM(config).save_pretrained(path)


class Engine:
    """vLLM with a connector, or without."""

    def __init__(self, model: str, connector: str, max_tokens: int, gpu_blocks: int, host_gib: float) -> None:
        from vllm import LLM

        transfer = CONNECTORS[connector]
        if transfer is not None:
            extra = {"host_gib": host_gib} if connector == "kvtier" else {"cpu_bytes_to_use": int(host_gib * 2**30)}
            transfer = transfer | {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
            transfer["kv_connector_extra_config"] = extra
        self.llm = LLM(
            model=model,
            kv_transfer_config=transfer,
            dtype="float32",
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            enforce_eager=True,
            max_model_len=max_tokens,
            max_num_batched_tokens=max(2048, max_tokens),
            block_size=32,
            num_gpu_blocks_override=gpu_blocks,
            disable_log_stats=True,
            disable_hybrid_kv_cache_manager=connector == "simple",
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.seconds = {"scheduler": 0.0, "worker": 0.0}
        self.num_steps = 0
        if self.scheduler.connector is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            for name in SCHEDULER_CALLS:
                self._time(self.scheduler.connector, name, "scheduler")
            for name in WORKER_CALLS:
                self._time(get_kv_transfer_group(), name, "worker")
        self._count(self.scheduler)

    def _time(self, connector: Any, name: str, side: str) -> None:
        call = getattr(connector, name, None)
        if call is None:
            return

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[side] += time.perf_counter() - start

        setattr(connector, name, timed)

    def _count(self, scheduler: Any) -> None:
        schedule = scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.num_steps += 1
            return schedule(*args, **kwargs)

        scheduler.schedule = counted

    @contextlib.contextmanager
    def _without_connector(self) -> Iterator[None]:
        """The same engine as if it had been started without: what vLLM asks to know is whether there is one."""
        from vllm.distributed.kv_transfer import kv_transfer_state

        both = self.scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT
        self.scheduler.connector = kv_transfer_state._KV_CONNECTOR_AGENT = None
        try:
            yield
        finally:
            self.scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = both

    def _settle(self) -> None:
        """Take the acknowledgements of the last copies, so that no block is held any more."""
        for _ in range(1000):
            if self.scheduler.connector is None or not self.scheduler.connector.has_pending_push_work():
                return
            self.core.step_fn()
        raise RuntimeError("copies have not ended in 1000 steps")

    def serve(
        self, seeds: list[int], num_tokens: int, max_new: int, together: bool, has_connector: bool = True
    ) -> dict[str, Any]:
        """Ask documents, one after another or all together."""
        self._settle()
        with contextlib.nullcontext() if has_connector else self._without_connector():
            return self._serve(seeds, num_tokens, max_new, together)

    def _serve(self, seeds: list[int], num_tokens: int, max_new: int, together: bool) -> dict[str, Any]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_new, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": tokens_of(seed, num_tokens)} for seed in seeds]
        self.seconds, self.num_steps = {"scheduler": 0.0, "worker": 0.0}, 0
        times, outputs = [], []
        begin, begin_cpu = time.perf_counter(), time.process_time()
        for batch in [prompts] if together else [[prompt] for prompt in prompts]:
            start = time.perf_counter()
            outputs += self.llm.generate(batch, params, use_tqdm=False)
            times.append(time.perf_counter() - start)
        return {
            "seconds": time.perf_counter() - begin,
            "cpu_seconds": time.process_time() - begin_cpu,
            "times": times,
            "computed": sum(len(o.prompt_token_ids) - (o.num_cached_tokens or 0) for o in outputs),
            "tokens": [list(o.outputs[0].token_ids) for o in outputs],
            "connector_us_per_step": 1e6 * self.seconds["scheduler"] / max(1, self.num_steps),
            "connector_seconds": self.seconds,
            "num_steps": self.num_steps,
        }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    settings = json.loads(sys.argv[1])
    engine = Engine(**settings)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.serve(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
