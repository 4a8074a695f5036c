"""Who runs: admission, what gives way when the pool runs short, and preemption.

Every call is also checked by `CheckedScheduler`; see `test_scheduler_machine` for all the
promises at once.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from llamad_trio.scheduling.plan import Prepared, StepStatus
from llamad_trio.scheduling.pool import Reuse
from tests.scheduling.checked_scheduler import CheckedScheduler
from tests.scheduling.tracked import A, B, C, D, sampling

# -- admission ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_ctx", "first", "second", "fits"),
    [
        (100, (20, 80), (20, 80), True),  # optimistic about max_tokens
        (100, (48, 50), (20, 40), True),  # exactly a headroom of 32 is left
        (100, (49, 50), (20, 40), False),
        (64, (20, 40), (20, 24), True),  # no more headroom than it can use
        (100, (60, 40), (60, 40), False),  # only 8 tokens are resident, but 60 will be
    ],
)
def test_a_second_is_admitted_when_its_tokens_and_a_small_headroom_fit(
    n_ctx: int, first: tuple[int, int], second: tuple[int, int], fits: bool
) -> None:
    books = CheckedScheduler(n_ctx=n_ctx, n_batch=4)
    for token, (n_tokens, max_tokens) in enumerate((first, second), 1):
        books.submit([token] * n_tokens, max_tokens=max_tokens)
    books.step()
    books.plan()
    assert books.running == ([0, 1] if fits else [0])


def test_the_head_of_the_line_blocks_those_behind_it() -> None:
    books = CheckedScheduler(n_ctx=100)
    books.submit(A, max_tokens=5)
    large, small = books.submit([2] * 80, max_tokens=10), books.submit([3], max_tokens=1)
    books.step()
    assert books.running == [0]
    books.steps(4)
    books.plan()
    assert books.running == [large, small]


def test_a_paused_waiting_request_does_not_block_others() -> None:
    books = CheckedScheduler()
    paused, other = books.submit_all(A, B)
    books.pause(paused)
    books.plan()
    assert books.running == [other]


def test_age_is_the_order_of_submission_whatever_the_ids() -> None:
    books = CheckedScheduler(n_ctx=100, n_slots=3)
    for request_id, prompt in zip((7, 9, 3, 5), (A, B, C, D), strict=True):
        books.submit(prompt, max_tokens=80, request_id=request_id)
    books.step()
    assert books.running == [7, 9, 3]
    books.steps(45)
    assert books.preempted == [3, 9]
    books.run_to_end()


def test_a_prompt_longer_than_the_pool_less_the_headroom_runs_alone() -> None:
    books = CheckedScheduler(n_ctx=40, n_slots=2)
    books.submit_all([1] * 39, [2] * 39, max_tokens=1)
    books.drain()
    assert [books.finished(id_).generated_tokens for id_ in (0, 1)] == [1, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"id": 0},
        {"tokens": ()},
        {"max_tokens": 11},
        {"max_tokens": -1},
        {"targets": (1,)},
        {"holder": "h"},
        {"tokens": (1, 2), "max_tokens": 0, "targets": (1, 2, 3)},
    ],
)
def test_a_request_must_be_new_and_consistent_and_fit_an_empty_pool(change: dict[str, Any]) -> None:
    scheduler = CheckedScheduler(n_ctx=30).scheduler
    prepared = Prepared(id=0, tokens=A, max_tokens=10, sampling=sampling())
    scheduler.submit(prepared)
    with pytest.raises(AssertionError):
        scheduler.submit(attrs.evolve(prepared, **{"id": 1, **change}))


# -- when the pool runs short -------------------------------------------------------------


@pytest.mark.parametrize("n_ctx", [100, 101, 102])
def test_the_newest_is_preempted_first(n_ctx: int) -> None:
    books = CheckedScheduler(n_ctx=n_ctx)
    books.submit_all(A, B, C, max_tokens=80)
    books.step()
    assert books.running == [0, 1, 2]
    books.steps(20)
    assert books.preempted == [2]
    books.steps(25)
    assert books.preempted == [2, 1], "which had grown until nothing was left for itself"
    books.run_to_end()


def test_paused_ones_are_preempted_first_even_the_oldest() -> None:
    books = CheckedScheduler(n_ctx=100)
    books.submit_all(A, B, C, max_tokens=80)
    books.steps(3)
    books.pause(0)
    books.pause(1)
    books.steps(40)
    assert books.preempted == [1], "the newest of the paused"
    books.steps(40)
    assert books.preempted == [1, 0]
    books.run_to_end()


def test_a_paused_one_makes_way_for_those_who_wait() -> None:
    books = CheckedScheduler(n_slots=1)
    paused, other = books.submit(A, max_tokens=60), books.submit(B)
    books.steps(3)
    books.pause(paused)
    books.plan()
    assert books.running == [other]
    assert books.preempted == [paused]
    assert books.retained == [], "its cells are free"


def test_a_paused_one_is_not_preempted_in_vain() -> None:
    books = CheckedScheduler(n_ctx=100)
    books.submit([1] * 40, max_tokens=60)
    paused = books.submit(B, max_tokens=20)
    books.submit([3] * 80, max_tokens=20)
    books.steps(2)
    books.pause(paused)
    books.plan()
    assert books.preempted == [], "the third would not fit beside the first either way"


def test_a_paused_request_that_several_count_on_makes_way_without_harm() -> None:
    books = CheckedScheduler(n_ctx=66, n_slots=3, n_batch=16, reuse=Reuse.WHOLE)
    oldest = books.submit(D, max_tokens=4)
    books.pause(oldest)
    paused = books.submit(A[:10], max_tokens=30)
    books.steps(3)
    books.pause(paused)
    books.resume(oldest)
    tokens = [*books.requests[paused].history[:-1], 9, 9, 9, 9, 9]
    books.submit_all(tokens, tokens, tokens, max_tokens=15)
    books.run_to_end()
    assert all(books.finished(i).generated_tokens for i in range(5))


def test_retained_prefixes_go_before_anyone_is_preempted_the_least_recently_used_first() -> None:
    books = CheckedScheduler(n_ctx=100)
    longer = [*A, 5]
    books.submit_all(longer, B, max_tokens=1)
    books.drain()
    books.submit(A, max_tokens=1)  # makes use of the first: now B is the older one
    books.drain()
    first, second = books.submit_all(C, D, max_tokens=50)
    books.steps(10)
    assert books.retained == [B, longer, A]
    books.steps(1)
    assert books.retained == [longer, A]
    books.steps(10)
    assert books.retained == [A], "of which all but one cell was free"
    books.steps(1)
    assert books.retained == []
    assert books.preempted == []
    books.steps(10)
    assert books.preempted == [second]
    assert books.running == [first]


def test_a_session_keeps_its_prefix_in_preference_to_others() -> None:
    books = CheckedScheduler(n_ctx=100)
    books.submit(A, max_tokens=1, session="s")
    books.submit_all(B, C, max_tokens=1)
    books.drain()
    books.submit([4] * 60, max_tokens=40)
    books.step()
    assert books.retained == [A, C], "the oldest is of a session"
    books.step()
    assert books.retained == [A]
    books.steps(18)
    assert books.retained == [A]
    books.drain()
    assert A not in books.retained, "even that gives way to what a running request needs"
    assert books.preempted == []


def test_the_oldest_gets_its_cells_although_newer_ones_decode() -> None:
    books = CheckedScheduler(n_ctx=100, n_batch=4, n_slots=3)
    oldest, _ = books.submit([1] * 30, max_tokens=70), books.submit(B, max_tokens=80)
    books.step()
    books.pause(oldest)
    books.steps(90)
    books.resume(oldest)
    books.run_to_end()
    assert books.finished(oldest).generated_tokens == 70


def test_preempted_requests_go_on_where_they_were() -> None:
    books = CheckedScheduler(n_ctx=60, n_slots=2)
    for seed in range(6):
        books.submit([1 + seed, 2, 3], max_tokens=57, seed=seed)
    while not books.preempted:
        books.step()
    n_generated = books.requests[books.preempted[0]].generated
    assert 0 < n_generated < 57
    books.steps(3)
    assert books.requests[books.preempted[0]].generated == n_generated, "nothing is sampled twice"
    books.run_to_end()
    assert [books.finished(id_).generated_tokens for id_ in range(6)] == [57] * 6


def test_the_books_count_a_shared_step_right_when_a_decoding_request_is_preempted_in_it() -> None:
    books = CheckedScheduler(n_ctx=358, n_slots=2, n_batch=9, reuse=Reuse.NOTHING)
    oldest = books.submit([1] * 300, max_tokens=40)
    books.pause(oldest)
    newer = books.submit(B, max_tokens=100)
    books.steps(5)
    books.resume(oldest)  # its long prompt goes in while the newer one takes cell after cell
    while not books.preempted:
        books.step()
    assert books.preempted == [newer]
    assert books.requests[oldest].generated == 1, "its last chunk took the newer one's cells"
    stats = books.scheduler.stats()
    assert stats.prefill_tokens == 20 + 300
    assert stats.decode_tokens == books.requests[newer].generated - 1
    books.run_to_end()


# -- when llama.cpp has no room -----------------------------------------------------------


def no_room(books: CheckedScheduler) -> None:
    """A step for which there are no cells."""
    books.plan()
    books.finish(StepStatus.NO_ROOM)


def test_no_room_costs_retained_prefixes_first_then_the_paused_then_the_newest() -> None:
    books = CheckedScheduler()
    books.submit(A, max_tokens=1)
    books.drain()
    paused, _, newest = books.submit_all(B, C, D)
    books.steps(2)
    books.pause(paused)
    no_room(books)
    assert books.scheduler.stats().kv_retained_tokens == 0
    assert books.preempted == []
    no_room(books)
    assert books.preempted == [paused]
    no_room(books)
    assert books.preempted == [paused, newest]
    books.run_to_end()


def test_no_room_preempts_nobody_when_a_cancelled_request_leaves() -> None:
    books = CheckedScheduler()
    books.submit_all(A, B)
    books.plan()
    books.cancel(0)
    books.finish(StepStatus.NO_ROOM)
    assert books.preempted == []
    books.run_to_end()


def test_after_no_room_a_paused_request_does_not_keep_others_out() -> None:
    books = CheckedScheduler()
    paused, other = books.submit_all(A, B)
    no_room(books)
    assert books.running == [paused]
    books.step()
    assert books.running == [paused], "until it ends, nobody comes back"
    books.pause(paused)
    books.plan()
    assert other in books.running
