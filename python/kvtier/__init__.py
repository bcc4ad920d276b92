"""kvtier: a second tier for the KV cache of LLM engines."""

from __future__ import annotations

from kvtier._core import Admission, BlockTable, Event, Plan, Swaps, __version__
from kvtier.errors import (
    ConfigError,
    InvariantError,
    KvtierError,
    OutOfBlocksError,
    StaleTicketError,
    TransferError,
    UnknownRequestError,
)

__all__ = [
    "Admission",
    "BlockTable",
    "ConfigError",
    "Event",
    "InvariantError",
    "KvtierError",
    "OutOfBlocksError",
    "Plan",
    "StaleTicketError",
    "Swaps",
    "TransferError",
    "UnknownRequestError",
    "__version__",
]
