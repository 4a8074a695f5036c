"""How much of a prompt goes into a step, and how many threads compute it: from how long steps took.

A prompt goes in by pieces, so that the streams beside it do not stall.

llama.cpp's threads wait for each other at every node of the graph.  If one of them loses its
core to another process, all wait: on 2 cores, 2 threads beside one busy process decode at a
quarter to a half of what 1 thread does.  So the number is chosen while the engine runs, by
trying: a few steps with another number, compared with those before.

Knows neither clocks nor cores.
"""

from __future__ import annotations

from collections import deque

import attrs

MIN_CHUNK = 16
"""A prompt always advances by this many tokens a step; smaller chunks waste the batch."""

FIRST_CHUNK = 32
"""The first shared chunk, before any speed is known: near full prefill speed, and short."""

SMOOTHING = 0.3
"""Weight of the newest measurement: follows a growing context, forgives one slow step."""


class StepPacer:
    """Learns what decode rows and prompt tokens cost, and keeps shared steps near `target_s`."""

    def __init__(self, *, target_s: float, n_batch: int) -> None:
        self._target_s = target_s
        self._n_batch = n_batch
        self._decode_s: float | None = None
        self._token_s: float | None = None

    def observe(self, *, n_decode: int, n_prefill: int, elapsed_s: float) -> None:
        """Learn from a finished step of `n_decode` single rows and `n_prefill` prompt tokens."""
        if n_prefill == 0:
            self._decode_s = _blend(self._decode_s, elapsed_s)
        elif n_prefill >= MIN_CHUNK or self._token_s is None:
            decode_s = (self._decode_s or 0.0) if n_decode else 0.0
            # A chunk can not be cheaper than its share of the whole step's tokens.
            floor_s = elapsed_s * n_prefill / (n_prefill + n_decode) / 2
            prefill_s = max(elapsed_s - decode_s, floor_s)
            self._token_s = _blend(self._token_s, prefill_s / n_prefill)

    def prefill_budget(self, *, n_decode: int) -> int:
        """Prompt tokens for the next step, beside `n_decode` rows that decode a token."""
        room = self._n_batch - n_decode
        if n_decode == 0:
            return room
        if self._token_s is None:
            return min(FIRST_CHUNK, room)
        spare_s = self._target_s - (self._decode_s or 0.0)
        return max(0, min(room, max(MIN_CHUNK, int(spare_s / max(self._token_s, 1e-9)))))


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)


# -- threads ----------------------------------------------------------------------------------

WAITING = 0.1
"""Share of the time without a core that suggests fewer threads: under 0.05 on a quiet machine,
0.26 and more beside a busy process."""

SLOW = 1.35
"""How many times longer than usual steps must take to suggest fewer threads."""

BETTER, NOT_WORSE = 0.9, 1.02
"""Fewer threads are kept if steps take at most 0.9 times as long, more if 1.02 times."""

TRIAL_STEPS, TRIAL_S, LONG_TRIAL_S = 3, 0.03, 0.25
"""Steps are compared over three of them and 30 ms, ten slices of the scheduler; or over a
quarter of a second, if they are that long."""

EXPLORED = 0.004
"""Share of the time that may be spent on trials that nothing suggested.  They find what no
signal tells: a machine that was busy from the start."""

FIRST_PAUSE_S, LONGEST_PAUSE_S, WASTED = 0.25, 10.0, 0.01
"""Suggested trials pause for longer each time they fail, and waste 1 % at most."""

UP_PAUSE_S, LONGEST_UP_PAUSE_S, WASTED_UP = 0.5, 1.25, 0.05
"""Going up again is tried every half to one and a quarter seconds of computing, so that a quiet
machine is noticed within 3, also if one trial goes wrong."""

USUAL_S, USUAL_WEIGHT = 2.0, 0.05
"""What is usual follows in about two seconds, and no step has a weight above 0.05: slow enough
to notice a change, quick enough for a growing context."""

CLOCK_S = 1e-9
"""What takes less was not measured."""

MOST_UNKNOWN = 16
"""A trial ends without a verdict after so many steps of which it is not known what is usual."""


@attrs.define
class _Steps:
    """Some steps: how many, how long they took, and what would have been usual."""

    n: int = 0
    usual_s: float = 0.0
    elapsed_s: float = 0.0
    waited_s: float = 0.0

    def add(self, usual_s: float, elapsed_s: float, waited_s: float) -> None:
        self.n += 1
        self.usual_s += usual_s
        self.elapsed_s += elapsed_s
        self.waited_s += waited_s

    @property
    def are_enough(self) -> bool:
        return self.elapsed_s >= LONG_TRIAL_S or (
            self.n >= TRIAL_STEPS and self.elapsed_s >= TRIAL_S
        )

    @property
    def slowness(self) -> float:
        return self.elapsed_s / self.usual_s


@attrs.define
class _Trial:
    """Some steps with `n_threads`; good if they are no slower than `bound` times the usual."""

    n_threads: int
    slowness_before: float
    bound: float
    is_suggested: bool = True
    steps: _Steps = attrs.field(factory=_Steps)
    n_unknown: int = 0


class ThreadGovernor:
    """Chooses the number of threads for one kind of step; if not `adaptive`, always `limit`."""

    def __init__(self, limit: int, *, adaptive: bool = True) -> None:
        self._limit = limit
        self._adaptive = adaptive and limit > 1
        self.in_force = limit
        """The number that has proved best so far."""
        self._trial: _Trial | None = None
        self._usual: dict[int, float] = {}  # seconds a row, by shape, with the kept number
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=128)
        self._computed_s = 0.0
        self._regret_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._next_down_s = 0.0
        self._next_up_s = 0.0
        # Beside as many others as there are cores one fewer may be no better, half of them is.
        self._halves = False

    @property
    def n_threads(self) -> int:
        """For the next step: those in force, or others that are being tried."""
        return self.in_force if self._trial is None else self._trial.n_threads

    def observe(self, *, n_rows: int, elapsed_s: float, waited_s: float) -> None:
        """Learn from a step of `n_rows` tokens that was run with `n_threads`.

        For `waited_s` of its seconds the thread that ran it had no core.
        """
        if not self._adaptive or elapsed_s < CLOCK_S:
            return
        self._computed_s += elapsed_s
        # Steps of one shape cost about the same for each row.
        shape = n_rows if n_rows <= 16 else 16 + n_rows.bit_length()
        row_s = elapsed_s / n_rows
        usual = self._usual.get(shape)
        if self._trial is not None:
            self._observe_trial(self._trial, usual, n_rows, elapsed_s, waited_s)
        elif usual is None:
            self._usual[shape] = row_s
        else:
            self._recent.append((usual * n_rows, elapsed_s, waited_s))
            # One step in a hundred takes ten times as long: no more of it than twice counts.
            weight = min(USUAL_WEIGHT, elapsed_s / USUAL_S)
            self._usual[shape] += weight * (min(row_s, 2 * usual) - usual)
            self._consider_trial()

    def try_more_soon(self) -> None:
        """Something says that there are cores again."""
        self._next_up_s = min(self._next_up_s, self._computed_s)

    # -- trials -------------------------------------------------------------------------------

    def _consider_trial(self) -> None:
        recent = self._newest_steps()
        if not recent.are_enough:
            return
        if self.in_force < self._limit and self._computed_s >= self._next_up_s:
            more = min(self._limit, self.in_force + self._stride)
            self._trial = _Trial(more, recent.slowness, NOT_WORSE * recent.slowness)
        elif self.in_force > 1:
            is_slow = recent.waited_s >= WAITING * recent.elapsed_s or recent.slowness >= SLOW
            suggested = is_slow and self._computed_s >= self._next_down_s
            if suggested or self._may_explore(recent):
                halve = suggested and self._halves
                fewer = self.in_force // 2 if halve else self.in_force - self._stride
                bound = BETTER * recent.slowness
                self._trial = _Trial(fewer, recent.slowness, bound, is_suggested=suggested)

    @property
    def _stride(self) -> int:
        """One of a few, an eighth of many."""
        return max(1, self.in_force // 8)

    def _newest_steps(self) -> _Steps:
        """As few of the newest steps as are enough."""
        newest = _Steps()
        for step in reversed(self._recent):
            newest.add(*step)
            if newest.are_enough:
                break
        return newest

    def _may_explore(self, recent: _Steps) -> bool:
        """Whether there is time for a trial that nothing suggests, even if it goes badly."""
        step_s = recent.elapsed_s / recent.n
        trial_s = max(TRIAL_S, step_s, min(LONG_TRIAL_S, TRIAL_STEPS * step_s))
        at_worst_s = trial_s * (self.in_force / (self.in_force - self._stride) - 1)
        return self._regret_s + at_worst_s <= EXPLORED * self._computed_s

    def _observe_trial(
        self, trial: _Trial, usual: float | None, n_rows: int, elapsed_s: float, waited_s: float
    ) -> None:
        if usual is None:
            trial.n_unknown += 1
            if trial.n_unknown >= MOST_UNKNOWN:
                self._reject(trial)
            return
        done = trial.steps
        done.add(usual * n_rows, elapsed_s, waited_s)
        if done.are_enough and done.slowness <= trial.bound:
            self._keep(trial)
        elif done.are_enough or (done.elapsed_s >= TRIAL_S and done.slowness > 2 * trial.bound):
            self._reject(trial)

    def _keep(self, trial: _Trial) -> None:
        went_up = trial.n_threads > self.in_force
        self.in_force, self._trial = trial.n_threads, None
        self._usual.clear()
        self._recent.clear()
        self._pause_s = FIRST_PAUSE_S
        self._halves = False
        self._next_down_s = self._computed_s
        self._next_up_s = self._computed_s + (0.0 if went_up else UP_PAUSE_S)

    def _reject(self, trial: _Trial) -> None:
        went_up = trial.n_threads > self.in_force
        done, self._trial = trial.steps, None
        regret_s = max(0.0, done.elapsed_s - trial.slowness_before * done.usual_s)
        self._regret_s += regret_s
        if went_up:
            longest = max(LONGEST_UP_PAUSE_S, 4 * done.elapsed_s)
            pause_s = min(max(UP_PAUSE_S, regret_s / WASTED_UP), longest)
            self._next_up_s = self._computed_s + pause_s
        elif trial.is_suggested:
            self._next_down_s = self._computed_s + max(self._pause_s, regret_s / WASTED)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._halves = not self._halves


class ComputeThreads:
    """The threads of an engine: for steps that only decode, and for those with prompts."""

    def __init__(self, n_threads: int, n_threads_batch: int, *, adaptive: bool) -> None:
        self._decode = ThreadGovernor(n_threads, adaptive=adaptive)
        self._prompt = ThreadGovernor(n_threads_batch, adaptive=adaptive)

    @property
    def in_force(self) -> tuple[int, int]:
        """For steps that only decode, and for those with prompts; trials left out."""
        return self._decode.in_force, self._prompt.in_force

    def choose(self, *, with_prompt: bool) -> int:
        """Threads for the next step."""
        return (self._prompt if with_prompt else self._decode).n_threads

    def observe(self, *, with_prompt: bool, n_rows: int, elapsed_s: float, waited_s: float) -> None:
        """Learn from a step, as `ThreadGovernor.observe`."""
        one, other = self._decode, self._prompt
        if with_prompt:
            one, other = other, one
        before = one.in_force
        one.observe(n_rows=n_rows, elapsed_s=elapsed_s, waited_s=waited_s)
        if one.in_force > before:
            other.try_more_soon()
