"""The CUDA extension as a library: in the package if it was compiled, loaded at first use, called through its C ABI.

The structures are those of csrc/kvtier_cuda.h; the library says the version of its interface, and another one is
refused.
"""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import TransferError

ABI_VERSION = 1
LIBRARY = Path(__file__).parents[1] / "libkvtier_cuda.so"


class Status(enum.IntEnum):
    """What a call of the library returns."""

    OK = 0
    BAD_ARGUMENT = 1
    NO_DEVICE = 2
    CUDA_ERROR = 3
    NO_MEMORY = 4
    DEVICE_LOST = 5
    BUSY = 6
    UNKNOWN_TICKET = 7
    COPY_FAILED = 8


class CudaError(TransferError):
    """The CUDA extension refused a call, or a copy failed.

    Attributes:
        status: Its kind.
        cuda_code: CUDA's own number of the error; 0 where CUDA was not at fault.
        text: What the extension said, with CUDA's own words.
    """

    def __init__(self, status: int, cuda_code: int, text: str) -> None:
        self.status = Status(status)
        self.cuda_code = cuda_code
        self.text = text
        super().__init__(f"CUDA extension: {text}")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (int(self.status), self.cuda_code, self.text))


class ErrorText(ctypes.Structure):
    """`kvtier_error`."""

    _fields_ = (("status", ctypes.c_int32), ("cuda_code", ctypes.c_int32), ("text", ctypes.c_char * 248))

    def as_exception(self) -> CudaError:
        """The error to raise."""
        return CudaError(self.status, self.cuda_code, self.text.decode(errors="replace"))


class Device(ctypes.Structure):
    """`kvtier_device`."""

    _fields_ = (
        ("driver_version", ctypes.c_int32),
        ("runtime_version", ctypes.c_int32),
        ("num_devices", ctypes.c_int32),
        ("numa_node", ctypes.c_int32),
        ("has_batch_copy", ctypes.c_int32),
        ("reads_host", ctypes.c_int32),
        ("name", ctypes.c_char * 256),
    )


class Batch(ctypes.Structure):
    """`kvtier_batch`; pieces and groups are addresses.

    Attributes:
        arrays: What is at these addresses, to keep it allocated.
    """

    arrays: tuple[object, ...] = ()
    _fields_ = (
        ("ticket", ctypes.c_uint64),
        ("after_mark", ctypes.c_uint64),
        ("pieces", ctypes.c_void_p),
        ("groups", ctypes.c_void_p),
        ("num_pieces", ctypes.c_uint32),
        ("num_groups", ctypes.c_uint32),
        ("num_waves", ctypes.c_uint32),
        ("direction", ctypes.c_uint32),
    )


class Report(ctypes.Structure):
    """`kvtier_report`."""

    _fields_ = (("ticket", ctypes.c_uint64), ("error", ErrorText))


class Options(ctypes.Structure):
    """`kvtier_options`."""

    _fields_ = (("device", ctypes.c_int32), ("host_registered", ctypes.c_int32), ("staging_bytes", ctypes.c_uint64))


class Counts(ctypes.Structure):
    """`kvtier_counts`."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "num_copies",
            "num_batch_copies",
            "num_batched_rows",
            "num_kernels",
            "num_replaced_groups",
            "num_failed_tickets",
            "num_open_tickets",
            "staging_bytes",
        )
    )


_pointer, _error = ctypes.c_void_p, ctypes.POINTER(ErrorText)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "probe": (ctypes.c_int32, ctypes.POINTER(Device), _error),
    "register_host": (ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, _error),
    "unregister_host": (ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, _error),
    "open": (ctypes.POINTER(Options), ctypes.POINTER(_pointer), _error),
    "close": (_pointer, ctypes.c_uint32, _error),
    "mark": (_pointer, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64), _error),
    "submit": (_pointer, ctypes.POINTER(Batch), _error),
    "wait_layer": (_pointer, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint64, _error),
    "poll": (_pointer, ctypes.POINTER(Report), ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t), _error),
    "counts": (_pointer, ctypes.POINTER(Counts), _error),
}


class CudaLibrary:
    """The loaded extension.

    Args:
        path: The library's file.

    Raises:
        TransferError: There is no such file, the system cannot load it, or it is of another version.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise TransferError("this build of kvtier has no CUDA extension: there was no nvcc when it was built")
        try:
            self._library = ctypes.CDLL(str(path))
            version = int(self._library.kvtier_cuda_abi_version())
            for name, arguments in _SIGNATURES.items():
                getattr(self._library, f"kvtier_cuda_{name}").argtypes = arguments
        except (OSError, AttributeError) as error:
            raise TransferError(f"the CUDA extension cannot be loaded: {error}") from error
        if version != ABI_VERSION:
            raise TransferError(f"the CUDA extension has interface {version}, this kvtier wants {ABI_VERSION}")

    def call(self, name: str, *arguments: Any) -> None:
        """Call `kvtier_cuda_<name>`, which takes a pointer to an error as its last argument.

        Raises:
            CudaError: The extension refused.
        """
        error = ErrorText()
        if getattr(self._library, f"kvtier_cuda_{name}")(*arguments, ctypes.byref(error)) != Status.OK:
            raise error.as_exception()


_loaded: dict[Path, CudaLibrary] = {}


def load() -> CudaLibrary:
    """The extension; loaded once.

    Raises:
        TransferError: It is not there, or cannot be loaded.
    """
    if LIBRARY not in _loaded:
        _loaded[LIBRARY] = CudaLibrary(LIBRARY)
    return _loaded[LIBRARY]


@dataclass(frozen=True)
class CudaDevice:
    """A device as CUDA sees it.

    Attributes:
        index: Its number.
        name: Its name.
        num_devices: Devices of this machine that CUDA shows.
        driver_version: As CUDA counts: 13000 is 13.0.
        runtime_version: That of the runtime inside of the extension.
        numa_node: Node of the host memory nearest to it; None where that is not known.
        has_batch_copy: Whether the driver copies many pieces in one call.
        reads_host: Whether kernels reach registered host memory at its host address.
    """

    index: int
    name: str
    num_devices: int
    driver_version: int
    runtime_version: int
    numa_node: int | None
    has_batch_copy: bool
    reads_host: bool


def probe(device: int = 0) -> CudaDevice:
    """What CUDA says of a device.

    Raises:
        TransferError: There is no extension; or, as CudaError, no driver, an old one, or no such device.
    """
    found = Device()
    load().call("probe", device, ctypes.byref(found))
    return CudaDevice(
        index=device,
        name=found.name.decode(errors="replace"),
        num_devices=found.num_devices,
        driver_version=found.driver_version,
        runtime_version=found.runtime_version,
        numa_node=None if found.numa_node < 0 else found.numa_node,
        has_batch_copy=bool(found.has_batch_copy),
        reads_host=bool(found.reads_host),
    )


def why_absent(device: int = 0) -> str | None:
    """Why a CUDA device cannot be used; None if it can."""
    try:
        probe(device)
    except TransferError as error:
        return str(error)
    return None
