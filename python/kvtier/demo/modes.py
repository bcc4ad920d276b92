"""Runs the workload on the small engine: without reuse, with a Gpu prefix cache, with two tiers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

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
CopierFactory = Callable[[KvMemory, int], Copier]


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
    """One mode's figures by round.

    Attributes:
        rounds: The figures.
        turn_seconds: The seconds of each turn that the mode had; they add up to `seconds`.
        answers: The answers of all requests, in the order of asking.
        num_compared: Blocks that came back and were compared with what had left.
        num_different: Those of them that were different.
    """

    rounds: dict[str, RoundFigures] = field(default_factory=dict)
    turn_seconds: dict[str, list[float]] = field(default_factory=dict)
    answers: list[list[int]] = field(default_factory=list)
    num_compared: int = 0
    num_different: int = 0


def demo_model(path: str | None, device: str, seed: int) -> Model:
    """The model of the demo: a checkpoint folder, or random weights.

    On the CPU it computes in float64, on other devices in float32, whatever the checkpoint holds. The modes compute
    the same tokens in batches of different sizes, and these round differently: with fewer digits, a near tie between
    two tokens would now and then fall the other way in one mode, and look like a wrong block.

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
    on_cpu = model.device.type == "cpu"
    gpu = host if on_cpu else torch.cuda.mem_get_info(model.device)[0]
    each = len(MODES) * document_bytes  # every mode has its own engine
    if workload.gpu_documents * each > gpu:
        limit = f"at most {gpu // each}: {each} bytes for each in {len(MODES)} modes, {gpu} are available"
        raise ConfigError("--gpu-documents", workload.gpu_documents, limit)
    host -= workload.gpu_documents * each if on_cpu else 0
    if workload.cpu_documents * document_bytes > host:
        limit = f"at most {host // document_bytes}: {document_bytes} bytes for each, {host} are available"
        raise ConfigError("--cpu-documents", workload.cpu_documents, limit)


def warm_up(workload: Workload, model: Model) -> None:
    """Run a document that is not part of the workload, so that the first mode does not pay for torch's first steps."""
    with Engine(model, gpu_blocks=workload.document_blocks, block_size=BLOCK_SIZE) as engine:
        engine.generate([workload.document(-1, model.vocab_size)], Sampling(workload.answer_tokens, ignore_eos=True))


def run_modes(
    workload: Workload,
    model: Model,
    modes: Sequence[str] = MODES,
    *,
    verify: bool = True,
    copier_factory: CopierFactory = make_copier,
    on_request: Callable[[int], None] = lambda place: None,
) -> list[ModeResult]:
    """Run both rounds in every mode.

    Each mode has an engine with empty memory. The modes take turns after every document (or group of documents, if
    several are in flight), each starting from rest and finishing its copies: what else the machine does, and how fast
    its clock runs just then, falls on all of them alike. One after the other they would be compared with the weather.

    Args:
        workload: What to ask.
        model: The model, the same for all modes.
        modes: Which of `MODES`, in the order of the results.
        verify: Compare the bytes of every block that comes back.
        copier_factory: Makes what moves blocks.
        on_request: Called after each request with the place of its mode in `modes`; its time is not counted.

    Raises:
        ConfigError: The machine cannot hold the workload.
    """
    size = workload.in_flight if workload.in_flight == 1 else 4 * workload.in_flight
    with ExitStack() as stack:
        runs = [ModeRun(mode, workload, model, verify, copier_factory) for mode in modes]
        for run in runs:
            stack.enter_context(run.engine)
        for name, order in workload.rounds().items():
            for run in runs:
                run.begin()
            for turn, start in enumerate(range(0, len(order), size)):
                for step in range(len(runs)):
                    place = (turn + step) % len(runs)
                    runs[place].ask(order[start : start + size], partial(on_request, place))
            for run in runs:
                run.end(name)
    return [run.result for run in runs]


class ModeRun:
    """One mode's engine on its way through the workload.

    Attributes:
        engine: The engine, to be closed by the caller.
        result: What has been measured so far.
    """

    def __init__(
        self, mode: str, workload: Workload, model: Model, verify: bool, copier_factory: CopierFactory
    ) -> None:
        self._mode = mode
        self._workload = workload
        self._clock = Clock()
        self._witness = Witness(self._clock)
        self.result = ModeResult()
        table_factory: Callable[..., kvtier.BlockTable] = kvtier.BlockTable
        if verify:
            table_factory = self._witness.watch_table(table_factory)
            copier_factory = self._witness.watch_copier(copier_factory)
        self.engine = Engine(
            model,
            gpu_blocks=workload.gpu_blocks,
            cpu_blocks=workload.cpu_blocks if mode == "two_tier" else 0,
            block_size=BLOCK_SIZE,
            table_factory=table_factory,
            copier_factory=copier_factory,
            clock=self._clock,
        )

    def begin(self) -> None:
        """Begin a round."""
        self._before = self._counters()
        self._requests: list[Request] = []
        self._seconds: list[float] = []

    def ask(self, documents: list[int], on_request: Callable[[], None]) -> None:
        """Ask these documents, `in_flight` at a time, and finish the copies that they cause."""
        engine, clock = self.engine, self._clock
        sampling = Sampling(max_new_tokens=self._workload.answer_tokens, ignore_eos=True)
        prompts = deque(self._workload.document(index, engine.model.vocab_size) for index in documents)
        start = clock()
        num_live = 0
        while num_live or prompts:
            while num_live < self._workload.in_flight and prompts:
                # without reuse: a salt of its own for each request, so that none finds another's blocks
                salt = f"{len(self.result.rounds)} {len(self._requests)}" if self._mode == "none" else None
                self._requests.append(engine.submit(prompts.popleft(), sampling, salt=salt))
                num_live += 1
            for _ in engine.step():
                num_live -= 1
                with clock.paused():
                    on_request()
        engine.settle()
        self._seconds.append(clock() - start)

    def end(self, name: str) -> None:
        """End a round and put its figures into the result."""
        counted = {key: value - self._before[key] for key, value in self._counters().items()}
        self.result.rounds[name] = _figures(self._requests, counted, sum(self._seconds))
        self.result.turn_seconds[name] = self._seconds
        self.result.answers += [request.answer for request in self._requests]
        self.result.num_compared = self._witness.num_compared
        self.result.num_different = self._witness.num_different

    def _counters(self) -> dict[str, int]:
        return self.engine.table.stats() | self.engine.stats()


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
