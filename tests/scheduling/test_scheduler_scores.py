"""Requests that score tokens: the rows they need, and what they take over.

Every call is also checked by `CheckedScheduler`: that there is one score for each target,
of the right context, and that a step asks for no more rows of logits than there are.
"""

from __future__ import annotations

import pytest

from llamad_trio.core.errors import InferenceError
from llamad_trio.scheduling.plan import StepPlan, StepStatus
from llamad_trio.scheduling.pool import Reuse
from tests.scheduling.checked_scheduler import CheckedScheduler
from tests.scheduling.fake_memory import score
from tests.scheduling.tracked import A, B, C, sizes

TEXT = [1 + i * i % 11 for i in range(60)]
"""A prompt in which positions are told apart."""


def rows(plan: StepPlan) -> dict[int, int]:
    """Rows of logits that a plan asks for, for each request."""
    return {work.request_id: work.n_outputs for work in plan.work}


def holding(prompt: list[int], *, reuse: Reuse = Reuse.PREFIX) -> CheckedScheduler:
    """Somebody holds `prompt`."""
    books = CheckedScheduler(n_ctx=300, reuse=reuse)
    books.submit(prompt, max_tokens=0, holder="h")
    books.drain()
    return books


# -- scores -------------------------------------------------------------------------------


def test_each_target_is_scored_after_its_own_token_in_order_and_nothing_is_sampled() -> None:
    books = CheckedScheduler()
    request = books.submit(TEXT[:20], max_tokens=0, targets=(7, 8, 9))
    plan = books.next_plan()
    assert plan.new_samplers == ()
    assert not any(work.sample for work in plan.work)
    books.finish()
    assert books.plan() is None
    finished = books.finished(request)
    assert finished.scores == (score(TEXT[:18], 7), score(TEXT[:19], 8), score(TEXT[:20], 9))
    assert (finished.text, finished.generated_tokens) == ("", 0)
    assert (finished.finish_reason, finished.logprobs) == ("length", ())


# -- rows ---------------------------------------------------------------------------------


def test_no_more_targets_are_scored_in_a_step_than_there_are_sequences() -> None:
    books = CheckedScheduler(n_slots=4, n_seqs=12)
    request = books.score(TEXT, 30)
    planned = []
    while plan := books.plan():
        (work,) = plan.work
        planned.append((work.pos, len(work.tokens), len(work.targets)))
        books.finish()
    assert planned == [(0, 42, 12), (42, 12, 12), (54, 6, 6)]
    assert len(books.finished(request).scores) == 30


def test_tokens_that_are_not_scored_after_need_no_rows() -> None:
    books = CheckedScheduler(n_slots=1, n_seqs=2, n_batch=50)
    books.score(TEXT, 3)
    for n_tokens, n_rows in ((50, 0), (9, 2), (1, 1)):
        plan = books.next_plan()
        assert (sizes(plan), rows(plan)) == ({0: n_tokens}, {0: n_rows})
        books.finish()


def test_streams_keep_their_rows_beside_one_who_scores() -> None:
    books = CheckedScheduler(n_slots=4, n_seqs=6, n_ctx=400, n_batch=512)
    first, second = books.submit(A, max_tokens=50), books.submit(B, max_tokens=50)
    books.step()
    scorer = books.score(TEXT[:20], 10)
    prompt = books.submit(C)
    for _ in range(2):
        assert rows(books.next_plan()) == {first: 1, second: 1, scorer: 3, prompt: 1}
        books.finish()
    books.run_to_end()


def test_the_oldest_who_scores_has_the_rows_that_nobody_needs() -> None:
    books = CheckedScheduler(n_slots=3, n_seqs=8, n_ctx=400, n_batch=512)
    first, second, third = (books.score([i, *TEXT[:20]], 4) for i in (1, 2, 3))
    assert rows(books.next_plan()) == {first: 4, second: 3, third: 1}
    books.finish()
    assert rows(books.next_plan()) == {second: 1, third: 3}
    books.run_to_end()


def test_where_nothing_is_reused_a_full_house_still_scores_a_target_a_step() -> None:
    books = CheckedScheduler(n_slots=2, n_seqs=2, n_ctx=200, reuse=Reuse.NOTHING)
    stream, scorer = books.submit(A, max_tokens=30), books.score(TEXT[:20], 3)
    for _ in range(3):
        assert rows(books.next_plan()) == {stream: 1, scorer: 1}
        books.finish()
    assert len(books.finished(scorer).scores) == 3
    books.run_to_end()


# -- reuse --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reuse", "n_held", "prompt", "n_targets", "n_cached"),
    [
        (Reuse.PREFIX, 40, [*TEXT[:40], 5, 6], 3, 39),
        (Reuse.PREFIX, 60, TEXT, 25, 35),
        (Reuse.PREFIX, 60, TEXT, 60, 0),  # logits are wanted of the very first
        (Reuse.WHOLE, 39, [*TEXT[:40], 5, 6], 3, 39),
        (Reuse.WHOLE, 39, [*TEXT[:41], 5, 6], 3, 39),
        (Reuse.WHOLE, 40, [*TEXT[:40], 5, 6], 3, 0),  # ends among what is scored
        (Reuse.NOTHING, 60, TEXT, 5, 0),
    ],
)
def test_who_scores_goes_on_from_what_is_held_up_to_its_first_scored_token(
    reuse: Reuse, n_held: int, prompt: list[int], n_targets: int, n_cached: int
) -> None:
    books = holding(TEXT[:n_held], reuse=reuse)
    held = books.retained
    for _ in range(2):
        request = books.score(prompt, n_targets)
        books.drain()
        assert books.finished(request).cached_tokens == n_cached
        assert books.retained == held, "and what was scored is not"
    books.run_to_end()


def test_one_who_scores_after_another_shares_the_prompt_while_that_runs() -> None:
    books = CheckedScheduler(n_ctx=300, n_batch=45)
    first = books.score([*TEXT[:50], 1, 2, 3, 4, 5], 6)
    second = books.score([*TEXT[:50], 6, 7, 8, 9, 10], 6)
    assert sizes(books.next_plan()) == {first: 45}, "the second waits for what they have in common"
    books.finish()
    books.drain()
    assert books.finished(second).cached_tokens == 45


@pytest.mark.parametrize("reuse", Reuse)
def test_what_was_scored_is_not_retained(reuse: Reuse) -> None:
    books = CheckedScheduler(n_ctx=300, reuse=reuse)
    books.score(TEXT, 5)
    books.drain()
    assert books.retained == []
    books.score(TEXT, 30)
    books.step()
    books.cancel(1)
    assert books.retained == []
    books.run_to_end()


# -- when things go wrong -------------------------------------------------------------------


@pytest.mark.parametrize("reuse", Reuse)
def test_who_is_preempted_while_it_scores_has_each_score_once(reuse: Reuse) -> None:
    books = CheckedScheduler(n_slots=2, n_seqs=4, n_ctx=300, reuse=reuse)
    other, scorer = books.submit(A, max_tokens=40), books.score(TEXT, 20)
    books.steps(5)
    books.plan()
    books.pause(scorer)
    while not books.preempted:
        books.finish(StepStatus.NO_ROOM)
        books.plan()
    assert books.preempted == [scorer]
    books.finish()
    books.resume(scorer)
    books.run_to_end()
    assert books.finished(other).generated_tokens == 40


@pytest.mark.parametrize("reuse", Reuse)
def test_an_aborted_step_of_scores_is_computed_again(reuse: Reuse) -> None:
    books = CheckedScheduler(n_slots=1, n_seqs=6, n_ctx=300, reuse=reuse)
    books.score(TEXT, 20)
    while books.plan():
        n_steps = books.scheduler.stats().steps
        books.finish(StepStatus.ABORTED if n_steps in (1, 4) else StepStatus.DONE)
    assert books.scheduler.stats().aborted_steps == 2
    books.run_to_end()


def test_logits_that_are_no_numbers_fail_only_who_scores_with_them() -> None:
    books = CheckedScheduler(n_ctx=300, n_batch=200)
    bad, good = books.score([1, *TEXT], 5), books.score([2, *TEXT], 5)
    assert min(rows(books.next_plan()).values()) > 0
    books.finish(failing=[bad])
    assert isinstance(books.error(bad), InferenceError)
    books.run_to_end()
    assert len(books.finished(good).scores) == 5
