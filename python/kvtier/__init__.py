"""kvtier: a second tier for the KV cache of LLM engines."""

from __future__ import annotations

from kvtier._core import Admission, BlockTable, Event, Plan, Swaps, __version__
from kvtier.copy import CopyEngine
from kvtier.errors import (
    ConfigError,
    InvariantError,
    KvtierError,
    OutOfBlocksError,
    StaleTicketError,
    TransferError,
    UnknownRequestError,
)
from kvtier.memory import HostMemory, MemoryLayout

__all__ = [
    "Admission",
    "BlockTable",
    "ConfigError",
    "CopyEngine",
    "Event",
    "HostMemory",
    "InvariantError",
    "KvtierError",
    "MemoryLayout",
    "OutOfBlocksError",
    "Plan",
    "StaleTicketError",
    "Swaps",
    "TransferError",
    "UnknownRequestError",
    "__version__",
]
