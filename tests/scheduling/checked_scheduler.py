"""A scheduler that is checked against its promises at every call.

It drives the real `Scheduler` with a `FakeMemory`, keeps books of its own, and compares
the two after everything that happens.  Tests add only what is particular to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs

from llamad_trio.core.errors import ContextOverflow, InferenceError, LlamadError
from llamad_trio.scheduling.pacing import ComputeThreads
from llamad_trio.scheduling.plan import Copy, MemoryOp, Prepared, StepPlan, StepResult, StepStatus
from llamad_trio.scheduling.pool import Reuse
from llamad_trio.scheduling.run import Event, Failed, Finished, Piece
from llamad_trio.scheduling.scheduler import MIN_SHARED_TOKENS, Scheduler
from tests.scheduling.fake_memory import Cell, EndlessModel, FakeMemory, FakeModel, n_cells
from tests.scheduling.oracles import longest_prefix, n_common
from tests.scheduling.tracked import Tracked, sampling

MOST_STEPS = 5_000
"""Steps after which a scheduler that has not come to rest never will."""


@attrs.frozen
class _Holding:
    """Who runs at a moment, oldest first, and all the cells they hold."""

    running: list[int]
    cells: set[Cell]


class CheckedScheduler:
    """A `Scheduler`, a `FakeMemory`, and the checks between them."""

    def __init__(
        self,
        *,
        n_slots: int = 4,
        n_seqs: int | None = None,
        n_ctx: int = 100,
        n_cells: int | None = None,
        n_batch: int = 64,
        reuse: Reuse = Reuse.PREFIX,
        can_rewind: bool | None = None,
        step_target_s: float = 0.1,
        model: FakeModel | None = None,
    ) -> None:
        self.model = model or EndlessModel()
        self.n_slots = n_slots
        self.n_seqs = n_slots + 8 if n_seqs is None else n_seqs
        self.n_ctx = n_ctx
        self.reuse = reuse
        self.memory = FakeMemory(
            model=self.model,
            n_seqs=self.n_seqs,
            n_ctx=n_ctx,
            n_cells=n_ctx if n_cells is None else n_cells,
            n_batch=n_batch,
            can_rewind=reuse is not Reuse.WHOLE if can_rewind is None else can_rewind,
        )
        self.scheduler = Scheduler(
            n_slots=n_slots,
            n_seqs=self.n_seqs,
            n_ctx=n_ctx,
            n_batch=n_batch,
            step_target_s=step_target_s,
            threads=ComputeThreads(1, 1, adaptive=False),
            reuse=reuse,
        )
        self.pool = self.scheduler._pool
        self.requests: dict[int, Tracked] = {}
        self.in_flight: StepPlan | None = None
        self.preempted: list[int] = []
        self.has_lost = False  # then what was copied may not be copied again
        self.has_holders = False
        self.totals: Counter[str] = Counter()  # by their names in `EngineStats`

    # -- the calls of `Scheduler` -------------------------------------------------------

    def submit(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int = 10,
        seed: int = 0,
        request_id: int | None = None,
        **fields: Any,
    ) -> int:
        """Take a request in; return its id: the one given, or the next number."""
        prepared = Prepared(
            id=max(self.requests, default=-1) + 1 if request_id is None else request_id,
            tokens=tuple(tokens),
            max_tokens=max_tokens,
            sampling=sampling(seed),
            **fields,
        )
        self.has_holders |= prepared.holder is not None
        arrival = len(self.requests)
        self.requests[prepared.id] = Tracked(prepared, arrival, self.model, list(tokens))
        self.scheduler.submit(prepared)
        self.check()
        return prepared.id

    def score(self, prompt: Sequence[int], n_targets: int, *, request_id: int | None = None) -> int:
        """Have targets scored after the last tokens of `prompt`; no two are the same."""
        targets = tuple(range(100, 100 + n_targets))
        return self.submit(prompt, max_tokens=0, targets=targets, request_id=request_id)

    def cancel(self, request_id: int) -> None:
        """Cancel; from then on no event may come."""
        scored = self._scored()
        self.requests[request_id].cancelled = True
        self.scheduler.cancel(request_id)
        self._check_scored(scored)
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

    def hold(self, holder: str, tokens: Sequence[int]) -> bool:
        """Hold on to what is resident."""
        whole = self.reuse is Reuse.WHOLE
        resident = longest_prefix(self.contents().values(), tokens, whole=whole)
        if self.reuse is Reuse.NOTHING:
            resident = 0
        assert self.scheduler.n_resident(tokens) == resident or self.has_lost
        self.has_holders = True
        held = self.scheduler.hold(holder, tokens)
        # The only sequence there is for it may be the very one it was in.
        assert not held or resident == len(tokens)
        self.check()
        return held

    def let_go(self, holder: str) -> None:
        """The holder is gone."""
        self.scheduler.let_go(holder)
        self.check()

    def plan(self) -> StepPlan | None:
        """Plan a step, and check that it is a fair one."""
        before, begun = self._holding(), self._begun()
        n_pending = len(self.pool._ops)
        plan = self.in_flight = self.scheduler.plan()
        self._check_admission(before.running)
        self._check_preemption(before)
        if plan is None:
            assert not any(request.runnable for request in self.requests.values()), "a hang"
        else:
            self._check_reuse(plan, self._begun() - begun, n_pending)
            self._check_work(plan)
            self._check_decoding(plan, begun)
            self._check_followers(plan)
        self.check()
        return plan

    def finish(
        self,
        status: StepStatus = StepStatus.DONE,
        *,
        failing: Collection[int] = (),
        failing_copies: Collection[int] = (),
        elapsed_s: float = 0.01,
    ) -> list[Event]:
        """Run the step in flight, apply its result, and check what comes of it."""
        before = self._holding()
        plan, self.in_flight = self.in_flight, None
        assert plan is not None
        n_retained = len(self.pool._retained)
        result = self.memory.run(
            plan, status=status, failing=failing, failing_copies=failing_copies, elapsed_s=elapsed_s
        )
        self._count(plan, result)
        scored = self._scored()
        events = self.scheduler.apply(result)
        self._check_scored(scored)
        for request_id, sampled in result.sampled.items():
            self.requests[request_id].take(sampled)
        for event in events:
            self._record(event)
        failed = {event.id: event.error for event in events if isinstance(event, Failed)}
        self._check_failures(plan, result, failed, before.running, n_retained)
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
        assert self.scheduler.stats().slots["free"] == self.n_slots
        return events

    # -- several at once ----------------------------------------------------------------

    def submit_all(self, *prompts: Sequence[int], max_tokens: int = 10) -> list[int]:
        """Take requests in that arrive together; return their ids."""
        return [self.submit(prompt, max_tokens=max_tokens) for prompt in prompts]

    def next_plan(self) -> StepPlan:
        """Plan a step, of which there must be one."""
        plan = self.plan()
        assert plan is not None
        return plan

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
        self.submit([1], max_tokens=1)  # takes the last operations and samplers along
        self.drain()
        assert not any(request.live for request in self.requests.values()), "no outcome"
        stats = self.scheduler.stats()
        assert stats.slots["free"] == self.n_slots
        assert stats.kv_used_tokens == 0
        assert self.reuse is not Reuse.NOTHING or stats.kv_retained_tokens == 0
        assert list(self.memory.samplers) == self.scheduler._old_samplers, "a sampler leaked"

    # -- what tests ask -----------------------------------------------------------------

    @property
    def running(self) -> list[int]:
        """Ids of the requests that hold a slot, oldest first."""
        ids = [run.id for run in self.scheduler._running]
        return sorted(ids, key=lambda id_: self.requests[id_].arrival)

    def seq(self, request_id: int) -> int:
        """The sequence of a running request."""
        (seq,) = (run.seq for run in self.scheduler._running if run.id == request_id)
        return seq

    @property
    def retained(self) -> list[list[int]]:
        """What is retained, the least recently used first."""
        contents = self.contents()
        return [contents[seq] for seq in self.pool._retained]

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

    def cells(self) -> Mapping[int, Sequence[Cell]]:
        """The pool's sequences, once the operations that are on their way have been made."""
        planned: tuple[MemoryOp, ...] = self.in_flight.memory if self.in_flight else ()
        return self.memory.after([*planned, *self.pool._ops])

    def _cells_of(self, seqs: Iterable[int]) -> set[Cell]:
        cells = self.cells()
        return {cell for seq in seqs for cell in cells[seq]}

    def _holding(self) -> _Holding:
        running = self.running
        return _Holding(running, self._cells_of(self.seq(id_) for id_ in running))

    def _begun(self) -> set[int]:
        """Running requests that have taken over what there was."""
        return {run.id for run in self.scheduler._running if run.begun}

    def _decoding(self, running: Iterable[int]) -> list[int]:
        """Those of `running` that have only tokens of their last sampling to compute."""
        cells = self.cells()
        return [
            id_
            for id_ in running
            if not self.requests[id_].paused
            and self.requests[id_].is_decoding(len(cells[self.seq(id_)]))
        ]

    def _scored(self) -> dict[int, tuple[int, Sequence[Cell]]]:
        """Sequences in which something is scored, by request, and what they hold."""
        cells = self.memory.sequences
        seqs = {id_: self.seq(id_) for id_ in self.running if self.requests[id_].prepared.targets}
        return {id_: (seq, list(cells[seq])) for id_, seq in seqs.items()}

    def contents(self) -> dict[int, list[int]]:
        """The tokens of `cells`."""
        return {seq: [token for _, token in cells] for seq, cells in self.cells().items()}

    # -- the checks ---------------------------------------------------------------------

    def check(self) -> None:
        """The scheduler's books agree with the pool, and with what was seen from outside."""
        self._check_pool()
        running = self.running
        stats = self.scheduler.stats()
        assert len(set(running)) == len(running)
        n_paused = sum(self.requests[id_].paused for id_ in running)
        n_decoding = len(self._decoding(running))
        assert stats.slots == {
            "free": self.n_slots - len(running),
            "prefill": len(running) - n_paused - n_decoding,
            "decode": n_decoding,
            "paused": n_paused,
        }
        assert self.scheduler.n_running == sum(self.requests[id_].live for id_ in running)
        assert (
            stats.queued == sum(r.live for r in self.requests.values()) - self.scheduler.n_running
        )
        assert stats.preemptions == len(self.preempted)
        assert all(getattr(stats, name) == n for name, n in self.totals.items())
        self._check_holders(running)
        flight = self.in_flight
        assert self.scheduler.in_flight_is_unwanted == (
            flight is not None and all(self.requests[w.request_id].cancelled for w in flight.work)
        )

    def _check_pool(self) -> None:
        """Every sequence is held by one, and every cell is counted once."""
        cells = self.cells()
        tree, retained = self.pool._tree, list(self.pool._retained)
        assert set(self.pool._held.values()) <= set(retained)
        held = [self.seq(id_) for id_ in self.running]
        assert sorted([*held, *retained, *self.pool._free]) == list(range(self.n_seqs))
        for seq, expected in cells.items():
            assert tree.tokens(seq) == [token for _, token in expected]
        assert not any(cells[seq] for seq in self.pool._free)
        assert all(cells[seq] for seq in retained)
        stats = self.scheduler.stats()
        assert stats.kv_used_tokens == n_cells(cells[seq] for seq in held)
        assert stats.kv_retained_tokens == n_cells(cells.values()) - stats.kv_used_tokens
        assert stats.kv_used_tokens + stats.kv_retained_tokens + stats.kv_free_tokens == self.n_ctx
        assert stats.kv_free_tokens >= 0
        match self.reuse:
            case Reuse.NOTHING:
                assert not retained
            case _ if self.has_holders:
                pass  # who may hold what others hold
            case Reuse.WHOLE:
                ends = [cells[seq][-1] for seq in retained]
                assert len(set(ends)) == len(ends), "the same state twice"
            case Reuse.PREFIX:
                for seq in retained:
                    others = [held for other, held in cells.items() if other != seq]
                    assert not any(cells[seq][-1] in held for held in others), "kept in vain"

    def _check_scored(self, before: Mapping[int, tuple[int, Sequence[Cell]]]) -> None:
        """What was scored is gone when its request is."""
        after, cells = self.running, self.cells()
        for id_, (seq, held) in before.items():
            if id_ not in after and held and seq in self.pool._retained:
                assert cells[seq] != held, "what was scored is retained"

    def _check_holders(self, running: Iterable[int]) -> None:
        """Only the living hold slots, and cancelled ones until their step is over."""
        computing = {work.request_id for work in self.in_flight.work} if self.in_flight else set()
        for request_id in running:
            request = self.requests[request_id]
            assert request.outcome is None
            assert request.live or request_id in computing

    def _check_admission(self, before: Sequence[int]) -> None:
        """First come, first served."""
        after = self.running
        started = [id_ for id_ in after if id_ not in before]
        for request_id in started:
            request = self.requests[request_id]
            assert request.runnable
            overtaken = [
                id_
                for id_, other in self.requests.items()
                if other.arrival < request.arrival and other.runnable and id_ not in after
            ]
            assert not overtaken, f"{request_id} overtook {overtaken}"

    def _check_preemption(self, before: _Holding) -> None:
        """Retained prefixes go first, then those who pause, then the newest, never the oldest."""
        after = self.running
        lost = [id_ for id_ in before.running if id_ not in after and self.requests[id_].live]
        self.preempted += lost
        asked = [id_ for id_ in before.running if self.requests[id_].runnable]
        # A prefix shared with somebody who runs, or ran until now, would have freed nothing.
        spared = self._cells_of(self.pool._retained) - before.cells - self._holding().cells
        for request_id in lost:
            if self.requests[request_id].paused:
                continue
            assert request_id != asked[0], "the oldest was preempted"
            assert not any(self.requests[id_].paused for id_ in after), "paused ones go first"
            newest = self.requests[after[-1]]
            assert newest.arrival < self.requests[request_id].arrival, "the newest goes first"
            assert not spared, "retained prefixes go first"

    def _check_reuse(self, plan: StepPlan, begun: Iterable[int], n_pending: int) -> None:
        """Who begins goes on from the longest prefix anybody holds, unless it is of no use.

        The first `n_pending` operations were asked for earlier.
        """
        starting = {self.seq(id_): self.requests[id_] for id_ in begun}
        cached = dict.fromkeys(starting, 0)
        for i, operation in enumerate(plan.memory[n_pending:], n_pending):
            if isinstance(operation, Copy):
                request = starting[operation.dst]
                cached[operation.dst] = operation.n
                longest = self._longest(request, plan.memory[:i], operation.dst)
                assert operation.n == longest or self.has_lost
        for seq, request in starting.items():
            if not cached[seq]:
                assert not self._longest(request, plan.memory, seq) or self.has_lost
            if request.generated == 0:
                request.cached_tokens = cached[seq]
                self.totals["cached_tokens"] += cached[seq]

    def _longest(self, request: Tracked, operations: Iterable[MemoryOp], but: int) -> int:
        """Tokens the request could go on from, after `operations`."""
        if self.reuse is Reuse.NOTHING:
            return 0
        cells = self.memory.after(operations)
        held = [[token for _, token in cells[seq]] for seq in cells if seq != but]
        wanted = request.history[: request.n_reusable]
        return longest_prefix(held, wanted, whole=self.reuse is Reuse.WHOLE)

    def _check_followers(self, plan: StepPlan) -> None:
        """Who lets newer prompts go first is waiting for an older one to compute its prefix."""
        running = [self.requests[id_] for id_ in self.running]
        served = {work.request_id for work in plan.work}
        prompts = [r for r in running if r.prepared.id in served and r.generated == 0]
        for run in self.scheduler._running:
            request = self.requests[run.id]
            if run.begun or request.paused or not prompts or prompts[-1].arrival < request.arrival:
                continue
            assert self.reuse is Reuse.PREFIX
            held = len(self.contents()[run.seq])
            assert any(
                n_common(request.history[: request.n_reusable], leader.history)
                >= held + MIN_SHARED_TOKENS
                for leader in running
                if leader.arrival < request.arrival and leader.runnable
            ), "it waits for nobody"

    def _check_work(self, plan: StepPlan) -> None:
        ids = [work.request_id for work in plan.work]
        assert len(set(ids)) == len(ids)
        for work in plan.work:
            request = self.requests[work.request_id]
            assert request.runnable, "work for nobody"
            assert work.seq == self.seq(work.request_id)
            end = work.pos + len(work.tokens)
            assert list(work.tokens) == request.history[work.pos : end]
            generates = request.prepared.max_tokens > 0
            assert work.sample == (generates and end == len(request.history))
            assert list(work.targets) == request.targets_of(work)
        oldest = next(id_ for id_ in self.running if self.requests[id_].runnable)
        assert oldest in ids, "the oldest does not progress"
        for prepared in plan.new_samplers:
            assert prepared is self.requests[prepared.id].prepared

    def _check_decoding(self, plan: StepPlan, begun: Collection[int]) -> None:
        """Who decodes goes on in every step; forced tokens come before prompts, those of the
        oldest first.  Only the oldest request of all has a token of its prompt all the same."""
        # Who has just come back may have found all but the last tokens; it is no row until then.
        decoding = [id_ for id_ in self._decoding(self.running) if id_ in begun]
        n = len(decoding)
        rows, prompts = plan.work[:n], plan.work[n:]
        assert [work.request_id for work in rows] == decoding, "decode rows come first"
        is_short = [
            work.pos + len(work.tokens) < len(self.requests[work.request_id].history)
            for work in rows
        ]
        if any(is_short):
            later = rows[is_short.index(True) + 1 :]
            assert all(len(work.tokens) == 1 for work in later), "the oldest comes first"
            oldest = next(id_ for id_ in self.running if self.requests[id_].runnable)
            spared = [w.request_id == oldest and len(w.tokens) == 1 for w in prompts]
            assert all(spared), "forced tokens come before prompts"

    def _count(self, plan: StepPlan, result: StepResult) -> None:
        self.totals["steps"] += 1
        self.totals["aborted_steps"] += result.status is StepStatus.ABORTED
        if result.status is StepStatus.DONE:
            for work in plan.work:
                decodes = self.requests[work.request_id].is_decoding(work.pos)
                self.totals["decode_tokens" if decodes else "prefill_tokens"] += len(work.tokens)
        lost = set(result.cleared)
        if result.status is StepStatus.FAILED:
            lost |= {work.seq for work in plan.work}
        self.has_lost |= bool(lost)
        for request_id in self.running:
            if self.seq(request_id) in lost:  # what it had reused is computed again
                self.totals["cached_tokens"] -= self.requests[request_id].cached_tokens
                self.requests[request_id].cached_tokens = 0

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
                assert event == attrs.evolve(request.alone, cached_tokens=request.cached_tokens)
                n_wanted = max(1, len(request.prepared.targets))
                assert event.cached_tokens <= event.prompt_tokens - n_wanted
                text = event.text if request.prepared.streams else ""
                assert "".join(request.pieces) == text
            case Failed():
                request.outcome = event

    def _check_failures(
        self,
        plan: StepPlan,
        result: StepResult,
        failed: dict[int, LlamadError],
        before: Sequence[int],
        n_retained: int,
    ) -> None:
        """Who fails, and why, follows from the result alone."""
        wanted = {w.request_id for w in plan.work if not self.requests[w.request_id].cancelled}
        match result.status:
            case StepStatus.FAILED:
                assert failed.keys() == wanted
                assert {str(error) for error in failed.values()} <= {f"inference: {result.reason}"}
            case StepStatus.NO_ROOM if failed:
                assert list(failed) == before, "whoever is not alone can be preempted"
                assert n_retained == 0
                assert all(isinstance(error, ContextOverflow) for error in failed.values())
            case _:
                assert failed.keys() == result.failures.keys() & wanted
                assert all(isinstance(error, InferenceError) for error in failed.values())
