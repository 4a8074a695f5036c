"""A scheduler that is checked against its promises at every call.

It drives the real `Scheduler` with a `FakeMemory`, keeps books of its own, and compares
the two after everything that happens.  Tests add only what is particular to them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property

import attrs

from llamad_trio.core.errors import ContextOverflow, InferenceError, LlamadError
from llamad_trio.core.plan import Prepared, StepPlan, StepResult, StepStatus, Work
from llamad_trio.core.sampling import SamplingParams
from llamad_trio.core.scheduler import Event, Failed, Finished, Piece, Scheduler
from tests.core.fake_memory import EndlessModel, FakeMemory, FakeModel, LoneRun, lone_run

MOST_STEPS = 5_000
"""Steps after which a scheduler that has not come to rest never will."""


def sampling(seed: int = 0) -> SamplingParams:
    """Sampling numbers, of which the fake model minds the seed."""
    return SamplingParams(
        greedy=False,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repeat_penalty=1.0,
        penalty_window=0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=seed,
    )


@attrs.define(slots=False, eq=False)
class Tracked:
    """What is known of one request, from outside."""

    prepared: Prepared
    arrival: int
    model: FakeModel
    history: list[int]
    pieces: list[str] = attrs.field(factory=list)
    outcome: Finished | Failed | None = None
    cancelled: bool = False
    paused: bool = False
    cached_tokens: int = 0

    @cached_property
    def alone(self) -> LoneRun:
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

    def is_decode_row(self, work: Work) -> bool:
        """Whether `work` is nothing but the token that was generated last."""
        return self.generated > 0 and work.pos == len(self.history) - 1


class CheckedScheduler:
    """A `Scheduler`, a `FakeMemory`, and the checks between them."""

    def __init__(
        self,
        *,
        n_slots: int = 4,
        n_ctx: int = 100,
        n_cells: int | None = None,
        n_batch: int = 64,
        retain: bool = True,
        can_rewind: bool = True,
        step_target_s: float = 0.1,
        model: FakeModel | None = None,
    ) -> None:
        self.model = model or EndlessModel()
        self.n_slots = n_slots
        self.n_ctx = n_ctx
        self.retain = retain
        self.memory = FakeMemory(
            model=self.model,
            n_slots=n_slots,
            n_ctx=n_ctx,
            n_cells=n_ctx if n_cells is None else n_cells,
            n_batch=n_batch,
            can_rewind=can_rewind,
        )
        self.scheduler = Scheduler(
            n_slots=n_slots,
            n_ctx=n_ctx,
            n_batch=n_batch,
            step_target_s=step_target_s,
            retain=retain,
        )
        self.requests: dict[int, Tracked] = {}
        self.in_flight: StepPlan | None = None
        self.preempted: list[int] = []
        self.totals = {"steps": 0, "aborted": 0, "prefill": 0, "decode": 0, "cached": 0}

    # -- the calls of `Scheduler` -------------------------------------------------------

    def submit(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int = 10,
        stop: Sequence[str] = (),
        streams: bool = True,
        seed: int = 0,
        request_id: int | None = None,
    ) -> int:
        """Take a request in; return its id: the one given, or the next number."""
        prepared = Prepared(
            id=max(self.requests, default=-1) + 1 if request_id is None else request_id,
            tokens=tuple(tokens),
            max_tokens=max_tokens,
            sampling=sampling(seed),
            stop=tuple(stop),
            streams=streams,
        )
        arrival = len(self.requests)
        self.requests[prepared.id] = Tracked(prepared, arrival, self.model, list(tokens))
        self.scheduler.submit(prepared)
        self.check()
        return prepared.id

    def cancel(self, request_id: int) -> None:
        """Cancel; from then on no event may come."""
        self.requests[request_id].cancelled = True
        self.scheduler.cancel(request_id)
        self.check()

    def pause(self, request_id: int) -> None:
        """The reader falls behind."""
        self.requests[request_id].paused = True
        self.scheduler.pause(request_id)
        self.check()

    def resume(self, request_id: int) -> None:
        """The reader catches up."""
        self.requests[request_id].paused = False
        self.scheduler.resume(request_id)
        self.check()

    def plan(self) -> StepPlan | None:
        """Plan a step, and check that it is a fair one."""
        before = self.running
        plan = self.in_flight = self.scheduler.plan()
        self._check_admission(before)
        self._check_preemption(before)
        if plan is None:
            assert not any(request.runnable for request in self.requests.values()), "a hang"
        else:
            self._check_work(plan)
        self.check()
        return plan

    def finish(
        self,
        status: StepStatus = StepStatus.DONE,
        *,
        failing: Collection[int] = (),
        elapsed_s: float = 0.01,
    ) -> list[Event]:
        """Run the step in flight, apply its result, and check what comes of it."""
        plan, self.in_flight = self.in_flight, None
        assert plan is not None
        before = self.running
        retained = self.scheduler.stats().kv_retained
        result = self.memory.run(plan, status=status, failing=failing, elapsed_s=elapsed_s)
        self._count(plan, result)
        events = self.scheduler.apply(result)
        for request_id, sampled in result.sampled.items():
            self.requests[request_id].history.append(sampled.token)
        for event in events:
            self._record(event)
        failed = {event.id: event.error for event in events if isinstance(event, Failed)}
        self._check_failures(plan, result, failed, before, retained)
        if result.status is StepStatus.NO_ROOM:
            self._check_preemption(before)
        self.check()
        return events

    def fail_all(self, error: LlamadError) -> list[Event]:
        """End everything, as a closing engine does."""
        waiting = {id_ for id_, request in self.requests.items() if request.live}
        events = self.scheduler.fail_all(error)
        self.in_flight = None
        for event in events:
            self._record(event)
        assert {event.id for event in events} == waiting
        assert all(isinstance(event, Failed) and event.error is error for event in events)
        assert self.scheduler.plan() is None
        assert self.scheduler.stats().slots_free == self.n_slots
        return events

    # -- several at once ----------------------------------------------------------------

    def step(self) -> StepPlan | None:
        """Plan and finish one step; return its plan."""
        plan = self.plan()
        if plan is not None:
            self.finish()
        return plan

    def steps(self, n: int) -> None:
        """Up to `n` steps."""
        for _ in range(n):
            if self.step() is None:
                return

    def drain(self) -> None:
        """Go on until there is nothing to do."""
        for _ in range(MOST_STEPS):
            if self.step() is None:
                return
        raise AssertionError("no end in sight")

    def run_to_end(self) -> None:
        """Resume all, drain, and check that everything has ended and nothing is left over."""
        for request_id, request in self.requests.items():
            if request.paused and request.live:
                self.resume(request_id)
        if self.in_flight:
            self.finish()
        self.drain()
        self.submit([1], max_tokens=1)  # takes the last trims and samplers along
        self.drain()
        assert not any(request.live for request in self.requests.values()), "no outcome"
        stats = self.scheduler.stats()
        assert stats.slots_free == self.n_slots
        assert stats.kv_used == 0
        assert self.retain or stats.kv_retained == 0
        assert list(self.memory.samplers) == self.scheduler._old_samplers, "a sampler leaked"

    # -- what tests ask -----------------------------------------------------------------

    @property
    def running(self) -> list[int]:
        """Ids of the requests that hold a slot, oldest first."""
        ids = [slot.run.id for slot in self.scheduler._slots if slot.run is not None]
        return sorted(ids, key=lambda id_: self.requests[id_].arrival)

    def seq(self, request_id: int) -> int:
        """The sequence a running request is in."""
        (seq,) = (s.seq for s in self.scheduler._slots if s.run and s.run.id == request_id)
        return seq

    def finished(self, request_id: int) -> Finished:
        """The outcome of a request that is complete."""
        outcome = self.requests[request_id].outcome
        assert isinstance(outcome, Finished)
        return outcome

    def error(self, request_id: int) -> LlamadError:
        """The outcome of a request that failed."""
        outcome = self.requests[request_id].outcome
        assert isinstance(outcome, Failed)
        return outcome.error

    def contents(self) -> dict[int, list[int]]:
        """The pool's sequences, once the trims that are on their way have been made."""
        contents = {seq: list(tokens) for seq, tokens in self.memory.sequences.items()}
        planned = self.in_flight.trims if self.in_flight else ()
        for trim in (*planned, *self.scheduler._trims):
            assert trim.keep <= len(contents[trim.seq])
            del contents[trim.seq][trim.keep :]
        return contents

    # -- the checks ---------------------------------------------------------------------

    def check(self) -> None:
        """The scheduler's books agree with the pool, and with what was seen from outside."""
        contents = self.contents()
        slots = self.scheduler._slots
        assert {s.seq: list(s.tokens[: s.resident]) for s in slots} == contents
        running = self.running
        held = {slot.seq for slot in slots if slot.run is not None}
        stats = self.scheduler.stats()
        assert stats.kv_used == sum(len(contents[seq]) for seq in held)
        assert stats.kv_retained == sum(len(contents[seq]) for seq in contents if seq not in held)
        assert stats.kv_used + stats.kv_retained + stats.kv_free == self.n_ctx
        assert stats.kv_free >= 0
        assert len(set(running)) == len(running)
        assert stats.slots_free == self.n_slots - len(running)
        assert stats.slots_prefill + stats.slots_decode + stats.slots_paused == len(running)
        assert stats.running == sum(self.requests[id_].live for id_ in running)
        assert stats.preemptions == len(self.preempted)
        assert stats.steps == self.totals["steps"]
        assert stats.aborted_steps == self.totals["aborted"]
        assert stats.prefill_tokens == self.totals["prefill"]
        assert stats.decode_tokens == self.totals["decode"]
        assert stats.cached_tokens == self.totals["cached"]
        self._check_holders(running)
        self._check_unwanted()

    def _check_holders(self, running: Iterable[int]) -> None:
        """Only the living hold slots, and cancelled ones until their step is over."""
        computing = {work.request_id for work in self.in_flight.work} if self.in_flight else set()
        for request_id in running:
            request = self.requests[request_id]
            assert request.outcome is None
            assert request.live or request_id in computing

    def _check_unwanted(self) -> None:
        flight = self.in_flight
        unwanted = flight is not None and all(
            self.requests[work.request_id].cancelled for work in flight.work
        )
        assert self.scheduler.in_flight_is_unwanted == unwanted

    def _check_admission(self, before: Sequence[int]) -> None:
        """First come, first served."""
        after = self.running
        started = [id_ for id_ in after if id_ not in before]
        contents = self.contents()
        for request_id in started:
            request = self.requests[request_id]
            assert request.runnable
            overtaken = [
                id_
                for id_, other in self.requests.items()
                if other.arrival < request.arrival and other.runnable and id_ not in after
            ]
            assert not overtaken, f"{request_id} overtook {overtaken}"
            if request.generated == 0:
                request.cached_tokens = len(contents[self.seq(request_id)])
                self.totals["cached"] += request.cached_tokens

    def _check_preemption(self, before: Sequence[int]) -> None:
        """Retained prefixes go first, then those who pause, then the newest, never the oldest."""
        after = self.running
        lost = [id_ for id_ in before if id_ not in after and self.requests[id_].live]
        self.preempted += lost
        asked = [id_ for id_ in before if self.requests[id_].runnable]
        for request_id in lost:
            if self.requests[request_id].paused:
                continue
            assert request_id != asked[0], "the oldest was preempted"
            assert not any(self.requests[id_].paused for id_ in after), "paused ones go first"
            newest = self.requests[after[-1]]
            assert newest.arrival < self.requests[request_id].arrival, "the newest goes first"
            assert self.scheduler.stats().kv_retained == 0, "retained prefixes go first"

    def _check_work(self, plan: StepPlan) -> None:
        ids = [work.request_id for work in plan.work]
        assert len(set(ids)) == len(ids)
        for work in plan.work:
            request = self.requests[work.request_id]
            assert request.runnable, "work for nobody"
            assert work.seq == self.seq(work.request_id)
            end = work.pos + len(work.tokens)
            assert list(work.tokens) == request.history[work.pos : end]
            assert work.sample == (end == len(request.history))
        rows = [self.requests[work.request_id].is_decode_row(work) for work in plan.work]
        assert rows == sorted(rows, reverse=True), "decode rows come first"
        oldest = next(id_ for id_ in self.running if self.requests[id_].runnable)
        assert oldest in ids, "the oldest does not progress"
        for spec in plan.new_samplers:
            prepared = self.requests[spec.request_id].prepared
            assert (spec.params, spec.seen) == (prepared.sampling, prepared.tokens)

    def _count(self, plan: StepPlan, result: StepResult) -> None:
        self.totals["steps"] += 1
        self.totals["aborted"] += result.status is StepStatus.ABORTED
        if result.status is StepStatus.DONE:
            for work in plan.work:
                decodes = self.requests[work.request_id].is_decode_row(work)
                self.totals["decode" if decodes else "prefill"] += len(work.tokens)

    def _record(self, event: Event) -> None:
        request = self.requests[event.id]
        assert request.live, "an event after the end"
        match event:
            case Piece(text=text):
                assert text
                assert request.prepared.streams
                request.pieces.append(text)
                assert request.alone.text.startswith("".join(request.pieces))
            case Finished():
                request.outcome = event
                self._check_finished(request, event)
            case Failed():
                request.outcome = event

    def _check_finished(self, request: Tracked, event: Finished) -> None:
        alone = request.alone
        assert event.text == alone.text
        assert event.generated_tokens == alone.generated_tokens
        assert event.finish_reason == alone.finish_reason
        assert event.stop_sequence == alone.stop_sequence
        assert event.prompt_tokens == len(request.prepared.tokens)
        assert event.cached_tokens == request.cached_tokens < event.prompt_tokens
        assert "".join(request.pieces) == (event.text if request.prepared.streams else "")

    def _check_failures(
        self,
        plan: StepPlan,
        result: StepResult,
        failed: dict[int, LlamadError],
        before: Sequence[int],
        retained: int,
    ) -> None:
        """Who fails, and why, follows from the result alone."""
        wanted = {w.request_id for w in plan.work if not self.requests[w.request_id].cancelled}
        match result.status:
            case StepStatus.FAILED:
                assert failed.keys() == wanted
                assert {str(error) for error in failed.values()} <= {f"inference: {result.reason}"}
            case StepStatus.NO_ROOM if failed:
                assert list(failed) == before, "whoever is not alone can be preempted"
                assert retained == 0
                assert all(isinstance(error, ContextOverflow) for error in failed.values())
            case _:
                assert failed.keys() == result.failures.keys() & wanted
                assert all(isinstance(error, InferenceError) for error in failed.values())
