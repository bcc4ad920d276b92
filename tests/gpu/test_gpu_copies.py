"""The CUDA extension on a GPU: `make gpu-test`, or pytest with any Python that has torch and kvtier's wheel."""

from __future__ import annotations

import copy_checks
import pytest
from copy_checks import LAYOUTS, PATHS
from gpu_memory import TorchGpu
from kvtier import CopyEngine, HostMemory, MemoryLayout
from kvtier.cuda import CudaCopyEngine

each_path = pytest.mark.parametrize("paths", PATHS, ids="/".join)
NUM_PLANS = 10_000


@each_path
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes(gpu: TorchGpu, layout: str, paths: tuple[str, str]) -> None:
    copy_checks.check_bytes(gpu, layout, *paths)


@each_path
def test_a_store_waits_for_a_slow_step(gpu: TorchGpu, paths: tuple[str, str]) -> None:
    copy_checks.check_store_order(gpu, *paths)


@each_path
def test_a_load_waits_for_a_slow_reader(gpu: TorchGpu, paths: tuple[str, str]) -> None:
    copy_checks.check_load_order(gpu, *paths)


@each_path
def test_layers_arrive_in_waves(gpu: TorchGpu, paths: tuple[str, str]) -> None:
    copy_checks.check_layers(gpu, *paths)


@each_path
@pytest.mark.parametrize("layout", ["block first", "odd sizes"])
def test_random_plans(gpu: TorchGpu, layout: str, paths: tuple[str, str]) -> None:
    copy_checks.check_random_plans(gpu, layout, *paths, num_plans=NUM_PLANS // 6 + 1, seed=len(layout))


def test_tensors_of_layers_on_torch_s_current_stream(gpu: TorchGpu) -> None:
    torch = gpu.torch
    layers = [torch.randn(2, 8, 16, 4, 32, device=gpu.device, dtype=torch.bfloat16) for _ in range(3)]
    layout = MemoryLayout.from_tensors(layers, block_dim=1)
    assert layout.device == gpu.index
    host = HostMemory(4, layout.block_bytes)
    with pytest.raises(ValueError, match=r"gpu\.device"):
        CopyEngine(layout, host)
    before = [layer.clone() for layer in layers]
    with CudaCopyEngine(layout, host, stream=torch.cuda.current_stream) as engine:
        for layer in layers:
            layer.mul_(2)  # on the current stream, just before the store
        engine.submit_pairs(1, "store", [(3, 0), (4, 1)])
        assert engine.wait(30) == [(1, [])]
        for layer in layers:
            layer.zero_()
        engine.submit_pairs(2, "load", [(0, 6), (1, 7)])
        for index, layer in enumerate(layers):
            engine.wait_layer(2, index)
            torch.testing.assert_close(layer[:, 6:8], before[index][:, 3:5] * 2, rtol=0, atol=0)
        assert engine.wait(30) == [(2, [])]
