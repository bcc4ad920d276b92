"""Compares the bytes of every block that came back from host memory with the bytes it left with.

The witness stands between the engine and its table and copier and believes neither. What a block should hold follows
from the tokens of the request that it was loaded for; what it held is a digest taken before its store began. Swapped
blocks, which leave an answer plausible, have each other's digest. The clock stands still meanwhile.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier import Admission, BlockTable, Plan
    from kvtier.demo.clock import Clock
    from kvtier.engine import Copier, KvMemory

HASH_BYTES = 32
UNKNOWN = b"a block that nobody asked to copy"


class Witness:
    """Watches one engine.

    Attributes:
        num_compared: Blocks that came back and were compared.
        num_different: Those of them whose bytes were not those they left with.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.num_compared = 0
        self.num_different = 0
        self.left_with: dict[bytes, bytes] = {}  # block hash -> digest of the bytes when it was last stored
        self.published: dict[int, bytes] = {}  # Gpu block id -> block hash
        self.awaited: dict[int, bytes] = {}  # Gpu block id -> hash of the block that is being loaded into it

    def watch_table(self, table_factory: Callable[..., BlockTable]) -> Callable[..., Any]:
        """Make tables that this witness sees."""
        return lambda *args, **options: _WatchedTable(table_factory(*args, **options), self)

    def watch_copier(self, copier_factory: Callable[[KvMemory, int], Copier]) -> Callable[[KvMemory, int], Any]:
        """Make copiers that this witness sees."""
        return lambda memory, cpu_blocks: _WatchedCopier(copier_factory(memory, cpu_blocks), memory, self)


class _WatchedTable:
    def __init__(self, table: BlockTable, witness: Witness) -> None:
        self._table = table
        self._witness = witness

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def admit(self, request_id: str | int, token_ids: Sequence[int], **identity: Any) -> Admission:
        admission = self._table.admit(request_id, token_ids, **identity)
        with self._witness.clock.paused():
            if admission.cpu_hit_blocks:
                hashes = self._table.block_hashes(token_ids, **identity)
                first = admission.gpu_hit_blocks
                for place in range(first, first + admission.cpu_hit_blocks):
                    block_hash = hashes[place * HASH_BYTES : (place + 1) * HASH_BYTES]
                    self._witness.awaited[int(admission.block_ids[place])] = block_hash
        return admission

    def step(self) -> Plan:
        plan = self._table.step()
        with self._witness.clock.paused():
            for event in self._table.events():
                if event.tier == "gpu" and event.kind == "stored":
                    self._witness.published[event.block_id] = event.block_hash
        return plan


class _WatchedCopier:
    def __init__(self, copier: Copier, memory: KvMemory, witness: Witness) -> None:
        self._copier = copier
        self._memory = memory
        self._witness = witness
        self._loads: dict[int, list[tuple[int, bytes]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copier, name)

    def submit(self, plan: Plan) -> None:
        witness = self._witness
        with witness.clock.paused():
            for gpu_block, _ in plan.stores.tolist():
                witness.left_with[witness.published.get(gpu_block, UNKNOWN)] = self._digest(gpu_block)
            if plan.load_ticket is not None:
                targets = plan.loads[:, 1].tolist()
                self._loads[plan.load_ticket] = [(block, witness.awaited.pop(block, UNKNOWN)) for block in targets]
        self._copier.submit(plan)

    def poll(self) -> Sequence[tuple[int, Sequence[int]]]:
        return self._compare(self._copier.poll())

    def wait(self, timeout_s: float) -> Sequence[tuple[int, Sequence[int]]]:
        return self._compare(self._copier.wait(timeout_s))

    def _compare(self, finished: Sequence[tuple[int, Sequence[int]]]) -> Sequence[tuple[int, Sequence[int]]]:
        """Compare what the finished loads brought, before the engine hears of it."""
        with self._witness.clock.paused():
            for ticket, failed in finished:
                for index, (block, block_hash) in enumerate(self._loads.pop(ticket, ())):
                    if index not in failed:
                        expected = None if block_hash == UNKNOWN else self._witness.left_with.get(block_hash)
                        self._witness.num_compared += 1
                        self._witness.num_different += self._digest(block) != expected
        return finished

    def _digest(self, gpu_block: int) -> bytes:
        content = self._memory.tensor[gpu_block].view(torch.uint8).cpu().numpy()
        return hashlib.blake2b(content.tobytes(), digest_size=16).digest()
