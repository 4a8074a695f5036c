"""Which request runs in which slot, what each step computes, and what comes of it.

Decides admission, eviction, preemption, batching and the end of every request.
Refuses to know of clocks, threads, Trio and llama.cpp: it takes requests and step
results, and gives step plans and events.

The rules:

1. Requests are admitted in the order they arrived, into a free slot, when their
   tokens and a small headroom fit beside what the running ones have.
2. A step decodes one token for every running request first; what is left of its
   budget goes to tokens that constraints have forced, then to prompts, the oldest first.
3. When the pool runs short: retained prefixes go, least recently used first; then
   requests whose readers have paused them; then the newest running one.  What is
   preempted waits again in its old place, and goes on where it was.
4. The oldest running request is never preempted and goes on in every step, so there is
   always progress.
5. Nothing of a cancelled request is planned again.
6. A prompt goes on from the longest prefix anybody holds; when somebody older is still
   computing a longer one, it waits for that.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

import attrs

from llamad_trio.core.errors import ContextOverflow, InferenceError, LlamadError
from llamad_trio.core.info import EngineStats
from llamad_trio.scheduling.pacing import ComputeThreads, StepPacer
from llamad_trio.scheduling.plan import Copy, Prepared, StepPlan, StepResult, StepStatus, Work
from llamad_trio.scheduling.pool import Pool, Reuse
from llamad_trio.scheduling.prefix import Match, common_length
from llamad_trio.scheduling.run import Event, Failed, Run, RunState
from llamad_trio.scheduling.shelf import Shelf, Snapshot

HEADROOM_TOKENS = 32
"""Free cells asked for beyond the prompt at admission: enough that a request is not
preempted in its first moments, little enough that a high `max_tokens` costs nothing."""

MIN_SHARED_TOKENS = 8
"""A request waits for another's prefill only when it saves at least this much of its own."""


@attrs.define
class _Totals:
    """What `EngineStats` tells of all steps since the start, under the same names."""

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    aborted_steps: int = 0


class Scheduler:
    """The state of one engine's requests, slots and KV pool.

    Args:
        n_seqs: sequences there are, more than `n_slots` if anything is to be retained.
        n_batch: most tokens in a step, at least `n_slots`.
        step_target_s: seconds a step with running streams should take.
        shelf: where prefixes go that leave the pool, if anywhere.

    Call `plan`, run the plan, call `apply` with its result; between the two a step
    is in flight.  Every other method may be called at any time.
    """

    def __init__(
        self,
        *,
        n_slots: int,
        n_seqs: int,
        n_ctx: int,
        n_batch: int,
        step_target_s: float,
        threads: ComputeThreads,
        reuse: Reuse,
        shelf: Shelf | None = None,
    ) -> None:
        assert 1 <= n_slots <= n_batch
        assert n_seqs > n_slots or reuse is Reuse.NOTHING
        self.n_ctx = n_ctx
        self._n_slots = n_slots
        self._n_seqs = n_seqs
        self._pacer = StepPacer(target_s=step_target_s, n_batch=n_batch)
        self.threads = threads
        self.shelf = Shelf() if shelf is None else shelf
        self._pool = Pool(n_ctx=n_ctx, n_seqs=n_seqs, reuse=reuse, shelf=self.shelf)
        self._runs: dict[int, Run] = {}
        self._running: list[Run] = []  # those that hold a slot, oldest first
        self._plan: StepPlan | None = None
        self._growth: dict[int, int] = {}
        self._old_samplers: list[int] = []
        self._wanted: set[int] = set()
        self._preempted: list[int] = []
        self._short_of_cells = False
        self._arrivals = 0
        self._totals = _Totals()

    # -- what callers ask -------------------------------------------------------------

    def submit(self, prepared: Prepared) -> None:
        """Take a request in.  It must fit in an empty pool (see `Prepared`)."""
        assert prepared.id not in self._runs
        assert len(prepared.tokens) >= 1
        assert 0 <= prepared.max_tokens <= self.n_ctx - len(prepared.tokens)
        assert prepared.max_tokens == 0 or not (prepared.targets or prepared.holder)
        assert len(prepared.targets) <= len(prepared.tokens)
        self._arrivals += 1
        self._runs[prepared.id] = Run(prepared, self._arrivals)

    def cancel(self, request_id: int) -> None:
        """Nobody wants this request any more.  No event follows.  Unknown ids are ignored."""
        run = self._runs.get(request_id)
        if run is None or run.cancelled:
            return
        run.cancelled = True
        if self._plan is None or all(w.request_id != run.id for w in self._plan.work):
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
        plan, self._plan = self._plan, None
        ended = list(self._runs.values())
        for run in ended:
            self._end(run)
        if plan is not None:
            self._pool.distrust(plan)
        return [Failed(run.id, error) for run in ended if not run.cancelled]

    @property
    def in_flight_is_unwanted(self) -> bool:
        """Whether a step is in flight and everybody with work in it has cancelled."""
        return self._plan is not None and all(
            self._runs[work.request_id].cancelled for work in self._plan.work
        )

    @property
    def has_waiting(self) -> bool:
        """Whether a request is waiting that could not be admitted."""
        return any(r.state is RunState.WAITING and not r.paused for r in self._runs.values())

    @property
    def n_running(self) -> int:
        """Requests that hold a slot and are still wanted."""
        return sum(not run.cancelled for run in self._running)

    def take_preempted(self) -> list[int]:
        """Requests that were preempted since the last call, in order."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def stats(self) -> EngineStats:
        """A snapshot of the books: `queued` are those that were submitted, `requests` is empty."""
        running = self._running
        n_paused = sum(run.paused for run in running)
        n_decode = sum(self._decodes(run) for run in running if not run.paused)
        used = self._pool.n_held(run.seq for run in running)
        n_threads, n_threads_batch = self.threads.in_force
        return EngineStats(
            slots={
                "free": self._n_slots - len(running),
                "prefill": len(running) - n_paused - n_decode,
                "decode": n_decode,
                "paused": n_paused,
            },
            queued=len(self._runs) - len(running),
            kv_used_tokens=used,
            kv_retained_tokens=self.n_ctx - self._pool.free_cells - used,
            kv_free_tokens=self._pool.free_cells,
            requests={},
            n_threads=n_threads,
            n_threads_batch=n_threads_batch,
            **attrs.asdict(self._totals),
        )

    # -- what sessions ask ------------------------------------------------------------

    def n_resident(self, tokens: Sequence[int]) -> int:
        """How many of the first tokens somebody holds, so that one can go on from there."""
        return self._pool.n_resident(tokens)

    def hold(self, holder: str, tokens: Sequence[int]) -> bool:
        """Let `holder` hold what is resident already; false if not all of it is, or not for long."""
        return self._is_settled(tokens) and self._pool.hold_resident(holder, tokens)

    def _is_settled(self, tokens: Sequence[int]) -> bool:
        """Whether what is resident of `tokens` is still so when the step in flight is over."""
        if self._plan is None:
            return True
        in_use = {run.seq for run in self._running}
        if any(isinstance(op, Copy) and op.dst not in in_use for op in self._plan.memory):
            return False  # copies to keep can fail, and take along what replaced them since
        if self._pool.reuse is not Reuse.WHOLE:
            return True
        wanted = list(tokens)
        return not any(
            work.pos == len(wanted) and self._runs[work.request_id].tokens[: work.pos] == wanted
            for work in self._plan.work
        )

    def let_go(self, holder: str) -> None:
        """The holder is gone: what it held is kept like anything else."""
        self._pool.let_go(holder)

    # -- the tiers below the pool -----------------------------------------------------

    def take_wanted(self) -> set[int]:
        """Entries of the shelf that requests wait for, and that are on disk only."""
        wanted, self._wanted = self._wanted, set()
        return wanted

    def plan_saving(self) -> StepPlan:
        """A last step, without work, that writes out every retained prefix."""
        assert not self._runs
        self._pool.save_all()
        return StepPlan(work=(), memory=self._pool.take_ops())

    def take_saved(self, result: StepResult) -> list[Snapshot]:
        """All that is to survive, of what the last step has saved and what was shelved."""
        self._pool.take_saved(result.saved)
        return self.shelf.take_all()

    # -- the step ---------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or `None` when there is nothing to compute."""
        assert self._plan is None, "a step is in flight"
        self._growth.clear()
        self._admit()
        self._grow_prompts(self._grow_decoding())
        if not self._growth:
            return None
        # Only now: a prompt's growth may have preempted one that was to decode.
        work = tuple(self._work(self._runs[id_], n) for id_, n in self._growth.items())
        sampling = [self._runs[item.request_id] for item in work if item.sample]
        starting = [run for run in sampling if not run.has_sampler]
        for run in starting:
            run.has_sampler = True
        self._plan = StepPlan(
            work=work,
            n_threads=self.threads.choose(with_prompt=not all(w.decodes for w in work)),
            memory=self._pool.take_ops(),
            new_samplers=tuple(run.prepared for run in starting),
            old_samplers=tuple(self._old_samplers),
        )
        self._old_samplers.clear()
        return self._plan

    def apply(self, result: StepResult) -> list[Event]:
        """Take the result of the plan in flight; return what its requests' readers get."""
        plan, self._plan = self._plan, None
        assert plan is not None, "no step is in flight"
        self._growth.clear()
        self._pool.take_saved(result.saved)
        self._totals.steps += 1
        events: list[Event] = []
        match result.status:
            case StepStatus.DONE:
                self._measure(plan, result)
                for work in plan.work:
                    events += self._advance(work, result)
            case StepStatus.ABORTED:
                self._totals.aborted_steps += 1
                self._forget(result.cleared)
            case StepStatus.NO_ROOM:
                self._forget(result.cleared)
                events += self._yield_room(plan)
            case StepStatus.FAILED:
                self._pool.prove(work.seq for work in plan.work)
                self._forget({*result.cleared, *(work.seq for work in plan.work)})
                for work in plan.work:
                    events += self._fail(self._runs[work.request_id], InferenceError(result.reason))
        for work in plan.work:
            run = self._runs.get(work.request_id)
            if run is not None and run.cancelled:
                self._end(run)
        return events

    # -- admission and the pool -------------------------------------------------------

    def _admit(self) -> None:
        if self._short_of_cells and any(not run.paused for run in self._running):
            return  # or who has just been preempted would come back, and nobody progress
        for run in list(self._runs.values()):
            if run.state is not RunState.WAITING or run.paused:
                continue  # a paused one waits for its own reader; the others need not
            if not self._find_room(run):
                return
            run.seq = self._pool.open()
            run.move(RunState.RUNNING)
            insort(self._running, run, key=lambda r: r.arrival)

    def _find_room(self, run: Run) -> bool:
        """Whether `run` can start, preempting paused requests if that is what it takes."""
        paused = [r for r in self._running if r.paused]
        active = [r for r in self._running if not r.paused]
        if len(active) == self._n_slots or not self._fits(run, active):
            return False  # not even without all of the paused
        while len(self._running) == self._n_slots or not self._fits(run, self._running):
            if not paused:
                return False  # what one of them held was counted on by more than one
            self._preempt(paused.pop())
        return True

    def _fits(self, run: Run, running: Iterable[Run]) -> bool:
        """Whether `run` and a small headroom fit beside what `running` have and will have.

        A prefix they share counts once, computed or not.
        """
        left = run.prepared.max_tokens - run.n_generated
        held: list[tuple[int, int]] = []
        to_come = min(left, HEADROOM_TOKENS)
        older: list[Run] = []
        for r in sorted((*running, run), key=lambda r: r.arrival):
            if r.begun:
                resident = self._pool.length(r.seq)
                held.append((r.seq, resident))
            else:
                match = self._pool.find(r.tokens, r.n_reusable)
                held.append((match.seq, match.n))
                resident = max(match.n, self._worth_waiting(r, match.n, older))
            to_come += len(r.tokens) - resident
            older.append(r)
        wanted = self._pool.n_cells(held) + to_come
        return wanted <= self.n_ctx or len(older) == 1

    def _worth_waiting(self, run: Run, n: int, older: Iterable[Run]) -> int:
        """Tokens that `run`, which can have `n` now, can have once others have computed them;
        0 if it had better begin."""
        if self._pool.reuse is not Reuse.PREFIX:
            return 0
        soon = 0
        for other in older:
            if not other.paused:
                common = common_length(run.tokens, other.tokens, run.n_reusable)
                if not other.begun or common > self._pool.length(other.seq):
                    soon = max(soon, common)
        return soon if soon >= n + MIN_SHARED_TOKENS else 0

    def _begin(self, run: Run) -> bool:
        """Take over what is computed already; false while somebody is computing more of it."""
        match = self._pool.find(run.tokens, run.n_reusable)
        older = (other for other in self._running if other.arrival < run.arrival)
        if self._worth_waiting(run, match.n, older):
            return False  # they hold less of that, or it would have been found
        shelved = self.shelf.match(run.tokens, run.n_reusable)
        n_cached = match.n
        if shelved.n >= n_cached + MIN_SHARED_TOKENS and self._has_room_for(shelved):
            snapshot = self.shelf.snapshot(shelved.seq)
            if snapshot is None:
                self._wanted.add(shelved.seq)
                return False  # until it has been read
            self._make_room(run, len(snapshot.tokens))
            self._pool.restore(snapshot, shelved.n, run.seq)
            n_cached = shelved.n
        elif n_cached:
            self._pool.share(match, run.seq)
        run.begun = True
        if run.n_generated == 0:
            run.cached_tokens = n_cached
            self._totals.cached_tokens += n_cached
        return True

    def _has_room_for(self, shelved: Match) -> bool:
        """Whether all of a shelf's entry fits for a moment, if retained prefixes go."""
        length = self.shelf.length(shelved.seq)
        growth = sum(self._growth.values())
        return self._pool.n_held(r.seq for r in self._running) + growth + length <= self.n_ctx

    def _make_room(self, run: Run, n_tokens: int) -> int:
        """Free cells until `run` can grow by `n_tokens`; return how many it can grow by."""
        while (free := self._pool.free_cells - sum(self._growth.values())) < n_tokens:
            if self._pool.evict():
                continue
            paused = [r for r in self._running if r.paused and r is not run]
            victims = paused or [r for r in self._running if r.arrival > run.arrival]
            if not victims:
                return free
            self._preempt(victims[-1])
        return n_tokens

    def _preempt(self, run: Run) -> None:
        self._pool.close(run.seq, keep=False)
        self._leave_slot(run)
        self._growth.pop(run.id, None)
        run.move(RunState.WAITING)
        self._totals.preemptions += 1
        self._preempted.append(run.id)

    def _leave_slot(self, run: Run) -> None:
        self._running.remove(run)
        run.seq, run.begun = -1, False

    # -- planning ---------------------------------------------------------------------

    def _grow_decoding(self) -> int:
        """Plan what follows the tokens that were sampled; return the budget that is left."""
        awake = [r for r in self._running if not r.paused]
        decoding = [r for r in awake if self._decodes(r)]
        budget = self._pacer.prefill_budget(n_decode=len(decoding))
        # The oldest must go on, even with a prompt beside streams that are forced all the time.
        kept = 1 if budget and awake[:1] != decoding[:1] else 0
        for run in decoding:
            if run.state is not RunState.RUNNING:
                continue  # preempted for one before it
            n = self._make_room(run, 1 + min(self._n_pending(run) - 1, budget - kept))
            if n:
                self._growth[run.id] = n
                budget -= n - 1
            else:
                self._preempt(run)  # it is the newest itself
        return budget

    def _grow_prompts(self, budget: int) -> None:
        # A step has a row of logits for each sequence there is, and each request needs one.
        spare_rows = self._n_seqs - len(self._running)
        for run in list(self._running):
            if run.state is not RunState.RUNNING or run.paused or self._decodes(run):
                continue
            if budget and (run.begun or self._begin(run)):
                without_rows = max(0, run.n_reusable - self._pool.length(run.seq))
                wanted = min(self._n_pending(run), budget, without_rows + 1 + spare_rows)
                if n := self._make_room(run, wanted):
                    self._growth[run.id] = n
                    budget -= n
                    spare_rows -= max(0, n - without_rows - 1)

    def _work(self, run: Run, n_tokens: int) -> Work:
        pos = self._pool.length(run.seq)
        end = pos + n_tokens
        return Work(
            run.id,
            run.seq,
            pos,
            run.tokens[pos:end],
            sample=end == len(run.tokens) and run.prepared.max_tokens > 0,
            targets=run.targets_between(pos, end),
            decodes=self._decodes(run),
        )

    # -- applying a result ------------------------------------------------------------

    def _measure(self, plan: StepPlan, result: StepResult) -> None:
        elapsed_s = result.elapsed_s
        n_decode = sum(work.decodes for work in plan.work)
        n_prefill = plan.n_tokens - n_decode
        self._pacer.observe(n_decode=n_decode, n_prefill=n_prefill, elapsed_s=elapsed_s)
        n_generated, n_prompt = plan.n_generated, plan.n_tokens - plan.n_generated
        self.threads.observe(
            with_prompt=n_prompt > 0,
            n_rows=plan.n_tokens,
            elapsed_s=result.compute_s,
            waited_s=result.waited_s,
        )
        self._totals.decode_tokens += n_generated
        self._totals.prefill_tokens += n_prompt
        # A shared step's time is split by tokens: exact when it holds one kind only.
        self._totals.decode_s += elapsed_s * n_generated / plan.n_tokens
        self._totals.prefill_s += elapsed_s * n_prompt / plan.n_tokens

    def _advance(self, work: Work, result: StepResult) -> list[Event]:
        run = self._runs[work.request_id]
        self._pool.extend(run.seq, work.tokens)
        if run.cancelled:
            return []
        if reason := result.failures.get(run.id):
            self._pool.clear(run.seq)  # what led to no token is nothing to build on
            return self._fail(run, InferenceError(reason))
        if work.targets:
            first = work.pos + len(work.tokens) - len(work.targets)
            run.scores.update(enumerate(result.scores[run.id], first))
        events: list[Event] = []
        if work.sample:
            if run.n_generated == 0:
                self._pool.checkpoint(run.seq, run.prepared.session)
            events += run.take(result.sampled[run.id])
        elif run.prepared.max_tokens == 0 and self._n_pending(run) == 0:
            run.ends = "length"
        if run.ends:
            events += run.finish()
            self._end(run)
        return events

    def _fail(self, run: Run, error: LlamadError) -> list[Event]:
        if run.cancelled:
            return []
        self._end(run)
        return [Failed(run.id, error)]

    def _yield_room(self, plan: StepPlan) -> list[Event]:
        """llama.cpp had fewer cells than the books say: give back what can be given."""
        if self._pool.evict_all() or any(run.cancelled for run in self._running):
            return []
        self._short_of_cells = True
        if len(self._running) > 1:
            paused = [run for run in self._running if run.paused]
            self._preempt((paused or self._running)[-1])
            return []
        (run,) = self._running
        resident = self._pool.length(run.seq)
        overflow = ContextOverflow("decode", resident, plan.n_tokens, self.n_ctx)
        return self._fail(run, overflow)

    def _forget(self, seqs: Iterable[int]) -> None:
        """llama.cpp has lost these sequences: what they had reused is computed again."""
        lost = set(seqs)
        for seq in lost:
            self._pool.lose(seq)
        for run in self._running:
            if run.seq in lost:
                self._totals.cached_tokens -= run.cached_tokens
                run.cached_tokens = 0

    def _end(self, run: Run) -> None:
        if run.state is RunState.RUNNING:
            self._short_of_cells = False
            request = run.prepared
            if request.holder is not None and run.ends:
                self._pool.hold(run.seq, request.holder)
            else:
                # What was scored is one of many continuations, and nobody's beginning.
                self._pool.close(run.seq, keep=not request.targets, session=request.session)
            self._leave_slot(run)
        run.move(RunState.ENDED)
        del self._runs[run.id]
        if run.has_sampler:
            self._old_samplers.append(run.id)

    def _n_pending(self, run: Run) -> int:
        """Tokens that are not in the KV cache yet."""
        return len(run.tokens) - self._pool.length(run.seq)

    def _decodes(self, run: Run) -> bool:
        """Whether its next step is that of tokens just generated."""
        return 0 < self._n_pending(run) <= run.n_new
