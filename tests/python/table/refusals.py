"""What a refusal must say."""

from __future__ import annotations

HUGE = [2**31, 2**32, 2**63, 2**64, 10**30]


def refused(call, *expected):
    """The error of a call that must fail with one of these."""
    try:
        result = call()
    except BaseException as error:
        if isinstance(error, expected):
            return error
        raise AssertionError(f"{type(error).__name__} is no documented error: {error}") from error
    raise AssertionError(f"accepted, with the result {result}")


def names(error, argument, value):
    """The error says which argument, what was given and what would have been right."""
    if isinstance(error, TypeError):
        return argument in str(error)
    assert error.argument.startswith(argument), error
    assert error.limit, error
    if value is not None:
        assert str(value)[:20] in str(error.value), error
    assert all(part in str(error) for part in (error.argument, str(error.value), error.limit)), error
    return True
