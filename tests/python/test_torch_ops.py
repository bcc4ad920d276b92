"""The custom operators of torch: checked by torch, by the bytes of the copy engine, and by what they refuse."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest
from copy_layouts import torch_or_skip
from kvtier import ConfigError, CopyEngine, HostMemory, MemoryLayout

torch = torch_or_skip()
torch_ops = importlib.import_module("kvtier.torch_ops")

CASES = [("float32", (6, 3, 4), 0), ("bfloat16", (2, 6, 5), 1), ("uint8", (6, 7), 0), ("int64", (2, 2, 6, 3), 2)]


def make(dtype: str, shape: tuple[int, ...], block_dim: int) -> tuple[list[Any], Any]:
    """Two layers of 6 blocks, distinct values, and zeroed host memory of 8 blocks."""
    count = 1
    for size in shape:
        count *= size
    layers = [(torch.arange(count).reshape(shape) % 251 + layer).to(getattr(torch, dtype)) for layer in (0, 3)]
    block_bytes = sum(layer.numel() * layer.element_size() for layer in layers) // 6
    return layers, torch.zeros(8, block_bytes, dtype=torch.uint8)


@pytest.mark.parametrize(("dtype", "shape", "block_dim"), CASES)
@pytest.mark.parametrize("name", ["load_blocks", "store_blocks"])
def test_torch_accepts_the_operators(name: str, dtype: str, shape: tuple[int, ...], block_dim: int) -> None:
    gpu, host = make(dtype, shape, block_dim)
    for pairs in ([[0, 5], [3, 1]], []):
        ids = torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2)
        torch.library.opcheck(getattr(torch.ops.kvtier, name).default, (gpu, host, ids, block_dim))


@pytest.mark.parametrize(("dtype", "shape", "block_dim"), CASES)
def test_the_bytes_are_those_of_the_copy_engine(dtype: str, shape: tuple[int, ...], block_dim: int) -> None:
    gpu, host = make(dtype, shape, block_dim)
    stores = [(4, 0), (0, 7), (1, 3)]
    memory = HostMemory(8, host.shape[1])
    with CopyEngine(MemoryLayout.from_tensors(gpu, block_dim), memory) as engine:
        engine.submit_pairs(1, "store", stores)
        assert engine.wait(30) == [(1, [])]
    torch.ops.kvtier.store_blocks(gpu, host, torch.tensor(stores), block_dim)
    assert torch.equal(host, torch.from_numpy(memory.array()))
    before = [layer.clone() for layer in gpu]
    loads = torch.tensor([(0, 5), (7, 2)])  # blocks 4 and 0 come back as 5 and 2
    torch.ops.kvtier.load_blocks(gpu, host, loads, block_dim)
    for layer, old in zip(gpu, before, strict=True):
        order = torch.tensor([0, 1, 0, 3, 4, 4])
        assert torch.equal(layer, old.index_select(block_dim, order))


def test_a_single_block_beside_others_is_loaded() -> None:
    gpu = [torch.zeros(2, 1, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.float32)]
    host = torch.arange(18, dtype=torch.uint8).reshape(2, 9)  # the second fragment starts at an odd byte
    torch.ops.kvtier.load_blocks(gpu, host, torch.tensor([[1, 0]]))
    assert gpu[1][0].view(torch.uint8).tolist() == list(range(10, 18))
    assert not gpu[1][1].any()


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"gpu": []}, "gpu"),
        ({"block_dim": 3}, "block_dim"),
        ({"block_dim": -1}, "block_dim"),
        ({"host": torch.zeros(8, 5, dtype=torch.uint8)}, "host.shape"),
        ({"host": torch.zeros(8, 96, dtype=torch.int8)}, "host.dtype"),
        ({"pairs": torch.tensor([[0.0, 1.0]])}, "pairs.dtype"),
        ({"pairs": torch.tensor([0, 1])}, "pairs.shape"),
        ({"pairs": torch.tensor([[0, 1], [0, 8]])}, "pairs[1]"),
        ({"pairs": torch.tensor([[-1, 1]])}, "pairs[0]"),
        ({"pairs": torch.tensor([[0, 1], [2, 1]])}, "pairs"),
    ],
)
def test_refusals_name_the_argument_and_copy_nothing(changes: dict[str, Any], argument: str) -> None:
    gpu, host = make("float32", (6, 3, 4), 0)
    given = {"gpu": gpu, "host": host, "pairs": torch.tensor([[1, 1]]), "block_dim": 0} | changes
    with pytest.raises(ConfigError) as caught:
        torch.ops.kvtier.store_blocks(given["gpu"], given["host"], given["pairs"], given["block_dim"])
    assert caught.value.argument == argument
    assert not given["host"].any()


def test_importing_kvtier_registers_nothing() -> None:
    code = "import sys, kvtier; print('torch' in sys.modules, 'kvtier.torch_ops' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "False"]
