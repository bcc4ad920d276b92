"""Bad input: a typed error names argument, value and limit, and nothing has changed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from kvtier.errors import ConfigError, UnknownRequestError
from refusals import HUGE, names, refused


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("gpu_blocks", value) for value in (0, -1, 2**24 + 1, *HUGE, -(10**30))),
        *(("cpu_blocks", value) for value in (-1, 2**24 + 1, *HUGE, -(10**30))),
        *(("block_size", value) for value in (0, -1, 65537, *HUGE, -(10**30))),
        *(("ranks", value) for value in (0, -1, 65, *HUGE, -(10**30))),
        *(("max_store_blocks_per_step", value) for value in (-1, -(10**30))),
        *(("policy", value) for value in ("", "LRU", "fifo", "lru\0", "é" * 100, "\ud800")),
        *(("store", value) for value in ("", "Eager", "lazy?")),
        *(("hash", value) for value in ("", "md5", "sha-256")),
    ],
)
def test_constructor_values(make_table, argument, value):
    arguments = {"gpu_blocks": 4, "cpu_blocks": 4, "block_size": 4} | {argument: value}
    error = refused(lambda: make_table(**arguments), ConfigError)
    assert names(error, argument, value if isinstance(value, int) else None)


@pytest.mark.parametrize("argument", ["gpu_blocks", "cpu_blocks", "block_size", "ranks", "max_store_blocks_per_step"])
@pytest.mark.parametrize("value", ["4", 4.0, b"4", [4], True])
def test_constructor_numbers_of_the_wrong_type(make_table, argument, value):
    arguments = {"gpu_blocks": 4, "cpu_blocks": 4, "block_size": 4} | {argument: value}
    assert names(refused(lambda: make_table(**arguments), TypeError, ConfigError), argument, None)


@pytest.mark.parametrize("argument", ["policy", "store", "hash", "root"])
@pytest.mark.parametrize("value", [1, 1.5, ["lru"]])
def test_constructor_names_of_the_wrong_type(make_table, argument, value):
    arguments = {"gpu_blocks": 4, "cpu_blocks": 4, "block_size": 4} | {argument: value}
    assert names(refused(lambda: make_table(**arguments), TypeError, ConfigError), argument, None)


def test_the_largest_budget_means_no_limit(make_table):
    for value in (2**31, 2**63 - 1):
        assert make_table(4, 4, 4, max_store_blocks_per_step=value).stats()["gpu_blocks"] == 4


class Boastful(list):
    """A list that claims to be longer than any memory."""

    def __len__(self) -> int:
        return 10**12


BAD_TOKENS = {
    "a claimed length": Boastful([1]),
    "a range without end": range(10**12),
    "an iterator": iter([1, 2]),
    "a generator without end": itertools.count(),
    "a set": {1, 2},
    "a dict": {1: 2},
    "bools inside": [True, 1],
    "negative": [0, -1],
    "too large": [0, 2**32],
    "far too large": [10**30],
    "far too small": [-(10**30)],
    "negative in a buffer": np.array([1, -1], dtype=np.int64),
    "small and negative in a buffer": np.array([1, -1], dtype=np.int8),
    "too large in a buffer": np.array([2**32], dtype=np.int64),
    "too large in an unsigned buffer": np.array([2**64 - 1], dtype=np.uint64),
    "floats": [1.0, 2.0],
    "floats in a buffer": np.array([1.0, 2.0]),
    "half floats in a buffer": np.array([1.0, 2.0], dtype=np.float16),
    "bools in a buffer": np.array([True, False]),
    "complex in a buffer": np.array([1j]),
    "other byte order": np.array([1, 2], dtype=">i4"),
    "dates in a buffer": np.array(["2020-01-01"], dtype="M8[D]"),
    "objects in a buffer": np.array([1, None], dtype=object),
    "gaps": np.arange(8)[::2],
    "backwards": np.arange(8)[::-1],
    "two dimensions": np.arange(8).reshape(2, 4),
    "no dimension": np.array(3),
    "text": "1234",
    "text inside": ["1"],
    "none inside": [1, None],
    "lists inside": [[1, 2]],
    "none": None,
    "a number": 7,
}


@pytest.mark.parametrize("case", list(BAD_TOKENS))
def test_token_ids(busy, case):
    tokens = BAD_TOKENS[case]
    for call in (
        lambda table: table.admit("new", tokens),
        lambda table: table.extend("hashed", tokens),
        lambda table: table.lookup(tokens),
        lambda table: table.block_hashes(tokens),
    ):
        error = busy.refuses(call, ConfigError, TypeError)
        wrong_value = isinstance(tokens, np.ndarray) and tokens.dtype.kind in "iufb"
        assert isinstance(error, ConfigError) or not wrong_value, "a buffer in the wrong form is a wrong value"
        assert names(error, "token_ids", None)
    busy.finish()


def test_a_wrong_token_id_is_named_with_its_limit(busy):
    for tokens, value in (([0, -1], -1), ([5, 2**32], 2**32), (np.array([-7]), -7), ([3, 10**30], 10**30)):
        error = busy.refuses(lambda table, tokens=tokens: table.admit("new", tokens), ConfigError)
        assert names(error, "token_ids", value)
        assert str(2**32 - 1) in error.limit


def test_no_tokens(busy):
    for tokens in ([], (), np.array([], dtype=np.int32), b""):
        error = busy.refuses(lambda table, tokens=tokens: table.admit("new", tokens), ConfigError)
        assert names(error, "token_ids", None)
        assert busy.table.lookup(tokens) == (0, 0)
        assert busy.table.block_hashes(tokens) == b""
        assert busy.extend("hashed", list(tokens)) == []
    for num_tokens in (0, -1):
        error = busy.refuses(lambda table, n=num_tokens: table.admit_hashed("new", [], n), ConfigError)
        assert names(error, "num_tokens", num_tokens)
    error = busy.refuses(lambda table: table.extend_hashed("digests", [], -1), ConfigError)
    assert names(error, "num_tokens", -1)
    assert busy.extend_hashed("digests", [], 0) == []


def test_a_request_id_twice(busy):
    for call in (lambda t: t.admit("hashed", [1]), lambda t: t.admit_hashed("hashed", [], 1)):
        assert names(busy.refuses(call, ConfigError), "request_id", "hashed")
    busy.open(1, [1])
    busy.open("1", [1])
    assert names(busy.refuses(lambda table: table.admit(1, [1]), ConfigError), "request_id", 1)


@pytest.mark.parametrize("request_id", [None, 1.5, b"r", ("r",), [], object()])
def test_a_request_id_of_the_wrong_type(busy, request_id):
    for call in REQUEST_CALLS:
        busy.refuses(lambda table, call=call: call(table, request_id), TypeError)


@pytest.mark.parametrize("request_id", [2**63, -(2**63) - 1, 10**30, "\ud800"])
def test_a_request_id_outside_its_limits(busy, request_id):
    for call in REQUEST_CALLS:
        error = busy.refuses(lambda table, call=call: call(table, request_id), ConfigError, UnknownRequestError)
        if isinstance(error, ConfigError):
            assert names(error, "request_id", None)
    error = busy.refuses(lambda table: table.admit(request_id, [1]), ConfigError)
    assert names(error, "request_id", None)


REQUEST_CALLS = [
    lambda table, r: table.extend(r, [1]),
    lambda table, r: table.extend_hashed(r, [], 1),
    lambda table, r: table.commit(r, 1),
    lambda table, r: table.is_ready(r),
    lambda table, r: table.valid_tokens(r),
    lambda table, r: table.block_ids(r),
    lambda table, r: table.release(r),
    lambda table, r: table.abort(r),
    lambda table, r: table.preempt(r),
]


@pytest.mark.parametrize("request_id", ["", "nobody", 0, -1, 2**63 - 1, -(2**63)])
def test_unknown_requests(busy, request_id):
    for call in REQUEST_CALLS:
        error = busy.refuses(lambda table, call=call: call(table, request_id), UnknownRequestError)
        assert error.request_id == request_id
        assert repr(request_id) in str(error)
    busy.finish()


def test_extended_the_wrong_way(busy):
    error = busy.refuses(lambda table: table.extend("digests", [1]), ConfigError)
    assert names(error, "request_id", None)
    error = busy.refuses(lambda table: table.extend_hashed("hashed", [], 1), ConfigError)
    assert names(error, "request_id", None)


def test_commit_outside_the_request(busy):
    for num_tokens in (-1, 10, *HUGE, -(10**30)):
        error = busy.refuses(lambda table, n=num_tokens: table.commit("hashed", n), ConfigError)
        assert names(error, "num_tokens", num_tokens)
    error = busy.refuses(lambda table: table.commit("loading", 18), ConfigError)
    assert names(error, "num_tokens", 18)
    assert "17" in error.limit
    for num_tokens in (None, 1.0, "1"):
        busy.refuses(lambda table, n=num_tokens: table.commit("hashed", n), TypeError)


DIGEST = bytes(32)
BAD_DIGESTS = {
    "none for one block": [],
    "two for one block": [DIGEST, DIGEST],
    "short": [DIGEST[:-1]],
    "long": [DIGEST + b"x"],
    "empty": [b""],
    "a short buffer": bytes(31),
    "a long buffer": bytes(33),
    "two in a buffer": bytes(64),
    "gaps": np.zeros(64, dtype=np.uint8)[::2],
    "numbers in a buffer": np.zeros(4, dtype=np.int64),
    "bytearrays inside": [bytearray(32)],
    "an iterator": iter([DIGEST]),
    "a set": {DIGEST},
    "a claimed length": Boastful([DIGEST]),
    "text": "x" * 32,
    "text inside": ["x" * 32],
    "numbers inside": [7],
    "none inside": [None],
    "none": None,
    "a number": 32,
}


@pytest.mark.parametrize("case", list(BAD_DIGESTS))
def test_digests(busy, case):
    digests = BAD_DIGESTS[case]
    for call in (
        lambda table: table.admit_hashed("new", digests, 4),
        lambda table: table.extend_hashed("digests", digests, 2),
    ):
        assert names(busy.refuses(call, ConfigError, TypeError), "digests", None)
    if case in ("short", "long", "empty", "a short buffer", "a long buffer", "gaps"):
        assert names(busy.refuses(lambda table: table.lookup_hashed(digests), ConfigError), "digests", None)
    busy.finish()


def test_digests_in_every_form(make_table):
    packed = bytes(range(64))
    for digests in (
        [packed[:32], packed[32:]],
        (packed[:32], packed[32:]),
        packed,
        bytearray(packed),
        memoryview(packed),
        np.frombuffer(packed, dtype=np.uint8),
        np.frombuffer(packed, dtype=np.uint8).reshape(2, 32),
    ):
        table = make_table(4, 4, 4)
        table.admit_hashed("r", digests, 8)
        table.commit("r", 8)
        assert [event.block_hash for event in table.events()] == [packed[:32], packed[32:]]
        assert table.lookup_hashed(digests) == (2, 0)


def test_more_tokens_than_can_be(busy):
    for num_tokens in HUGE:
        error = busy.refuses(lambda table, n=num_tokens: table.admit_hashed("new", [], n), ConfigError)
        assert error.argument in ("num_tokens", "digests")
        error = busy.refuses(lambda table, n=num_tokens: table.extend_hashed("digests", [], n), ConfigError)
        assert error.argument in ("num_tokens", "digests")
    for num_tokens in (None, 4.0, "4"):
        busy.refuses(lambda table, n=num_tokens: table.admit_hashed("new", [DIGEST], n), TypeError)


@pytest.mark.parametrize("value", [1.5, ["x"], object(), {"x": 1}])
def test_salt_adapter_and_media_of_the_wrong_type(busy, value):
    for options in (
        {"salt": value},
        {"salt": ("x",)},
        {"adapter": value},
        {"adapter": ("x", value)},
        {"adapter": ("x", ("y",))},
        {"adapter": ("x", None)},
        {"media": [(value, 0)]},
        {"media": [(None, 0)]},
        {"media": [("x", value)]},
        {"media": [("x", "0")]},
        {"media": [("x",)]},
        {"media": [("x", 0, 0)]},
        {"media": [value]},
        {"media": 7},
    ):
        for call in (
            lambda table, options=options: table.admit("new", [1, 2], **options),
            lambda table, options=options: table.lookup([1, 2], **options),
            lambda table, options=options: table.block_hashes([1, 2], **options),
        ):
            busy.refuses(call, TypeError, ConfigError)


@pytest.mark.parametrize("value", [2**127, -(2**127) - 1, 10**60, "\ud800"])
def test_salt_adapter_and_media_outside_their_limits(busy, value):
    for argument, options in (
        ("salt", {"salt": value}),
        ("adapter", {"adapter": value}),
        ("adapter", {"adapter": ("x", value)}),
        ("media", {"media": [(value, 0)]}),
    ):
        for call in (
            lambda table, options=options: table.admit("new", [1, 2], **options),
            lambda table, options=options: table.lookup([1, 2], **options),
            lambda table, options=options: table.block_hashes([1, 2], **options),
        ):
            assert names(busy.refuses(call, ConfigError), argument, None)


def test_media_behind_the_tokens(busy):
    for offset in (-1, 2, *HUGE, -(10**30)):
        error = busy.refuses(lambda table, at=offset: table.admit("new", [1, 2], media=[("x", at)]), ConfigError)
        assert names(error, "media", offset)
