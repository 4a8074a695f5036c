"""Any history of requests, readers and step results keeps every promise of the scheduler.

The promises are checked by `CheckedScheduler`; here is only what can happen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from llamad_trio.core.errors import EngineClosed
from llamad_trio.scheduling.plan import StepStatus
from llamad_trio.scheduling.pool import Reuse
from tests.scheduling.checked_scheduler import CheckedScheduler
from tests.scheduling.fake_memory import PIECES, EndlessModel, FakeModel, ForcingModel, HashModel
from tests.scheduling.tracked import copies

TOKENS = st.integers(1, len(PIECES) - 1)
STEMS = ([1 + i * i % 11 for i in range(60)], [12 - i % 7 for i in range(60)])
STOPS = ("stop", "ab", "aa", "b\n", "é", "🙂", "\ufffd", "aba", "")
STATUSES = st.sampled_from([StepStatus.DONE] * 4 + [s for s in StepStatus if s.name != "DONE"])
SESSIONS = st.sampled_from([None, None, "s", "t"])
N_TARGETS = st.sampled_from([0, 0, 0, 1, 7, 30]) | st.integers(0, 60)

HOLDERS = st.sampled_from(["s", "t"])


Draw = Callable[[st.SearchStrategy[Any]], Any]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come and go, readers pause, steps fail."""

    reuse: Reuse
    books: CheckedScheduler

    @initialize(data=st.data())
    def open(self, data: st.DataObject) -> None:
        draw = data.draw
        n_slots = draw(st.sampled_from([3, 4, 2, 1]))
        n_ctx = draw(st.integers(40, 90) | st.integers(60, 160) | st.integers(2, 12))
        model: FakeModel = EndlessModel() if draw(st.booleans()) else HashModel()
        can_rewind = draw(st.booleans())
        self.books = CheckedScheduler(
            n_slots=n_slots,
            n_seqs=n_slots + draw(st.sampled_from([1, 2, 8, 3])),
            n_ctx=n_ctx,
            n_cells=max(1, n_ctx - draw(st.sampled_from([0, 0, 0, 1, 10]))),
            n_batch=n_slots + draw(st.sampled_from([64, 20, 5, 1, 0])),
            reuse=self.reuse,
            can_rewind=can_rewind if self.reuse is Reuse.NOTHING else None,
            model=ForcingModel(model) if draw(st.booleans()) else model,
        )
        self.ends_by_closing = draw(st.sampled_from([False, False, False, True]))

    def ask(self, draw: Draw, tokens: list[int], max_tokens: int, **fields: Any) -> None:
        """Ask for a continuation of `tokens`, or, by chance, for scores of some of them."""
        id_ = len(self.books.requests) * 7919 % 10_007  # which tells nothing of the arrival
        if n_targets := draw(N_TARGETS):
            self.books.score(tokens, min(n_targets, len(tokens)), request_id=id_)
        else:
            limit = min(max_tokens, self.books.n_ctx - len(tokens))
            session = draw(SESSIONS)
            holder = session if limit == 0 else None
            self.books.submit(
                tokens, max_tokens=limit, session=session, holder=holder, request_id=id_, **fields
            )

    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        """Prompts that begin like each other, and like earlier ones."""
        draw = data.draw
        shared = draw(st.sampled_from([20, 36, 59, 5, 0]) | st.integers(0, 60))
        tokens = draw(st.sampled_from(STEMS))[:shared]
        tokens += draw(st.lists(TOKENS, min_size=1, max_size=5))
        differ = draw(st.booleans())
        for i in range(draw(st.integers(1, 4))):
            self.ask(
                draw,
                [*tokens, *([1 + i] if differ else [])][-self.books.n_ctx + 1 :],
                draw(st.sampled_from([80, 40, 20, 5, 1, 0])),
                stop=draw(st.just([]) | st.lists(st.sampled_from(STOPS), max_size=3)),
                streams=draw(st.booleans()),
                seed=draw(st.integers(0, 3)),
                n_logprobs=draw(st.sampled_from([None, None, None, 0])),
            )
        self.plan_if(draw(st.booleans()))

    @precondition(lambda self: self.books.requests)
    @rule(data=st.data(), cut=st.just(0) | st.integers(0, 30), own=st.lists(TOKENS, max_size=4))
    def follow_up(self, data: st.DataObject, cut: int, own: list[int]) -> None:
        """A prompt that continues what another request has said so far, or branches off it."""
        earlier = self.books.requests[data.draw(st.sampled_from(list(self.books.requests)))]
        tokens = [*earlier.history[: len(earlier.history) - cut], *own]
        if 0 < len(tokens) < self.books.n_ctx and 0 not in tokens:
            self.ask(data.draw, tokens, data.draw(st.integers(1, 20)))
        self.plan_if(data.draw(st.booleans()))

    def plan_if(self, wanted: bool) -> None:
        """Take up what has just arrived in a step that may go wrong."""
        if wanted and self.books.in_flight is None:
            self.books.plan()

    def live(self) -> list[int]:
        return [id_ for id_, request in self.books.requests.items() if request.live]

    def some_live(self) -> st.SearchStrategy[int]:
        """A request without an outcome; as often one that runs as one that waits."""
        live = st.sampled_from(self.live())
        running = [id_ for id_ in self.books.running if self.books.requests[id_].live]
        return live | st.sampled_from(running) if running else live

    @precondition(lambda self: self.books.requests)
    @rule(data=st.data(), holder=HOLDERS, cut=st.integers(0, 4))
    def hold(self, data: st.DataObject, holder: str, cut: int) -> None:
        """Somebody wants to go on from a request, or from nearly all of it."""
        earlier = self.books.requests[data.draw(st.sampled_from(list(self.books.requests)))]
        if tokens := earlier.history[: len(earlier.history) - cut]:
            self.books.hold(holder, tokens)

    @rule(holder=HOLDERS)
    def let_go(self, holder: str) -> None:
        self.books.let_go(holder)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.books.cancel(data.draw(self.some_live()))

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        self.books.pause(data.draw(self.some_live()))

    @precondition(lambda self: any(r.paused and r.live for r in self.books.requests.values()))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        paused = [id_ for id_ in self.live() if self.books.requests[id_].paused]
        self.books.resume(data.draw(st.sampled_from(paused)))

    @precondition(lambda self: self.books.in_flight is None)
    @rule()
    def plan(self) -> None:
        self.books.plan()

    @precondition(lambda self: self.books.in_flight is not None)
    @rule(data=st.data(), status=STATUSES, elapsed_s=st.sampled_from([0.0, 0.001, 0.05, 2.0]))
    def finish(self, data: st.DataObject, status: StepStatus, elapsed_s: float) -> None:
        plan = self.books.in_flight
        assert plan is not None
        failing: set[int] = set()
        failing_copies: set[int] = set()
        if status is StepStatus.DONE and data.draw(st.integers(0, 3)) == 0:
            failing = data.draw(st.sets(st.sampled_from([work.request_id for work in plan.work])))
        copied_to = [copy.dst for copy in copies(plan)]
        if len(copied_to) > 0 and data.draw(st.booleans()):
            failing_copies = data.draw(st.sets(st.sampled_from(copied_to)))
        self.books.finish(
            status, failing=failing, failing_copies=failing_copies, elapsed_s=elapsed_s
        )

    @precondition(lambda self: self.books.in_flight is None)
    @rule(
        n=st.integers(1, 15),
        copies_fail=st.sampled_from([False, False, True]),
        leaves_one_in_flight=st.booleans(),
    )
    def steps(self, n: int, copies_fail: bool, leaves_one_in_flight: bool) -> None:
        """Nothing happens for a while, but the work."""
        for _ in range(n):
            plan = self.books.plan()
            if plan is None:
                return
            failing_copies = [copy.dst for copy in copies(plan)] if copies_fail else []
            self.books.finish(failing_copies=failing_copies)
        if leaves_one_in_flight:
            self.books.plan()

    def teardown(self) -> None:
        if not hasattr(self, "books"):
            return
        if self.ends_by_closing:
            self.books.fail_all(EngineClosed())
        else:
            self.books.run_to_end()


def run(reuse: Reuse, *, n_examples: int, n_steps: int) -> None:
    run_state_machine_as_test(
        type("Machine", (SchedulerMachine,), {"reuse": reuse}),
        settings=settings(
            max_examples=n_examples,
            stateful_step_count=n_steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize(
    ("reuse", "n_examples"), [(Reuse.NOTHING, 15), (Reuse.WHOLE, 20), (Reuse.PREFIX, 25)]
)
def test_every_history_keeps_every_promise(reuse: Reuse, n_examples: int) -> None:
    run(reuse, n_examples=n_examples, n_steps=40)


@pytest.mark.slow
@pytest.mark.parametrize("reuse", Reuse)
def test_every_history_keeps_every_promise_at_length(reuse: Reuse) -> None:
    run(reuse, n_examples=2_000, n_steps=80)
