"""The long-document-QA workload: every document asked once, then all of them again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from kvtier.errors import ConfigError

ORDERS = ("random", "tile", "interleave")
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Workload:
    """What is asked, in which order, and how much of it fits into each tier.

    Attributes:
        documents: Number of documents.
        document_tokens: Length of each, in tokens.
        answer_tokens: Length of each answer.
        gpu_documents: Documents, each with room for its answer, that Gpu memory holds, in every mode.
        cpu_documents: As many for host memory.
        order: Order of the second round. `"random"`: shuffled. `"tile"`: that of the first round. `"interleave"`: the
            two halves of the documents alternate.
        in_flight: Requests that are asked at the same time; 1 asks one after the other.
        seed: Seed of the documents, the order and the random weights.
    """

    documents: int = 40
    document_tokens: int = 1024
    answer_tokens: int = 8
    gpu_documents: int = 10
    cpu_documents: int = 40
    order: Literal["random", "tile", "interleave"] = "random"
    in_flight: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the limits.

        Raises:
            ConfigError: One is not kept; it names the command-line option.
        """
        for name in ("documents", "document_tokens", "answer_tokens", "gpu_documents", "cpu_documents", "in_flight"):
            value = getattr(self, name)
            if not 1 <= value <= 2**24:
                raise ConfigError(option(name), value, f"1 .. {2**24}")
        if self.order not in ORDERS:
            raise ConfigError("--order", self.order, f"one of {', '.join(ORDERS)}")
        if not 0 <= self.seed < 2**31:
            raise ConfigError("--seed", self.seed, f"0 .. {2**31 - 1}")

    @property
    def document_blocks(self) -> int:
        """Blocks of one document with its answer."""
        return -(-(self.document_tokens + self.answer_tokens) // BLOCK_SIZE)

    @property
    def gpu_blocks(self) -> int:
        """Blocks of Gpu memory."""
        return self.gpu_documents * self.document_blocks

    @property
    def cpu_blocks(self) -> int:
        """Blocks of host memory."""
        return self.cpu_documents * self.document_blocks

    def document(self, index: int, vocab_size: int) -> list[int]:
        """The tokens of one document: random, the same on every call."""
        dice = random.Random(f"{self.seed} {index}")
        return dice.choices(range(vocab_size), k=self.document_tokens)

    def rounds(self) -> dict[str, list[int]]:
        """Which documents are asked in which order, by round."""
        first = list(range(self.documents))
        if self.order == "random":
            second = random.Random(self.seed).sample(first, len(first))
        elif self.order == "tile":
            second = first
        else:
            half = -(-len(first) // 2)
            second = sorted(first, key=lambda index: (index % half, index))
        return {"first": first, "second": second}


def option(name: str) -> str:
    """The command-line option that sets this attribute."""
    return "--" + name.replace("_", "-")
