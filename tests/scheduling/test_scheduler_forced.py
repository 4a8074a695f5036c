"""What the scheduler promises of tokens that a constraint forces, one promise at a time.

Every call is also checked by `CheckedScheduler`: that the text is what it would have been
alone, and that nothing is sampled before all that was forced has been computed.
"""

from __future__ import annotations

import pytest

from llamad_trio.scheduling.plan import Sampled, StepStatus
from llamad_trio.scheduling.pool import Reuse
from llamad_trio.scheduling.run import Finished, Piece
from tests.scheduling.checked_scheduler import CheckedScheduler, sizes
from tests.scheduling.fake_memory import (
    EndlessModel,
    ForcingModel,
    ForcingOnceModel,
    HashModel,
    ScriptModel,
    forcing,
)

A, B, C = ([i] * 20 for i in (1, 2, 3))
"""Prompts of 20 tokens that have no beginning in common."""


def said(*script: bytes | Sampled, **fields: object) -> tuple[list[str], Finished]:
    """What a reader gets of a model that says `script` and ends."""
    books = CheckedScheduler(model=ScriptModel(script))
    books.submit(A, **fields)  # type: ignore[arg-type]
    events = []
    while books.plan():
        events += books.finish()
    assert isinstance(events[-1], Finished)
    return [event.text for event in events if isinstance(event, Piece)], events[-1]


# -- the text -----------------------------------------------------------------------------


def test_forced_tokens_are_text_and_come_in_one_piece_with_the_sampled_one() -> None:
    pieces, finished = said(forcing(b"{", b'"a"', b":"), b"1", forcing(b" ", b"}"))
    assert pieces == ['{"a":', "1", " }"]
    assert finished.text == '{"a":1 }'
    assert finished.generated_tokens == 3 + 1 + 2 + 1, "the token that ended it counts"
    assert finished.finish_reason == "stop"


def test_a_character_may_be_sampled_by_half_and_forced_by_half() -> None:
    smile = "🙂".encode()
    assert said(forcing(smile[:1], smile[1:3]), smile[3:])[0] == ["🙂"]
    assert said(forcing(smile[:1], smile[1:], b"!"))[0] == ["🙂!"]


def test_a_stop_sequence_inside_forced_tokens_ends_the_text_before_it() -> None:
    pieces, finished = said(forcing(b"a", b" ST", b"OP b", b"c", b"d"), stop=["STOP"])
    assert pieces == ["a "]
    assert (finished.text, finished.stop_sequence) == ("a ", "STOP")
    assert finished.finish_reason == "stop"
    assert finished.generated_tokens == 3, "those after it were never generated"


def test_a_stop_sequence_may_begin_in_forced_tokens_and_end_in_a_sampled_one() -> None:
    _, finished = said(forcing(b"a", b"ST"), b"OP", stop=["STOP"])
    assert (finished.text, finished.stop_sequence) == ("a", "STOP")
    assert finished.generated_tokens == 3


def test_a_stop_sequence_completes_in_the_sampled_token_whatever_it_forces() -> None:
    _, finished = said(forcing(b"STOP", b"a"), stop=["STOP"])
    assert (finished.text, finished.generated_tokens) == ("", 1)


def test_the_limit_of_tokens_cuts_forced_ones() -> None:
    pieces, finished = said(forcing(b"a", b"b", b"c", b"d"), max_tokens=2)
    assert pieces == ["ab"]
    assert (finished.text, finished.generated_tokens) == ("ab", 2)
    assert finished.finish_reason == "length"


def test_the_limit_of_tokens_may_be_the_last_of_the_forced_ones() -> None:
    _, finished = said(forcing(b"a", b"b", b"c"), max_tokens=3)
    assert (finished.text, finished.finish_reason) == ("abc", "length")


@pytest.mark.parametrize("forced", [(), (b"b", b"c")])
def test_a_complete_text_ends_without_another_token(forced: tuple[bytes, ...]) -> None:
    _, finished = said(forcing(b"a", *forced, is_complete=True), b"never")
    assert finished.text == "a" + "bc"[: len(forced)]
    assert (finished.finish_reason, finished.stop_sequence) == ("stop", None)
    assert finished.generated_tokens == 1 + len(forced)


def test_a_text_that_is_complete_exactly_at_the_limit_was_not_cut_off() -> None:
    _, finished = said(forcing(b"a", b"b", b"c", is_complete=True), max_tokens=3)
    assert (finished.text, finished.finish_reason) == ("abc", "stop")
    _, finished = said(forcing(b"a", is_complete=True), max_tokens=1)
    assert (finished.text, finished.finish_reason) == ("a", "stop")


def test_a_text_that_the_limit_cuts_before_it_is_complete_was_cut_off() -> None:
    _, finished = said(forcing(b"a", b"b", b"c", is_complete=True), max_tokens=2)
    assert (finished.text, finished.finish_reason) == ("ab", "length")


def test_a_stop_sequence_before_the_completion_is_what_ended_it() -> None:
    _, finished = said(forcing(b"a", b"b", b"c", is_complete=True), stop=["b"])
    assert (finished.text, finished.stop_sequence) == ("a", "b")
    assert finished.generated_tokens == 2


def test_what_only_looked_like_a_stop_sequence_is_shown_when_the_text_is_complete() -> None:
    pieces, finished = said(forcing(b"a", b" ST", is_complete=True), stop=["STOP"])
    assert pieces == ["a ", "ST"]
    assert (finished.finish_reason, finished.stop_sequence) == ("stop", None)


def test_probabilities_are_told_in_the_order_of_the_tokens() -> None:
    books = CheckedScheduler(model=HashModel())
    request = books.submit(A, max_tokens=30, seed=1, n_logprobs=0)
    silent = books.submit(B, max_tokens=30, seed=1)
    books.run_to_end()
    finished = books.finished(request)
    assert len(finished.logprobs) == finished.generated_tokens > 5
    assert [told.token for told in finished.logprobs] == books.requests[request].history[20:]
    assert books.finished(silent).logprobs == ()


# -- the step -----------------------------------------------------------------------------


def forced_once(n: int, **fields: object) -> CheckedScheduler:
    """The request of seed 0 has `n` tokens forced after its first."""
    return CheckedScheduler(model=ForcingOnceModel(n), **{"n_ctx": 300, **fields})  # type: ignore[arg-type]


def test_forced_tokens_are_computed_together_and_one_is_sampled_after_the_last() -> None:
    books = forced_once(20)
    books.submit(A, max_tokens=60)
    books.step()
    assert books.requests[0].generated == 21
    plan = books.plan()
    assert plan is not None
    (work,) = plan.work
    assert (work.pos, len(work.tokens), work.sample) == (20, 21, True)
    books.finish()
    assert books.requests[0].generated == 22
    assert sizes(books.plan()) == {0: 1}


def test_more_forced_tokens_than_a_step_takes_are_spread_over_steps() -> None:
    books = forced_once(20, n_batch=8, n_slots=2)
    books.submit(A, max_tokens=60)
    books.steps(3)
    n_generated, planned = books.requests[0].generated, []
    for _ in range(3):
        plan = books.plan()
        assert plan is not None
        planned.append((len(plan.work[0].tokens), plan.work[0].sample))
        assert books.requests[0].generated == n_generated == 21, "sampled too early"
        books.finish()
    assert planned == [(8, False), (8, False), (5, True)]
    assert books.requests[0].generated == 22
    books.run_to_end()
    assert books.finished(0).generated_tokens == 60


def test_forced_tokens_come_before_prompts() -> None:
    books = forced_once(20, n_batch=12)
    forced = books.submit(A, max_tokens=60)
    books.steps(2)
    prompt = books.submit(B, seed=1)
    assert sizes(books.plan()) == {forced: 12}
    books.finish()
    assert sizes(books.plan()) == {forced: 9, prompt: 3}
    books.run_to_end()


def test_a_prompt_gets_what_forced_tokens_leave_of_the_steps_time() -> None:
    books = forced_once(20, n_batch=512, step_target_s=0.1)
    stream = books.submit(A, max_tokens=60)
    books.plan()
    books.finish(elapsed_s=0.020)  # 1 ms for each token of a prompt: 100 of them are a step
    prompt = books.submit([2] * 200, seed=1)
    assert sizes(books.plan()) == {stream: 1 + 20, prompt: 100 - 20}


def test_every_stream_has_its_one_token_before_the_oldest_has_its_forced_ones() -> None:
    books = CheckedScheduler(
        model=ScriptModel([forcing(b"a", *[b"b"] * 40)]), n_ctx=300, n_batch=66
    )
    first, second, third = (books.submit(prompt, max_tokens=50) for prompt in (A, B, C))
    books.step()
    assert sizes(books.plan()) == {first: 1 + 40, second: 1 + 23, third: 1}
    books.finish()
    assert sizes(books.plan()) == {second: 17, third: 40}
    books.run_to_end()


def test_the_oldest_goes_on_with_its_prompt_beside_streams_that_are_forced_all_the_time() -> None:
    model = ScriptModel([forcing(b"a", *[b"b"] * 20)] * 20)
    books = CheckedScheduler(model=model, n_ctx=400, n_batch=8)
    oldest, stream = books.submit(A, max_tokens=1), books.submit(B, max_tokens=200)
    books.pause(oldest)
    books.steps(4)
    books.resume(oldest)
    assert sizes(books.plan()) == {stream: 7, oldest: 1}
    books.run_to_end()


def test_forced_tokens_count_as_generated_ones() -> None:
    books = forced_once(20)
    books.submit(A, max_tokens=60)
    books.step()
    stats = books.scheduler.stats()
    assert (stats.slots["decode"], stats.slots["prefill"]) == (1, 0)
    books.step()
    stats = books.scheduler.stats()
    assert (stats.prefill_tokens, stats.decode_tokens) == (20, 21)


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
    assert sizes(books.plan()) == {oldest: 1 + 50}
    assert books.preempted == [newest]
    books.run_to_end()
    assert books.finished(newest).generated_tokens == 30


def test_forced_tokens_of_the_newest_take_what_room_there_is_and_go_on_later() -> None:
    books = forced_once(40, n_ctx=80, n_slots=2)
    oldest, newest = books.submit(A, max_tokens=5, seed=1), books.submit(B, max_tokens=56)
    books.step()
    assert sizes(books.plan()) == {oldest: 1, newest: 39}, "80 - 20 - 20 - 1"
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


def test_a_request_cancelled_while_its_forced_tokens_are_computed_gets_nothing_of_the_step() -> (
    None
):
    books = forced_once(20)
    books.submit(A, max_tokens=60)
    books.step()
    books.plan()
    books.cancel(0)
    assert books.finish() == []
    assert books.plan() is None
    books.run_to_end()


def test_a_request_paused_with_forced_tokens_pending_is_left_out_until_it_resumes() -> None:
    books = forced_once(20, n_batch=8, n_slots=2)
    paused = books.submit(A, max_tokens=60)
    books.steps(4)
    assert pending(books, paused) == 13
    other = books.submit(B, seed=1)
    books.pause(paused)
    assert sizes(books.plan()) == {other: 8}
    books.finish()
    assert books.scheduler.stats().slots["paused"] == 1
    books.steps(4)
    assert pending(books, paused) == 13
    books.resume(paused)
    assert sizes(books.plan()) == {paused: 7, other: 1}
    books.run_to_end()


@pytest.mark.parametrize("reuse", Reuse)
def test_an_aborted_step_of_forced_tokens_is_computed_again(reuse: Reuse) -> None:
    books = forced_once(20, reuse=reuse)
    books.submit(A, max_tokens=60)
    books.step()
    books.plan()
    books.finish(StepStatus.ABORTED)
    again = 21 if reuse is not Reuse.WHOLE else 41
    assert sizes(books.plan()) == {0: again}, "without rewinding, from the beginning"
    books.run_to_end()
    assert books.finished(0).generated_tokens == 60


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
