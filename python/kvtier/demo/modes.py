"""Runs the workload on the small engine: without reuse, with a Gpu prefix cache, with two tiers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import kvtier
from kvtier.demo.clock import Clock
from kvtier.demo.witness import Witness
from kvtier.demo.workload import BLOCK_SIZE, Workload
from kvtier.engine import Copier, Engine, KvMemory, Model, Request, Sampling, load_model, make_copier, random_model
from kvtier.engine.checkpoint import checked_device
from kvtier.errors import ConfigError
from kvtier.host_memory import available_host_bytes

MODES = ("none", "gpu", "two_tier")


@dataclass(frozen=True)
class RoundFigures:
    """What one round cost. Times are without the time that comparing bytes takes."""

    prompt_tokens: int
    computed_tokens: int
    gpu_hit_tokens: int
    cpu_hit_tokens: int
    loaded_blocks: int
    stored_blocks: int
    ttft_mean_s: float
    ttft_p99_s: float
    seconds: float


@dataclass
class ModeResult:
    """One mode's figures and answers, and how many of the blocks that came back were compared and found different."""

    rounds: dict[str, RoundFigures] = field(default_factory=dict)
    answers: list[list[int]] = field(default_factory=list)
    num_compared: int = 0
    num_different: int = 0


def demo_model(path: str | None, device: str, seed: int) -> Model:
    """The model of the demo: a checkpoint folder, or random weights.

    On the CPU it computes in float64, on other devices in float32, whatever the checkpoint holds. The modes compute
    the same tokens in batches of different sizes, and these round differently: in float32 about one answer token in a
    hundred thousand would come out different for no other reason, in bfloat16 one in a hundred.

    Raises:
        ConfigError: The folder is malformed, or the device is not there.
    """
    dtype = torch.float64 if checked_device(device).type == "cpu" else torch.float32
    return load_model(path, device, dtype) if path else random_model(seed=seed, device=device, dtype=dtype)


def check_room(workload: Workload, model: Model) -> None:
    """Refuse a workload that the model or the machine cannot hold.

    Raises:
        ConfigError: It names the command-line option.
    """
    total = workload.document_tokens + workload.answer_tokens
    if total > model.max_tokens:
        limit = f"at most {model.max_tokens - workload.answer_tokens}, the model's {model.max_tokens} less the answer"
        raise ConfigError("--document-tokens", workload.document_tokens, limit)
    document_bytes = model.make_memory(1, BLOCK_SIZE).block_bytes * workload.document_blocks
    host = available_host_bytes()
    gpu = host if model.device.type == "cpu" else torch.cuda.mem_get_info(model.device)[0]
    gpu_bytes, cpu_bytes = workload.gpu_documents * document_bytes, workload.cpu_documents * document_bytes
    if gpu_bytes > gpu:
        limit = f"at most {gpu // document_bytes}: {gpu_bytes} bytes are needed on {model.device}, {gpu} available"
        raise ConfigError("--gpu-documents", workload.gpu_documents, limit)
    host -= gpu_bytes if model.device.type == "cpu" else 0
    if cpu_bytes > host:
        limit = f"at most {host // document_bytes}: {cpu_bytes} bytes of host memory are needed, {host} available"
        raise ConfigError("--cpu-documents", workload.cpu_documents, limit)


def warm_up(workload: Workload, model: Model) -> None:
    """Run a document that is not part of the workload, so that the first mode does not pay for torch's first steps."""
    with Engine(model, gpu_blocks=workload.document_blocks, block_size=BLOCK_SIZE) as engine:
        engine.generate([workload.document(-1, model.vocab_size)], _sampling(workload))


def run_mode(
    mode: str,
    workload: Workload,
    model: Model,
    *,
    verify: bool = True,
    copier_factory: Callable[[KvMemory, int], Copier] = make_copier,
    on_request: Callable[[], None] = lambda: None,
) -> ModeResult:
    """Run both rounds in one mode, on an engine with empty memory.

    Args:
        mode: One of `MODES`.
        workload: What to ask.
        model: The model, the same for all modes.
        verify: Compare the bytes of every block that comes back.
        copier_factory: Makes what moves blocks.
        on_request: Called after each request; its time is not counted.

    Raises:
        ConfigError: The machine cannot hold the workload.
    """
    clock = Clock()
    witness = Witness(clock)
    table_factory: Callable[..., kvtier.BlockTable] = kvtier.BlockTable
    if verify:
        table_factory, copier_factory = witness.watch_table(table_factory), witness.watch_copier(copier_factory)
    engine = Engine(
        model,
        gpu_blocks=workload.gpu_blocks,
        cpu_blocks=workload.cpu_blocks if mode == "two_tier" else 0,
        block_size=BLOCK_SIZE,
        table_factory=table_factory,
        copier_factory=copier_factory,
        clock=clock,
    )
    result = ModeResult()
    with engine:
        for name, order in workload.rounds().items():
            before = engine.table.stats() | engine.stats()
            start = clock()
            # without reuse: a salt of its own for each request, so that none finds another's blocks
            salts = [f"{name} {place}" if mode == "none" else None for place in range(len(order))]
            requests = _ask(engine, workload, order, salts, clock, on_request)
            engine.settle()
            seconds = clock() - start
            after = engine.table.stats() | engine.stats()
            result.rounds[name] = _figures(requests, {key: after[key] - before[key] for key in after}, seconds)
            result.answers += [request.answer for request in requests]
    result.num_compared, result.num_different = witness.num_compared, witness.num_different
    return result


def _ask(
    engine: Engine,
    workload: Workload,
    order: list[int],
    salts: list[str | None],
    clock: Clock,
    on_request: Callable[[], None],
) -> list[Request]:
    """Ask the documents in order, at most `in_flight` at a time; a request is submitted when one before it ends."""
    requests: list[Request] = []
    num_live = 0
    while num_live or len(requests) < len(order):
        while num_live < workload.in_flight and len(requests) < len(order):
            place = len(requests)
            with clock.paused():
                prompt = workload.document(order[place], engine.model.vocab_size)
            requests.append(engine.submit(prompt, _sampling(workload), salt=salts[place]))
            num_live += 1
        for _ in engine.step():
            num_live -= 1
            with clock.paused():
                on_request()
    return requests


def _sampling(workload: Workload) -> Sampling:
    return Sampling(max_new_tokens=workload.answer_tokens, ignore_eos=True)


def _figures(requests: list[Request], counted: dict[str, int], seconds: float) -> RoundFigures:
    ttft = sorted(r.first_token_s - r.submitted_s for r in requests if r.first_token_s is not None)
    return RoundFigures(
        prompt_tokens=sum(request.prompt_tokens for request in requests),
        computed_tokens=counted["computed_prompt_tokens"],
        gpu_hit_tokens=counted["gpu_hit_tokens"],
        cpu_hit_tokens=counted["cpu_hit_tokens"],
        loaded_blocks=counted["loaded_blocks"],
        stored_blocks=counted["stored_blocks"],
        ttft_mean_s=sum(ttft) / len(ttft),
        ttft_p99_s=ttft[math.ceil(0.99 * len(ttft)) - 1],
        seconds=seconds,
    )
