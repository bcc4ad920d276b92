"""kvtier: a second tier for the KV cache of LLM engines.

Importing it warns if its core was compiled without optimisation; `KVTIER_ALLOW_DEBUG_BUILD=1` in the environment, for
those who work on the core, silences that.
"""

from __future__ import annotations

import os
import warnings

from kvtier._core import Admission, BlockTable, Event, HostTable, Plan, Swaps, __build__, __version__
from kvtier.errors import (
    ConfigError,
    InvariantError,
    KvtierError,
    OutOfBlocksError,
    SessionInUseError,
    StaleTicketError,
    TransferError,
    UnknownRequestError,
)

TYPE_CHECKING = False  # as that of typing, which would be half of the time that importing kvtier takes
if TYPE_CHECKING:
    from kvtier.copy import CopyEngine
    from kvtier.memory import HostMemory, MemoryLayout

__all__ = [
    "Admission",
    "BlockTable",
    "ConfigError",
    "CopyEngine",
    "Event",
    "HostMemory",
    "HostTable",
    "InvariantError",
    "KvtierError",
    "MemoryLayout",
    "OutOfBlocksError",
    "Plan",
    "SessionInUseError",
    "StaleTicketError",
    "Swaps",
    "TransferError",
    "UnknownRequestError",
    "__version__",
]

if __build__ != "release" and os.environ.get("KVTIER_ALLOW_DEBUG_BUILD", "0") in ("", "0"):
    warnings.warn(
        "kvtier's core was compiled without optimisation and is many times slower than it should be; "
        "`make build` compiles it in release mode, KVTIER_ALLOW_DEBUG_BUILD=1 silences this warning",
        RuntimeWarning,
        stacklevel=2,
    )

_IMPORTED_AT_FIRST_USE = {"CopyEngine": "copy", "HostMemory": "memory", "MemoryLayout": "memory"}


def __getattr__(name: str) -> object:
    if name not in _IMPORTED_AT_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_IMPORTED_AT_FIRST_USE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
