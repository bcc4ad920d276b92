"""Two tables over one Cpu tier: what one has stored, the other finds."""

import pytest

kvtier = pytest.importorskip("kvtier")

PROMPT = list(range(17))
OTHER = list(range(100, 117))


def cycle(table: "kvtier.BlockTable") -> "kvtier.Plan":
    plan = table.step()
    for ticket in (plan.load_ticket, plan.store_ticket):
        if ticket is not None:
            table.complete(ticket)
    return plan


def run(table: "kvtier.BlockTable", request: str, prompt: list[int]) -> "kvtier.Admission":
    admission = table.admit(request, prompt)
    cycle(table)
    table.commit(request, len(prompt))
    cycle(table)
    table.release(request)
    return admission


@pytest.fixture
def pair():
    first = kvtier.BlockTable(8, 16, 4)
    return first, first.share(12)


def test_acknowledged_blocks_are_seen_by_the_other(pair):
    first, second = pair
    assert (second.gpu_blocks, second.cpu_blocks, second.block_size) == (12, 16, 4)
    run(first, "r", PROMPT)
    assert first.lookup(PROMPT) == (4, 0)
    assert second.lookup(PROMPT) == (0, 4)
    admission = run(second, "r", PROMPT)
    assert (admission.gpu_hit_blocks, admission.cpu_hit_blocks) == (0, 4)
    # The second one had nothing to store: the tier knew the blocks.
    assert second.stats()["stored_blocks"] == 0
    assert second.stats()["cpu_cached_blocks"] == 4


def test_a_store_that_runs_is_no_hit_for_the_other(pair):
    first, second = pair
    first.admit("r", PROMPT)
    first.commit("r", 17)
    plan = first.step()
    assert second.lookup(PROMPT) == (0, 0)
    # Nor is it stored twice: the tier is receiving it.
    second.admit("r", PROMPT)
    second.commit("r", 17)
    assert second.step().store_ticket is None
    first.complete(plan.store_ticket)
    second.release("r")
    assert first.lookup(PROMPT) == (4, 0)


def test_requests_and_tickets_are_each_tables_own(pair):
    first, second = pair
    first.admit("r", PROMPT)
    second.admit("r", OTHER)
    first.commit("r", 17)
    second.commit("r", 17)
    plans = first.step(), second.step()
    assert plans[0].store_ticket == plans[1].store_ticket == 1
    assert not set(plans[0].stores[:, 1].tolist()) & set(plans[1].stores[:, 1].tolist())
    first.complete(1)
    with pytest.raises(kvtier.StaleTicketError):
        first.complete(1)
    second.complete(1)
    first.audit()
    first.release("r")
    second.release("r")
    second.audit()
    assert first.stats()["cpu_cached_blocks"] == second.stats()["cpu_cached_blocks"] == 8


def test_reset_is_refused_while_the_other_is_at_work(pair):
    first, second = pair
    run(first, "r", PROMPT)
    second.admit("q", OTHER)
    assert not first.reset()
    assert first.lookup(PROMPT) == (4, 0)
    second.abort("q")
    assert first.reset()
    assert second.lookup(PROMPT) == (0, 0)


def test_refusals(pair):
    for gpu_blocks in (0, -1, 2**24 + 1):
        with pytest.raises(kvtier.ConfigError) as refusal:
            pair[0].share(gpu_blocks)
        assert refusal.value.argument == "gpu_blocks"
