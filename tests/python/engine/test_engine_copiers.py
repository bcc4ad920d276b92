"""TorchCopyEngine on CPU tensors, and the choice of a copier."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kvtier import CopyEngine
from kvtier.engine import TorchCopyEngine, make_copier
from kvtier.engine.copiers import runs_of
from kvtier.errors import ConfigError, TransferError
from tiny_models import tiny_model

NONE = np.empty((0, 2), dtype=np.int32)


def plan_of(loads=None, stores=None, first_ticket: int = 1) -> SimpleNamespace:  # type: ignore[no-untyped-def]
    """What the copier reads of a `Plan`."""
    return SimpleNamespace(
        loads=NONE if loads is None else np.array(loads, dtype=np.int32),
        stores=NONE if stores is None else np.array(stores, dtype=np.int32),
        load_ticket=None if loads is None else first_ticket,
        store_ticket=None if stores is None else first_ticket + (loads is not None),
    )


def blocks_of(num_blocks: int = 16) -> torch.Tensor:
    return torch.arange(num_blocks * 24, dtype=torch.float32).view(num_blocks, 3, 2, 4)


def test_blocks_go_out_and_come_back_unchanged() -> None:
    blocks = blocks_of()
    before = blocks.clone()
    copier = TorchCopyEngine(blocks, 16)
    copier.submit(plan_of(stores=[(0, 5), (1, 6), (2, 7), (9, 1), (4, 4)]))
    assert copier.wait(1.0) == [(1, [])]
    assert copier.poll() == copier.wait(0.0) == copier.wait(60.0) == []  # nothing is open: nothing to wait for
    assert torch.equal(blocks, before)
    blocks.zero_()
    copier.submit(plan_of(loads=[(5, 3), (6, 11), (7, 0), (1, 15), (4, 2)], first_ticket=2))
    assert copier.poll() == [(2, [])]
    for target, source in {3: 0, 11: 1, 0: 2, 15: 9, 2: 4}.items():
        assert torch.equal(blocks[target], before[source])
    assert blocks[[1, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14]].count_nonzero() == 0
    assert copier.stats() == {
        "loaded_blocks": 5,
        "stored_blocks": 5,
        "pieces": 3 + 4,
    }  # out: 0-2, 4, 9; back: 1, 4-5, 6, 7
    copier.close()


def test_loads_and_stores_of_one_plan() -> None:
    blocks = blocks_of()
    before = blocks.clone()
    copier = TorchCopyEngine(blocks, 4)
    copier.submit(plan_of(stores=[(1, 0)]))
    copier.submit(plan_of(loads=[(0, 8)], stores=[(2, 3)], first_ticket=7))
    assert copier.poll() == [(1, []), (7, []), (8, [])]
    copier.submit(plan_of(loads=[(3, 9)], first_ticket=9))
    assert torch.equal(blocks[[8, 9]], before[[1, 2]])


def test_an_empty_plan_is_nothing() -> None:
    copier = TorchCopyEngine(blocks_of(), 4)
    copier.submit(plan_of())
    assert copier.poll() == []


def test_runs_merge_only_where_both_sides_continue() -> None:
    pairs = np.array([(0, 5), (1, 6), (2, 7), (9, 1), (4, 4), (3, 9), (10, 2)], dtype=np.int32)
    assert runs_of(pairs) == [(0, 5, 3), (3, 9, 1), (4, 4, 1), (9, 1, 2)]
    assert runs_of(NONE) == []


@pytest.mark.parametrize(
    ("plan", "argument"),
    [
        (plan_of(stores=[(0, 0), (16, 1)]), "stores[1]"),
        (plan_of(stores=[(0, 0), (1, 4)]), "stores[1]"),
        (plan_of(stores=[(-1, 0)]), "stores[0]"),
        (plan_of(loads=[(4, 0)]), "loads[0]"),
        (plan_of(loads=[(0, 16)]), "loads[0]"),
        (plan_of(stores=[(0, 1), (5, 1)]), "stores"),
        (plan_of(loads=[(0, 1)], stores=[(0, 9)]), "stores[0]"),
    ],
)
def test_bad_plans_are_refused_before_anything_moves(plan: SimpleNamespace, argument: str) -> None:
    blocks = blocks_of()
    before = blocks.clone()
    copier = TorchCopyEngine(blocks, 4)
    with pytest.raises(ConfigError) as caught:
        copier.submit(plan)
    assert caught.value.argument == argument
    assert copier.poll() == []
    assert copier.stats() == {"loaded_blocks": 0, "stored_blocks": 0, "pieces": 0}
    assert torch.equal(blocks, before)


def test_a_closed_copier_takes_nothing() -> None:
    copier = TorchCopyEngine(blocks_of(), 4)
    copier.close()
    copier.close()
    with pytest.raises(TransferError, match="closed"):
        copier.submit(plan_of(stores=[(0, 0)]))


def test_a_tensor_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ConfigError, match="contiguous"):
        TorchCopyEngine(blocks_of().transpose(0, 1), 4)


def test_more_host_memory_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match="available") as caught:
        TorchCopyEngine(tiny_model("llama").make_memory(2, 64).tensor, 2**24)
    assert caught.value.argument == "cpu_blocks"
    assert caught.value.value == 2**24


def test_the_cores_copy_engine_is_taken_for_cpu_memory() -> None:
    memory = tiny_model("llama").make_memory(4, 16)
    copier = make_copier(memory, 8)
    assert isinstance(copier, CopyEngine)
    assert copier.cpu.num_blocks == 8
    memory.tensor.random_(9)
    before = memory.tensor.clone()
    copier.submit(plan_of(stores=[(0, 7), (3, 2)]))  # type: ignore[arg-type]
    assert copier.wait(10.0) == [(1, [])]
    copier.submit(plan_of(loads=[(2, 1), (7, 2)], first_ticket=2))  # type: ignore[arg-type]
    assert copier.wait(10.0) == [(2, [])]
    assert torch.equal(memory.tensor, before[[0, 3, 0, 3]])
    copier.close()


def test_a_single_tier_copies_nothing() -> None:
    copier = make_copier(tiny_model("llama").make_memory(4, 16), 0)
    copier.submit(plan_of())  # type: ignore[arg-type]
    assert copier.poll() == []
    copier.close()


def test_the_copier_refuses_more_host_memory_than_there_is() -> None:
    memory = tiny_model("llama").make_memory(2, 64)
    with pytest.raises(ConfigError, match="available") as caught:
        make_copier(memory, 2**23)
    assert (caught.value.argument, caught.value.value) == ("cpu_blocks", 2**23)
