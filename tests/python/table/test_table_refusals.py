"""Refused calls: stale tickets, wrong ranks, no blocks; and limits that are reached without one."""

from __future__ import annotations

import copy
import pickle

import numpy as np
from kvtier import errors
from kvtier.errors import ConfigError, OutOfBlocksError, StaleTicketError, UnknownRequestError
from refusals import HUGE, names


def test_ranks_and_failed_pairs(busy):
    load, store = busy.table.open_tickets()
    for rank in (-1, 2, *HUGE, -(10**30)):
        error = busy.refuses(lambda table, rank=rank: table.complete(load, rank), ConfigError)
        assert names(error, "rank", rank)
    for failed in ([4], [0, -1], [2**32], [10**30], np.array([4]), np.array([-1]), np.array([2**64 - 1], np.uint64)):
        error = busy.refuses(lambda table, failed=failed: table.complete(load, 0, failed), ConfigError)
        assert names(error, "failed", None)
    for failed in (7, "1", ["1"], [None], [1.5]):
        busy.refuses(lambda table, failed=failed: table.complete(load, 0, failed), TypeError, ConfigError)
    for failed in (np.array([1.0]), np.zeros((1, 1), dtype=np.int64), np.zeros(4, dtype=np.int64)[::2]):
        busy.refuses(lambda table, failed=failed: table.complete(load, 0, failed), ConfigError)
    busy.refuses(lambda table: table.complete(load, "0"), TypeError)
    busy.refuses(lambda table: table.complete(load, 0.0), TypeError)
    busy.complete(load, 1, np.array([3, 3, 1], dtype=np.uint8))
    busy.complete(load, 0, (2,))
    busy.complete(store, 0, range(0))
    busy.complete(store, 1, [])
    busy.finish()


def test_stale_tickets(busy):
    load, store = busy.table.open_tickets()
    busy.complete(load, 1)
    busy.done_again(0)
    for ticket in (-1, 0, store + 1, *HUGE, -(10**30)):
        error = busy.refuses(lambda table, ticket=ticket: table.complete(ticket), StaleTicketError)
        assert error.ticket == ticket
        assert str(ticket) in str(error)
    before = busy.stat("num_stale_completions")
    busy.refuses(lambda table: table.complete(load, 1, [0]), StaleTicketError)
    busy.complete(load, 0)
    for rank in (0, 1):
        busy.refuses(lambda table, rank=rank: table.complete(load, rank), StaleTicketError)
    assert busy.stat("num_stale_completions") == before + 3
    for ticket in (None, "1", 1.0):
        busy.refuses(lambda table, ticket=ticket: table.complete(ticket), TypeError)
    busy.finish()


def test_out_of_blocks(busy):
    free = busy.stat("gpu_free_blocks") + busy.stat("gpu_evictable_blocks")
    before = busy.stat("num_refused")
    error = busy.open_is_refused("new", busy.unseen(4 * free + 1))
    assert (error.needed, error.available, error.total) == (free + 1, free, 16)
    busy.refuses(lambda table: table.extend("hashed", busy.unseen(400)), OutOfBlocksError)
    full_blocks = (6 + 400) // 4 - 1
    busy.refuses(lambda table: table.extend_hashed("digests", bytes(32 * full_blocks), 400), OutOfBlocksError)
    assert busy.stat("num_refused") == before + 3
    busy.finish()


def test_a_refused_call_leaves_the_eviction_order_alone(make):
    """What a refused call found or asked for must not count as used."""
    t = make(8, 8)
    old, young = t.unseen(9), t.unseen(9)
    t.full(old)
    t.full(young)
    t.open_is_refused("r", old[:8] + t.unseen(40))
    t.lookup(old)
    t.refuses(lambda table: table.admit("r", [*old, -1]), ConfigError)
    t.open("filler", t.unseen(20))
    assert t.lookup(young) == (2, 0)
    t.finish()


def test_a_hash_named_twice_counts_once(make):
    """Digests come from outside: the same one may stand at two positions, and costs only one evictable block."""
    t = make(3, 4)
    digest = bytes([9]) * 32
    t.admit_hashed("r", [digest], 5)
    t.commit("r", 5)
    t.cycle()
    t.release("r")
    admission = t.admit_hashed("twice", [digest] * 3, 13)
    assert (admission.gpu_hit_blocks, admission.fresh_blocks) == (3, 1)
    t.release("twice")
    t.wipe_gpu()
    t.admit_hashed("loads", [digest] * 2, 9)
    t.cycle()
    t.finish()


def test_events_beyond_the_most_that_may_wait(make_table):
    table = make_table(4096, 0, 1)
    for _ in range(9):
        table.admit("r", range(4096))
        table.commit("r", 4096)
        table.release("r")
        assert table.reset()
    events = table.events()
    assert len(events) == 65_536
    assert table.stats()["events_dropped"] == 9 * 2 * 4096 - 65_536
    # Those that came first: what finds no room is dropped.
    assert [(event.kind, event.block_id) for event in events[4096:8192]] == [("removed", at) for at in range(4096)]
    assert table.events() == []
    table.admit("r", range(1))
    table.commit("r", 1)
    assert [event.kind for event in table.events()] == ["stored"]


def test_errors_survive_a_process_boundary(busy):
    for error in (
        busy.refuses(lambda table: table.admit("new", [-1]), ConfigError),
        busy.refuses(lambda table: table.release("nobody"), UnknownRequestError),
        busy.refuses(lambda table: table.complete(99), StaleTicketError),
        busy.open_is_refused("new", busy.unseen(400)),
    ):
        for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert type(other) is type(error)
            assert str(other) == str(error)
            assert vars(other) == vars(error)
        assert isinstance(error, errors.KvtierError)
