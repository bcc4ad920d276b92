"""`python -m kvtier.cuda`: says whether kvtier can copy from and to a GPU here. Exit status: 0 if so, else 1."""

import sys

from kvtier.cuda import probe
from kvtier.errors import TransferError


def main() -> int:
    """Print the devices, or why there is none."""
    try:
        first = probe()
        devices = [first, *(probe(index) for index in range(1, first.num_devices))]
    except TransferError as error:
        print(f"no CUDA: {error}")
        return 1
    for device in devices:
        batch = "with" if device.has_batch_copy else "without"
        print(f"device {device.index}: {device.name}, driver {device.driver_version}, {batch} batch copies")
    return 0


if __name__ == "__main__":
    sys.exit(main())
