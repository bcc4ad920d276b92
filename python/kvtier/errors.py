"""The exceptions that kvtier raises, all under `KvtierError`.

Each also subclasses the built-in exception that Python users expect for its kind.
"""

from __future__ import annotations


class KvtierError(Exception):
    """Base class of every exception that kvtier raises on purpose."""


class ConfigError(KvtierError, ValueError):
    """An argument is outside its limits.

    Attributes:
        argument: Name of the argument.
        value: The value that was given, as text.
        limit: What would have been accepted, as text.
    """

    def __init__(self, argument: str, value: object, limit: str) -> None:
        self.argument = argument
        self.value = value
        self.limit = limit
        super().__init__(f"{argument} = {value}: {limit}")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.argument, self.value, self.limit))


class OutOfBlocksError(KvtierError, RuntimeError):
    """The Gpu tier cannot give all blocks that a request needs; nothing was changed.

    Attributes:
        needed: Blocks that the call needed.
        available: Blocks that were free or evictable for it.
        total: Blocks of the tier.
    """

    def __init__(self, needed: int, available: int, total: int) -> None:
        self.needed = needed
        self.available = available
        self.total = total
        super().__init__(f"needs {needed} GPU blocks, {available} of {total} are free or evictable")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.needed, self.available, self.total))


class UnknownRequestError(KvtierError, KeyError):
    """No live request has this id: it was never admitted, or has ended.

    Attributes:
        request_id: The id that was given.
    """

    def __init__(self, request_id: object) -> None:
        self.request_id = request_id
        super().__init__(f"request_id = {request_id!r}: no live request has this id")

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.request_id,))


class StaleTicketError(KvtierError, RuntimeError):
    """The ticket was never issued, is already finished, or this rank has acknowledged it before.

    Attributes:
        ticket: The ticket that was given.
    """

    def __init__(self, ticket: int, reason: str) -> None:
        self.ticket = ticket
        self.reason = reason
        super().__init__(f"ticket = {ticket}: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.ticket, self.reason))


class TransferError(KvtierError, RuntimeError):
    """The copy engine could not take or finish a copy; the text says which and why."""


class SessionInUseError(KvtierError, RuntimeError):
    """Two threads called the scheduler's side of one table at the same time; see docs/threading.md."""

    def __init__(self) -> None:
        super().__init__("another thread is using this table's session")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), ())


class InvariantError(KvtierError, RuntimeError):
    """`audit()` found a table that breaks one of its invariants; this is a bug in kvtier."""
