"""How much of a prompt goes into a step beside streams, on a machine whose costs are made up."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from llamad_trio.scheduling.pacing import FIRST_CHUNK, MIN_CHUNK, StepPacer


def costs(n_decode: int, n_prefill: int, *, row_s: float, token_s: float) -> float:
    """Seconds a step takes: rows that decode together cost little more than one."""
    return (row_s if n_decode else 0.0) + n_prefill * token_s


def learned(pacer: StepPacer, *, row_s: float, token_s: float, steps: int = 60) -> int:
    """The budget beside 2 streams after some steps."""
    for _ in range(3):
        elapsed_s = costs(2, 0, row_s=row_s, token_s=token_s)
        pacer.observe(n_decode=2, n_prefill=0, elapsed_s=elapsed_s)
    budget = pacer.prefill_budget(n_decode=2)
    for _ in range(steps):
        elapsed_s = costs(2, budget, row_s=row_s, token_s=token_s)
        pacer.observe(n_decode=2, n_prefill=budget, elapsed_s=elapsed_s)
        budget = pacer.prefill_budget(n_decode=2)
    return budget


@pytest.mark.parametrize("token_s", [0.0005, 0.001, 0.003])
@pytest.mark.parametrize("row_s", [0.001, 0.01, 0.04])
def test_shared_steps_come_to_take_the_target_time(row_s: float, token_s: float) -> None:
    pacer = StepPacer(target_s=0.1, n_batch=512)
    budget = learned(pacer, row_s=row_s, token_s=token_s)
    took = costs(2, budget, row_s=row_s, token_s=token_s)
    assert 0.1 - token_s <= took <= 0.1 or budget in (MIN_CHUNK, 510)


def test_it_follows_a_machine_that_gets_slower() -> None:
    pacer = StepPacer(target_s=0.1, n_batch=512)
    fast = learned(pacer, row_s=0.01, token_s=0.0005)
    slow = learned(pacer, row_s=0.01, token_s=0.002)
    assert fast == pytest.approx(180, abs=2)
    assert slow == pytest.approx(45, abs=2)


def test_one_slow_step_is_soon_forgiven() -> None:
    pacer = StepPacer(target_s=0.1, n_batch=512)
    before = learned(pacer, row_s=0.01, token_s=0.001)
    pacer.observe(n_decode=2, n_prefill=before, elapsed_s=1.0)
    assert pacer.prefill_budget(n_decode=2) < before / 2
    assert learned(pacer, row_s=0.01, token_s=0.001) == pytest.approx(before, abs=2)


def test_a_prompt_always_advances_by_a_chunk_worth_its_step() -> None:
    pacer = StepPacer(target_s=0.01, n_batch=512)
    assert learned(pacer, row_s=5.0, token_s=1.0) == MIN_CHUNK
    assert pacer.prefill_budget(n_decode=0) == 512


@pytest.mark.parametrize(
    ("alone", "budget"),
    [
        ([], FIRST_CHUNK),  # nothing is known
        ([(500, 0.5)], 100),
        ([(500, 0.5), (1, 0.1)], 100),  # a tiny chunk does not distort what is known
    ],
)
def test_what_a_prompt_alone_has_taught_serves_the_shared_step(
    alone: list[tuple[int, float]], budget: int
) -> None:
    pacer = StepPacer(target_s=0.1, n_batch=512)
    for n_prefill, elapsed_s in alone:
        pacer.observe(n_decode=0, n_prefill=n_prefill, elapsed_s=elapsed_s)
    assert pacer.prefill_budget(n_decode=1) == budget
    assert pacer.prefill_budget(n_decode=0) == 512, "alone it takes the whole batch"


@given(
    n_batch=st.integers(1, 64),
    seen=st.lists(
        st.tuples(
            st.integers(0, 8), st.integers(0, 64), st.sampled_from([0.0, 1e-9, 0.01, 1.0, 1e9])
        ).filter(lambda step: step[0] + step[1] > 0),
        max_size=20,
    ),
    n_decode=st.integers(0, 64),
)
def test_whatever_it_has_seen_the_batch_is_never_overfull_nor_the_prompt_starved(
    n_batch: int, seen: list[tuple[int, int, float]], n_decode: int
) -> None:
    pacer = StepPacer(target_s=0.1, n_batch=n_batch)
    for rows, tokens, elapsed_s in seen:
        pacer.observe(n_decode=rows, n_prefill=tokens, elapsed_s=elapsed_s)
    n_decode = min(n_decode, n_batch)
    budget = pacer.prefill_budget(n_decode=n_decode)
    assert min(MIN_CHUNK, n_batch - n_decode) <= budget <= n_batch - n_decode
