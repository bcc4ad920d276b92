"""The engine: continuous batching over a kvtier block table.

One `step` is: room for the running requests, admission, one plan of copies, one forward pass, commit. The table
decides which blocks; the copier moves bytes beside the forward pass; the engine never waits for a copy while it has
anything to compute.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Self

from kvtier.config import checked_integer
from kvtier.engine.copiers import Copier, make_copier
from kvtier.engine.memory import Segment
from kvtier.engine.request import Request, Sampling, choose_token
from kvtier.errors import ConfigError, OutOfBlocksError, TransferError, UnknownRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier import BlockTable
    from kvtier.engine.memory import KvMemory
    from kvtier.engine.model import Model

COPY_TIMEOUT_S = 60.0


class Engine:
    """Runs requests on a model, with `kvtier.BlockTable` as its only block allocator.

    It belongs to one thread. `table`, `memory` and `copier` may be looked at.
    """

    def __init__(
        self,
        model: Model,
        *,
        gpu_blocks: int,
        cpu_blocks: int = 0,
        block_size: int = 16,
        max_step_tokens: int = 512,
        max_running: int = 64,
        table_factory: Callable[..., BlockTable] | None = None,
        copier_factory: Callable[[KvMemory, int], Copier] = make_copier,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make an engine with empty memory.

        Args:
            model: The model.
            gpu_blocks: Blocks of the model's device memory.
            cpu_blocks: Blocks of host memory; 0: no second tier, only a prefix cache.
            block_size: Tokens per block.
            max_step_tokens: Most tokens of one forward pass; a longer prompt is computed in chunks.
            max_running: Most requests that are admitted at the same time.
            table_factory: Makes the table; called as `kvtier.BlockTable` is, which is the default.
            copier_factory: Makes what moves blocks, from the memory and `cpu_blocks`.
            clock: Seconds, for the times of a request.

        Raises:
            ConfigError: A size is outside its limits or more than the machine has.
        """
        for name, value in (("max_step_tokens", max_step_tokens), ("max_running", max_running)):
            if checked_integer(name, value, "at least 1") < 1:
                raise ConfigError(name, value, "at least 1")
        if table_factory is None:
            import kvtier

            table_factory = kvtier.BlockTable
        root = f"{model.name} {model.dtype} block-first".encode()
        self.table = table_factory(gpu_blocks, cpu_blocks, block_size, root=root)
        self.memory = model.make_memory(gpu_blocks, block_size)
        self.copier = copier_factory(self.memory, cpu_blocks)
        self.model = model
        self.max_step_tokens = max_step_tokens
        self.max_running = max_running
        self.clock = clock
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self._ids = count()
        self._counters = dict.fromkeys(
            ("num_steps", "num_preempted", "computed_tokens", "computed_prompt_tokens", "copy_waits"), 0
        )

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        *,
        request_id: str | int | None = None,
        salt: str | bytes | int | None = None,
    ) -> Request:
        """Queue a request.

        Args:
            prompt: Token ids, at least one.
            sampling: How the answer is chosen; None: greedily, 16 tokens.
            request_id: A name not in use; None: one is made.
            salt: Requests with different salts share no block.

        Returns:
            The request; it fills up as `step` is called.

        Raises:
            ConfigError: An argument is outside its limits, or the request could never fit into Gpu memory.
            TypeError: An argument is of the wrong kind.
        """
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            raise TypeError(f"sampling: a Sampling is wanted, not {type(sampling).__name__}")
        if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)):
            raise TypeError(f"prompt: a sequence of token ids is wanted, not {type(prompt).__name__}")
        limit = f"token ids 0 .. {self.model.vocab_size - 1}"
        tokens = [checked_integer("prompt", token, limit) for token in prompt]
        if not tokens:
            raise ConfigError("prompt", "no tokens", "at least 1 token")
        wrong = next((token for token in tokens if not 0 <= token < self.model.vocab_size), None)
        if wrong is not None:
            raise ConfigError("prompt", f"token {wrong}", limit)
        total = len(tokens) + sampling.max_new_tokens
        if total > self.model.max_tokens:
            raise ConfigError("prompt + max_new_tokens", total, f"the model takes {self.model.max_tokens} tokens")
        room = self.table.gpu_blocks * self.table.block_size
        if total - 1 > room:  # the last token of an answer is never computed
            raise ConfigError("prompt + max_new_tokens", total, f"Gpu memory has room for {room} tokens")
        if request_id is None:
            request_id = f"request-{next(self._ids)}"
        # what the table would refuse at admission is refused here
        try:
            self.table.is_ready(request_id)
            is_live = True
        except UnknownRequestError:
            is_live = any(request.request_id == request_id for request in self.waiting)
        if is_live:
            raise ConfigError("request_id", request_id, "not the id of a live request")
        self.table.lookup((), salt=salt)
        request = Request(request_id, tokens, len(tokens), sampling, salt, self.clock())
        self.waiting.append(request)
        return request

    def abort(self, request_id: str | int) -> None:
        """End a request at once.

        Raises:
            UnknownRequestError: No live request has this id.
        """
        for request in [*self.waiting, *self.running]:
            if request.request_id == request_id:
                if request in self.running:
                    self.running.remove(request)
                    self.table.abort(request_id)
                else:
                    self.waiting.remove(request)
                request.finish_reason, request.finished_s = "aborted", self.clock()
                return
        raise UnknownRequestError(request_id)

    def step(self) -> list[Request]:
        """Advance every request that can advance: at most one forward pass.

        Returns:
            The requests that finished in this step.

        Raises:
            TransferError: Nothing could run, and the copies that requests wait for did not finish within 60 s.
        """
        self._counters["num_steps"] += 1
        self._make_room()
        self._admit()
        self._start_copies()
        batch = self._next_batch()
        finished = self._run(batch) if batch else []
        if not batch and self.table.open_tickets():
            self._wait_for_a_copy()
        self._acknowledge(self.copier.poll())
        return finished

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling | None = None) -> list[list[int]]:
        """Run these prompts to their ends.

        Returns:
            The answers, in the order of the prompts.

        Raises:
            ConfigError: A prompt is outside the limits of `submit`.
            TransferError: As `step`.
        """
        requests = [self.submit(prompt, sampling) for prompt in prompts]
        while any(request.finish_reason is None for request in requests):
            self.step()
        return [request.answer for request in requests]

    def settle(self) -> None:
        """Make the stores that are due and wait for every copy, at most 60 s for the next one to finish.

        Raises:
            TransferError: A copy did not finish in that time.
        """
        self._start_copies()
        while self.table.open_tickets():
            self._wait_for_a_copy()

    def stats(self) -> dict[str, int]:
        """Counters since construction.

        `num_steps`; `num_preempted`; `computed_tokens` and those of them that belong to prompts,
        `computed_prompt_tokens` (a token computed twice counts twice); `copy_waits`, steps that had nothing to compute
        and waited for a copy.
        """
        return dict(self._counters)

    def close(self) -> None:
        """Stop the copier. The engine cannot be used afterwards; a second call does nothing."""
        self.copier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_room(self) -> None:
        """Reserve the place of each running request's newest token, preempting the youngest while there is none."""
        for request in list(self.running):
            while request in self.running and request.reserved_tokens < len(request.tokens):
                try:
                    added = self.table.extend(request.request_id, request.tokens[request.reserved_tokens :])
                except OutOfBlocksError:
                    self._preempt(self.running[-1])
                else:
                    request.block_ids += added.tolist()
                    request.reserved_tokens = len(request.tokens)

    def _preempt(self, request: Request) -> None:
        self.table.preempt(request.request_id)
        self.running.remove(request)
        request.back_to_waiting()
        self.waiting.appendleft(request)
        self._counters["num_preempted"] += 1

    def _admit(self) -> None:
        """Admit waiting requests in order, until one does not fit."""
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            try:
                admission = self.table.admit(request.request_id, request.tokens, salt=request.salt)
            except OutOfBlocksError:
                if self.running or self.table.open_tickets():
                    return  # their ends, or the ends of their copies, will make room
                raise
            request.block_ids = admission.block_ids.tolist()
            request.reserved_tokens = len(request.tokens)
            self.running.append(self.waiting.popleft())

    def _start_copies(self) -> None:
        """Hand the copies that are due to the copier.

        Stores read blocks that earlier steps wrote and that nobody writes again; loads write blocks whose requests are
        not ready before the acknowledgement. So both may run beside the forward pass of this step.
        """
        plan = self.table.step()
        tickets = [(plan.load_ticket, len(plan.loads)), (plan.store_ticket, len(plan.stores))]
        if all(ticket is None for ticket, _ in tickets):
            return
        try:
            self.copier.submit(plan)
        except TransferError:  # its queue is full: the loads are recomputed, the stores come again
            for ticket, pairs in tickets:
                if ticket is not None:
                    self.table.complete(ticket, failed=range(pairs))

    def _acknowledge(self, finished: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Tell the table which copies are done: only now are these blocks hits."""
        for ticket, failed in finished:
            self.table.complete(ticket, failed=failed)

    def _wait_for_a_copy(self) -> None:
        self._counters["copy_waits"] += 1
        finished = self.copier.wait(COPY_TIMEOUT_S)
        if not finished:
            raise TransferError(f"tickets {self.table.open_tickets()}: not finished after {COPY_TIMEOUT_S} s")
        self._acknowledge(finished)

    def _next_batch(self) -> list[tuple[Request, Segment]]:
        """Choose the tokens to compute: one for each request that decodes, then chunks of prompts, oldest first."""
        for request in self.running:
            if not request.ready and self.table.is_ready(request.request_id):
                request.ready = True
                # after a failed load this is less than the hits promised, and the rest is computed again
                request.computed_tokens = self.table.valid_tokens(request.request_id)
        batch = []
        budget = self.max_step_tokens
        for request in sorted((r for r in self.running if r.ready), key=lambda r: r.pending_tokens > 1):
            num_tokens = min(request.pending_tokens, budget)
            if num_tokens:
                start = request.computed_tokens
                batch.append((request, Segment(request.block_ids, start, start + num_tokens)))
                budget -= num_tokens
        return batch

    def _run(self, batch: list[tuple[Request, Segment]]) -> list[Request]:
        """Compute the batch, commit what was written, and choose the next token where all tokens are computed."""
        tokens = [token for request, part in batch for token in request.tokens[part.start : part.end]]
        logits = self.model.forward(tokens, [part for _, part in batch], self.memory)
        finished = []
        for row, (request, part) in zip(logits, batch, strict=True):
            self._counters["computed_tokens"] += part.end - part.start
            self._counters["computed_prompt_tokens"] += max(0, min(part.end, request.prompt_tokens) - part.start)
            request.computed_tokens = part.end
            self.table.commit(request.request_id, part.end)
            if request.pending_tokens == 0:
                request.tokens.append(choose_token(row, request.sampling, request.generator))
                if request.first_token_s is None:
                    request.first_token_s = self.clock()
                request.finish_reason = self._finish_reason(request)
                if request.finish_reason:
                    finished.append(request)
        for request in finished:
            self.table.release(request.request_id)
            self.running.remove(request)
            request.finished_s = self.clock()
        return finished

    def _finish_reason(self, request: Request) -> Any:
        if request.tokens[-1] in self.model.eos_token_ids and not request.sampling.ignore_eos:
            return "eos"
        return "length" if len(request.answer) == request.sampling.max_new_tokens else None
