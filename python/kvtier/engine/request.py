"""One request on its way through the engine, and how its tokens are chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from kvtier.config import checked_integer
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the tokens of an answer are chosen, and when it ends.

    Attributes:
        max_new_tokens: The answer is at most this long; at least 1.
        temperature: 0 takes the most likely token; above, logits are divided by it and a token is drawn.
        top_k: Draw among this many most likely tokens; 0: among all.
        top_p: Draw among the most likely tokens that together reach this probability, above 0 and up to 1.
        seed: Seed of the request's own random numbers, one for each token: what is drawn does not depend on which
            other requests share the batch.
        ignore_eos: Go on after a token that ends the answer.
    """

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Check the limits.

        Raises:
            ConfigError: One is not kept.
        """
        if checked_integer("max_new_tokens", self.max_new_tokens, "at least 1") < 1:
            raise ConfigError("max_new_tokens", self.max_new_tokens, "at least 1")
        if not isinstance(self.temperature, (int, float)) or not 0 <= self.temperature < float("inf"):
            raise ConfigError("temperature", self.temperature, "0 or a positive number")
        if checked_integer("top_k", self.top_k, "0 or more") < 0:
            raise ConfigError("top_k", self.top_k, "0 or more")
        if not isinstance(self.top_p, (int, float)) or not 0 < self.top_p <= 1:
            raise ConfigError("top_p", self.top_p, "above 0 and up to 1")
        if not 0 <= checked_integer("seed", self.seed, "0 .. 2**63 - 1") < 2**63:
            raise ConfigError("seed", self.seed, "0 .. 2**63 - 1")


@dataclass(eq=False)
class Request:
    """A request and how far it has come.

    Attributes:
        request_id: Its name in the table.
        tokens: The prompt, then the answer so far.
        prompt_tokens: Length of the prompt.
        sampling: How the answer is chosen.
        salt: Requests with different salts share no block.
        submitted_s: When `Engine.submit` took it, on the engine's clock, in seconds.
        first_token_s: When its first answer token was chosen; None before.
        finished_s: When it ended; None before.
        finish_reason: `"length"`, `"eos"` or `"aborted"`; None before it ends.
        block_ids: Its Gpu blocks, in order; empty while it waits for admission.
        reserved_tokens: Leading tokens that the table knows and has blocks for.
        computed_tokens: Leading tokens whose KV is in memory.
        ready: Whether its loads are finished, so that it may run.
    """

    request_id: str | int
    tokens: list[int]
    prompt_tokens: int
    sampling: Sampling
    salt: str | bytes | int | None
    submitted_s: float
    first_token_s: float | None = None
    finished_s: float | None = None
    finish_reason: Literal["length", "eos", "aborted"] | None = None
    block_ids: list[int] = field(default_factory=list)
    reserved_tokens: int = 0
    computed_tokens: int = 0
    ready: bool = False

    def __post_init__(self) -> None:
        """Give the request its own random numbers."""
        self.generator = torch.Generator().manual_seed(self.sampling.seed)

    @property
    def answer(self) -> list[int]:
        """The answer so far."""
        return self.tokens[self.prompt_tokens :]

    @property
    def pending_tokens(self) -> int:
        """Tokens whose KV must be computed before the next one can be chosen."""
        return len(self.tokens) - self.computed_tokens

    def back_to_waiting(self) -> None:
        """Forget blocks and progress, but not the tokens nor the state of the random numbers: it was preempted."""
        self.block_ids = []
        self.reserved_tokens = self.computed_tokens = 0
        self.ready = False


def choose_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token of one request.

    Args:
        logits: Shape (vocab_size,), any floating-point dtype, on any device.
        sampling: How to choose.
        generator: The request's random numbers, on the CPU; one is drawn unless temperature is 0.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = logits.to("cpu", torch.float64)
    # the largest logit first becomes 0, so that no temperature, however small, makes an infinity
    probabilities, tokens = (
        ((scaled - scaled.max()) / sampling.temperature).softmax(-1).sort(descending=True, stable=True)
    )
    kept = probabilities.cumsum(-1) - probabilities < sampling.top_p  # the token that crosses top_p is kept
    if sampling.top_k:
        kept[sampling.top_k :] = False
    cumulative = (probabilities * kept).cumsum(-1)
    drawn = torch.rand((), generator=generator, dtype=torch.float64) * cumulative[-1]
    place = int(torch.searchsorted(cumulative, drawn, right=True))
    return int(tokens[min(place, int(kept.sum()) - 1)])
