"""`CudaCopyEngine` when CUDA refuses, fails, is lost or is not there: typed errors, and a ticket at most."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from copy_layouts import make_layout, torch_or_skip
from cuda_double import TIMEOUT_S, Double, Rig, double, double_library
from kvtier import ConfigError, CopyEngine, HostMemory, MemoryLayout, TransferError
from kvtier.cuda import CudaCopyEngine, CudaError, Status, library, probe, why_absent

__all__ = ["double", "double_library"]

INVALID_VALUE, OUT_OF_MEMORY, LAUNCH_FAILURE = 1, 2, 719


@pytest.fixture
def rig_of(double: Double) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(name: str = "L4", **options: Any) -> Rig:
        made.append(Rig(double, make_layout(name), **options))
        return made[-1]

    yield make
    for rig in made:
        rig.end()


def test_a_failed_copy_fails_its_ticket(rig_of: Callable[..., Rig], double: Double) -> None:
    rig = rig_of()
    double.fail(b"cudaMemcpyAsync", INVALID_VALUE, 1)
    ticket = rig.submit("load", [(0, 0), (5, 2), (7, 9)])
    with pytest.raises(CudaError, match="text of the double"):
        rig.engine.wait_layer(ticket, 2)
    assert rig.engine.wait(TIMEOUT_S) == [(ticket, [0, 1, 2])]
    error = rig.engine.last_error
    assert error is not None
    assert (error.status, error.cuda_code) == (Status.COPY_FAILED, INVALID_VALUE)
    assert "cudaMemcpyAsync: text of the double" in str(error)
    assert rig.engine.stats()["num_failed_pairs"] == 3
    rig.copy("load", [(0, 0), (5, 2), (7, 9)])  # and its blocks are free again


def test_a_refused_submission_leaves_nothing_behind(rig_of: Callable[..., Rig], double: Double) -> None:
    rig = rig_of()
    double.fail(b"cudaEventCreateWithFlags", OUT_OF_MEMORY, 1)  # the mark has one, the ticket gets none
    with pytest.raises(CudaError, match="cudaEventCreateWithFlags") as raised:
        rig.submit("load", [(5, 2)])
    assert raised.value.status == Status.NO_MEMORY
    assert isinstance(raised.value, TransferError)
    copied = pickle.loads(pickle.dumps(raised.value))
    assert (copied.status, str(copied)) == (raised.value.status, str(raised.value))
    assert rig.engine.stats()["queue_depth"] == 0
    rig.copy("load", [(5, 2)])


def test_stores_that_are_refused_behind_loads_are_reported(rig_of: Callable[..., Rig], double: Double) -> None:
    class Plan:
        load_ticket, store_ticket = 7, 8
        loads, stores = np.array([[1, 1]], np.int32), np.array([[2, 2], [3, 3]], np.int32)

    rig = rig_of()
    double.fail(b"cudaEventCreateWithFlags", OUT_OF_MEMORY, 4)  # after the mark's and those of three waves
    rig.engine.submit(Plan())
    ended = rig.engine.wait(TIMEOUT_S)
    while len(ended) < 2:
        ended += rig.engine.wait(TIMEOUT_S)
    assert sorted(ended) == [(7, []), (8, [0, 1])]
    assert rig.engine.stats()["num_finished_tickets"] == 2


def test_a_lost_device_fails_every_ticket_and_takes_no_more(rig_of: Callable[..., Rig], double: Double) -> None:
    rig = rig_of()
    stream = ctypes.c_void_p(rig.stream)
    double.hold(stream)
    first, second = rig.submit("load", [(0, 0), (5, 2)]), rig.submit("store", [(9, 9)])
    double.lose_device(LAUNCH_FAILURE)
    assert sorted(rig.engine.poll()) == [(first, [0, 1]), (second, [0])]
    assert rig.engine.last_error is not None
    assert rig.engine.last_error.status == Status.DEVICE_LOST
    with pytest.raises(CudaError, match="text of the double"):
        rig.submit("load", [(5, 2)])
    double.let_go(stream)
    rig.engine.close()


def test_memory_that_cannot_be_registered_is_used_as_it_is(rig_of: Callable[..., Rig], double: Double) -> None:
    double.fail(b"cudaHostRegister", OUT_OF_MEMORY, 0)
    with pytest.warns(RuntimeWarning, match=r"bytes of host memory are not registered.*cudaHostRegister"):
        rig = rig_of(load_path="kernel", store_path="gather")
    contents = rig.block_on_gpu(3)
    rig.copy("store", [(3, 2)])
    assert rig.block_on_cpu(2) == contents
    rig.copy("load", [(2, 8)])
    assert rig.block_on_gpu(8) == contents
    stats = rig.engine.stats()
    assert stats["host_registered"] == 0
    assert stats["num_replaced_groups"] > 0  # a kernel could not have read it
    assert double.num_host_waits() > 0


def test_device_memory_that_is_short_costs_the_path_only(rig_of: Callable[..., Rig], double: Double) -> None:
    double.fail(b"cudaMalloc", OUT_OF_MEMORY, 0)
    rig = rig_of(store_path="gather")
    assert rig.engine.stats()["staging_bytes"] == 0
    rig.copy("store", [(3, 2)])
    assert rig.engine.stats()["num_replaced_groups"] == 1


def test_a_driver_without_batch_copies_gets_plain_ones(rig_of: Callable[..., Rig], double: Double) -> None:
    double.hide_batch_copy()
    assert not probe().has_batch_copy
    rig = rig_of(load_path="batch", store_path="batch")
    contents = rig.block_on_gpu(3)
    rig.copy("store", [(3, 2)])
    assert rig.block_on_cpu(2) == contents
    assert rig.engine.stats()["num_replaced_groups"] == 1


def test_a_capturing_stream_is_refused(rig_of: Callable[..., Rig], double: Double) -> None:
    rig = rig_of()
    double.set_capturing(1)
    with pytest.raises(CudaError, match="capturing a graph"):
        rig.submit("load", [(5, 2)])
    double.set_capturing(0)
    rig.copy("load", [(5, 2)])


def test_bad_arguments_are_named(rig_of: Callable[..., Rig], double: Double) -> None:
    rig = rig_of()
    cases: list[tuple[str, dict[str, Any]]] = [
        ("load_path", {"load_path": "gather"}),
        ("store_path", {"store_path": "kernel"}),
        ("staging_bytes", {"staging_bytes": -1}),
        ("max_queued", {"max_queued": 0}),
    ]
    for name, options in cases:
        with pytest.raises(ConfigError, match=f"^{name} = "):
            CudaCopyEngine(rig.memory, rig.host, **options)
    with pytest.raises(ConfigError, match=r"^cpu\.block_bytes = "):
        CudaCopyEngine(rig.memory, HostMemory(2, 8))
    in_host_memory = MemoryLayout.from_tensors(np.zeros((4, 8), np.uint8))
    with pytest.raises(ConfigError, match=r"^gpu\.device = None"):
        CudaCopyEngine(in_host_memory, HostMemory(2, 8))
    with pytest.raises(ConfigError, match=r"^gpu\.device = 0"):
        CopyEngine(rig.memory, rig.host)  # it would read device memory with the processor
    for stream in ("default", -1, True, lambda: None):
        with pytest.raises(ConfigError, match=r"^stream = "):
            CudaCopyEngine(rig.memory, HostMemory(2, rig.memory.block_bytes), stream=stream).submit_pairs(1, "load", [])


def test_any_library_s_stream_will_do(rig_of: Callable[..., Rig]) -> None:
    rig = rig_of()

    class TorchStream:
        cuda_stream = rig.stream

    class CupyStream:
        ptr = rig.stream

    for stream in (TorchStream(), CupyStream(), lambda: TorchStream(), 0, None):
        ticket = rig.submit("load", [(5, 2)])
        rig.engine.wait_layer(ticket, 2, stream=stream)
        assert rig.engine.wait(TIMEOUT_S) == [(ticket, [])]


def test_garbage_with_open_copies_waits_for_them(rig_of: Callable[..., Rig], double: Double) -> None:
    rig = rig_of()
    double.set_library_delay_us(3000)
    rig.submit("store", [(3, 2)])
    contents = rig.block_on_gpu(3)
    engine, rig.engine = rig.engine, CudaCopyEngine(rig.memory, HostMemory(2, rig.memory.block_bytes))
    del engine
    gc.collect()
    assert double.num_live_streams() == 2  # those of the other engine
    assert rig.block_on_cpu(2) == contents


def test_a_forked_child_is_refused(rig_of: Callable[..., Rig]) -> None:
    rig = rig_of()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            rig.engine.poll()
        except TransferError as error:
            rig.engine.close()
            status = 0 if "forked" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    rig.copy("load", [(5, 2)])


def test_why_there_is_no_cuda(double: Double, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert why_absent() is None
    assert probe().name == "the double"
    assert "device = 3" in str(why_absent(3))
    double.set_driver_version(0)
    assert "no CUDA driver is installed" in str(why_absent())
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "libkvtier_cuda.so")
    assert why_absent() == "this build of kvtier has no CUDA extension: there was no nvcc when it was built"
    (tmp_path / "libkvtier_cuda.so").write_bytes(b"no library")
    assert "cannot be loaded" in str(why_absent())
    monkeypatch.setattr(library, "LIBRARY", double.path)
    monkeypatch.setattr(library, "ABI_VERSION", 2)
    monkeypatch.setattr(library, "_loaded", {})
    assert why_absent() == "the CUDA extension has interface 1, this kvtier wants 2"


def test_the_installed_package_says_what_it_has() -> None:
    reason = why_absent()
    done = subprocess.run([sys.executable, "-m", "kvtier.cuda"], capture_output=True, text=True, timeout=60)
    if reason is None:
        assert (done.returncode, done.stdout.startswith("device 0: ")) == (0, True)
    else:
        assert (done.returncode, done.stdout) == (1, f"no CUDA: {reason}\n")
    assert library.LIBRARY.exists() or reason == (
        "this build of kvtier has no CUDA extension: there was no nvcc when it was built"
    )


def test_tensors_are_described_with_their_device() -> None:
    torch = torch_or_skip()
    assert MemoryLayout.from_tensors(torch.zeros(4, 8)).device is None
    with pytest.raises(ConfigError, match="cpu or cuda"):
        MemoryLayout.from_tensors(torch.zeros(4, 8, device="meta"))


def test_layers_end_where_their_tensors_do() -> None:
    storage = np.zeros((3, 2, 4, 16), np.uint8)  # layers, keys and values, blocks, bytes
    layout = MemoryLayout.from_tensors(list(storage), block_dim=1)
    assert layout.layer_ends == [32, 64, 96]
    joined = MemoryLayout([(1024, 64, 16), (1040, 64, 16), (4096, 16, 16)], 4, None)
    assert len(joined.fragments) == 2
    assert joined.layer_ends == [16, 32, 48]
