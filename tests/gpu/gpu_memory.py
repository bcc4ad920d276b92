"""What the tests on a GPU need of it: memory, a compute stream that can be slow, and reads and writes behind it.

`TorchGpu` is a real one. The tests of these tests give another, on CUDA's test double.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class GpuMemory(Protocol):
    """Device memory of one allocation."""

    address: int
    owner: object

    def write(self, content: Bytes) -> None:
        """Give all bytes their content; done when it returns."""

    def read(self) -> Bytes:
        """All bytes as they are now."""

    def prepare(self, content: Bytes) -> Any:
        """What `write_later` takes; may wait for the device, so it comes before `hold`."""

    def write_later(self, offset: int, prepared: Any) -> None:
        """Have the compute stream write bytes after what it has; returns at once."""

    def read_later(self, offset: int, num_bytes: int) -> Callable[[], Bytes]:
        """Have the compute stream read bytes after what it has; what is returned waits for them."""


class Gpu(Protocol):
    """A device with a compute stream."""

    index: int
    stream: int

    def memory(self, num_bytes: int) -> GpuMemory:
        """Allocate."""

    def hold(self) -> float:
        """Keep the compute stream busy for a while; returns at once, with the least seconds that it will take."""

    def let_go(self) -> None:
        """End what `hold` began, if it does not end by itself."""


class TorchMemory:
    """A tensor of bytes."""

    def __init__(self, gpu: TorchGpu, num_bytes: int) -> None:
        self._gpu, self._torch = gpu, gpu.torch
        self.owner = self._torch.zeros(num_bytes, dtype=self._torch.uint8, device=gpu.device)
        self._torch.cuda.synchronize()
        self.address = self.owner.data_ptr()

    def write(self, content: Bytes) -> None:
        self.owner.copy_(self._torch.from_numpy(content))
        self._torch.cuda.synchronize()

    def read(self) -> Bytes:
        self._torch.cuda.synchronize()
        return self.owner.cpu().numpy()

    def prepare(self, content: Bytes) -> Any:
        prepared = self._torch.from_numpy(content).to(self._gpu.device)
        self._torch.cuda.synchronize()
        return prepared

    def write_later(self, offset: int, prepared: Any) -> None:
        with self._torch.cuda.stream(self._gpu.torch_stream):
            self.owner[offset : offset + len(prepared)].copy_(prepared, non_blocking=True)
        self._gpu.kept.append(prepared)

    def read_later(self, offset: int, num_bytes: int) -> Callable[[], Bytes]:
        copied = self._gpu.scratch(num_bytes)
        with self._torch.cuda.stream(self._gpu.torch_stream):
            copied.copy_(self.owner[offset : offset + num_bytes], non_blocking=True)

        def wait() -> Bytes:
            self._torch.cuda.synchronize()
            return copied.cpu().numpy()

        return wait


class TorchGpu:
    """The device that torch has as its current one."""

    def __init__(self) -> None:
        import torch

        self.torch: Any = torch
        self.index = torch.cuda.current_device()
        self.device = torch.device("cuda", self.index)
        self.torch_stream = torch.cuda.Stream(self.device)
        self.stream = self.torch_stream.cuda_stream
        self.kept: list[object] = []
        self._cycles = self._cycles_of(0.25)
        # Allocated ahead: an allocation behind a slow kernel may wait for it.
        self._scratch = torch.zeros(64 << 20, dtype=torch.uint8, device=self.device)
        self._scratch_used = 0
        torch.cuda.synchronize()

    def scratch(self, num_bytes: int) -> Any:
        """Device memory that stays as it is until 64 MiB more were asked for."""
        if self._scratch_used + num_bytes > len(self._scratch):
            self._scratch_used = 0
        self._scratch_used += num_bytes
        return self._scratch[self._scratch_used - num_bytes : self._scratch_used]

    def _cycles_of(self, seconds: float) -> int:
        """How long a sleeping kernel is to count for a time."""
        some = 10_000_000
        for _ in range(2):  # the first call also loads the kernel
            self.torch.cuda.synchronize()
            start = time.perf_counter()
            self.torch.cuda._sleep(some)
            self.torch.cuda.synchronize()
        return int(some * seconds / (time.perf_counter() - start))

    def memory(self, num_bytes: int) -> TorchMemory:
        return TorchMemory(self, num_bytes)

    def hold(self) -> float:
        with self.torch.cuda.stream(self.torch_stream):
            self.torch.cuda._sleep(self._cycles)
        return 0.15

    def let_go(self) -> None:
        pass


def why_no_gpu() -> str | None:
    """Why `TorchGpu` and kvtier's extension cannot work here; None if they can."""
    try:
        import torch
    except ImportError as error:
        return f"torch is not installed ({error})"
    from kvtier.cuda import why_absent

    if not torch.cuda.is_available():
        return f"torch finds no CUDA device; kvtier says: {why_absent() or 'there is one'}"
    return why_absent(torch.cuda.current_device())
