"""From the pieces of a ticket to the batch that the extension takes: which path, which together, in which wave."""

from __future__ import annotations

import bisect
import itertools
import operator
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvtier.cuda.library import Batch
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvtier.memory import HostMemory, MemoryLayout

LoadPath = Literal["merged", "batch", "kernel"]
StorePath = Literal["merged", "batch", "gather"]

_PATHS = {"merged": 0, "batch": 1, "kernel": 2, "gather": 3}
_MAX_WAVES = 1024
# Columns of a piece.
_DESTINATION, _DESTINATION_STRIDE, _ROW_BYTES, _NUM_ROWS = 1, 3, 4, 5


class BatchShape:
    """How the tickets of two memories are grouped. Loads go in waves, one per layer, or per several if there are many.

    Raises:
        ConfigError: There is no such path.
    """

    def __init__(self, gpu: MemoryLayout, cpu: HostMemory, load_path: LoadPath, store_path: StorePath) -> None:
        for name, path, paths in (("load_path", load_path, LoadPath), ("store_path", store_path, StorePath)):
            if path not in get_args(paths):
                raise ConfigError(name, repr(path), f"one of {', '.join(get_args(paths))}")
        self._load_path, self._store_path = load_path, store_path
        self._cpu = cpu
        ends = list(itertools.accumulate(size for _, _, size in gpu.fragments))
        self._num_fragments = len(ends)
        # Per layer, how many fragments there are to its end: fragments of several layers may have been joined.
        self._fragments_until = [bisect.bisect_left(ends, end) + 1 for end in gpu.layer_ends]
        waves = sorted(set(self._fragments_until))
        step = -(-len(waves) // _MAX_WAVES)
        self._wave_ends = sorted({*waves[step - 1 :: step], waves[-1]})

    @property
    def num_waves(self) -> int:
        """Waves of a load."""
        return len(self._wave_ends)

    def wave_of(self, layer: int) -> int:
        """The wave with which a layer is complete.

        Raises:
            ConfigError: There is no such layer.
        """
        if not 0 <= operator.index(layer) < len(self._fragments_until):
            raise ConfigError("layer", layer, f"0 .. {len(self._fragments_until) - 1}")
        return bisect.bisect_left(self._wave_ends, self._fragments_until[layer])

    def batch(self, ticket: int, is_load: bool, pieces: npt.NDArray[np.uint64], mark: int) -> Batch:
        """The batch of a ticket; it keeps the arrays that it points to.

        Args:
            ticket: Its number.
            is_load: Which way the bytes go.
            pieces: As from `OutlinedTickets.open`: shape (n, 6).
            mark: What the copies wait for.
        """
        groups = self._load_groups(len(pieces)) if is_load else self._store_groups(pieces)
        batch = Batch(
            ticket=ticket,
            after_mark=mark,
            pieces=pieces.ctypes.data,
            groups=groups.ctypes.data,
            num_pieces=len(pieces),
            num_groups=len(groups),
            num_waves=self.num_waves if is_load else 1,
            direction=0 if is_load else 1,
        )
        batch.arrays = (pieces, groups)
        return batch

    def _load_groups(self, num_pieces: int) -> npt.NDArray[np.void]:
        """A group per wave: its fragments of all runs, which follow each other."""
        import numpy as np

        groups = _zeroed_groups(self.num_waves)
        ends = np.array(self._wave_ends, np.uint32) * (num_pieces // self._num_fragments)
        groups["path"] = _PATHS[self._load_path]
        groups["wave"] = range(self.num_waves)
        groups["first_piece"][1:] = ends[:-1]
        groups["num_pieces"] = ends - groups["first_piece"]
        return groups

    def _store_groups(self, pieces: npt.NDArray[np.uint64]) -> npt.NDArray[np.void]:
        """One group; or one per run, with the slots that its pieces fill."""
        gathers = self._store_path == "gather"
        groups = _zeroed_groups(len(pieces) // self._num_fragments if gathers else 1)
        groups["path"] = _PATHS[self._store_path]
        if not gathers:
            groups["num_pieces"] = len(pieces)
            return groups
        groups["first_piece"] = range(0, len(pieces), self._num_fragments)
        groups["num_pieces"] = self._num_fragments
        first = pieces[:: self._num_fragments]  # fragment 0 starts where the slot does
        span = groups["span"]
        span[:, _DESTINATION] = first[:, _DESTINATION]
        span[:, _DESTINATION_STRIDE] = self._cpu.slot_bytes
        span[:, _ROW_BYTES] = self._cpu.block_bytes
        span[:, _NUM_ROWS] = first[:, _NUM_ROWS]
        return groups


def _zeroed_groups(num_groups: int) -> npt.NDArray[np.void]:
    """`kvtier_group`s."""
    import numpy as np

    fields = [(name, "<u4") for name in ("path", "wave", "first_piece", "num_pieces")]
    return np.zeros(num_groups, np.dtype([*fields, ("span", "<u8", (6,))]))


def handle_of(stream: Any) -> int:
    """The handle of a stream, of an object that has one, or of what a function returns.

    Raises:
        ConfigError: There is none.
    """
    found = stream() if callable(stream) else stream
    for name in ("cuda_stream", "ptr"):
        found = getattr(found, name, found)
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < 1 << 64:
        raise ConfigError("stream", repr(stream), "a stream's handle, or an object or a function that gives one")
    return found
