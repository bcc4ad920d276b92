"""Scenarios S08 to S11: what is stored and when, what is part of a key, and reset; see S01 to S07."""

from __future__ import annotations

import pytest
from expected_hashes import PLAIN, Identity
from table_harness import span

A = span(0, 16)


@pytest.mark.parametrize("lag", [1, 9])
def test_s08_generated_blocks_reach_the_host(make, lag):
    t = make(32, 32)
    tokens = span(0, 25)
    t.open("r", tokens[:6])
    stored = []
    for total in range(7, 27):
        t.extend("r", [tokens[total - 1]])
        committed = max(total - lag, 6)
        t.commit("r", committed)
        stored += t.cycle().stores[:, 0].tolist()
        assert len(stored) == committed // 4, "none before its commit, none skipped"
    t.commit("r", 25)
    t.release("r")
    stored += t.cycle().stores[:, 0].tolist()
    assert len(stored) == len(set(stored)) == 6
    t.wipe_gpu()
    assert t.lookup(tokens) == (0, 6)
    t.finish()


def test_s09_a_full_host_tier_defers_stores(make):
    t = make(24, 2)
    prompts = {name: t.unseen(17) for name in ("r1", "r2", "r3")}
    for name, tokens in prompts.items():
        t.open(name, tokens)
    for name in prompts:
        t.commit(name, 17)
    first = t.step()
    assert len(first.stores) <= 2
    assert first.not_stored == {"no_cpu_slot": 10}
    for name in prompts:
        t.extend(name, t.unseen(4))
        t.commit(name, 21)
    second = t.step()
    assert len(second.stores) == 0
    assert second.store_ticket is None
    assert second.not_stored == {"no_cpu_slot": 13}
    t.done(first)
    for _ in range(8):
        assert len(t.cycle().stores) <= 2
    t.finish()


def test_s09_a_budget_defers_stores(make):
    t = make(24, 8, max_store_blocks_per_step=3)
    t.open("A", A)
    t.commit("A", 17)
    plan = t.cycle()
    assert len(plan.stores) == 3
    assert plan.not_stored == {"budget": 1}
    plan = t.cycle()
    assert len(plan.stores) == 1
    assert plan.not_stored == {}
    t.finish()


def test_s09_without_a_host_tier_it_is_a_prefix_cache(make):
    t = make(24, 0)
    plan = t.full(A)
    assert (len(plan.loads), len(plan.stores), plan.not_stored) == (0, 0, {})
    assert t.hits("again", A) == (4, 0, 1)
    t.finish()


MEDIA = "0123456789abcdef" * 3
IDENTITIES = {
    "none": PLAIN,
    "salt x": Identity(salt="x"),
    "adapter x 1": Identity(adapter=("x", 1)),
    "adapter x 2": Identity(adapter=("x", 2)),
    "adapter x": Identity(adapter="x"),
    "adapter 1": Identity(adapter=1),
    "adapter '1'": Identity(adapter="1"),
    "media 1 at 4": Identity(media=((MEDIA + "0001beef", 4),)),
    "media 2 at 4": Identity(media=((MEDIA + "9991beef", 4),)),
    "media 1 at 8": Identity(media=((MEDIA + "0001beef", 8),)),
    "number 1 at 4": Identity(media=((0x0001BEEF, 4),)),
    "number 2 at 4": Identity(media=((0x9991BEEF, 4),)),
    "a bc": Identity(salt="a", adapter="bc"),
    "ab c": Identity(salt="ab", adapter="c"),
    "(a bc)": Identity(adapter=("a", "bc")),
    "(ab c)": Identity(adapter=("ab", "c")),
}


@pytest.mark.parametrize("stored", list(IDENTITIES))
def test_s10_identity_is_part_of_the_key(make, stored):
    def first_covered(identity):
        return min((offset // 4 for _, offset in identity.media), default=4)

    t = make(64, 64)
    t.full(A, IDENTITIES[stored])
    one = IDENTITIES[stored]
    for name, other in IDENTITIES.items():
        expected = 4
        if (one.salt, one.adapter) != (other.salt, other.adapter):
            expected = 0
        elif name != stored:
            expected = min(first_covered(one), first_covered(other))
        assert t.lookup(A, other) == (expected, 0), f"{stored} then {name}"
    t.finish()


def test_s10_token_ids_keep_their_boundaries(make):
    t = make(64, 64)
    t.full([1, 23, *span(50, 64)])
    assert t.lookup([12, 3, *span(50, 64)]) == (0, 0)
    t.full([0, 0, 0, 256, *span(50, 62)])
    assert t.lookup([0, 0, 1, 0, *span(50, 62)]) == (0, 0)
    t.finish()


def test_s11_reset_reaches_both_tiers_or_says_no(make):
    t = make(16, 16)
    t.full(A)
    t.events.clear()
    assert t.reset()
    assert t.lookup(A) == (0, 0)
    assert (t.events_of("removed", "gpu"), t.events_of("removed", "cpu")) == (4, 4)
    assert t.hits("A", A) == (0, 0, 5)
    assert len(t.step().loads) == 0
    t.commit("A", 17)
    assert not t.reset()
    assert t.lookup(A) == (4, 0)
    plan = t.step()
    assert not t.reset()
    t.release("A")
    assert not t.reset(), "copies still run"
    t.done(plan)
    assert t.reset()
    t.finish()
