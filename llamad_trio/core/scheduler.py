"""Which request runs in which slot, what each step computes, and what comes of it.

Decides admission, eviction, preemption, batching and the end of every request.
Refuses to know of clocks, threads, Trio and llama.cpp: it takes requests and step
results, and gives step plans and events.

The rules:

1. Requests are admitted in the order they arrived, into a free slot, when their
   tokens and a small headroom fit beside what the running ones have.
2. A step decodes one token for every running request first; what is left of its
   budget goes to prompts, the oldest first.
3. When the pool runs short: retained prefixes go, least recently used first; then
   requests whose readers have paused them; then the newest running one.  What is
   preempted waits again in its old place, and goes on where it was.
4. The oldest running request is never preempted, so there is always progress.
5. Nothing of a cancelled request is planned again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto

import attrs

from llamad_trio.core.completion import FinishReason
from llamad_trio.core.errors import ContextOverflow, InferenceError, LlamadError
from llamad_trio.core.pacing import StepPacer
from llamad_trio.core.plan import (
    Prepared,
    SamplerSpec,
    StepPlan,
    StepResult,
    StepStatus,
    Trim,
    Work,
)
from llamad_trio.core.stop import StopMatcher
from llamad_trio.core.utf8 import Utf8Assembler

__all__ = ["Event", "Failed", "Finished", "Piece", "Scheduler", "SchedulerStats"]

HEADROOM_TOKENS = 32
"""Free cells asked for beyond the prompt at admission: enough that a request is not
preempted in its first moments, little enough that a high `max_tokens` costs nothing."""


@attrs.frozen
class Piece:
    """Text to hand to the reader of request `id`; never empty."""

    id: int
    text: str


@attrs.frozen(kw_only=True)
class Finished:
    """Request `id` is complete."""

    id: int
    text: str
    prompt_tokens: int
    generated_tokens: int
    finish_reason: FinishReason
    stop_sequence: str | None
    cached_tokens: int


@attrs.frozen
class Failed:
    """Request `id` ended with an error."""

    id: int
    error: LlamadError


Event = Piece | Finished | Failed


class _State(Enum):
    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


_MOVES = {
    (_State.WAITING, _State.RUNNING),  # admitted
    (_State.RUNNING, _State.WAITING),  # preempted
    (_State.WAITING, _State.ENDED),  # cancelled, or the engine closed
    (_State.RUNNING, _State.ENDED),  # finished, failed, cancelled
}


@attrs.define(eq=False)
class _Slot:
    """One llama.cpp sequence.  `tokens[:resident]` is what its KV cache holds."""

    seq: int
    tokens: Sequence[int] = ()
    resident: int = 0
    run: _Run | None = None
    last_used: int = 0


@attrs.define(eq=False)
class _Run:
    """A request on its way: everything that survives preemption."""

    prepared: Prepared
    arrival: int
    tokens: list[int]
    stop: StopMatcher
    utf8: Utf8Assembler = attrs.field(factory=Utf8Assembler)
    state: _State = _State.WAITING
    slot: _Slot | None = None
    text: list[str] = attrs.field(factory=list)
    cached_tokens: int = 0
    has_sampler: bool = False
    paused: bool = False
    cancelled: bool = False

    @property
    def id(self) -> int:
        return self.prepared.id

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.prepared.tokens)

    @property
    def pending(self) -> int:
        """Tokens that are not in the KV cache yet."""
        return len(self.tokens) - (self.slot.resident if self.slot else 0)

    @property
    def decodes(self) -> bool:
        """Whether its next step is the single row of a generated token."""
        return self.generated > 0 and self.pending == 1

    def move(self, state: _State) -> None:
        assert (self.state, state) in _MOVES, f"{self.state} -> {state}"
        self.state = state


@attrs.frozen(kw_only=True)
class SchedulerStats:
    """Counts at one moment, and totals since the start."""

    running: int
    slots_free: int
    slots_prefill: int
    slots_decode: int
    slots_paused: int
    kv_used: int
    kv_retained: int
    kv_free: int
    prefill_tokens: int
    prefill_s: float
    decode_tokens: int
    decode_s: float
    cached_tokens: int
    preemptions: int
    steps: int
    aborted_steps: int


class Scheduler:
    """The state of one engine's requests, slots and KV pool.

    Args:
        n_slots: sequences that can run at once.
        n_ctx: tokens in the KV pool, shared by all slots.
        n_batch: most tokens in a step, at least `n_slots`.
        step_target_s: seconds a step with running streams should take.
        retain: keep the KV of ended requests for reuse; needs a memory that can rewind.

    Call `plan`, run the plan, call `apply` with its result; between the two a step
    is in flight.  Every other method may be called at any time.
    """

    def __init__(
        self, *, n_slots: int, n_ctx: int, n_batch: int, step_target_s: float, retain: bool
    ) -> None:
        assert 1 <= n_slots <= n_batch
        self.n_ctx = n_ctx
        self._retain = retain
        self._pacer = StepPacer(target_s=step_target_s, n_batch=n_batch)
        self._slots = [_Slot(seq) for seq in range(n_slots)]
        self._runs: dict[int, _Run] = {}
        self._plan: StepPlan | None = None
        self._growth: dict[int, int] = {}
        self._n_decode = 0
        self._trims: list[Trim] = []
        self._old_samplers: list[int] = []
        self._short_of_cells = False
        self._arrivals = 0
        self._tick = 0
        self._totals: Counter[str] = Counter()
        self._prefill_s = 0.0
        self._decode_s = 0.0

    # -- what callers ask -------------------------------------------------------------

    def submit(self, prepared: Prepared) -> None:
        """Take a request in.  It must fit in an empty pool (see `Prepared`)."""
        assert prepared.id not in self._runs
        assert len(prepared.tokens) >= 1
        assert 1 <= prepared.max_tokens <= self.n_ctx - len(prepared.tokens)
        self._arrivals += 1
        stop = StopMatcher(prepared.stop)
        self._runs[prepared.id] = _Run(prepared, self._arrivals, list(prepared.tokens), stop)

    def cancel(self, request_id: int) -> None:
        """Nobody wants this request any more.  No event follows.  Unknown ids are ignored."""
        run = self._runs.get(request_id)
        if run is None or run.cancelled:
            return
        run.cancelled = True
        if not self._is_in_flight(run):
            self._end(run)

    def pause(self, request_id: int) -> None:
        """Its reader cannot take more: leave it out of the next plans."""
        if run := self._runs.get(request_id):
            run.paused = True

    def resume(self, request_id: int) -> None:
        """Its reader has caught up."""
        if run := self._runs.get(request_id):
            run.paused = False

    def fail_all(self, error: LlamadError) -> list[Event]:
        """End every request with `error`, and the step in flight, if there is one."""
        self._plan = None
        ended = list(self._runs.values())
        for run in ended:
            self._end(run)
        return [Failed(run.id, error) for run in ended if not run.cancelled]

    @property
    def in_flight_is_unwanted(self) -> bool:
        """Whether a step is in flight and everybody with work in it has cancelled."""
        return self._plan is not None and all(
            self._runs[work.request_id].cancelled for work in self._plan.work
        )

    @property
    def is_full(self) -> bool:
        """Whether a request is waiting that could not be admitted."""
        return any(r.state is _State.WAITING and not r.paused for r in self._runs.values())

    @property
    def n_running(self) -> int:
        """Requests that hold a slot and are still wanted."""
        return sum(not run.cancelled for run in self._running())

    def stats(self) -> SchedulerStats:
        """A snapshot."""
        running = self._running()
        retained = sum(slot.resident for slot in self._slots if slot.run is None)
        used = sum(slot.resident for slot in self._slots) - retained
        totals = self._totals
        return SchedulerStats(
            running=self.n_running,
            slots_free=len(self._slots) - len(running),
            slots_prefill=sum(not run.paused and not run.decodes for run in running),
            slots_decode=sum(not run.paused and run.decodes for run in running),
            slots_paused=sum(run.paused for run in running),
            kv_used=used,
            kv_retained=retained,
            kv_free=self.n_ctx - used - retained,
            prefill_tokens=totals["prefill_tokens"],
            prefill_s=self._prefill_s,
            decode_tokens=totals["decode_tokens"],
            decode_s=self._decode_s,
            cached_tokens=totals["cached_tokens"],
            preemptions=totals["preemptions"],
            steps=totals["steps"],
            aborted_steps=totals["aborted_steps"],
        )

    # -- the step ---------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or `None` when there is nothing to compute."""
        assert self._plan is None, "a step is in flight"
        self._tick += 1
        self._growth.clear()
        self._admit()
        self._grow_decoding()
        self._grow_prompts(self._pacer.prefill_budget(n_decode=len(self._growth)))
        if not self._growth:
            return None
        # Only now: a prompt's growth may have preempted one that was to decode.
        self._n_decode = sum(self._runs[id_].decodes for id_ in self._growth)
        work = tuple(self._work(self._runs[id_], n) for id_, n in self._growth.items())
        self._plan = StepPlan(
            work=work,
            trims=tuple(self._trims),
            new_samplers=tuple(self._new_samplers(work)),
            old_samplers=tuple(self._old_samplers),
        )
        self._trims.clear()
        self._old_samplers.clear()
        return self._plan

    def apply(self, result: StepResult) -> list[Event]:
        """Take the result of the plan in flight; return what its requests' readers get."""
        plan, self._plan = self._plan, None
        assert plan is not None, "no step is in flight"
        self._growth.clear()
        self._totals["steps"] += 1
        events: list[Event] = []
        match result.status:
            case StepStatus.DONE:
                self._measure(plan, result.elapsed_s)
                for work in plan.work:
                    events += self._advance(work, result)
            case StepStatus.ABORTED:
                self._totals["aborted_steps"] += 1
                self._forget(result.cleared)
            case StepStatus.NO_ROOM:
                self._forget(result.cleared)
                events += self._yield_room(plan)
            case StepStatus.FAILED:
                self._forget(work.seq for work in plan.work)
                for work in plan.work:
                    events += self._fail(self._runs[work.request_id], InferenceError(result.reason))
        for work in plan.work:
            run = self._runs.get(work.request_id)
            if run is not None and run.cancelled:
                self._end(run)
        return events

    # -- admission and the pool -------------------------------------------------------

    def _admit(self) -> None:
        if self._short_of_cells and any(not run.paused for run in self._running()):
            return  # or who has just been preempted would come back, and nobody progress
        for run in list(self._runs.values()):
            if run.state is not _State.WAITING or run.paused:
                continue  # a paused one waits for its own reader; the others need not
            slot = self._find_room(run)
            if slot is None:
                return
            self._start(run, slot)

    def _find_room(self, run: _Run) -> _Slot | None:
        """A slot for `run`, preempting paused requests if that is what it takes."""
        left = run.prepared.max_tokens - run.generated
        wanted = min(len(run.tokens) + min(left, HEADROOM_TOKENS), self.n_ctx)
        running = self._running()
        paused = [r for r in running if r.paused]
        # What was admitted counts whole, though its prompt may not be computed yet.
        committed = sum(len(r.tokens) for r in running)
        if committed - sum(len(r.tokens) for r in paused) + wanted > self.n_ctx:
            return None  # not even without all of the paused
        while True:
            slot = self._choose_slot(run.tokens)
            if slot is not None and committed + wanted <= self.n_ctx:
                return slot
            if not paused:
                return None
            victim = paused.pop()
            committed -= len(victim.tokens)
            self._preempt(victim)

    def _choose_slot(self, tokens: Sequence[int]) -> _Slot | None:
        """The free slot that helps `tokens` most and costs the others least."""
        free = [slot for slot in self._slots if slot.run is None]
        if not free:
            return None
        shared = {slot.seq: self._reusable(slot, tokens) for slot in free}
        best = max(free, key=lambda slot: shared[slot.seq])
        # Sharing only little of a long retained prefix would destroy the rest of it.
        if 2 * shared[best.seq] >= min(best.resident, len(tokens)) > 0:
            return best
        return min(free, key=lambda slot: (slot.resident > 0, slot.last_used))

    def _reusable(self, slot: _Slot, tokens: Sequence[int]) -> int:
        """Leading tokens that need no computing; the last always does, for its logits."""
        limit = min(slot.resident, len(tokens) - 1)
        for n in range(limit):
            if slot.tokens[n] != tokens[n]:
                return n
        return limit

    def _start(self, run: _Run, slot: _Slot) -> None:
        keep = self._reusable(slot, run.tokens)
        self._trim(slot, keep)
        if run.generated == 0:
            run.cached_tokens = keep
            self._totals["cached_tokens"] += keep
        slot.run, slot.tokens, run.slot = run, run.tokens, slot
        run.move(_State.RUNNING)

    def _make_room(self, run: _Run, n_tokens: int) -> int:
        """Free cells until `run` can grow by `n_tokens`; return how many it can grow by."""
        while (free := self._free_cells()) < n_tokens:
            retained = [slot for slot in self._slots if slot.run is None and slot.resident]
            if retained:
                self._trim(min(retained, key=lambda slot: slot.last_used), 0)
            elif victim := self._victim(run):
                self._preempt(victim)
            else:
                return free
        return n_tokens

    def _victim(self, run: _Run) -> _Run | None:
        """Whom to preempt so that `run` can grow: paused readers first, then the newest."""
        others = [r for r in self._running() if r is not run]
        paused = [r for r in others if r.paused]
        newer = [r for r in others if r.arrival > run.arrival]
        candidates = paused or newer
        return candidates[-1] if candidates else None

    def _preempt(self, run: _Run) -> None:
        assert run.slot is not None
        slot, run.slot = run.slot, None
        slot.run = None
        self._trim(slot, 0)
        self._growth.pop(run.id, None)
        run.move(_State.WAITING)
        self._totals["preemptions"] += 1

    def _trim(self, slot: _Slot, keep: int) -> None:
        if slot.resident > keep:
            slot.resident = keep
            self._trims.append(Trim(slot.seq, keep))

    def _free_cells(self) -> int:
        resident = sum(slot.resident for slot in self._slots)
        return self.n_ctx - resident - sum(self._growth.values())

    # -- planning ---------------------------------------------------------------------

    def _grow_decoding(self) -> None:
        for run in self._running():
            if run.state is not _State.RUNNING or run.paused or not run.decodes:
                continue
            if self._make_room(run, 1):
                self._growth[run.id] = 1
            else:
                self._preempt(run)  # it is the newest itself

    def _grow_prompts(self, budget: int) -> None:
        for run in self._running():
            if run.state is not _State.RUNNING or run.paused or run.decodes:
                continue
            if n := self._make_room(run, min(run.pending, budget)):
                self._growth[run.id] = n
                budget -= n

    def _work(self, run: _Run, n_tokens: int) -> Work:
        assert run.slot is not None
        pos = run.slot.resident
        end = pos + n_tokens
        return Work(run.id, run.slot.seq, pos, run.tokens[pos:end], sample=end == len(run.tokens))

    def _new_samplers(self, work: Iterable[Work]) -> Iterator[SamplerSpec]:
        for item in work:
            run = self._runs[item.request_id]
            if item.sample and not run.has_sampler:
                run.has_sampler = True
                prepared = run.prepared
                yield SamplerSpec(request_id=run.id, params=prepared.sampling, seen=prepared.tokens)

    # -- applying a result ------------------------------------------------------------

    def _measure(self, plan: StepPlan, elapsed_s: float) -> None:
        n_decode = self._n_decode
        n_prefill = plan.n_tokens - n_decode
        self._pacer.observe(n_decode=n_decode, n_prefill=n_prefill, elapsed_s=elapsed_s)
        self._totals["decode_tokens"] += n_decode
        self._totals["prefill_tokens"] += n_prefill
        # A shared step's time is split by tokens: exact when it holds one kind only.
        self._decode_s += elapsed_s * n_decode / plan.n_tokens
        self._prefill_s += elapsed_s * n_prefill / plan.n_tokens

    def _advance(self, work: Work, result: StepResult) -> list[Event]:
        run = self._runs[work.request_id]
        assert run.slot is not None
        run.slot.resident += len(work.tokens)
        if run.cancelled or not work.sample:
            return []
        if reason := result.failures.get(run.id):
            self._trim(run.slot, 0)  # what led to no token is nothing to build on
            return self._fail(run, InferenceError(reason))
        sampled = result.sampled[run.id]
        run.tokens.append(sampled.token)
        if sampled.ends:
            return self._finish(run, "stop")
        shown = run.stop.push(run.utf8.push(sampled.piece))
        run.text.append(shown)
        if run.stop.matched is not None:
            return [*self._piece(run, shown), *self._finish(run, "stop")]
        if run.generated >= run.prepared.max_tokens:
            return [*self._piece(run, shown), *self._finish(run, "length")]
        return self._piece(run, shown)

    def _piece(self, run: _Run, text: str) -> list[Event]:
        return [Piece(run.id, text)] if text and run.prepared.streams else []

    def _finish(self, run: _Run, reason: FinishReason) -> list[Event]:
        rest = run.stop.push(run.utf8.flush()) + run.stop.flush()
        run.text.append(rest)
        finished = Finished(
            id=run.id,
            text="".join(run.text),
            prompt_tokens=len(run.prepared.tokens),
            generated_tokens=run.generated,
            finish_reason="stop" if run.stop.matched is not None else reason,
            stop_sequence=run.stop.matched,
            cached_tokens=run.cached_tokens,
        )
        self._end(run)
        return [*self._piece(run, rest), finished]

    def _fail(self, run: _Run, error: LlamadError) -> list[Event]:
        if run.cancelled:
            return []
        self._end(run)
        return [Failed(run.id, error)]

    def _yield_room(self, plan: StepPlan) -> list[Event]:
        """llama.cpp had fewer cells than the books say: give back what can be given."""
        retained = [slot for slot in self._slots if slot.run is None and slot.resident]
        for slot in retained:
            self._trim(slot, 0)
        running = self._running()
        if retained or any(run.cancelled for run in running):
            return []
        self._short_of_cells = True
        if len(running) > 1:
            paused = [run for run in running if run.paused]
            self._preempt((paused or running)[-1])
            return []
        (run,) = running
        resident = run.slot.resident if run.slot else 0
        overflow = ContextOverflow("decode", resident, plan.n_tokens, self.n_ctx)
        return self._fail(run, overflow)

    def _forget(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            slot = self._slots[seq]
            slot.resident = 0
            if slot.run:  # what it had reused is computed again
                self._totals["cached_tokens"] -= slot.run.cached_tokens
                slot.run.cached_tokens = 0

    def _end(self, run: _Run) -> None:
        run.move(_State.ENDED)
        del self._runs[run.id]
        if run.has_sampler:
            self._old_samplers.append(run.id)
        if slot := run.slot:
            self._short_of_cells = False
            run.slot, slot.run = None, None
            slot.last_used = self._tick
            slot.tokens = run.tokens[: slot.resident]
            if not self._retain:
                self._trim(slot, 0)

    # -- looking around ---------------------------------------------------------------

    def _running(self) -> list[_Run]:
        """The runs that hold a slot, oldest first."""
        return sorted((s.run for s in self._slots if s.run), key=lambda run: run.arrival)

    def _is_in_flight(self, run: _Run) -> bool:
        return self._plan is not None and any(w.request_id == run.id for w in self._plan.work)
