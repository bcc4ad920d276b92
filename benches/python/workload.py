"""What the benches of the table do from Python, with digests given in one buffer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from kvtier import BlockTable

BLOCK_SIZE = 16
DOCUMENT = 1280


def digests(document: int, num_blocks: int) -> bytes:
    """Block hashes of a document that no other number has."""
    import numpy as np

    return np.random.default_rng(document).bytes(32 * num_blocks)


def microseconds(call: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def mean(times: Iterator[float]) -> float:
    """The mean of one round."""
    collected = list(times)
    return sum(collected) / len(collected)


class Hits:
    """A Gpu tier of `gpu_blocks` full of documents, each a complete hit; one token is left to compute."""

    def __init__(self, gpu_blocks: int, num_blocks: int) -> None:
        self.table = BlockTable(gpu_blocks, 0, BLOCK_SIZE)
        self.documents = [digests(n, num_blocks) for n in range((gpu_blocks - 1) // num_blocks)]
        for n, document in enumerate(self.documents):
            self.table.admit_hashed(n, document, num_blocks * BLOCK_SIZE)
            self.table.commit(n, num_blocks * BLOCK_SIZE)
            self.table.release(n)
        self.num_tokens = num_blocks * BLOCK_SIZE + 1
        self.turn = 0

    def __call__(self) -> None:
        """`admit_hashed` (lookup, hold, reserve) and `release`."""
        self.table.admit_hashed(-1, self.documents[self.turn], self.num_tokens)
        self.table.release(-1)
        self.turn = (self.turn + 1) % len(self.documents)


class Misses:
    """Full tiers, and a new document with each call: both tiers evict."""

    def __init__(self, gpu_blocks: int, cpu_blocks: int, num_blocks: int) -> None:
        self.table = BlockTable(gpu_blocks, cpu_blocks, BLOCK_SIZE)
        self.num_blocks = num_blocks
        self.document = 0
        for _ in range(cpu_blocks // num_blocks + 1):
            self.prepare()
            self()

    def prepare(self) -> None:
        """Makes the next document; not part of what is measured."""
        self.document += 1
        self.digests = digests(self.document, self.num_blocks)

    def __call__(self) -> None:
        """`admit_hashed`, `commit`, `step`, `complete`, `release`."""
        table, request, num_tokens = self.table, self.document, self.num_blocks * BLOCK_SIZE
        table.admit_hashed(request, self.digests, num_tokens)
        table.commit(request, num_tokens)
        ticket = table.step().store_ticket
        if ticket is not None:
            table.complete(ticket)
        table.release(request)


class Spill:
    """A Gpu tier that holds one document, a Cpu tier that holds eight."""

    def __init__(self, num_blocks: int = DOCUMENT) -> None:
        self.table = BlockTable(num_blocks + 1, 8 * num_blocks, BLOCK_SIZE)
        self.num_blocks, self.num_tokens = num_blocks, num_blocks * BLOCK_SIZE
        self.document = 0
        self.turn = 0
        for _ in range(9):
            self.prepare_store()
            self.store()
            self.finish_store()

    def prepare_store(self) -> None:
        """A new document is admitted and committed."""
        self.document += 1
        self.table.admit_hashed(self.document, digests(self.document, self.num_blocks), self.num_tokens)
        self.table.commit(self.document, self.num_tokens)

    def store(self) -> None:
        """`step` and `complete` of its stores."""
        ticket = self.table.step().store_ticket
        assert ticket is not None
        self.table.complete(ticket)

    def finish_store(self) -> None:
        """The document's request ends."""
        self.table.release(self.document)

    def prepare_hit(self) -> None:
        """Chooses a document that the Gpu tier does not have."""
        self.digests = digests(self.document - 7 + self.turn % 7, self.num_blocks)
        self.turn += 1

    def hit(self) -> None:
        """`admit_hashed`, `step` and `complete` of its loads."""
        self.admission = self.table.admit_hashed(-1, self.digests, self.num_tokens + 1)
        ticket = self.table.step().load_ticket
        assert ticket is not None
        self.table.complete(ticket)

    def finish_hit(self) -> None:
        """The request ends."""
        assert self.admission.cpu_hit_blocks == self.num_blocks
        self.table.release(-1)
