"""Tokens that a constraint forces: how they are computed, beside what, and what becomes of them.

Every call is also checked by `CheckedScheduler`: that the text is what it would have been
alone, and that nothing is sampled before all that was forced has been computed.
"""

from __future__ import annotations

import pytest

from llamad_trio.scheduling.plan import StepStatus
from llamad_trio.scheduling.pool import Reuse
from tests.scheduling.checked_scheduler import CheckedScheduler
from tests.scheduling.fake_memory import (
    EndlessModel,
    ForcingModel,
    ForcingOnceModel,
    ScriptModel,
    forcing,
)
from tests.scheduling.tracked import A, B, C, sizes

# -- the step -----------------------------------------------------------------------------


def forced_once(n: int, **fields: object) -> CheckedScheduler:
    """The request of seed 0 has `n` tokens forced after its first."""
    return CheckedScheduler(model=ForcingOnceModel(n), **{"n_ctx": 300, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n_batch", "planned"),
    [(64, [(20, 21, True)]), (8, [(20, 8, False), (28, 8, False), (36, 5, True)])],
)
def test_forced_tokens_are_computed_together_and_one_is_sampled_after_the_last(
    n_batch: int, planned: list[tuple[int, int, bool]]
) -> None:
    books = forced_once(20, n_batch=n_batch, n_slots=2)
    books.submit(A, max_tokens=60)
    while not books.requests[0].generated:
        books.step()
    for expected in planned:
        assert books.requests[0].generated == 21, "sampled too early"
        (work,) = books.next_plan().work
        assert (work.pos, len(work.tokens), work.sample) == expected
        books.finish()
    assert books.requests[0].generated == 22
    assert sizes(books.next_plan()) == {0: 1}
    books.run_to_end()
    assert books.finished(0).generated_tokens == 60


def test_forced_tokens_come_before_prompts() -> None:
    books = forced_once(20, n_batch=12)
    forced = books.submit(A, max_tokens=60)
    books.steps(2)
    prompt = books.submit(B, seed=1)
    assert sizes(books.next_plan()) == {forced: 12}
    books.finish()
    assert sizes(books.next_plan()) == {forced: 9, prompt: 3}
    books.run_to_end()


def test_a_prompt_gets_what_forced_tokens_leave_of_the_steps_time() -> None:
    books = forced_once(20, n_batch=512, step_target_s=0.1)
    stream = books.submit(A, max_tokens=60)
    books.plan()
    books.finish(elapsed_s=0.020)  # 1 ms for each token of a prompt: 100 of them are a step
    prompt = books.submit([2] * 200, seed=1)
    assert sizes(books.next_plan()) == {stream: 1 + 20, prompt: 100 - 20}


def test_every_stream_has_its_one_token_before_the_oldest_has_its_forced_ones() -> None:
    books = CheckedScheduler(
        model=ScriptModel([forcing(b"a", *[b"b"] * 40)]), n_ctx=300, n_batch=66
    )
    first, second, third = books.submit_all(A, B, C, max_tokens=50)
    books.step()
    assert sizes(books.next_plan()) == {first: 1 + 40, second: 1 + 23, third: 1}
    books.finish()
    assert sizes(books.next_plan()) == {second: 17, third: 40}
    books.run_to_end()


def test_the_oldest_goes_on_with_its_prompt_beside_streams_that_are_forced_all_the_time() -> None:
    model = ScriptModel([forcing(b"a", *[b"b"] * 20)] * 20)
    books = CheckedScheduler(model=model, n_ctx=400, n_batch=8)
    oldest, stream = books.submit(A, max_tokens=1), books.submit(B, max_tokens=200)
    books.pause(oldest)
    books.steps(4)
    books.resume(oldest)
    assert sizes(books.next_plan()) == {stream: 7, oldest: 1}
    books.run_to_end()


# -- while forced tokens are pending --------------------------------------------------------


def pending(books: CheckedScheduler, request: int) -> int:
    """Tokens that are known and not computed."""
    return len(books.requests[request].history) - len(books.contents()[books.seq(request)])


def test_forced_tokens_of_an_older_request_preempt_the_newest_when_the_pool_runs_short() -> None:
    books = forced_once(50, n_ctx=105, n_slots=2)
    oldest, newest = books.submit(A, max_tokens=60), books.submit(B, max_tokens=30, seed=1)
    books.pause(oldest)
    books.steps(20)
    books.resume(oldest)
    books.step()
    assert books.preempted == []
    assert sizes(books.next_plan()) == {oldest: 1 + 50}
    assert books.preempted == [newest]
    books.run_to_end()
    assert books.finished(newest).generated_tokens == 30


def test_forced_tokens_of_the_newest_take_what_room_there_is_and_go_on_later() -> None:
    books = forced_once(40, n_ctx=80, n_slots=2)
    oldest, newest = books.submit(A, max_tokens=5, seed=1), books.submit(B, max_tokens=56)
    books.step()
    assert sizes(books.next_plan()) == {oldest: 1, newest: 39}, "80 - 20 - 20 - 1"
    books.run_to_end()
    assert books.finished(newest).generated_tokens == 56


@pytest.mark.parametrize("reuse", Reuse)
@pytest.mark.parametrize("n_steps", [1, 2])
def test_a_request_preempted_with_forced_tokens_pending_goes_on_where_it_was(
    reuse: Reuse, n_steps: int
) -> None:
    books = forced_once(20, n_batch=20, n_slots=2, reuse=reuse)
    preempted, other = books.submit(A, max_tokens=60), books.submit(B, max_tokens=60, seed=1)
    while not books.requests[preempted].generated:
        books.step()
    books.steps(n_steps - 1)
    assert pending(books, preempted) == {1: 21, 2: 21 - 20}[n_steps]
    n_generated = books.requests[preempted].generated
    books.pause(preempted)
    while not books.preempted:  # a retained checkpoint goes first
        books.plan()
        books.finish(StepStatus.NO_ROOM)
    assert books.preempted == [preempted]
    assert books.requests[preempted].generated == n_generated == 21
    books.resume(preempted)
    books.steps(3)
    assert books.running == [other], "nobody comes back before the other one has ended"
    books.run_to_end()
    assert books.finished(preempted).generated_tokens == 60


def test_a_request_cancelled_with_forced_tokens_pending_is_not_planned_again() -> None:
    books = forced_once(20, n_batch=8)
    books.submit(A, max_tokens=60)
    books.steps(4)
    assert pending(books, 0) == 13
    books.cancel(0)
    assert books.plan() is None
    assert books.retained == [books.requests[0].history[:28]], "only what was computed"
    again = books.submit([*books.requests[0].history, 7], max_tokens=1)
    books.run_to_end()
    assert books.finished(again).cached_tokens == 28


def test_a_request_paused_with_forced_tokens_pending_is_left_out_until_it_resumes() -> None:
    books = forced_once(20, n_batch=8, n_slots=2)
    paused = books.submit(A, max_tokens=60)
    books.steps(4)
    assert pending(books, paused) == 13
    other = books.submit(B, seed=1)
    books.pause(paused)
    assert sizes(books.next_plan()) == {other: 8}
    books.finish()
    assert books.scheduler.stats().slots["paused"] == 1
    books.steps(4)
    assert pending(books, paused) == 13
    books.resume(paused)
    assert sizes(books.next_plan()) == {paused: 7, other: 1}
    books.run_to_end()


def test_what_was_forced_after_the_end_of_the_text_is_not_computed() -> None:
    script = [forcing(b"a", b"b", b"STOP", b"c", b"d")]
    books = CheckedScheduler(model=ScriptModel(script))
    books.submit(A, stop=["STOP"])
    books.step()
    assert books.plan() is None
    assert books.retained == [A]


@pytest.mark.parametrize("reuse", Reuse)
def test_text_under_constraints_is_what_it_would_have_been_alone(reuse: Reuse) -> None:
    books = CheckedScheduler(
        n_slots=3, n_ctx=75, n_batch=11, reuse=reuse, model=ForcingModel(EndlessModel())
    )
    for seed in range(12):
        books.submit([*A[:5], *B[: 3 + seed % 4]], max_tokens=60, seed=seed, stop=["ab\n"])
    for i in range(60):
        if books.plan():
            books.finish(StepStatus.ABORTED if i % 7 == 6 else StepStatus.DONE)
    books.run_to_end()
    assert books.preempted != []
