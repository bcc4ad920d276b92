"""Everything here needs a GPU; without one it is skipped, and the reason is said."""

from __future__ import annotations

import pytest
from gpu_memory import TorchGpu, why_no_gpu


@pytest.fixture(scope="session")
def gpu() -> TorchGpu:
    reason = why_no_gpu()
    if reason is not None:
        pytest.skip(f"no GPU to test with: {reason}")
    return TorchGpu()
