"""What has to outlive copies on a GPU: the extension's copier, the registration of host memory, and both memories."""

from __future__ import annotations

import contextlib
import ctypes
import os
import warnings
from typing import TYPE_CHECKING

from kvtier.cuda.library import Batch, Counts, CudaError, Options, Report, Status, load
from kvtier.errors import TransferError

if TYPE_CHECKING:
    from kvtier.memory import HostMemory, MemoryLayout

# Registration in one piece fails beyond some tens of GiB on some systems.
CHUNK_BYTES = 32 << 30
RELEASE_TIMEOUT_S = 2.0
_REPORTS_PER_CALL = 64


class Copier:
    """A copier of the extension. Not for several threads at once; knows nothing of the engine that uses it.

    Args:
        gpu: The engine's memory.
        cpu: The host memory; registered with CUDA here, and given back by `close`.
        staging_bytes: Device memory for gathering stores.

    Raises:
        TransferError: There is no extension or no device, or the device is short of memory.
    """

    def __init__(self, gpu: MemoryLayout, cpu: HostMemory, staging_bytes: int) -> None:
        assert gpu.device is not None
        self.slots_per_chunk = max(1, CHUNK_BYTES // cpu.slot_bytes)
        self._process = os.getpid()
        self._library = load()
        self._owners: tuple[object, ...] = (gpu._owner, cpu._arena)
        self._range = (gpu.device, cpu.address, cpu.total_bytes, self.slots_per_chunk * cpu.slot_bytes)
        self._handle = ctypes.c_void_p()
        self.is_registered = False
        try:
            self._library.call("register_host", *self._range)
            self.is_registered = True
        except CudaError as error:
            if error.status == Status.NO_DEVICE:
                raise
            text = (
                f"{cpu.total_bytes} bytes of host memory are not registered, so copies are slow and wait: {error.text}"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        options = Options(gpu.device, self.is_registered, staging_bytes)
        try:
            self._library.call("open", ctypes.byref(options), ctypes.byref(self._handle))
        except CudaError:
            self._unregister()
            raise

    def check_process(self) -> None:
        """Refuse to go on in a child of the process that made this.

        Raises:
            TransferError: This is such a child.
        """
        if os.getpid() != self._process:
            raise TransferError(f"the copy engine belongs to process {self._process}; this process was forked from it")

    def mark(self, stream: int) -> int:
        """Mark what was enqueued on a stream so far."""
        mark = ctypes.c_uint64()
        self._library.call("mark", self._handle, stream, ctypes.byref(mark))
        return mark.value

    def submit(self, batch: Batch) -> None:
        """Enqueue the copies of a ticket."""
        self._library.call("submit", self._handle, ctypes.byref(batch))

    def wait_layer(self, ticket: int, wave: int, stream: int) -> None:
        """Have a stream wait for the waves of a ticket up to this one."""
        self._library.call("wait_layer", self._handle, ticket, wave, stream)

    def poll(self) -> list[tuple[int, CudaError | None]]:
        """The tickets that ended since the last call, each with what went wrong."""
        reports: list[tuple[int, CudaError | None]] = []
        some = (Report * _REPORTS_PER_CALL)()
        num = ctypes.c_size_t(_REPORTS_PER_CALL)
        while num.value == _REPORTS_PER_CALL:
            self._library.call("poll", self._handle, some, _REPORTS_PER_CALL, ctypes.byref(num))
            for report in some[: num.value]:
                failed = report.error.status != Status.OK
                reports.append((report.ticket, report.error.as_exception() if failed else None))
        return reports

    def counts(self) -> dict[str, int]:
        """The extension's own counters."""
        counts = Counts()
        self._library.call("counts", self._handle, ctypes.byref(counts))
        return {name: getattr(counts, name) for name, *_ in Counts._fields_}

    def close(self, timeout_s: float) -> None:
        """Wait for open copies, then let go of the memories; the second call does nothing.

        Raises:
            CudaError: Copies still run after the time; nothing was let go.
        """
        if not self._handle:
            return
        self._library.call("close", self._handle, int(timeout_s * 1000))
        self._handle = ctypes.c_void_p()
        self._unregister()
        self._owners = ()

    def _unregister(self) -> None:
        if self.is_registered:
            self.is_registered = False
            with contextlib.suppress(CudaError):  # the device is lost, and with it the registration
                self._library.call("unregister_host", *self._range)

    def release(self) -> None:
        """Close at the end of the engine or of the process; memory that copies still use is never freed."""
        if os.getpid() != self._process:
            return  # the copies and what is registered are the parent's
        try:
            self.close(RELEASE_TIMEOUT_S)
        except CudaError:
            _never_free(self)


def _never_free(owner: object) -> None:
    """One reference too many, which not even the end of the interpreter takes away."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
