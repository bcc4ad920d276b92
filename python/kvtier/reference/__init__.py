"""A readable twin of the block table in plain Python.

`ReferenceBlockTable` takes the same calls as `kvtier.BlockTable` and gives the same answers, ids and order included.
It is written to be read and to be compared with, not to be fast. Every rule is in docs/design.md.
"""

from kvtier.reference.results import Admission, Event, Plan, Swaps
from kvtier.reference.table import ReferenceBlockTable

__all__ = ["Admission", "Event", "Plan", "ReferenceBlockTable", "Swaps"]
