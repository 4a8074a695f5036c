"""Requests as tests see them: prompts to ask with, and what is known of each from outside."""

from __future__ import annotations

from functools import cached_property

import attrs

from llamad_trio.core.request import Request
from llamad_trio.scheduling.plan import (
    Copy,
    Prepared,
    Sampled,
    SamplingParams,
    StepPlan,
    Work,
    resolve_sampling,
)
from llamad_trio.scheduling.run import Failed, Finished
from tests.scheduling.fake_memory import FakeModel, lone_run

A, B, C, D = ([i] * 20 for i in (1, 2, 3, 4))
"""Prompts of 20 tokens that have no beginning in common."""


def sizes(plan: StepPlan) -> dict[int, int]:
    """Tokens that a plan computes for each request."""
    return {work.request_id: len(work.tokens) for work in plan.work}


def copies(plan: StepPlan) -> list[Copy]:
    """The copies a plan asks for."""
    return [operation for operation in plan.memory if isinstance(operation, Copy)]


def sampling(seed: int = 0) -> SamplingParams:
    """Sampling numbers, of which the fake model minds the seed."""
    return resolve_sampling(Request("anything"), n_ctx=1, fresh_seed=seed)


@attrs.define(slots=False, eq=False)
class Tracked:
    """What is known of one request, from outside.

    `n_new` is the number of tokens that came of its last sampling.
    """

    prepared: Prepared
    arrival: int
    model: FakeModel
    history: list[int]
    n_new: int = 0
    pieces: list[str] = attrs.field(factory=list)
    outcome: Finished | Failed | None = None
    cancelled: bool = False
    paused: bool = False
    cached_tokens: int = 0

    @cached_property
    def alone(self) -> Finished:
        return lone_run(self.prepared, self.model)

    @property
    def live(self) -> bool:
        return self.outcome is None and not self.cancelled

    @property
    def runnable(self) -> bool:
        return self.live and not self.paused

    @property
    def generated(self) -> int:
        return len(self.history) - len(self.prepared.tokens)

    @property
    def n_reusable(self) -> int:
        """Tokens it may go on from: no logits are wanted of them."""
        return len(self.history) - max(1, len(self.prepared.targets))

    def is_decoding(self, n_resident: int) -> bool:
        """Whether only tokens of the last sampling are missing."""
        return len(self.history) - self.n_new <= n_resident < len(self.history)

    def take(self, sampled: Sampled) -> None:
        """A sampled token and those it forces follow, as far as the text goes."""
        tokens = [sampled.token, *(token for token, _ in sampled.forced)]
        new = tokens[: self.alone.generated_tokens - self.generated]
        self.history += new
        self.n_new = len(new)

    def targets_of(self, work: Work) -> list[int]:
        """What is to be scored after the tokens of `work`."""
        first = len(self.prepared.tokens) - len(self.prepared.targets)
        targets = dict(enumerate(self.prepared.targets, first))
        positions = range(work.pos, work.pos + len(work.tokens))
        return [targets[position] for position in positions if position in targets]
