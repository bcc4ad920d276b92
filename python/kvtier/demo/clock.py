"""A stopwatch that stands still while the demo looks at what it measures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds since some moment, without the time spent inside `paused`."""

    def __init__(self) -> None:
        self._paused_s = 0.0

    def __call__(self) -> float:
        """Now, in seconds."""
        return time.perf_counter() - self._paused_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside takes no time."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - start
