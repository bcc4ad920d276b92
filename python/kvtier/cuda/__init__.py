"""Copies between GPU memory and host memory on CUDA streams, where the CUDA extension and a GPU are there.

`why_absent()` says what is missing where they are not; `python -m kvtier.cuda` prints it. Importing this loads nothing.
"""

from kvtier.cuda.engine import CudaCopyEngine
from kvtier.cuda.library import CudaDevice, CudaError, Status, probe, why_absent

__all__ = ["CudaCopyEngine", "CudaDevice", "CudaError", "Status", "probe", "why_absent"]
