"""The checks of tests/gpu, with CUDA's test double in place of a GPU: that they hold, and that they can fail."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from cuda_double import REPOSITORY, Double, double, double_library
from kvtier.cuda.copier import Copier
from kvtier.cuda.library import Batch

sys.path.insert(0, str(REPOSITORY / "tests/gpu"))
sys.path.insert(0, str(REPOSITORY / "benches/python/gpu"))
import copy_checks
import measures
from copy_checks import LAYOUTS, PATHS
from gpu_memory import Bytes

__all__ = ["double", "double_library"]

each_path = pytest.mark.parametrize("paths", PATHS, ids="/".join)


class DoubleMemory:
    """A numpy array that the double takes for device memory."""

    def __init__(self, gpu: DoubleGpu, num_bytes: int) -> None:
        self._gpu = gpu
        self.owner = self._array = np.zeros(num_bytes + 256, np.uint8)
        self._start = -self._array.ctypes.data % 256
        self._bytes = self._array[self._start :][:num_bytes]
        self.address = self._bytes.ctypes.data
        gpu.double.adopt(ctypes.c_void_p(self.address), num_bytes)

    def write(self, content: Bytes) -> None:
        self._bytes[:] = content

    def read(self) -> Bytes:
        self._gpu.double.drain(self._gpu.handle)
        return self._bytes.copy()

    def prepare(self, content: Bytes) -> Bytes:
        self._gpu.kept.append(content)
        return content

    def write_later(self, offset: int, prepared: Bytes) -> None:
        self._copy(self.address + offset, prepared.ctypes.data, prepared.size)

    def read_later(self, offset: int, num_bytes: int) -> Callable[[], Bytes]:
        copied = np.zeros(num_bytes, np.uint8)
        self._gpu.kept.append(copied)
        self._copy(copied.ctypes.data, self.address + offset, num_bytes)

        def wait() -> Bytes:
            self._gpu.double.drain(self._gpu.handle)
            return copied

        return wait

    def _copy(self, to: int, source: int, num_bytes: int) -> None:
        self._gpu.double.copy_on(self._gpu.handle, ctypes.c_void_p(to), ctypes.c_void_p(source), num_bytes)


class DoubleGpu:
    """Device 0 of the double."""

    index = 0

    def __init__(self, double: Double) -> None:
        self.double = double
        self.stream = double.new_stream()
        self.handle = ctypes.c_void_p(self.stream)
        self.kept: list[object] = []
        self._is_held = False

    def memory(self, num_bytes: int) -> DoubleMemory:
        return DoubleMemory(self, num_bytes)

    def hold(self) -> float:
        self.double.hold(self.handle)
        self._is_held = True
        return 5.0

    def let_go(self) -> None:
        if self._is_held:
            self.double.let_go(self.handle)
        self._is_held = False


@pytest.fixture
def gpu(double: Double) -> Iterator[DoubleGpu]:
    gpu = DoubleGpu(double)
    yield gpu
    gpu.let_go()
    double.end_stream(gpu.handle)


@each_path
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes(gpu: DoubleGpu, layout: str, paths: tuple[str, str]) -> None:
    copy_checks.check_bytes(gpu, layout, *paths)


@each_path
@pytest.mark.parametrize("check", ["store_order", "load_order", "layers"])
def test_order(gpu: DoubleGpu, check: str, paths: tuple[str, str]) -> None:
    getattr(copy_checks, f"check_{check}")(gpu, *paths)


@each_path
def test_random_plans(gpu: DoubleGpu, paths: tuple[str, str]) -> None:
    gpu.double.set_max_delay_us(50)
    copy_checks.check_random_plans(gpu, "odd sizes", *paths, num_plans=600, seed=1)


@pytest.mark.parametrize("check", ["store_order", "load_order"])
def test_a_copy_that_does_not_wait_is_seen(gpu: DoubleGpu, monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    mark = Copier.mark
    monkeypatch.setattr(Copier, "mark", lambda self, _: mark(self, 0))  # the mark of a stream that is not the step's
    with pytest.raises(AssertionError):
        getattr(copy_checks, f"check_{check}")(gpu, "merged", "merged")


def test_a_layer_that_is_not_waited_for_is_seen(gpu: DoubleGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Copier, "wait_layer", lambda *_: None)
    gpu.double.set_library_delay_us(2000)
    with pytest.raises(AssertionError):
        copy_checks.check_layers(gpu, "merged", "merged")


def test_a_copy_that_is_lost_is_seen(gpu: DoubleGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Copier.submit

    def lose(self: Copier, batch: Batch) -> None:
        if batch.ticket % 10 == 0:
            batch.num_groups = 0
        submit(self, batch)

    monkeypatch.setattr(Copier, "submit", lose)
    with pytest.raises(AssertionError):
        copy_checks.check_random_plans(gpu, "block first", "merged", "merged", num_plans=400, seed=1)


def test_without_a_gpu_they_say_so() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", "-k", "slow_step"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "3 skipped" in done.stdout
    assert "no GPU to test with: torch finds no CUDA device; kvtier says: " in done.stdout


def test_the_bench_measures_every_path(gpu: DoubleGpu) -> None:
    case = measures.Case(block_bytes=8192, num_blocks=12, rounds=2)
    lines = measures.measure_paths(gpu, case)
    assert len({(line.what, line.direction) for line in lines}) == 9
    assert all(line.gb_per_s > 0 for line in lines)
    text = measures.render({"name": "a GPU", "driver": 13000, "torch": "2"}, lines, [("loads, merged", 1.25)])
    assert "| kvtier kernel + gather | both | 8192 | 12 | " in text
    assert "| loads, merged | 1.250 |" in text


def test_the_bench_copies_what_it_says(gpu: DoubleGpu) -> None:
    transfer = measures.Transfer(gpu, measures.Case(4096, 10, rounds=3), "kernel", "gather")
    with transfer.engine:
        transfer.gb_per_s("load", "store")
        stats = transfer.engine.stats()
    assert (stats["load_bytes"], stats["store_bytes"]) == (4 * 10 * 4096, 4 * 10 * 4096)
    assert stats["num_pieces"] == 2 * 4 * 10  # nothing merges


def test_the_bench_stops_at_a_failure(gpu: DoubleGpu) -> None:
    transfer = measures.Transfer(gpu, measures.Case(4096, 10, rounds=1), "merged", "merged")
    with transfer.engine:
        gpu.double.fail(b"cudaMemcpyAsync", 1, 3)
        with pytest.raises(SystemExit, match="failed"):
            transfer.gb_per_s("load")


def test_tables_go_between_their_marks() -> None:
    assert measures.put_between("a\n<s>\nold\n<e>\nz", "<s>", "<e>", "new") == "a\n<s>\nnew\n<e>\nz"
    with pytest.raises(SystemExit, match="once each"):
        measures.put_between("a", "<s>", "<e>", "new")


def test_without_a_gpu_the_bench_says_so() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, "benches/python/gpu/bench_gpu.py"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("no GPU to measure with: torch finds no CUDA device; kvtier says: ")
