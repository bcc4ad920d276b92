"""KV events of the host tier, for routers: published once every rank has acknowledged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtier._core import Event

__all__ = ["KvEvents"]


class KvEvents:
    """Turns the table's events into vLLM's.

    Args:
        block_size: Tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._origins: dict[int, dict[bytes, tuple[Any, int]]] = {}
        self._ready: list[Any] = []

    def expect(self, ticket: int, stores: Any, origins: dict[int, tuple[Any, int]]) -> None:
        """Remember where the blocks of a store ticket come from.

        Args:
            ticket: The ticket.
            stores: Rows (Gpu block id, Cpu block id): shape (n, 2), int32.
            origins: Gpu block id -> (request, index of the block in it).
        """
        kept: dict[bytes, tuple[Any, int]] = {}
        for gpu_id in stores[:, 0].tolist():
            if gpu_id in origins:
                request, index = origins[gpu_id]
                kept[bytes(request.block_hashes[index])] = (request, index)
        self._origins[ticket] = kept

    def collect(self, ticket: int | None, events: Iterable[Event]) -> None:
        """Take the table's events after a ticket has ended, or after a reset (None)."""
        origins = self._origins.pop(ticket, {}) if ticket is not None else {}
        for event in events:
            if event.kind == "stored":
                self._ready.append(self._stored(event.block_hash, origins.get(event.block_hash)))
            else:
                self._ready.append(self._removed(event.block_hash))

    def take(self, events: Iterable[Event]) -> list[Any]:
        """The events for vLLM since the last call, after those of the table that came without a ticket: evictions."""
        self.collect(None, events)
        ready, self._ready = self._ready, []
        return ready

    def _stored(self, digest: bytes, origin: tuple[Any, int] | None) -> Any:
        from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        request, index = origin if origin is not None else (None, 0)
        start = index * self._block_size
        lora = request.lora_request if request is not None else None
        fields: dict[str, Any] = {
            "block_hashes": [maybe_convert_block_hash(digest)],
            "parent_block_hash": maybe_convert_block_hash(request.block_hashes[index - 1])
            if request is not None and index
            else None,
            "token_ids": list(request.all_token_ids[start : start + self._block_size]) if request is not None else [],
            "block_size": self._block_size,
            "lora_id": lora.adapter_id if lora is not None else None,
            "medium": MEDIUM_CPU,
            "lora_name": lora.name if lora is not None else None,
            "extra_keys": self._extra_keys(request, start) if request is not None else None,
            "group_idx": 0,
        }
        return BlockStored(**{name: value for name, value in fields.items() if name in BlockStored.__struct_fields__})

    def _extra_keys(self, request: Any, start: int) -> Any:
        from vllm.v1.core import kv_cache_utils

        keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, start + self._block_size, 0)
        convert = getattr(kv_cache_utils, "to_event_extra_keys", list)
        return convert([keys])

    def _removed(self, digest: bytes) -> Any:
        from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        fields = {"block_hashes": [maybe_convert_block_hash(digest)], "medium": MEDIUM_CPU, "group_idx": 0}
        return BlockRemoved(**{name: value for name, value in fields.items() if name in BlockRemoved.__struct_fields__})
