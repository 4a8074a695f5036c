"""The step: what is in it, what comes of it, and what becomes of those who leave.

Every call is also checked by `CheckedScheduler`.
"""

from __future__ import annotations

import pytest

from llamad_trio.core.errors import ContextOverflow, EngineClosed, InferenceError
from llamad_trio.scheduling.plan import StepStatus
from llamad_trio.scheduling.pool import Reuse
from llamad_trio.scheduling.run import Failed
from tests.scheduling.checked_scheduler import CheckedScheduler
from tests.scheduling.fake_memory import HashModel
from tests.scheduling.tracked import A, B, C, D, sizes


def test_alone_a_prompt_takes_the_whole_batch() -> None:
    books = CheckedScheduler(n_ctx=1000, n_batch=512, step_target_s=0.001)
    books.submit([1] * 600)
    for expected in (512, 88):
        assert sizes(books.next_plan()) == {0: expected}
        books.finish(elapsed_s=9.0)
    assert books.requests[0].generated == 1


def test_beside_a_stream_the_prompt_is_cut_to_the_target_time() -> None:
    books = CheckedScheduler(n_ctx=2000, n_batch=512, step_target_s=0.1)
    stream = books.submit(A, max_tokens=500)
    for elapsed_s in (0.020, 0.010):
        books.plan()
        books.finish(elapsed_s=elapsed_s)
    reader = books.submit([2] * 900)
    for _ in range(10):
        assert sizes(books.next_plan()) == {stream: 1, reader: 90}
        # 10 ms for the row and 1 ms for each prompt token make 100 ms.
        books.finish(elapsed_s=0.010 + 0.001 * 90)
    assert books.requests[reader].generated == 1


def test_rows_that_decode_come_before_prompts_and_older_prompts_before_newer() -> None:
    books = CheckedScheduler(n_ctx=400, n_batch=24)
    books.submit(A, max_tokens=50)
    books.step()
    books.submit_all(B, C)
    assert list(sizes(books.next_plan()).items()) == [(0, 1), (1, 20), (2, 3)]


def test_nothing_to_do_is_no_plan() -> None:
    books = CheckedScheduler()
    assert books.plan() is None
    books.submit(A)
    books.pause(0)
    assert books.plan() is None
    books.resume(0)
    assert books.plan() is not None


def test_a_paused_request_is_left_out_and_keeps_its_slot() -> None:
    books = CheckedScheduler()
    paused, other = books.submit_all(A, B)
    books.steps(2)
    books.pause(paused)
    assert sizes(books.next_plan()).keys() == {other}
    assert books.running == [paused, other]
    assert books.scheduler.stats().slots["paused"] == 1
    books.run_to_end()


def test_a_sampler_is_made_with_the_first_token_and_closed_after_the_last() -> None:
    books = CheckedScheduler(n_batch=8)
    books.submit(A, max_tokens=2)
    opened = []
    while plan := books.plan():
        opened.append([prepared.id for prepared in plan.new_samplers])
        books.finish()
    assert opened == [[], [], [0], []]
    books.submit(B, max_tokens=1)
    assert books.next_plan().old_samplers == (0,)


# -- cancelling ---------------------------------------------------------------------------


def test_a_cancelled_request_frees_its_slot_at_once_or_never_runs() -> None:
    books = CheckedScheduler(n_slots=1)
    running, waiting = books.submit_all(A, B)
    books.step()
    books.cancel(waiting)
    books.cancel(running)
    assert books.scheduler.stats().slots["free"] == 1
    assert books.plan() is None


def test_a_request_cancelled_in_flight_gets_nothing_of_the_step() -> None:
    books = CheckedScheduler()
    books.submit(A, max_tokens=1)
    books.plan()
    books.cancel(0)
    assert books.scheduler.stats().slots["free"] == 3, "the step still writes to its sequence"
    assert books.finish() == []
    assert books.scheduler.stats().slots["free"] == 4


def test_cancelling_twice_or_nobody_is_nothing() -> None:
    books = CheckedScheduler()
    books.submit(A)
    books.plan()
    books.cancel(0)
    books.cancel(0)
    books.finish()
    books.cancel(0)
    for call in (books.scheduler.cancel, books.scheduler.pause, books.scheduler.resume):
        call(99)
    books.run_to_end()


def test_a_step_is_unwanted_when_everybody_in_it_has_cancelled() -> None:
    books = CheckedScheduler()

    def is_unwanted() -> bool:
        return books.scheduler.in_flight_is_unwanted

    books.submit_all(A, B)
    assert not is_unwanted(), "no step"
    books.plan()
    books.submit(C)  # waits, and has no part in the step
    assert not is_unwanted()
    books.cancel(0)
    assert not is_unwanted()
    books.cancel(1)
    assert is_unwanted()
    books.finish(StepStatus.ABORTED)
    assert not is_unwanted()
    books.run_to_end()


# -- steps that go wrong ------------------------------------------------------------------


@pytest.mark.parametrize("reuse", Reuse)
def test_an_aborted_step_is_computed_again_with_the_same_text(reuse: Reuse) -> None:
    books = CheckedScheduler(n_batch=8, reuse=reuse, model=HashModel())
    books.submit(A, max_tokens=30, seed=5)
    books.submit(B, max_tokens=30, seed=6)
    for i in range(60):
        if books.plan():
            books.finish(StepStatus.ABORTED if i % 5 == 4 else StepStatus.DONE)
    books.run_to_end()
    assert books.scheduler.stats().aborted_steps > 2


def test_one_requests_failure_costs_nobody_else() -> None:
    books = CheckedScheduler()
    bad, good = books.submit_all(A, B)
    books.plan()
    books.finish(failing=[bad])
    assert isinstance(books.error(bad), InferenceError)
    books.run_to_end()
    assert books.finished(good).generated_tokens == 10


def test_a_failed_step_fails_those_who_are_in_it() -> None:
    books = CheckedScheduler()
    inside, paused, waiting = books.submit_all(A, B, [3] * 70)
    books.step()
    books.pause(paused)
    books.plan()
    books.finish(StepStatus.FAILED)
    assert str(books.error(inside)) == "inference: the backend failed"
    books.run_to_end()
    assert {books.finished(id_).generated_tokens for id_ in (paused, waiting)} == {10}


def test_no_room_for_a_single_request_is_a_context_overflow() -> None:
    books = CheckedScheduler(n_batch=16)
    books.submit(A)
    books.step()
    books.plan()
    books.finish(StepStatus.NO_ROOM)
    error = books.error(0)
    assert isinstance(error, ContextOverflow)
    assert (error.resident_tokens, error.additional_tokens, error.n_ctx) == (16, 4, 100)


@pytest.mark.parametrize("reuse", Reuse)
def test_a_pool_smaller_than_the_books_say_still_serves_everybody(reuse: Reuse) -> None:
    books = CheckedScheduler(n_ctx=100, n_cells=60, n_batch=16, reuse=reuse)
    books.submit_all(A, B, C, D, max_tokens=39)
    too_long = books.submit([5] * 70)
    books.run_to_end()
    assert [books.finished(id_).generated_tokens for id_ in range(4)] == [39] * 4
    assert isinstance(books.error(too_long), ContextOverflow)


def test_when_the_engine_closes_everybody_gets_its_error() -> None:
    books = CheckedScheduler(n_slots=2)
    books.submit_all(A, B, C, D)
    books.plan()
    books.cancel(0)
    error = EngineClosed()
    assert books.fail_all(error) == [Failed(1, error), Failed(2, error), Failed(3, error)]
    assert books.fail_all(error) == []
