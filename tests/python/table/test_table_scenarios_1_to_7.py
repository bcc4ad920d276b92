"""Scenarios S01 to S07: kinds of faults that other two-tier caches shipped, each with early and late copies.

`make(gpu, cpu, block)` makes a table; the standing checks O1 to O7 run after every call on it.
"""

from __future__ import annotations

from table_harness import span

A = span(0, 16)
D = span(100, 116)
E = span(200, 216)


def test_s01_ids_are_local_to_their_tier(make):
    def run(t):
        plans = [t.full(A), t.full(D), t.full(E)]
        assert [len(plan.stores) for plan in plans] == [4, 4, 4]
        pairs = [tuple(pair) for plan in plans for pair in plan.stores.tolist()]
        assert all(0 <= gpu < 6 and 0 <= cpu < 16 for gpu, cpu in pairs)
        assert len({cpu - gpu for gpu, cpu in pairs}) > 1
        admission = t.open("A again", A)
        assert (admission.gpu_hit_blocks, admission.cpu_hit_blocks, admission.fresh_blocks) == (0, 4, 1)
        plan = t.cycle()
        assert len(plan.loads) == 4
        assert t.cells("gpu", admission.block_ids[:4]) == t.content(A)
        t.commit("A again", 17)
        t.release("A again")
        return [pairs, plan.loads.tolist(), admission.block_ids.tolist(), t.events, t.table.stats()]

    first, second = make(6, 16), make(6, 16)
    assert run(first) == run(second), "same calls, same decisions"
    first.finish()


def test_s02_a_gpu_hit_does_not_pin_the_host_copy(make):
    t = make(8, 8)
    x1, x2 = t.unseen(17), t.unseen(17)
    t.full(A)
    for _ in range(200):
        assert t.lookup(A) == (4, 0)
        assert t.hits("r", A) == (4, 0, 1)
        t.commit("r", 17)
        plan = t.step()
        assert (len(plan.loads), len(plan.stores)) == (0, 0)
        t.release("r")
    assert len(t.full(x1).stores) == 4
    assert len(t.full(x2).stores) == 4
    t.wipe_gpu()
    assert [t.lookup(tokens) for tokens in (A, x1, x2)] == [(0, 0), (0, 4), (0, 4)]
    assert t.stat("cpu_held_blocks") == 0
    t.finish()


def test_s03_releasing_twice(make):
    t = make(20, 16)
    t.open("r1", A)
    t.commit("r1", 17)
    t.cycle()
    t.release("r1")
    for call in ("release", "abort", "preempt"):
        t.is_unknown(call, "r1")
    assert t.stat("gpu_free_blocks") + t.stat("gpu_evictable_blocks") == 20

    t.open("r2", A)
    third = t.open("r3", A)
    t.release("r2")
    t.is_unknown("release", "r2")
    fourth = t.open("r4", t.unseen(40))
    assert not set(fourth.block_ids.tolist()) & set(third.block_ids.tolist())
    t.release("r4")
    t.release("r3")
    assert t.stat("gpu_free_blocks") + t.stat("gpu_evictable_blocks") == 20
    t.finish()


def test_s03_a_request_id_is_used_again_while_stores_run(make):
    t = make(20, 16)
    t.open("r5", D)
    t.commit("r5", 17)
    old = t.step()
    t.abort("r5")
    ids = t.open("r5", E).block_ids.tolist()
    t.done(old)
    t.done_again(old.store_ticket)
    assert t.table.block_ids("r5").tolist() == ids
    t.release("r5")
    t.wipe_gpu()
    assert t.lookup(D) == (0, 4)
    t.open("r", D)
    t.cycle()
    assert t.cells("gpu", t.table.block_ids("r")[:4]) == t.content(D)
    t.finish()


def test_s03_a_request_id_is_used_again_while_loads_run(make):
    t = make(20, 16)
    t.full(A)
    t.full(E)
    t.wipe_gpu()
    t.open("r6", A)
    old = t.step()
    t.abort("r6")
    ids = t.open("r6", E).block_ids.tolist()
    new = t.step()
    t.done(old)
    assert t.table.block_ids("r6").tolist() == ids
    assert not t.table.is_ready("r6")
    t.done(new)
    assert t.table.is_ready("r6")
    t.finish()


def test_s04_a_block_that_is_copied_out_is_not_free(make):
    t = make(5, 8)
    t.open("A", A)
    t.commit("A", 17)
    stores = t.step()
    assert len(stores.stores) == 4
    t.release("A")
    d = t.unseen(17)
    error = t.open_is_refused("D", d)
    assert (error.needed, error.available, error.total) == (5, 1, 5)
    t.done(stores)
    t.open("D", d)
    t.commit("D", 17)
    t.cycle()
    t.release("D")
    t.wipe_gpu()
    assert t.lookup(A) == (0, 4)
    ids = t.open("A", A).block_ids[:4]
    t.cycle()
    assert t.cells("gpu", ids) == t.content(A)
    t.finish()


def test_s04_a_failed_store_is_offered_again(make):
    t = make(16, 8)
    t.open("A", A)
    t.commit("A", 17)
    first = t.step()
    t.done(first, fail=True)
    assert t.lookup(A) == (4, 0)
    assert t.stat("cpu_free_blocks") == 8
    assert t.events_of("stored", "cpu") == 0
    second = t.cycle()
    assert sorted(second.stores[:, 0].tolist()) == sorted(first.stores[:, 0].tolist())
    t.release("A")
    t.wipe_gpu()
    assert t.lookup(A) == (0, 4)
    t.finish()


def test_s05_preempted_while_a_store_runs(make):
    t = make(6, 16)
    tokens = span(0, 13)
    t.open("r1", tokens[:9])
    t.commit("r1", 9)
    assert len(t.cycle().stores) == 2
    t.extend("r1", tokens[9:])
    t.commit("r1", 13)
    running = t.step()
    assert len(running.stores) == 1
    t.preempt("r1")

    assert t.hits("r1", tokens) == (3, 0, 1)
    assert len(t.step().loads) == 0
    t.preempt("r1")

    unseen = t.unseen(21)
    t.open_is_refused("r2", unseen)
    t.done(running)
    t.open("r2", unseen)
    t.commit("r2", 21)
    t.cycle()
    t.release("r2")

    admission = t.open("r1", tokens)
    assert (admission.gpu_hit_blocks, admission.cpu_hit_blocks, admission.fresh_blocks) == (0, 3, 1)
    assert len(t.cycle().loads) == 3
    assert t.cells("gpu", admission.block_ids[:3]) == t.content(tokens)
    t.finish()


def test_s06_own_hits_survive_own_allocation(make):
    t = make(6, 0)
    ids = t.open("A", A).block_ids.tolist()
    t.commit("A", 17)
    t.release("A")
    second = t.open("A+8", A[:16] + t.unseen(8))
    assert (second.gpu_hit_blocks, second.fresh_blocks) == (4, 2)
    assert second.block_ids.tolist()[:4] == ids[:4]
    t.release("A+8")
    # 25 tokens are seven blocks of a tier of six: four hit, three more are needed.
    error = t.open_is_refused("A+9", A[:16] + t.unseen(9))
    assert (error.needed, error.available) == (3, 2)
    assert t.lookup(A) == (4, 0)
    t.open("unseen", t.unseen(16))
    assert t.lookup(A) == (2, 0), "the end of the chain is given up first"
    t.abort("unseen")
    t.finish()


def test_s06_the_host_tier_gives_up_tails_first(make):
    t = make(24, 6)
    z = t.unseen(17)
    t.full(A)
    t.full(z)
    t.wipe_gpu()
    assert t.lookup(A) == (0, 2)
    assert t.lookup(z) == (0, 4)
    t.finish()


def test_s07_nothing_is_a_hit_before_it_is_written(make):
    t = make(24, 24)
    assert t.hits("r1", A) == (0, 0, 5)
    assert t.hits("r2", A) == (0, 0, 5)
    assert t.lookup(A) == (0, 0)
    t.commit("r1", 17)
    assert t.lookup(A) == (4, 0)
    t.commit("r2", 17)
    assert len(t.cycle().stores) == 4, "one store for each distinct block"
    t.release("r1")
    t.release("r2")

    admission = t.open("r3", A[:16])
    assert admission.cached_tokens < 16
    holder = t.open("r3b", A)
    written = admission.block_ids[admission.gpu_hit_blocks :].tolist()
    assert not set(written) & set(holder.block_ids.tolist())
    t.release("r3")
    t.release("r3b")

    t.wipe_gpu()
    for name in ("r4", "r5", "r6"):
        admission = t.open(name, A)
        assert admission.gpu_hit_blocks + admission.cpu_hit_blocks == 4
    assert t.hits("r7", t.unseen(4)) == (0, 0, 1)
    plan = t.step()
    destinations = plan.loads[:, 1].tolist()
    assert len(destinations) == len(set(destinations))
    t.done(plan)
    for name, num_tokens in (("r4", 17), ("r5", 17), ("r6", 17), ("r7", 4)):
        t.commit(name, num_tokens)
        assert t.table.is_ready(name)
    t.finish()
