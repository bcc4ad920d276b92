"""A small continuous-batching engine on torch: the example for engine writers.

Read `engine.py` first: it has every call to the block table, in the order of a step. Needs `kvtier[demo]`.
"""

from __future__ import annotations

from kvtier.engine.checkpoint import load_model, random_model
from kvtier.engine.copiers import Copier, TorchCopyEngine, make_copier
from kvtier.engine.engine import Engine
from kvtier.engine.memory import KvMemory, Segment
from kvtier.engine.model import Model
from kvtier.engine.request import Request, Sampling

__all__ = [
    "Copier",
    "Engine",
    "KvMemory",
    "Model",
    "Request",
    "Sampling",
    "Segment",
    "TorchCopyEngine",
    "load_model",
    "make_copier",
    "random_model",
]
