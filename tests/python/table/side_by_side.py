"""Two block tables driven by the same calls, which must answer alike, errors, events and statistics included."""

from __future__ import annotations

from typing import Any

from kvtier.errors import ConfigError, KvtierError


class SideBySide:
    """Has every method of a block table; gives the answer of the first table once the second agrees.

    Args:
        one: The table whose answers are passed on.
        other: The table that must agree.
    """

    def __init__(self, one: Any, other: Any) -> None:
        self._one, self._other = one, other

    def __getattr__(self, name: str) -> Any:
        one, other = getattr(self._one, name), getattr(self._other, name)
        if not callable(one):
            assert one == other, f"{name}: {one} or {other}"
            return one

        def both(*args: Any, **options: Any) -> Any:
            result, error = outcome(one, args, options)
            other_result, other_error = outcome(other, args, options)
            shown, other_shown = comparable(result, error), comparable(other_result, other_error)
            assert shown == other_shown, f"{name}{args}: {shown} or {other_shown}"
            if error is not None:
                raise error
            return result

        return both


def outcome(call: Any, args: Any, options: Any) -> tuple[Any, Exception | None]:
    try:
        return call(*args, **options), None
    except (KvtierError, TypeError) as error:
        return None, error


def comparable(result: Any, error: Exception | None) -> Any:
    """A value that is equal for equal answers of different implementations."""
    if isinstance(error, ConfigError):
        # Implementations word values and limits as they like.
        return ("ConfigError", error.argument.split("[")[0])
    if isinstance(error, KvtierError):
        return (type(error).__name__, {name: value for name, value in vars(error).items() if name != "reason"})
    if error is not None:
        return type(error).__name__
    if hasattr(result, "dtype"):
        return (str(result.dtype), result.shape, result.tolist())
    if isinstance(result, (list, tuple)):
        return [comparable(item, None) for item in result]
    if type(result).__name__ in ("Admission", "Plan", "Swaps", "Event"):
        names = [name for name in dir(result) if not name.startswith("_") and name not in ("index", "count")]
        return [(name, comparable(getattr(result, name), None)) for name in names]
    return result
