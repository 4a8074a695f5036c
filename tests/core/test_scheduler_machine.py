"""Any history of requests, readers and step results keeps every promise of the scheduler.

The promises are checked by `CheckedScheduler`; here is only what can happen.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from llamad_trio.core.errors import EngineClosed
from llamad_trio.core.plan import StepStatus
from tests.core.checked_scheduler import CheckedScheduler
from tests.core.fake_memory import PIECES, EndlessModel, HashModel

TOKENS = st.integers(1, len(PIECES) - 1)
STEMS = ([1 + i * i % 11 for i in range(60)], [12 - i % 7 for i in range(60)])
STOPS = ("stop", "ab", "aa", "b\n", "é", "🙂", "\ufffd", "aba", "")
STATUSES = st.sampled_from([StepStatus.DONE] * 4 + [s for s in StepStatus if s.name != "DONE"])


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come and go, readers pause, steps fail."""

    books: CheckedScheduler

    @initialize(
        n_slots=st.sampled_from([3, 4, 2, 1]),
        n_ctx=st.integers(40, 90) | st.integers(60, 160) | st.integers(2, 12),
        missing_cells=st.sampled_from([0, 0, 0, 1, 10]),
        batch=st.sampled_from([0, 1, 5, 20, 64]),
        memory=st.sampled_from(["retains", "rewinds", "only clears"]),
        endless=st.sampled_from([True, False]),
        ends_by_closing=st.sampled_from([False, False, False, True]),
    )
    def open(
        self,
        n_slots: int,
        n_ctx: int,
        missing_cells: int,
        batch: int,
        memory: str,
        endless: bool,
        ends_by_closing: bool,
    ) -> None:
        self.ends_by_closing = ends_by_closing
        self.books = CheckedScheduler(
            n_slots=n_slots,
            n_ctx=n_ctx,
            n_cells=max(1, n_ctx - missing_cells),
            n_batch=n_slots + batch,
            retain=memory == "retains",
            can_rewind=memory != "only clears",
            model=EndlessModel() if endless else HashModel(),
        )

    @rule(
        stem=st.sampled_from(range(len(STEMS))),
        shared=st.integers(0, 15) | st.integers(0, 60),
        own=st.lists(TOKENS, min_size=1, max_size=5),
        max_tokens=st.sampled_from([80, 40, 20, 5, 1]),
        stop=st.just([]) | st.lists(st.sampled_from(STOPS), max_size=3),
        streams=st.booleans(),
        seed=st.integers(0, 3),
        n=st.integers(1, 4),
    )
    def submit(
        self,
        stem: int,
        shared: int,
        own: list[int],
        max_tokens: int,
        stop: list[str],
        streams: bool,
        seed: int,
        n: int,
    ) -> None:
        """Prompts that begin like others."""
        tokens = [*STEMS[stem][:shared], *own][-self.books.n_ctx + 1 :]
        limit = min(max_tokens, self.books.n_ctx - len(tokens))
        for i in range(n):
            self.books.submit(
                tokens,
                max_tokens=limit,
                stop=stop,
                streams=streams,
                seed=seed + i,
                request_id=self.new_id(),
            )

    @precondition(lambda self: self.books.requests)
    @rule(data=st.data(), own=st.lists(TOKENS, max_size=4), max_tokens=st.integers(1, 20))
    def follow_up(self, data: st.DataObject, own: list[int], max_tokens: int) -> None:
        """A prompt that continues what another request has said so far."""
        earlier = data.draw(st.sampled_from(list(self.books.requests.values())))
        tokens = [*earlier.history, *own]
        if len(tokens) < self.books.n_ctx and 0 not in tokens:
            limit = min(max_tokens, self.books.n_ctx - len(tokens))
            self.books.submit(tokens, max_tokens=limit, request_id=self.new_id())

    def new_id(self) -> int:
        """A new id, which tells nothing of the order of arrival."""
        return len(self.books.requests) * 7919 % 10_007

    def live(self) -> list[int]:
        return [id_ for id_, request in self.books.requests.items() if request.live]

    def some_live(self) -> st.SearchStrategy[int]:
        """A request without an outcome; as often one that runs as one that waits."""
        live = st.sampled_from(self.live())
        running = [id_ for id_ in self.books.running if self.books.requests[id_].live]
        return live | st.sampled_from(running) if running else live

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
        assert self.books.in_flight is not None
        failing = set()
        if status is StepStatus.DONE and data.draw(st.integers(0, 3)) == 0:
            ids = [work.request_id for work in self.books.in_flight.work]
            failing = data.draw(st.sets(st.sampled_from(ids)))
        self.books.finish(status, failing=failing, elapsed_s=elapsed_s)

    @precondition(lambda self: self.books.in_flight is None)
    @rule(n=st.integers(1, 15))
    def steps(self, n: int) -> None:
        """Nothing happens for a while, but the work."""
        self.books.steps(n)

    def teardown(self) -> None:
        if not hasattr(self, "books"):
            return
        if self.ends_by_closing:
            self.books.fail_all(EngineClosed())
        else:
            self.books.run_to_end()


def test_every_history_keeps_every_promise() -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=200,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_every_history_keeps_every_promise_at_length() -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=5_000,
            stateful_step_count=80,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
