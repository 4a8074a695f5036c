"""How many threads compute, on a machine whose speed and neighbours are made up."""

from __future__ import annotations

import random

import attrs
import pytest
from hypothesis import given, strategies as st

from llamad_trio.scheduling.pacing import ComputeThreads, ThreadGovernor


@attrs.define
class Machine:
    """Cores, some of them taken.  A step takes `work_s` on one thread.

    With a core for each thread it takes 1/n of that, and a little more.  Else the threads wait
    for each other at every node: three times as long, and a third of it without a core; unless
    `waits` says for which share of each step the computing thread has none.
    """

    n_cores: int
    n_taken: int = 0
    work_s: float = 0.01
    noise: float = 0.03
    waits: float | None = None
    wanders: random.Random = attrs.field(factory=lambda: random.Random(1))

    def step(self, n_threads: int) -> tuple[float, float]:
        """Seconds a step takes, and those of them without a core."""
        elapsed_s = self.work_s * (1 / n_threads + 0.02)
        elapsed_s *= 1 + self.noise * self.wanders.random()
        waited_s = 0.0
        if n_threads + self.n_taken > self.n_cores:
            elapsed_s, waited_s = 3 * elapsed_s, elapsed_s
        return elapsed_s, waited_s if self.waits is None else self.waits * elapsed_s


def compute(governor: ThreadGovernor, machine: Machine, seconds: float) -> list[tuple[int, float]]:
    """Run steps; for each, its threads and how long it took."""
    steps: list[tuple[int, float]] = []
    while seconds > 0:
        n_threads = governor.n_threads
        elapsed_s, waited_s = machine.step(n_threads)
        governor.observe(n_rows=1, elapsed_s=elapsed_s, waited_s=waited_s)
        steps.append((n_threads, elapsed_s))
        seconds -= elapsed_s
    return steps


def slowdown(steps: list[tuple[int, float]], machine: Machine, n_threads: int) -> float:
    """How much longer the steps took than they would have with `n_threads`."""
    fixed = sum(machine.step(n_threads)[0] for _ in steps)
    return sum(elapsed_s for _, elapsed_s in steps) / fixed


@pytest.mark.parametrize("n_cores", [2, 4, 16, 64])
@pytest.mark.parametrize("step_s", [0.001, 0.01, 0.2, 4.0])
def test_on_a_quiet_machine_it_costs_less_than_one_percent(n_cores: int, step_s: float) -> None:
    machine = Machine(n_cores, work_s=n_cores * step_s)
    governor = ThreadGovernor(n_cores)
    steps = compute(governor, machine, max(10.0, 1000 * step_s))
    assert slowdown(steps, machine, n_cores) < 1.01
    assert governor.in_force == n_cores


@pytest.mark.parametrize("n_cores", [2, 4, 16])
@pytest.mark.parametrize("from_the_start", [False, True])
def test_beside_a_busy_neighbour_it_leaves_it_a_core(n_cores: int, from_the_start: bool) -> None:
    machine = Machine(n_cores)
    governor = ThreadGovernor(n_cores)
    if not from_the_start:
        compute(governor, machine, 5.0)
    machine.n_taken = 1
    compute(governor, machine, 2.0)
    assert governor.in_force < n_cores
    steps = compute(governor, machine, 20.0)
    assert slowdown(steps, machine, n_cores) < 0.7
    assert slowdown(steps, machine, governor.in_force) < 1.1


@pytest.mark.parametrize("n_cores", [2, 4, 16])
@pytest.mark.parametrize("busy_s", [1.0, 100.0])
def test_it_is_back_within_three_seconds(n_cores: int, busy_s: float) -> None:
    machine = Machine(n_cores)
    governor = ThreadGovernor(n_cores)
    compute(governor, machine, 5.0)
    machine.n_taken = n_cores // 2
    compute(governor, machine, busy_s)
    machine.n_taken = 0
    compute(governor, machine, 3.0)
    assert governor.in_force == n_cores


def test_a_neighbour_that_the_computing_thread_does_not_feel_is_noticed_by_the_time() -> None:
    machine = Machine(8, waits=0.0)
    governor = ThreadGovernor(8)
    compute(governor, machine, 5.0)
    machine.n_taken = 1
    compute(governor, machine, 0.2)
    assert governor.in_force < 8


def test_what_nothing_suggests_is_found_in_time() -> None:
    """Busy from the start, and the thread that computes never loses its own core."""
    governor = ThreadGovernor(8)
    compute(governor, Machine(8, n_taken=1, waits=0.0), 4.0)
    assert governor.in_force < 8


def test_threads_that_wait_for_something_else_are_not_given_up() -> None:
    """Fewer are tried, and are slower; that must not cost much, however long it lasts."""
    machine = Machine(4, waits=0.3)
    governor = ThreadGovernor(4)
    steps = compute(governor, machine, 15.0)
    assert governor.in_force == 4
    assert slowdown(steps, machine, 4) < 1.02


def test_a_context_that_grows_is_no_neighbour() -> None:
    machine = Machine(4)
    governor = ThreadGovernor(4)
    for i in range(4000):
        machine.work_s = 0.01 * (1 + i / 500)
        elapsed_s, waited_s = machine.step(governor.n_threads)
        governor.observe(n_rows=1, elapsed_s=elapsed_s, waited_s=waited_s)
    assert governor.in_force == 4


def test_steps_of_other_shapes_are_not_compared() -> None:
    machine = Machine(2)
    governor = ThreadGovernor(2)
    numbers = random.Random(2)
    trials = 0
    for _ in range(3000):
        n_rows = numbers.choice([1, 2, 3, 8, 200])
        n_threads = governor.n_threads
        elapsed_s, waited_s = machine.step(n_threads)
        governor.observe(n_rows=n_rows, elapsed_s=elapsed_s * n_rows, waited_s=waited_s)
        trials += n_threads < 2
    assert governor.in_force == 2
    assert trials < 100


def test_a_number_that_is_fixed_stays() -> None:
    machine = Machine(2, n_taken=2)
    governor = ThreadGovernor(2, adaptive=False)
    assert {n for n, _ in compute(governor, machine, 5.0)} == {2}


@given(
    limit=st.integers(1, 256),
    steps=st.lists(
        st.tuples(st.integers(1, 1000), st.floats(0, 1e3), st.floats(-1, 1e3)), max_size=200
    ),
)
def test_whatever_is_measured_it_stays_between_one_and_the_limit(
    limit: int, steps: list[tuple[int, float, float]]
) -> None:
    governor = ThreadGovernor(limit)
    for n_rows, elapsed_s, waited_s in steps:
        governor.observe(n_rows=n_rows, elapsed_s=elapsed_s, waited_s=waited_s)
        assert 1 <= governor.n_threads <= limit
        assert 1 <= governor.in_force <= limit


def compute_kind(
    threads: ComputeThreads, machine: Machine, seconds: float, *, with_prompt: bool
) -> None:
    """Run steps of one kind."""
    while seconds > 0:
        elapsed_s, waited_s = machine.step(threads.choose(with_prompt=with_prompt))
        threads.observe(with_prompt=with_prompt, n_rows=1, elapsed_s=elapsed_s, waited_s=waited_s)
        seconds -= elapsed_s


def test_the_two_kinds_of_step_are_chosen_apart() -> None:
    threads = ComputeThreads(3, 4, adaptive=True)
    compute_kind(threads, Machine(4, n_taken=2), 2.0, with_prompt=True)
    assert threads.in_force == (3, 2)
    assert threads.choose(with_prompt=False) == 3


def test_when_one_kind_goes_up_the_other_tries_at_once() -> None:
    threads = ComputeThreads(2, 2, adaptive=True)
    machine = Machine(2, n_taken=1)
    compute_kind(threads, machine, 3.0, with_prompt=True)
    compute_kind(threads, machine, 3.0, with_prompt=False)
    assert threads.in_force == (1, 1)
    machine.n_taken = 0
    compute_kind(threads, machine, 3.0, with_prompt=False)
    assert threads.in_force == (2, 1)
    compute_kind(threads, machine, 0.2, with_prompt=True)
    assert threads.in_force == (2, 2)
