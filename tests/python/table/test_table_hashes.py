"""Golden block hashes: hex digests worked out by hand from docs/design.md, and the chain rules behind them."""

from __future__ import annotations

import random
from array import array
from hashlib import sha256

import expected_hashes
import numpy as np
import pytest
from expected_hashes import Identity

ROOT4 = sha256(b"kvtier-root-v1" + b"\x04\0\0\0" + b"rb" + bytes(8)).digest()


def hashes(table, *args):
    packed = table.block_hashes(*args)
    assert isinstance(packed, bytes)
    return [packed[at : at + 32] for at in range(0, len(packed), 32)]


def test_two_plain_blocks(make_table):
    first = sha256(ROOT4 + b"\x01\0\0\0" + b"\x02\0\0\0" + b"\x03\0\0\0" + b"\xff\xff\xff\xff").digest()
    second = sha256(first + b"\x05\0\0\0" + b"\x06\0\0\0" + b"\x07\0\0\0" + b"\x00\x01\0\0").digest()
    tokens = [1, 2, 3, 2**32 - 1, 5, 6, 7, 256, 9]
    assert hashes(make_table(1, 0, 4), tokens) == [first, second]


def test_salt_adapter_and_media(make_table):
    parent = sha256(
        ROOT4
        + (b"sb" + b"\x02\0\0\0\0\0\0\0" + "é".encode())
        + (b"ti" + b"\x10\0\0\0\0\0\0\0" + b"\x02" + bytes(15))
        + (b"ab" + b"\x01\0\0\0\0\0\0\0" + b"x")
        + (b"ai" + b"\x10\0\0\0\0\0\0\0" + b"\xff" * 16)
    ).digest()
    first = sha256(parent + b"\x01\0\0\0" * 4).digest()
    second = sha256(
        first
        + b"\x01\0\0\0" * 4
        + (b"\x01\0\0\0" + b"mb" + b"\x03\0\0\0\0\0\0\0" + b"\0\x01\x02")
        + (b"\x03\0\0\0" + b"mi" + b"\x10\0\0\0\0\0\0\0" + b"\x07" + bytes(15))
        + (b"\x03\0\0\0" + b"mb" + b"\0\0\0\0\0\0\0\0")
    ).digest()
    media = [(7, 7), ("", 7), (b"\0\x01\x02", 5)]
    assert hashes(make_table(1, 0, 4), [1] * 8, "é", ("x", -1), media) == [first, second]


def test_single_adapter_has_no_count(make_table):
    parent = sha256(ROOT4 + b"ab" + b"\x01\0\0\0\0\0\0\0" + b"x").digest()
    assert hashes(make_table(1, 0, 4), [0] * 4, None, "x") == [sha256(parent + bytes(16)).digest()]


def test_root_and_block_size(make_table):
    root = sha256(b"kvtier-root-v1" + b"\x01\0\0\0" + b"rb" + b"\x05\0\0\0\0\0\0\0" + b"llama").digest()
    table = make_table(1, 0, 1, root=b"llama")
    assert hashes(table, [9]) == [sha256(root + b"\x09\0\0\0").digest()]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (([0, 1, 2, 3],), "PLAIN"),
        (([0, 1, 2, 3], "tenant"), "SALT"),
        (([0, 1, 2, 3], None, None, [("image", 2)]), "MEDIA"),
    ],
)
def test_hex_digests_stay_what_they_are(make_table, arguments, expected):
    golden = {
        "PLAIN": "65ea909132c9896946c5263e19965d4ef0ecf54d094ec1df563fb491aa69af43",
        "SALT": "f63f29240bed1ff8036d56d942eb01c80a7fcb84e3fb6bd4f33290ed5271aefa",
        "MEDIA": "a78ba2d8c60747916ac9664dd4afd781e2fb25d7c97abc4e14990200e2388fbc",
    }
    assert make_table(1, 0, 4).block_hashes(*arguments).hex() == golden[expected]


def test_extension_continues_the_chain(make_table):
    """However a request's tokens arrive, its blocks hit those of the whole prompt, media included."""
    rng = random.Random(1)
    tokens = [rng.randrange(2**32) for _ in range(41)]
    media = [("late", 6), ("early", 1)]
    for first in (7, 8, 9, 40):
        table = make_table(32, 0, 4)
        table.admit("r", tokens[:first], None, None, media)
        for token in tokens[first:]:
            table.extend("r", [token])
        table.commit("r", 41)
        assert table.lookup(tokens, None, None, media) == (10, 0)
        names = [event.block_hash for event in table.events()]
        assert names == expected_hashes.block_hashes(tokens, Identity(media=tuple(media)), 4)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_every_integer_buffer_is_read_alike(make_table, dtype):
    table = make_table(1, 0, 4)
    tokens = [1, 2, 3, 4, 5, 6, 7, 127]
    expected = table.block_hashes(tokens)
    assert table.block_hashes(np.array(tokens, dtype=dtype)) == expected
    assert table.block_hashes(tuple(np.array(tokens, dtype=dtype))) == expected


def test_other_sequences_and_buffers(make_table):
    table = make_table(1, 0, 4)
    expected = table.block_hashes([0, 1, 2, 3])
    for tokens in ((0, 1, 2, 3), range(4), bytes(range(4)), bytearray(range(4)), array("l", range(4))):
        assert table.block_hashes(tokens) == expected
    assert table.block_hashes(memoryview(bytes(range(4)))) == expected
    high = np.array([2**32 - 1] * 4, dtype=np.uint32)
    assert table.block_hashes(high) == table.block_hashes([2**32 - 1] * 4)


def test_random_prompts_agree_with_the_text(make_table):
    rng = random.Random(7)
    values = ["", "a", "ü", b"", b"\xff", 0, -1, 2**127 - 1, -(2**127), 12]
    for _ in range(200):
        size = rng.choice([1, 2, 3, 16])
        tokens = [rng.choice([0, 1, 255, 2**32 - 1]) for _ in range(rng.randrange(1, 40))]
        adapter = rng.choice([None, rng.choice(values), tuple(rng.choices(values, k=rng.randrange(3)))])
        media = tuple((rng.choice(values), rng.randrange(len(tokens))) for _ in range(rng.randrange(4)))
        identity = Identity(rng.choice([None, *values]), adapter, media)
        table = make_table(1, 0, size, root=b"root")
        expected = expected_hashes.block_hashes(tokens, identity, size, b"root")
        assert hashes(table, tokens, identity.salt, identity.adapter, list(media)) == expected


def test_xxh3_of_the_same_text(make_table):
    xxhash = pytest.importorskip("xxhash", reason="requirements/test.in has it")
    text = b"kvtier-root-v1" + b"\x04\0\0\0" + b"rb" + b"\x06\0\0\0\0\0\0\0" + b"secret"
    root = sha256(text + b"hb" + b"\x04\0\0\0\0\0\0\0" + b"xxh3").digest()
    salted = sha256(root + b"sb" + b"\x01\0\0\0\0\0\0\0" + b"a").digest()
    seed = int.from_bytes(root[:8], "little")
    media = b"\x02\0\0\0" + b"mi" + b"\x10\0\0\0\0\0\0\0" + b"\x07" + bytes(15)

    def digest(text):
        return bytes(reversed(xxhash.xxh3_128_digest(text, seed))) + bytes(16)

    table = make_table(1, 0, 4, hash="xxh3", root=b"secret")
    for parent, salt in [(root, None), (salted, "a")]:
        first = digest(parent + b"\x01\0\0\0" * 4)
        second = digest(first + b"\x02\0\0\0" * 4 + media)
        assert hashes(table, [1] * 4 + [2] * 4 + [3], salt, None, [(7, 6)]) == [first, second]
    assert hashes(table, [1] * 4) != hashes(make_table(1, 0, 4, hash="xxh3"), [1] * 4)


@pytest.mark.parametrize("size", [1, 4, 16, 61, 1000])
def test_xxh3_of_every_length(make_table, size):
    xxhash = pytest.importorskip("xxhash", reason="requirements/test.in has it")
    root = sha256(
        b"kvtier-root-v1" + size.to_bytes(4, "little") + b"rb" + bytes(8) + b"hb\x04\0\0\0\0\0\0\0xxh3"
    ).digest()
    tokens = [random.Random(size).randrange(2**32) for _ in range(3 * size)]
    parent, expected = root, []
    for at in range(0, 3 * size, size):
        text = parent + array("I", tokens[at : at + size]).tobytes()
        parent = bytes(reversed(xxhash.xxh3_128_digest(text, int.from_bytes(root[:8], "little")))) + bytes(16)
        expected.append(parent)
    assert hashes(make_table(1, 0, size, hash="xxh3"), tokens) == expected


def test_requests_find_their_blocks_by_xxh3(make_table):
    table = make_table(8, 8, 4, hash="xxh3")
    table.admit("a", range(17))
    table.commit("a", 17)
    plan = table.step()
    table.complete(plan.store_ticket)
    table.release("a")
    assert table.lookup(range(17)) == (4, 0)
    found = table.admit("b", range(9))
    assert found.gpu_hit_blocks == 2
