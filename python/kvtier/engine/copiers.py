"""What moves blocks between the tiers: the core's `CopyEngine` for CPU memory, torch streams for CUDA memory."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Protocol

import torch

from kvtier import CopyEngine, HostMemory, MemoryLayout
from kvtier.engine.memory import host_zeros
from kvtier.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from kvtier import Plan
    from kvtier.engine.memory import KvMemory


class Copier(Protocol):
    """Moves the blocks of plans in the background and says when they have moved."""

    def submit(self, plan: Plan) -> None:
        """Begin the copies of a plan, without waiting for anything."""

    def poll(self) -> Sequence[tuple[int, Sequence[int]]]:
        """Tickets that finished since the last call, each with the indices of its pairs that did not copy."""

    def wait(self, timeout_s: float) -> Sequence[tuple[int, Sequence[int]]]:
        """As `poll`, but wait for the first ticket to finish, at most `timeout_s` seconds."""

    def close(self) -> None:
        """Finish the copies that are under way and stop."""

    def stats(self) -> Mapping[str, float]:
        """Counters since construction."""


def make_copier(memory: KvMemory, cpu_blocks: int) -> Copier:
    """The copier for this memory, with host memory of `cpu_blocks` blocks.

    Raises:
        ConfigError: The machine does not have that much host memory.
    """
    if memory.tensor.is_cuda or cpu_blocks == 0:
        return TorchCopyEngine(memory.tensor, cpu_blocks)
    try:
        host = HostMemory(cpu_blocks, memory.block_bytes)
    except ConfigError as error:
        raise ConfigError("cpu_blocks", cpu_blocks, error.limit) from None
    return CopyEngine(MemoryLayout.from_tensors(memory.tensor), host)


def runs_of(pairs: npt.NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """Merge pairs that continue each other on both sides: (source, destination, number of blocks) for each run."""
    runs: list[tuple[int, int, int]] = []
    for source, target in sorted(pairs.tolist()):
        if runs and (source, target) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((source, target, 1))
    return runs


class TorchCopyEngine:
    """Copies blocks with torch, on a stream of their own for each direction.

    Loads wait, on the device, for what the compute stream was given before `submit`: it may still read the previous
    contents of their destination. Stores wait for the same: it may still write their source. The host waits for
    neither. For a tensor in CPU memory the copies are done before `submit` returns.
    """

    def __init__(self, blocks: torch.Tensor, cpu_blocks: int) -> None:
        """Allocate the host memory.

        Args:
            blocks: The engine's memory: one block for each index of the first dimension, contiguous.
            cpu_blocks: Blocks of host memory.

        Raises:
            ConfigError: `blocks` is not contiguous, or the host memory cannot be allocated.
        """
        if not blocks.is_contiguous():
            raise ConfigError("blocks", f"strides {tuple(blocks.stride())}", "a contiguous tensor, blocks first")
        self._gpu = blocks.view(len(blocks), -1)
        self._host = host_zeros("cpu_blocks", (cpu_blocks, self._gpu.shape[1]), blocks.dtype)
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._pinned = False
        if blocks.is_cuda:
            self._streams = {side: torch.cuda.Stream(blocks.device) for side in ("load", "store")}
            # torch's own pinned allocator rounds up to a power of two: register the pages instead
            if self._host.numel():
                size = self._host.numel() * self._host.itemsize
                status = torch.cuda.cudart().cudaHostRegister(self._host.data_ptr(), size, 0)
                self._pinned = int(status) == 0
                if not self._pinned:
                    warnings.warn(f"{size} bytes of host memory cannot be pinned: copies are slow", stacklevel=2)
        self._open: dict[int, torch.cuda.Event | None] = {}
        self._closed = False
        self._counters = dict.fromkeys(("loaded_blocks", "stored_blocks", "pieces"), 0)

    def submit(self, plan: Plan) -> None:
        """Begin the copies of a plan; never waits for the device.

        Raises:
            ConfigError: A block id is out of range, or a block is the destination of two pairs; nothing was copied.
            TransferError: The engine is closed.
        """
        if self._closed:
            raise TransferError("the copy engine is closed")
        self._check("loads", plan.loads, self._host, self._gpu)
        self._check("stores", plan.stores, self._gpu, self._host)
        if plan.load_ticket is not None:
            self._open[plan.load_ticket] = self._copy("load", plan.loads, self._host, self._gpu)
            self._counters["loaded_blocks"] += len(plan.loads)
        if plan.store_ticket is not None:
            self._open[plan.store_ticket] = self._copy("store", plan.stores, self._gpu, self._host)
            self._counters["stored_blocks"] += len(plan.stores)

    def poll(self) -> list[tuple[int, list[int]]]:
        """Tickets that finished since the last call, each with the indices of its pairs that did not copy: none.

        A copy that fails on a CUDA device breaks the device's context; torch raises then, here or anywhere else.
        """
        done = [ticket for ticket, event in self._open.items() if event is None or event.query()]
        for ticket in done:
            del self._open[ticket]
        return [(ticket, []) for ticket in done]

    def wait(self, timeout_s: float) -> list[tuple[int, list[int]]]:
        """As `poll`, but wait for the first ticket to finish, at most `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while not (done := self.poll()) and self._open and time.monotonic() < deadline:
            time.sleep(50e-6)
        return done

    def close(self) -> None:
        """Wait for the copies that are under way and give the host memory back; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for stream in self._streams.values():
            stream.synchronize()
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr())
        self._host = self._host[:0].clone()

    def stats(self) -> dict[str, int]:
        """Counters since construction: `loaded_blocks`, `stored_blocks`, and `pieces`, the copies they merged into."""
        return dict(self._counters)

    def _copy(
        self, side: str, pairs: npt.NDArray[np.int32], source: torch.Tensor, target: torch.Tensor
    ) -> torch.cuda.Event | None:
        runs = runs_of(pairs)
        self._counters["pieces"] += len(runs)
        if not self._streams:
            for first, second, num_blocks in runs:
                target[second : second + num_blocks] = source[first : first + num_blocks]
            return None
        stream = self._streams[side]
        stream.wait_stream(torch.cuda.current_stream(self._gpu.device))
        with torch.cuda.stream(stream):
            for first, second, num_blocks in runs:
                target[second : second + num_blocks].copy_(source[first : first + num_blocks], non_blocking=True)
            event: torch.cuda.Event = stream.record_event()
        return event

    @staticmethod
    def _check(name: str, pairs: npt.NDArray[np.int32], source: torch.Tensor, target: torch.Tensor) -> None:
        for row, (first, second) in enumerate(pairs.tolist()):
            if not (0 <= first < len(source) and 0 <= second < len(target)):
                limit = f"source below {len(source)}, destination below {len(target)}"
                raise ConfigError(f"{name}[{row}]", (first, second), limit)
        if len(set(pairs[:, 1].tolist())) != len(pairs):
            raise ConfigError(name, "a destination twice", "each block is the destination of one pair")
