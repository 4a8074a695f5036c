"""What requests take over from each other, and what they wait for.

That it is the longest prefix anybody holds, `CheckedScheduler` checks with every plan.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from llamad_trio.scheduling.plan import Copy, StepStatus
from llamad_trio.scheduling.pool import Reuse
from llamad_trio.scheduling.run import Failed, Finished
from tests.scheduling.checked_scheduler import CheckedScheduler
from tests.scheduling.tracked import A, B, D, copies, sizes

SHARED = [1 + i * i % 11 for i in range(1000)]
"""What several requests have in common, beside 20 tokens of their own."""


def suffix(i: int) -> list[int]:
    return [1 + (i + j * j) % 12 for j in range(20)]


def n_prompt_tokens_computed(books: CheckedScheduler) -> int:
    return books.scheduler.stats().prefill_tokens


def cached(books: CheckedScheduler, *requests: int) -> list[int]:
    """How many tokens each request took over."""
    return [books.finished(request).cached_tokens for request in requests]


def test_a_retained_prefix_is_shared_with_whatever_sequence_the_next_request_gets() -> None:
    books = CheckedScheduler()
    first = books.submit(A, max_tokens=5)
    books.plan()
    seq = books.seq(first)
    books.finish()
    books.drain()
    conversation = [*books.requests[first].history, 7, 8]
    second = books.submit(conversation, max_tokens=5)
    plan = books.next_plan()
    assert copies(plan) == [Copy(seq, books.seq(second), 24)], "the last was never computed"
    (work,) = plan.work
    assert (work.pos, list(work.tokens)) == (24, conversation[24:])
    assert books.seq(second) != seq
    books.run_to_end()
    assert cached(books, second) == [24]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    books = CheckedScheduler()
    books.submit(A, max_tokens=5)
    books.drain()
    again = books.submit(A, max_tokens=5)
    (work,) = books.next_plan().work
    assert (work.pos, list(work.tokens), work.sample) == (19, [1], True)
    books.run_to_end()
    assert cached(books, again) == [19]


def test_what_a_cancelled_request_computed_is_retained() -> None:
    books = CheckedScheduler(n_batch=12)
    books.submit(A)
    books.step()
    books.cancel(0)
    assert books.retained == [A[:12]]
    again = books.submit(A)
    books.run_to_end()
    assert cached(books, again) == [12]


def test_what_was_reused_is_no_longer_so_when_the_copy_fails() -> None:
    books = CheckedScheduler()
    books.submit(A, max_tokens=5)
    books.drain()
    again = books.submit([*A, 7], max_tokens=5)
    (copy,) = copies(books.next_plan())
    books.finish(failing_copies={copy.dst})
    assert [(w.pos, len(w.tokens)) for w in books.next_plan().work] == [(0, 21)]
    books.run_to_end()
    assert cached(books, again) == [0]


def test_the_cache_of_a_request_that_computed_nonsense_is_not_reused() -> None:
    books = CheckedScheduler()
    books.submit(A)
    books.plan()
    books.finish(failing=[0])
    again = books.submit(A)
    books.run_to_end()
    assert cached(books, again) == [0]


# -- prompts with a common beginning --------------------------------------------------------


def eight(*, n_batch: int = 512, max_tokens: int = 5) -> CheckedScheduler:
    """Eight requests that have just arrived together."""
    books = CheckedScheduler(n_slots=8, n_ctx=4000, n_batch=n_batch)
    books.submit_all(*([*SHARED, *suffix(i)] for i in range(8)), max_tokens=max_tokens)
    return books


@pytest.mark.parametrize("n_batch", [64, 250, 512, 2048])
def test_a_prefix_of_requests_that_arrive_together_is_computed_once(n_batch: int) -> None:
    books = eight(n_batch=n_batch)
    books.run_to_end()
    assert n_prompt_tokens_computed(books) <= 1250
    assert books.scheduler.stats().cached_tokens >= 7 * 980


def test_followers_wait_in_their_slots_while_others_run() -> None:
    books = CheckedScheduler(n_slots=4, n_ctx=4000, n_batch=100)
    leader, follower, stranger = books.submit_all([*SHARED, 1], [*SHARED, 2], D)
    assert sizes(books.next_plan()) == {leader: 100}
    assert books.running == [leader, follower, stranger]
    books.finish()
    books.steps(9)
    assert sizes(books.next_plan()).keys() == {leader, follower, stranger}
    books.run_to_end()


def test_nobody_waits_for_a_few_tokens() -> None:
    books = CheckedScheduler(n_ctx=400)
    books.submit_all([*SHARED[:7], *A], [*SHARED[:7], *B])
    assert sizes(books.next_plan()) == {0: 27, 1: 27}


@pytest.mark.parametrize("leave", [CheckedScheduler.cancel, CheckedScheduler.pause])
def test_followers_go_on_from_what_a_leader_has_computed_who_is_cancelled_or_paused(
    leave: Callable[[CheckedScheduler, int], None],
) -> None:
    books = eight()
    books.step()
    leave(books, 0)
    assert [(c.n, c.dst) for c in copies(books.next_plan())] == [(512, books.seq(1))]
    books.finish()
    books.drain()
    assert all(books.finished(i) for i in range(1, 8))
    assert n_prompt_tokens_computed(books) <= 1250
    books.run_to_end()


def test_followers_go_on_when_the_leader_fails() -> None:
    books = eight()
    books.plan()
    books.finish(StepStatus.FAILED)
    assert [(w.request_id, w.pos) for w in books.next_plan().work] == [(1, 0)]
    books.run_to_end()
    assert n_prompt_tokens_computed(books) <= 1250
    assert [type(books.requests[i].outcome) for i in range(8)] == [Failed] + [Finished] * 7


def test_followers_go_on_when_the_copy_fails() -> None:
    books = eight()
    while not (planned := copies(books.next_plan())):
        books.finish()
    books.finish(failing_copies={copy.dst for copy in planned})
    books.run_to_end()
    assert cached(books, *range(8)) == [0] * 8


def test_followers_go_on_when_the_leader_is_preempted() -> None:
    books = CheckedScheduler(n_ctx=150, n_batch=32, n_slots=3)
    oldest = books.submit(D, max_tokens=100)
    books.step()
    leader, follower = books.submit_all([*SHARED[:80], 5], [*SHARED[:80], 6])
    books.step()
    assert books.running == [oldest, leader, follower]
    books.pause(leader)
    books.plan()
    books.finish(StepStatus.NO_ROOM)
    assert books.preempted == [leader]
    books.drain()
    assert books.finished(follower).generated_tokens == 10
    books.run_to_end()
    assert books.finished(leader).generated_tokens == 10


def test_nobody_waits_for_what_is_computed_but_cannot_be_copied() -> None:
    books = CheckedScheduler(n_ctx=400)
    leader, follower = books.submit([*A, 5], max_tokens=60), books.submit([*A, 6])
    books.step()
    (copy,) = copies(books.next_plan())
    books.finish(failing_copies={copy.dst})
    third = books.submit([*A, 7])
    assert sizes(books.next_plan()).keys() == {leader, follower}
    books.finish()
    books.steps(15)
    assert books.finished(third).generated_tokens == 10
    assert leader in books.running
    books.run_to_end()


def test_a_newer_request_is_never_waited_for() -> None:
    books = CheckedScheduler(n_ctx=3000, n_batch=64)
    older = books.submit([*SHARED, 1])
    books.pause(older)
    newer = books.submit([*SHARED, 2])
    books.steps(3)
    books.resume(older)
    plan = books.next_plan()
    assert [c.n for c in copies(plan)] == [192]
    assert sizes(plan) == {older: 64}
    assert books.running == [older, newer]
    books.run_to_end()


@pytest.mark.parametrize("is_resident", [False, True])
def test_a_shared_prefix_counts_once_at_admission(is_resident: bool) -> None:
    books = CheckedScheduler(n_ctx=150, n_batch=128)
    books.submit([*SHARED[:80], *suffix(0)[:10]], max_tokens=20)
    if is_resident:
        books.step()
    books.submit_all(*([*SHARED[:80], *suffix(i)[:10]] for i in (1, 2, 3)), max_tokens=1)
    books.plan()
    assert books.running == [0, 1, 2, 3]
    books.run_to_end()
    assert books.preempted == []
    assert n_prompt_tokens_computed(books) == 80 + 4 * 10 + 1  # and the one of `run_to_end`


def test_where_nothing_is_shared_every_prompt_counts_whole_at_admission() -> None:
    books = CheckedScheduler(n_ctx=150, n_batch=64, reuse=Reuse.NOTHING)
    books.submit_all(*([*SHARED[:80], *suffix(i)[:10]] for i in range(4)))
    books.plan()
    assert books.running == [0]


# -- sequences ------------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", [Reuse.WHOLE, Reuse.PREFIX])
@pytest.mark.parametrize("spare", [1, 3, 16])
@pytest.mark.parametrize("n_rounds", [30, pytest.param(150, marks=pytest.mark.slow)])
def test_many_rounds_of_conversations_stay_within_the_sequences_there_are(
    reuse: Reuse, spare: int, n_rounds: int
) -> None:
    random = Random(spare)
    books = CheckedScheduler(n_slots=3, n_seqs=3 + spare, n_ctx=300, reuse=reuse)
    conversations = [[*SHARED[:30], i] for i in range(1, 7)]
    for _ in range(n_rounds):
        turns = {}
        for i in random.sample(range(6), random.randint(1, 4)):
            if len(conversations[i]) > 200:
                conversations[i] = conversations[i][: random.randint(31, 100)]
            turns[i] = books.submit(conversations[i], max_tokens=random.randint(1, 12))
            if random.random() < 0.2:
                books.step()
                books.cancel(turns[i])
        books.drain()
        for i, request in turns.items():
            conversations[i] = [*books.requests[request].history, *suffix(i)[: 1 + i]]
    books.run_to_end()
    assert books.scheduler.stats().cached_tokens > n_prompt_tokens_computed(books) / 5


# -- models that cannot go back -------------------------------------------------------------


def whole(n_slots: int = 4, n_seqs: int = 12) -> CheckedScheduler:
    return CheckedScheduler(n_slots=n_slots, n_seqs=n_seqs, n_ctx=300, reuse=Reuse.WHOLE)


def test_a_state_is_gone_on_from_where_a_request_or_its_prompt_ended_and_nowhere_else() -> None:
    books = whole()
    first = books.submit(A, max_tokens=5)
    books.drain()
    assert sorted(map(len, books.retained)) == [20, 24]
    exact = books.submit([*books.requests[first].history, 7, 8])
    other, third, changed, same = books.submit_all([*A, 9, 9, 9], [*A, 8], [*A[:-1], 9, 9], A)
    books.run_to_end()
    assert cached(books, exact) == [24]
    assert cached(books, other, third) == [20, 20], "a checkpoint is not used up"
    assert cached(books, changed, same) == [0, 0], "the state after its last token is too late"


def test_a_state_that_cannot_be_cut_is_not_waited_for() -> None:
    books = whole()
    books.submit_all(*([*A, i] for i in range(3)))
    assert sizes(books.next_plan()) == {0: 21, 1: 21, 2: 21}


def test_a_checkpoint_that_cannot_be_copied_is_as_if_never_made() -> None:
    books = whole()
    books.submit(A, max_tokens=5)
    books.step()
    (copy,) = copies(books.next_plan())
    books.finish(failing_copies={copy.dst})
    assert books.retained == []
    books.run_to_end()


# -- holders --------------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", [Reuse.WHOLE, Reuse.PREFIX])
def test_what_the_step_in_flight_goes_on_from_can_be_held_if_it_can_be_cut(reuse: Reuse) -> None:
    books = CheckedScheduler(n_ctx=300, reuse=reuse)
    request = books.submit(A, max_tokens=50)
    books.steps(3)
    books.plan()
    tokens = books.requests[request].history[:-1]
    can_be_cut = reuse is Reuse.PREFIX
    assert books.hold("h", tokens) == can_be_cut, "when the copy is made, a state will be gone"
    books.finish()
    assert books.hold("h", tokens) == can_be_cut
    assert books.hold("h", books.requests[request].history[:-1])
    books.run_to_end()


def test_a_copy_to_hold_that_fails_takes_nothing_along_that_was_held_since() -> None:
    books = CheckedScheduler(n_ctx=300, n_seqs=7)
    books.submit(A, max_tokens=5)
    books.drain()
    books.submit(B, max_tokens=50)
    books.step()
    assert books.hold("h", A[:15])
    (copy,) = copies(books.next_plan())
    books.hold("h", B[:10])
    books.hold("h", B[:5])
    books.finish(failing_copies={copy.dst})
    books.step()
    assert books.hold("h", B[:5])
    books.run_to_end()
