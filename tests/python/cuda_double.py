"""CUDA's test double for tests in Python: the extension linked with it, its controls, and an engine between layouts."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from copy_layouts import BLOCKS, Layout
from kvtier import HostMemory, MemoryLayout
from kvtier.cuda import CudaCopyEngine, library

REPOSITORY = Path(__file__).parents[2]
BUILD = REPOSITORY / "target/cuda_double"
TIMEOUT_S = 20


class Double:
    """The library with CUDA's double inside, and the controls of the double as methods: `fail`, `hold`, ..."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        for name in ("num_live_streams", "num_registered", "num_host_waits", "broken_rule"):
            getattr(self._library, f"double_{name}").restype = ctypes.c_size_t
        self._library.double_new_stream.restype = ctypes.c_void_p

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, f"double_{name}")

        def call(*arguments: Any) -> Any:
            return function(*(ctypes.c_size_t(each) if isinstance(each, int) else each for each in arguments))

        return call

    def rule(self) -> str:
        """Which rule of CUDA was broken; "" if none."""
        text = ctypes.create_string_buffer(200)
        self._library.double_broken_rule(text, ctypes.c_size_t(len(text)))
        return text.value.decode()


@pytest.fixture(scope="session")
def double_library() -> Double:
    for program in ("make", "g++"):
        if shutil.which(program) is None:
            if os.environ.get("KVTIER_REQUIRE_CORE"):
                pytest.fail(f"the test double needs {program}")
            pytest.skip(f"the test double of CUDA needs {program}")
    command = ["make", "--silent", "-C", "tests/cuda_double", "library", f"OUT={BUILD}"]
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    built = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr
    return Double(BUILD / "plain/libkvtier_cuda_double.so")


@pytest.fixture
def double(double_library: Double, monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    """The double in place of the compiled extension, as after start; checks that no rule of CUDA was broken."""
    monkeypatch.setattr(library, "LIBRARY", double_library.path)
    double_library.reset()
    yield double_library
    assert double_library.rule() == ""
    double_library.reset()


class Rig:
    """An engine between a layout, which plays the GPU, and noise-filled host memory."""

    def __init__(self, double: Double, layout: Layout, slots: int = BLOCKS, **options: Any) -> None:
        self.double, self.layout = double, layout
        self.address = layout.storage.ctypes.data
        double.adopt(ctypes.c_void_p(self.address), layout.storage.nbytes)
        described = MemoryLayout.from_tensors(layout.tensors, block_dim=layout.block_dim)
        self.memory = MemoryLayout(described.fragments, BLOCKS, layout, device=0)
        self.host = HostMemory(slots, self.memory.block_bytes)
        self.slots = np.frombuffer(memoryview(self.host._arena), np.uint8).reshape(slots, -1)
        self.slots[:] = np.arange(self.slots.size, dtype=np.uint32).reshape(self.slots.shape) % 253
        self.stream = double.new_stream()
        self.engine = CudaCopyEngine(self.memory, self.host, stream=self.stream, **options)
        self.ticket = 0

    def submit(self, direction: str, pairs: list[tuple[int, int]]) -> int:
        self.ticket += 1
        self.engine.submit_pairs(self.ticket, direction, pairs)
        return self.ticket

    def copy(self, direction: str, pairs: list[tuple[int, int]]) -> int:
        """Copies, and returns the number of pieces it took."""
        before = self.engine.stats()["num_pieces"]
        ticket = self.submit(direction, pairs)
        assert self.engine.wait(TIMEOUT_S) == [(ticket, [])]
        return self.engine.stats()["num_pieces"] - before

    def block_on_gpu(self, block: int) -> bytes:
        return self.layout.block_bytes(block)

    def block_on_cpu(self, slot: int) -> bytes:
        return self.slots[slot, : self.memory.block_bytes].tobytes()

    def end(self) -> None:
        self.engine.close(TIMEOUT_S)
        self.double.end_stream(ctypes.c_void_p(self.stream))
        self.double.disown(ctypes.c_void_p(self.address))
