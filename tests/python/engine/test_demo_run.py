"""The demo's modes and figures, and that its checks find what they are there to find."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from kvtier import Plan
from kvtier.demo import witness as witness_module
from kvtier.demo.clock import Clock
from kvtier.demo.command import run_demo
from kvtier.demo.modes import MODES, check_room, demo_model, run_modes
from kvtier.demo.report import Report
from kvtier.demo.workload import Workload
from kvtier.engine import KvMemory, Model, TorchCopyEngine
from kvtier.errors import ConfigError
from tiny_models import tiny_model

SMALL = {"documents": 8, "document_tokens": 70, "answer_tokens": 4, "gpu_documents": 2, "cpu_documents": 8}
HITS = 64  # of 70 tokens, 4 whole blocks
FIGURES = {
    "prompt_tokens",
    "computed_tokens",
    "gpu_hit_tokens",
    "cpu_hit_tokens",
    "loaded_blocks",
    "stored_blocks",
    "ttft_mean_s",
    "ttft_p99_s",
    "seconds",
}


@pytest.fixture(scope="module")
def model() -> Model:
    return demo_model(None, "cpu", 0)


def report_of(workload: Workload, model: Model, copier_factory=None) -> Report:  # type: ignore[no-untyped-def]
    options = {"copier_factory": copier_factory} if copier_factory else {}
    return Report(workload, dict(zip(MODES, run_modes(workload, model, **options), strict=True)))


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("order", ["random", "tile", "interleave"])
def test_figures(order: str, in_flight: int, model: Model) -> None:
    report = report_of(Workload(**SMALL, order=order, in_flight=in_flight), model)
    assert report.outputs_identical
    assert report.bytes_identical
    for mode, result in report.modes.items():
        assert list(result.rounds) == ["first", "second"]
        for name, figures in result.rounds.items():
            assert figures.prompt_tokens == 8 * 70
            assert figures.computed_tokens + figures.gpu_hit_tokens + figures.cpu_hit_tokens == 8 * 70
            assert 0 < figures.ttft_mean_s <= figures.ttft_p99_s < figures.seconds
            if mode == "none":
                assert figures.computed_tokens == 8 * 70
            if mode != "two_tier":
                assert figures.cpu_hit_tokens == figures.loaded_blocks == figures.stored_blocks == 0
            if name == "first":
                assert figures.computed_tokens == 8 * 70
    two = report.modes["two_tier"].rounds
    assert two["first"].stored_blocks == 8 * 4
    assert two["second"].gpu_hit_tokens + two["second"].cpu_hit_tokens == 8 * HITS
    assert two["second"].loaded_blocks * 16 == two["second"].cpu_hit_tokens >= 5 * HITS
    assert report.modes["two_tier"].num_compared == two["second"].loaded_blocks
    assert report.modes["gpu"].rounds["second"].computed_tokens > 8 * 70 / 2


def test_a_workload_that_fits_gains_nothing(model: Model) -> None:
    report = report_of(Workload(**SMALL | {"gpu_documents": 8}), model)
    assert report.modes["two_tier"].rounds["second"].cpu_hit_tokens == 0
    assert report.modes["gpu"].rounds["second"].gpu_hit_tokens == 8 * HITS
    assert report.bytes_identical


def test_host_memory_for_half_of_the_documents(model: Model) -> None:
    report = report_of(Workload(**SMALL | {"cpu_documents": 4}, order="tile"), model)
    assert report.outputs_identical
    assert report.bytes_identical


class Spoiler(TorchCopyEngine):
    """A copier that acknowledges everything and does something else; `spoil` is called after each plan's copies."""

    spoilt = 0

    def __init__(self, memory: KvMemory, cpu_blocks: int) -> None:
        super().__init__(memory.tensor, cpu_blocks)

    def submit(self, plan: Plan) -> None:
        super().submit(plan)
        self.spoil(plan)

    def spoil(self, plan: Plan) -> None:
        raise NotImplementedError


class SwapsLoadedBlocks(Spoiler):
    def spoil(self, plan: Plan) -> None:
        if len(plan.loads) > 1 and not Spoiler.spoilt:
            Spoiler.spoilt = 1
            pair = plan.loads[[1, 2], 1].tolist()
            self._gpu[pair] = self._gpu[pair[::-1]]


class SwapsStoredBlocks(Spoiler):
    def spoil(self, plan: Plan) -> None:
        if len(plan.stores) > 1 and not Spoiler.spoilt:
            Spoiler.spoilt = 1
            pair = plan.stores[[0, 1], 1].tolist()
            self._host[pair] = self._host[pair[::-1]]


class FlipsOneBit(Spoiler):
    def spoil(self, plan: Plan) -> None:
        if len(plan.loads) and not Spoiler.spoilt:
            Spoiler.spoilt = 1
            self._gpu[plan.loads[0, 1]].view(torch.uint8)[9] ^= 1


class LoadsNothing(Spoiler):
    def submit(self, plan: Plan) -> None:
        before = self._gpu.clone()
        super().submit(plan)
        if len(plan.loads):
            Spoiler.spoilt = 1
            self._gpu[plan.loads[:, 1].tolist()] = before[plan.loads[:, 1].tolist()]

    def spoil(self, plan: Plan) -> None:
        pass


@pytest.mark.parametrize("spoiler", [SwapsLoadedBlocks, SwapsStoredBlocks, FlipsOneBit, LoadsNothing])
def test_a_copier_that_spoils_blocks_is_found_out(
    spoiler: type[Spoiler], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Spoiler.spoilt = 0
    path = tmp_path / "figures.json"
    assert run_demo(Workload(**SMALL), None, "cpu", path, copier_factory=spoiler) == 1
    assert Spoiler.spoilt == 1
    assert json.loads(path.read_text())["bytes_identical"] is False
    assert "bytes they left with: NO" in capsys.readouterr().out


def test_swapped_blocks_of_one_bit_leave_the_tokens_alone(model: Model) -> None:
    """Why tokens alone are not enough."""
    Spoiler.spoilt = 0
    report = report_of(Workload(**SMALL), model, FlipsOneBit)
    assert report.outputs_identical
    assert not report.bytes_identical
    assert report.modes["two_tier"].num_different == 1


def test_different_answers_are_found_out(model: Model) -> None:
    report = report_of(Workload(**SMALL), model)
    report.modes["gpu"].answers[5][2] += 1
    assert not report.outputs_identical


def test_answers_depend_on_loaded_blocks(model: Model) -> None:
    report = report_of(Workload(**SMALL), model, LoadsNothing)
    assert not report.outputs_identical


def test_a_good_run_ends_with_zero_and_writes_the_promised_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    assert run_demo(Workload(**SMALL), None, "cpu", path) == 0
    fields = json.loads(path.read_text())
    assert set(fields) == {"capacity_docs", "modes", "outputs_identical", "bytes_identical"}
    assert fields["capacity_docs"] == {"gpu": 2, "cpu": 8}
    assert fields["outputs_identical"] is fields["bytes_identical"] is True
    assert set(fields["modes"]) == {"none", "gpu", "two_tier"}
    for rounds in fields["modes"].values():
        assert set(rounds) == {"first", "second"}
        assert all(set(figures) == FIGURES for figures in rounds.values())
    out = capsys.readouterr().out
    for text in ("GPU 2, host 8", "two tiers", "tokens identical in all three modes: yes", "left with: yes"):
        assert text in out
    assert "…" not in out  # no column is cut off


def test_comparing_bytes_takes_no_time_on_the_clock(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = witness_module._WatchedCopier._digest
    calls = []

    def slow_digest(self: object, block: int) -> bytes:
        calls.append(block)
        time.sleep(0.02)
        return digest(self, block)  # type: ignore[arg-type]

    workload = Workload(**SMALL | {"documents": 4, "cpu_documents": 4})
    (plain,) = run_modes(workload, model, ["two_tier"])
    monkeypatch.setattr(witness_module._WatchedCopier, "_digest", slow_digest)
    start = time.perf_counter()
    (watched,) = run_modes(workload, model, ["two_tier"])
    elapsed = time.perf_counter() - start
    counted = sum(figures.seconds for figures in watched.rounds.values())
    assert len(calls) >= 4 * 4 * 2 - 8
    assert elapsed - counted >= 0.02 * len(calls)
    assert watched.rounds["second"].loaded_blocks == plain.rounds["second"].loaded_blocks


def test_verification_can_be_left_out(model: Model) -> None:
    (result,) = run_modes(Workload(**SMALL), model, ["two_tier"], verify=False)
    assert result.num_compared == 0 < result.rounds["second"].loaded_blocks


def test_modes_take_turns(model: Model) -> None:
    """Every document is asked in all modes before the next one, and each mode starts first equally often."""
    seen: list[int] = []
    results = run_modes(Workload(**SMALL), model, on_request=seen.append)
    turns = [seen[i : i + 3] for i in range(0, len(seen), 3)]
    assert len(turns) == 16
    assert all(sorted(turn) == [0, 1, 2] for turn in turns)
    assert {turn[0] for turn in turns} == {0, 1, 2}
    for result in results:
        for name, figures in result.rounds.items():
            assert len(result.turn_seconds[name]) == 8
            assert sum(result.turn_seconds[name]) == pytest.approx(figures.seconds)


def test_clock() -> None:
    clock = Clock()
    start = clock()
    time.sleep(0.01)
    with clock.paused():
        time.sleep(0.1)
    assert 0.01 <= clock() - start < 0.1


def test_documents_and_orders() -> None:
    workload = Workload(**SMALL, seed=3)
    documents = [workload.document(index, 50) for index in range(8)]
    assert documents == [workload.document(index, 50) for index in range(8)]
    assert len({tuple(document) for document in documents}) == 8
    assert all(len(document) == 70 and set(document) <= set(range(50)) for document in documents)
    assert Workload(**SMALL, seed=4).document(0, 50) != documents[0]
    for seed in range(5):
        rounds = Workload(**SMALL, seed=seed).rounds()
        assert rounds["first"] == list(range(8)) != rounds["second"]
        assert sorted(rounds["second"]) == rounds["first"]
    assert Workload(**SMALL, order="tile").rounds()["second"] == list(range(8))
    assert Workload(**SMALL, order="interleave").rounds()["second"] == [0, 4, 1, 5, 2, 6, 3, 7]
    assert Workload(**SMALL | {"documents": 5}, order="interleave").rounds()["second"] == [0, 3, 1, 4, 2]


def test_room_for_answers() -> None:
    workload = Workload(**SMALL | {"document_tokens": 64, "answer_tokens": 1})
    assert workload.document_blocks == 5
    assert (workload.gpu_blocks, workload.cpu_blocks) == (10, 40)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"document_tokens": 510}, "--document-tokens"),
        ({"gpu_documents": 2**24}, "--gpu-documents"),
        ({"cpu_documents": 2**24}, "--cpu-documents"),
    ],
)
def test_a_workload_without_room_is_refused(changes: dict, argument: str) -> None:
    with pytest.raises(ConfigError, match="at most") as caught:
        check_room(Workload(**SMALL | changes), tiny_model("llama"))
    assert caught.value.argument == argument
