"""The engine's answers against transformers' `generate()`, whatever the batching, the hits and the copies do."""

from __future__ import annotations

import random
from functools import partial

import pytest
from kvtier import BlockTable, CopyEngine
from kvtier.engine import Engine, Sampling
from kvtier.errors import ConfigError, OutOfBlocksError, TransferError, UnknownRequestError
from kvtier.reference import ReferenceBlockTable
from scripted_copier import ScriptedCopier
from tiny_models import tiny_model, tokens_of, transformers_answer

FAMILIES = ("llama", "qwen2", "qwen3")
TABLES = {"core": BlockTable, "twin": ReferenceBlockTable}
LENGTH = 12


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    return [tokens_of(seed * 1000 + i, length) for i, length in enumerate(lengths)]


def expected(name: str, prompts: list[list[int]], length: int = LENGTH) -> list[list[int]]:
    return [transformers_answer(tiny_model(name), tuple(prompt), length) for prompt in prompts]


def engine_of(name: str = "llama", *, delay: int = 0, late: bool = False, fails=None, **sizes) -> Engine:
    sizes = {"gpu_blocks": 200, "cpu_blocks": 0, "block_size": 4} | sizes
    copier = partial(ScriptedCopier, delay=delay, late=late, fails=fails)
    return Engine(tiny_model(name), copier_factory=copier, **sizes)


def run(engine: Engine, prompts: list[list[int]], length: int = LENGTH) -> list[list[int]]:
    """As `generate`, with the table audited after every step."""
    requests = [engine.submit(prompt, Sampling(max_new_tokens=length)) for prompt in prompts]
    while any(request.finish_reason is None for request in requests):
        engine.step()
        engine.table.audit()
    return [request.answer for request in requests]


def forget_gpu(engine: Engine) -> None:
    """Empty the Gpu tier's cache: a filler takes all of it and is dropped."""
    engine.settle()
    tokens = engine.table.gpu_blocks * engine.table.block_size
    engine.table.admit("filler", [0] * tokens, salt="filler")
    engine.table.abort("filler")


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_answers_equal_generate(name: str, table: type) -> None:
    prompts = prompts_of([1, 2, 3, 4, 5, 17, 33, 70, 121])
    with engine_of(name, table_factory=table, max_step_tokens=32) as engine:
        assert run(engine, prompts) == expected(name, prompts)
        assert engine.stats()["computed_prompt_tokens"] == sum(map(len, prompts))
        # the last token of each answer is chosen but never computed
        assert engine.stats()["computed_tokens"] == sum(map(len, prompts)) + len(prompts) * (LENGTH - 1)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 64])
def test_chunked_prefill(chunk: int) -> None:
    prompts = prompts_of([50, 23, 61])
    with engine_of(max_step_tokens=chunk) as engine:
        assert run(engine, prompts) == expected("llama", prompts)
        assert engine.stats()["num_steps"] >= (sum(map(len, prompts)) + 3 * (LENGTH - 1)) / chunk


def test_a_step_mixes_decodes_and_a_prompt_within_its_budget() -> None:
    engine = engine_of(max_step_tokens=10)
    sizes = []
    forward = engine.model.forward

    class Watched:
        def __getattr__(self, name: str) -> object:
            return getattr(tiny_model("llama"), name)

        def forward(self, tokens, segments, memory):  # type: ignore[no-untyped-def]
            sizes.append([part.end - part.start for part in segments])
            return forward(tokens, segments, memory)

    engine.model = Watched()  # type: ignore[assignment]
    prompts = prompts_of([6, 35])
    assert run(engine, prompts) == expected("llama", prompts)
    assert all(sum(step) <= 10 for step in sizes)
    assert sizes[0] == [6, 4]
    assert sizes[1] == [1, 9]  # the short one decodes while the long one is still being read


@pytest.mark.parametrize("name", FAMILIES)
def test_prefix_hits_from_gpu(name: str) -> None:
    prompts = prompts_of([41, 60])
    with engine_of(name) as engine:
        assert run(engine, prompts) == expected(name, prompts)
        computed = engine.stats()["computed_prompt_tokens"]
        assert run(engine, prompts) == expected(name, prompts)
        # at least one token of a prompt is computed: 41 tokens leave 1, 60 leave 4
        assert engine.stats()["computed_prompt_tokens"] - computed == 1 + 4
        assert engine.table.stats()["gpu_hit_tokens"] == 40 + 56


@pytest.mark.parametrize("name", FAMILIES)
def test_the_cores_copy_engine(name: str) -> None:
    prompts = prompts_of([41, 60, 33])
    with Engine(tiny_model(name), gpu_blocks=50, cpu_blocks=100, block_size=4) as engine:
        assert isinstance(engine.copier, CopyEngine)
        assert run(engine, prompts) == expected(name, prompts)
        forget_gpu(engine)
        engine.memory.tensor.fill_(float("nan"))
        engine.copier.inject_failures("load", pairs=[17])  # block 7 of the second prompt: it starts again there
        computed = engine.stats()["computed_prompt_tokens"]
        assert run(engine, prompts) == expected(name, prompts)
        assert engine.stats()["computed_prompt_tokens"] - computed == 1 + (60 - 28) + 1
        assert engine.table.stats()["cpu_hit_blocks"] == 10 + 14 + 8


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("name", FAMILIES)
def test_prefix_hits_from_cpu(name: str, table: type, late: bool) -> None:
    prompts = prompts_of([41, 60])
    with engine_of(name, cpu_blocks=100, delay=2, late=late, table_factory=table) as engine:
        assert run(engine, prompts) == expected(name, prompts)
        forget_gpu(engine)
        engine.memory.tensor.fill_(float("nan"))
        computed = engine.stats()["computed_prompt_tokens"]
        assert run(engine, prompts) == expected(name, prompts)
        assert engine.stats()["computed_prompt_tokens"] - computed == 1 + 4
        assert engine.table.stats()["cpu_hit_tokens"] == 40 + 56
        assert engine.copier.stats()["loaded_blocks"] == 10 + 14


def test_answers_continue_as_hits() -> None:
    """A chat: the second prompt contains the first answer, whose blocks come back too."""
    (prompt,) = prompts_of([30])
    with engine_of(cpu_blocks=100) as engine:
        (answer,) = run(engine, [prompt])
        forget_gpu(engine)
        follow_up = prompt + answer + tokens_of(77, 5)
        assert run(engine, [follow_up]) == expected("llama", [follow_up])
        assert engine.table.stats()["cpu_hit_tokens"] == (30 + LENGTH - 1) // 4 * 4


def test_requests_whose_loads_run_do_not_block_others() -> None:
    prompts = prompts_of([41, 9])
    with engine_of(cpu_blocks=100) as engine:
        run(engine, prompts[:1])
        forget_gpu(engine)
        engine.copier.stuck = True  # type: ignore[attr-defined]
        slow, quick = (engine.submit(prompt, Sampling(max_new_tokens=LENGTH)) for prompt in prompts)
        while quick.finish_reason is None:
            engine.step()
        assert quick.answer == expected("llama", prompts)[1]
        assert slow.answer == []
        with pytest.raises(TransferError, match="not finished"):
            engine.step()
        engine.copier.stuck = False  # type: ignore[attr-defined]
        while slow.finish_reason is None:
            engine.step()
        assert slow.answer == expected("llama", prompts)[0]


@pytest.mark.parametrize("cpu_blocks", [0, 60], ids=["one-tier", "two-tiers"])
@pytest.mark.parametrize("name", FAMILIES)
def test_preemption_recomputes_or_reloads(name: str, cpu_blocks: int) -> None:
    prompts = prompts_of([30, 25, 28, 22])
    with engine_of(name, gpu_blocks=31, cpu_blocks=cpu_blocks, delay=1, late=True) as engine:
        assert run(engine, prompts, 40) == expected(name, prompts, 40)
        assert engine.stats()["num_preempted"] > 0


def test_a_preempted_request_keeps_what_it_has_drawn() -> None:
    sampling = Sampling(max_new_tokens=40, temperature=1.5, seed=9)
    prompts = prompts_of([30, 25, 28, 22])
    with engine_of() as roomy, engine_of(gpu_blocks=31) as tight:
        assert roomy.generate(prompts, sampling) == tight.generate(prompts, sampling)
        assert roomy.stats()["num_preempted"] == 0 < tight.stats()["num_preempted"]


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_failed_loads_are_recomputed(late: bool) -> None:
    prompts = prompts_of([41, 60])
    with engine_of(cpu_blocks=100, delay=1, late=late) as engine:
        run(engine, prompts)
        forget_gpu(engine)
        engine.copier.fails = lambda side, index: side == "load" and index in (3, 6, 12)  # type: ignore[attr-defined]
        computed = engine.stats()["computed_prompt_tokens"]
        assert run(engine, prompts) == expected("llama", prompts)
        # pairs 3 and 6 are of the first prompt: it starts again at block 3; pair 12 is block 2 of the second
        assert engine.stats()["computed_prompt_tokens"] - computed == (41 - 12) + (60 - 8)


def test_failed_stores_are_not_hits_and_come_again() -> None:
    prompts = prompts_of([41])
    with engine_of(cpu_blocks=100, fails=lambda side, index: side == "store" and index % 2 == 0) as engine:
        assert run(engine, prompts) == expected("llama", prompts)
        forget_gpu(engine)
        assert run(engine, prompts) == expected("llama", prompts)
        assert engine.table.stats()["store_failed_blocks"] > 0


def test_plans_that_the_copier_refuses_cost_time_only() -> None:
    prompts = prompts_of([41])
    with engine_of(cpu_blocks=100) as engine:
        engine.copier.refuse_next = 1  # type: ignore[attr-defined]
        run(engine, prompts)
        engine.settle()
        assert engine.table.stats()["store_failed_blocks"] > 0
        forget_gpu(engine)
        engine.copier.refuse_next = 1  # type: ignore[attr-defined]
        assert run(engine, prompts) == expected("llama", prompts)
        assert engine.table.stats()["load_failed_blocks"] > 0
        assert engine.table.stats()["loaded_blocks"] == 0


def test_salts_keep_requests_apart() -> None:
    prompts = prompts_of([41])
    with engine_of() as engine:
        for salt in ("a", "b"):
            request = engine.submit(prompts[0], Sampling(max_new_tokens=1), salt=salt)
            while request.finish_reason is None:
                engine.step()
        assert engine.table.stats()["gpu_hit_tokens"] == 0
        assert engine.stats()["computed_prompt_tokens"] == 82


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_random_traffic(table: type, seed: int) -> None:
    """Shared prefixes, little memory, late and failing copies, aborts: every finished answer is right."""
    dice = random.Random(seed)
    stems = [tokens_of(500 + i, 60) for i in range(3)]
    pool = [
        stem[: dice.choice((16, 30, 44, 60))] + tokens_of(600 + i, 4 * (i % 3) + 1) for i in range(12) for stem in stems
    ]

    def fails(side: str, index: int) -> bool:
        return dice.random() < 0.1

    copier = partial(ScriptedCopier, delay=seed % 4, late=seed % 2 == 1, fails=fails)
    sizes = {"gpu_blocks": 45, "cpu_blocks": 80 if seed % 3 else 10, "block_size": 4, "max_step_tokens": 40}
    with Engine(tiny_model("qwen3"), table_factory=table, copier_factory=copier, **sizes) as engine:
        live, finished, aborted = [], 0, 0
        for _ in range(150):
            if dice.random() < 0.35:
                live.append(engine.submit(dice.choice(pool), Sampling(max_new_tokens=LENGTH)))
            if live and dice.random() < 0.05:
                gone = live.pop(dice.randrange(len(live)))
                engine.abort(gone.request_id)
                assert gone.finish_reason == "aborted"
                aborted += 1
            if dice.random() < 0.05:
                engine.copier.refuse_next = 1  # type: ignore[attr-defined]
            for request in engine.step():
                live.remove(request)
                finished += 1
                prompt = tuple(request.tokens[: request.prompt_tokens])
                assert request.answer == transformers_answer(tiny_model("qwen3"), prompt, LENGTH)
            engine.table.audit()
        while live:
            for request in engine.step():
                live.remove(request)
        engine.copier.fails = lambda side, index: False  # type: ignore[attr-defined]
        engine.settle()
        stats = engine.table.stats()
        assert finished > 15
        assert aborted > 0
        assert stats["gpu_hit_blocks"] > 0
        assert stats["cpu_hit_blocks"] > 0 or seed % 3 == 0
        assert stats["gpu_held_blocks"] == stats["cpu_held_blocks"] == stats["num_tickets"] == 0


def test_settle_makes_the_last_blocks_hits_in_the_cpu_tier() -> None:
    prompts = prompts_of([41])
    with engine_of(cpu_blocks=100, delay=3, late=True) as engine:
        run(engine, prompts)
        engine.settle()
        assert engine.table.stats()["cpu_cached_blocks"] == (41 + LENGTH - 1) // 4


def test_times_are_taken_from_the_clock() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1
        return now[0]

    with Engine(tiny_model("llama"), gpu_blocks=50, block_size=4, max_step_tokens=8, clock=clock) as engine:
        request = engine.submit(tokens_of(1, 20), Sampling(max_new_tokens=3))
        assert (request.submitted_s, request.first_token_s, request.finished_s) == (1.0, None, None)
        while request.finish_reason is None:
            engine.step()
        assert (request.first_token_s, request.finished_s) == (2.0, 3.0)


@pytest.mark.parametrize(
    ("sizes", "argument"),
    [
        ({"gpu_blocks": 0}, "gpu_blocks"),
        ({"gpu_blocks": -3}, "gpu_blocks"),
        ({"cpu_blocks": -1}, "cpu_blocks"),
        ({"block_size": 0}, "block_size"),
        ({"max_step_tokens": 0}, "max_step_tokens"),
        ({"max_running": 0}, "max_running"),
        ({"gpu_blocks": 2**16, "block_size": 2**16}, "gpu_blocks"),
        ({"cpu_blocks": 2**18, "block_size": 2**12}, "cpu_blocks"),
    ],
)
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_sizes_outside_their_limits(sizes: dict, argument: str, table: type) -> None:
    with pytest.raises(ConfigError) as caught:
        Engine(tiny_model("llama"), table_factory=table, **({"gpu_blocks": 8} | sizes))
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("prompt", "options", "argument"),
    [
        ([], {}, "prompt"),
        ([3, -1], {}, "prompt"),
        ([101], {}, "prompt"),
        ([1] * 500, {"sampling": Sampling(max_new_tokens=13)}, "prompt + max_new_tokens"),
        ([1] * 190, {"sampling": Sampling(max_new_tokens=12)}, "prompt + max_new_tokens"),
        ([1], {"request_id": "taken"}, "request_id"),
    ],
)
def test_requests_outside_their_limits(prompt: list[int], options: dict, argument: str) -> None:
    with engine_of(gpu_blocks=50) as engine:
        engine.submit([1], request_id="taken")
        before = engine.table.stats()
        with pytest.raises(ConfigError) as caught:
            engine.submit(prompt, **options)
        assert caught.value.argument == argument
        assert engine.table.stats() == before
        assert len(engine.waiting) == 1


def test_a_request_that_just_fits_runs_to_its_end() -> None:
    """200 tokens of room: 190 + 11 - 1 computed."""
    prompts = prompts_of([190, 190])
    with engine_of(gpu_blocks=50, cpu_blocks=60, delay=2, late=True) as engine:
        assert run(engine, prompts, 11) == expected("llama", prompts, 11)


def test_abort_of_an_unknown_request() -> None:
    with engine_of() as engine, pytest.raises(UnknownRequestError):
        engine.abort("nobody")


def test_a_table_without_room_for_anything_says_so() -> None:
    with engine_of(gpu_blocks=8) as engine:
        engine.table.admit("somebody else", [1] * 32)
        engine.submit([1] * 8)
        with pytest.raises(OutOfBlocksError):
            engine.step()
