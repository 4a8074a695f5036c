"""What the scheduler promises, one promise at a time.

Every call is also checked by `CheckedScheduler`; see `test_scheduler_machine` for all the
promises at once.
"""

from __future__ import annotations

from random import Random

import pytest

from llamad_trio.core.errors import ContextOverflow, EngineClosed, InferenceError
from llamad_trio.scheduling.plan import Copy, StepPlan, StepStatus
from llamad_trio.scheduling.pool import Reuse
from llamad_trio.scheduling.run import Failed, Finished, Piece
from tests.scheduling.checked_scheduler import CheckedScheduler
from tests.scheduling.fake_memory import HashModel, ScriptModel

A, B, C, D = ([i] * 20 for i in (1, 2, 3, 4))
"""Prompts of 20 tokens that have no beginning in common."""

# -- admission ----------------------------------------------------------------------------


def test_admission_is_optimistic_about_max_tokens() -> None:
    books = CheckedScheduler(n_ctx=100)
    first, second = books.submit(A, max_tokens=80), books.submit(B, max_tokens=80)
    books.plan()
    assert books.running == [first, second]


def test_admission_asks_for_a_small_headroom_beside_the_running() -> None:
    books = CheckedScheduler(n_ctx=100)
    books.submit([1] * 48, max_tokens=50)
    books.submit(B, max_tokens=40)
    books.plan()
    assert books.running == [0, 1], "48 + 20 + 32 is exactly 100"

    books = CheckedScheduler(n_ctx=100)
    books.submit([1] * 49, max_tokens=50)
    books.submit(B, max_tokens=40)
    books.plan()
    assert books.running == [0]


def test_headroom_is_no_more_than_the_request_can_use() -> None:
    books = CheckedScheduler(n_ctx=64)
    books.submit(A, max_tokens=40)
    books.submit(B, max_tokens=24)
    books.plan()
    assert books.running == [0, 1], "20 + 20 + 24 is exactly 64"


def test_what_was_admitted_counts_whole_before_its_prompt_is_computed() -> None:
    books = CheckedScheduler(n_ctx=100, n_batch=4)
    books.submit([1] * 60, max_tokens=40)
    books.submit([2] * 60, max_tokens=40)
    books.step()
    books.plan()
    assert books.running == [0], "only 8 tokens are resident, but 60 will be"


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
    paused, other = books.submit(A), books.submit(B)
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
    books.submit([1] * 39, max_tokens=1)
    books.submit([2] * 39, max_tokens=1)
    books.drain()
    assert [books.finished(id_).generated_tokens for id_ in (0, 1)] == [1, 1]


def test_requests_must_be_new_and_fit_an_empty_pool() -> None:
    books = CheckedScheduler(n_ctx=30)
    with pytest.raises(AssertionError):
        books.submit(A, max_tokens=11)
    with pytest.raises(AssertionError):
        books.submit([], max_tokens=1)
    with pytest.raises(AssertionError):
        books.submit(A, max_tokens=-1)
    books = CheckedScheduler()
    books.submit(A, request_id=1)
    with pytest.raises(AssertionError):
        books.submit(A, request_id=1)


# -- when the pool runs short -------------------------------------------------------------


@pytest.mark.parametrize("n_ctx", [100, 101, 102])
def test_the_newest_is_preempted_first(n_ctx: int) -> None:
    books = CheckedScheduler(n_ctx=n_ctx)
    for prompt in (A, B, C):
        books.submit(prompt, max_tokens=80)
    books.step()
    assert books.running == [0, 1, 2]
    books.steps(20)
    assert books.preempted == [2]
    books.steps(25)
    assert books.preempted == [2, 1], "which had grown until nothing was left for itself"
    books.run_to_end()


def test_paused_ones_are_preempted_first_even_the_oldest() -> None:
    books = CheckedScheduler(n_ctx=100)
    for prompt in (A, B, C):
        books.submit(prompt, max_tokens=80)
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


def test_retained_prefixes_go_before_anyone_is_preempted_the_least_recently_used_first() -> None:
    books = CheckedScheduler(n_ctx=100)
    longer = [*A, 5]
    books.submit(longer, max_tokens=1)
    books.submit(B, max_tokens=1)
    books.drain()
    books.submit(A, max_tokens=1)  # makes use of the first: now B is the older one
    books.drain()
    first, second = books.submit(C, max_tokens=50), books.submit(D, max_tokens=50)
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


def test_the_oldest_gets_its_cells_although_newer_ones_decode() -> None:
    books = CheckedScheduler(n_ctx=100, n_batch=4, n_slots=3)
    oldest = books.submit([1] * 30, max_tokens=70)
    books.submit(B, max_tokens=80)
    books.step()
    books.pause(oldest)
    books.steps(90)
    books.resume(oldest)
    books.run_to_end()
    assert books.finished(oldest).generated_tokens == 70


def test_a_preempted_request_goes_on_where_it_was() -> None:
    books = CheckedScheduler(n_ctx=60, n_slots=2)
    for seed in range(6):
        books.submit([1 + seed, 2, 3], max_tokens=57, seed=seed)
    books.run_to_end()
    assert books.preempted != []
    assert [books.finished(id_).generated_tokens for id_ in range(6)] == [57] * 6


def test_no_token_is_sampled_twice_for_a_preempted_request() -> None:
    books = CheckedScheduler(n_ctx=80, n_slots=2)
    books.submit(A, max_tokens=60)
    preempted = books.submit(B, max_tokens=60)
    books.steps(25)
    assert books.preempted == [preempted]
    n_generated = books.requests[preempted].generated
    books.run_to_end()
    assert books.finished(preempted).generated_tokens == 60
    assert 0 < n_generated < 60


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


# -- prefixes -----------------------------------------------------------------------------


def spent(books: CheckedScheduler) -> int:
    """Prompt tokens computed so far."""
    return books.scheduler.stats().prefill_tokens


def copies(plan: StepPlan | None) -> list[Copy]:
    """The copies a plan asks for."""
    assert plan is not None
    return [operation for operation in plan.memory if isinstance(operation, Copy)]


def test_a_retained_prefix_is_shared_with_whatever_sequence_the_next_request_gets() -> None:
    books = CheckedScheduler()
    first = books.submit(A, max_tokens=5)
    books.plan()
    seq = books.seq(first)
    books.finish()
    books.drain()
    conversation = [*books.requests[first].history, 7, 8]
    second = books.submit(conversation, max_tokens=5)
    plan = books.plan()
    assert plan is not None
    assert copies(plan) == [Copy(seq, books.seq(second), 24)], "the last was never computed"
    (work,) = plan.work
    assert (work.pos, list(work.tokens)) == (24, conversation[24:])
    assert books.seq(second) != seq
    books.run_to_end()
    assert books.finished(second).cached_tokens == 24


def test_a_prefix_is_taken_from_a_running_request_too() -> None:
    books = CheckedScheduler(n_ctx=200)
    running = books.submit(A, max_tokens=60)
    books.steps(10)
    branch = books.submit([*books.requests[running].history[:25], 9], max_tokens=5)
    assert copies(books.plan()) == [Copy(books.seq(running), books.seq(branch), 25)]
    assert books.running == [running, branch]
    books.run_to_end()
    assert books.finished(branch).cached_tokens == 25


def test_the_longest_of_several_prefixes_is_taken() -> None:
    books = CheckedScheduler(n_ctx=400)
    for n in (5, 20, 12):
        books.submit([*A[:5], *B[:n], 9], max_tokens=1)
        books.drain()
    request = books.submit([*A[:5], *B, 8], max_tokens=1)
    books.drain()
    assert books.finished(request).cached_tokens == 25


def test_a_continuation_takes_its_predecessor_over_without_a_duplicate() -> None:
    books = CheckedScheduler(n_ctx=400)
    tokens = list(A)
    for _ in range(5):
        request = books.submit(tokens, max_tokens=10)
        books.drain()
        tokens = [*books.requests[request].history, 7, 8]
        assert books.retained == [tokens[:-3]]
    assert books.finished(request).cached_tokens == 20 + 4 * 12 - 3


def test_a_branch_leaves_the_tail_of_the_other_branch_retained() -> None:
    books = CheckedScheduler(n_slots=1)
    books.submit([*A, 2, 2, 2], max_tokens=1)
    books.submit([*A, 3, 3, 3], max_tokens=1)
    books.drain()
    assert books.retained == [[*A, 2, 2, 2], [*A, 3, 3, 3]]
    assert books.scheduler.stats().kv_retained_tokens == 20 + 3 + 3
    back = books.submit([*A, 2, 2, 2, 4], max_tokens=1)
    books.drain()
    assert books.finished(back).cached_tokens == 23


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    books = CheckedScheduler()
    books.submit(A, max_tokens=5)
    books.drain()
    again = books.submit(A, max_tokens=5)
    plan = books.plan()
    assert plan is not None
    (work,) = plan.work
    assert (work.pos, list(work.tokens), work.sample) == (19, [1], True)
    books.run_to_end()
    assert books.finished(again).cached_tokens == 19


def test_a_long_retained_prefix_is_not_spoiled_for_a_few_shared_tokens() -> None:
    books = CheckedScheduler(n_slots=2)
    books.submit([5, *A, *B], max_tokens=1)
    books.drain()
    books.submit([5, *C], max_tokens=1)
    books.drain()
    assert books.retained == [[5, *A, *B], [5, *C]]


def test_what_a_cancelled_request_computed_is_retained() -> None:
    books = CheckedScheduler(n_batch=12)
    books.submit(A)
    books.step()
    books.cancel(0)
    assert books.retained == [A[:12]]
    again = books.submit(A)
    books.run_to_end()
    assert books.finished(again).cached_tokens == 12


def test_what_was_reused_is_no_longer_so_when_the_copy_fails() -> None:
    books = CheckedScheduler()
    books.submit(A, max_tokens=5)
    books.drain()
    again = books.submit([*A, 7], max_tokens=5)
    (copy,) = copies(books.plan())
    books.finish(failing_copies={copy.dst})
    plan = books.plan()
    assert plan is not None
    assert [(w.pos, len(w.tokens)) for w in plan.work] == [(0, 21)]
    books.run_to_end()
    assert books.finished(again).cached_tokens == 0


def test_a_session_keeps_its_prefix_in_preference_to_others() -> None:
    books = CheckedScheduler(n_ctx=100)
    books.submit(A, max_tokens=1, session="s")
    books.submit(B, max_tokens=1)
    books.submit(C, max_tokens=1)
    books.drain()
    books.submit([4] * 60, max_tokens=30)
    books.step()
    assert books.retained == [A, C], "the oldest is of a session"
    books.step()
    assert books.retained == [A]
    books.steps(18)
    assert books.retained == [A]
    books.run_to_end()


def test_even_a_session_gives_way_to_what_a_running_request_needs() -> None:
    books = CheckedScheduler(n_ctx=100)
    books.submit(A, max_tokens=1, session="s")
    books.drain()
    books.submit([4] * 60, max_tokens=40)
    books.drain()
    assert A not in books.retained
    assert books.preempted == []


def test_without_reuse_nothing_stays_in_the_pool_and_nothing_is_copied() -> None:
    books = CheckedScheduler(reuse=Reuse.NOTHING, n_seqs=4)
    running = books.submit(A, max_tokens=30)
    books.step()
    again = books.submit(A)
    assert copies(books.plan()) == []
    books.run_to_end()
    assert books.finished(running).cached_tokens == books.finished(again).cached_tokens == 0
    assert books.retained == []


def test_the_cache_of_a_request_that_computed_nonsense_is_not_reused() -> None:
    books = CheckedScheduler()
    books.submit(A)
    books.plan()
    books.finish(failing=[0])
    again = books.submit(A)
    books.run_to_end()
    assert books.finished(again).cached_tokens == 0


# -- prompts with a common beginning --------------------------------------------------------

SHARED = [1 + i * i % 11 for i in range(1000)]
"""What eight requests have in common, beside 20 tokens of their own."""


def own(i: int) -> list[int]:
    return [1 + (i + j * j) % 12 for j in range(20)]


def eight(*, n_batch: int = 512, max_tokens: int = 5) -> CheckedScheduler:
    """Eight requests that have just arrived together."""
    books = CheckedScheduler(n_slots=8, n_ctx=4000, n_batch=n_batch)
    for i in range(8):
        books.submit([*SHARED, *own(i)], max_tokens=max_tokens)
    return books


@pytest.mark.parametrize("n_batch", [64, 250, 512, 2048])
def test_a_prefix_of_requests_that_arrive_together_is_computed_once(n_batch: int) -> None:
    books = eight(n_batch=n_batch)
    books.run_to_end()
    assert spent(books) <= 1250
    assert books.scheduler.stats().cached_tokens >= 7 * 980


def test_followers_wait_in_their_slots_while_others_run() -> None:
    books = CheckedScheduler(n_slots=4, n_ctx=4000, n_batch=100)
    leader, follower = books.submit([*SHARED, 1]), books.submit([*SHARED, 2])
    stranger = books.submit(D)
    plan = books.plan()
    assert plan is not None
    assert [w.request_id for w in plan.work] == [leader]
    assert books.running == [leader, follower, stranger]
    books.finish()
    books.steps(9)
    plan = books.plan()
    assert plan is not None
    assert {w.request_id for w in plan.work} == {leader, follower, stranger}
    books.run_to_end()


def test_nobody_waits_for_a_few_tokens() -> None:
    books = CheckedScheduler(n_ctx=400)
    books.submit([*SHARED[:7], *A])
    books.submit([*SHARED[:7], *B])
    plan = books.plan()
    assert plan is not None
    assert [len(w.tokens) for w in plan.work] == [27, 27]


def test_followers_go_on_when_the_leader_is_cancelled() -> None:
    books = eight()
    books.step()
    books.cancel(0)
    plan = books.plan()
    assert [(c.n, c.dst) for c in copies(plan)] == [(512, books.seq(1))]
    books.run_to_end()
    assert spent(books) <= 1250


def test_followers_go_on_when_the_leader_fails() -> None:
    books = eight()
    books.plan()
    books.finish(StepStatus.FAILED)
    plan = books.plan()
    assert plan is not None
    assert [(w.request_id, w.pos) for w in plan.work] == [(1, 0)]
    books.run_to_end()
    assert spent(books) <= 1250
    assert [type(books.requests[i].outcome) for i in range(8)] == [Failed] + [Finished] * 7


def test_followers_go_on_from_what_a_paused_leader_has_computed() -> None:
    books = eight()
    books.step()
    books.pause(0)
    assert [(c.n, c.dst) for c in copies(books.plan())] == [(512, books.seq(1))]
    books.finish()
    books.drain()
    assert all(books.finished(i) for i in range(1, 8))
    books.run_to_end()


def test_followers_go_on_when_the_leader_is_preempted() -> None:
    books = CheckedScheduler(n_ctx=150, n_batch=32, n_slots=3)
    oldest = books.submit(D, max_tokens=100)
    books.step()
    prompt = SHARED[:80]
    leader, follower = books.submit([*prompt, 5]), books.submit([*prompt, 6])
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


def test_followers_go_on_when_the_copy_fails() -> None:
    books = eight()
    while not (planned := copies(books.plan())):
        books.finish()
    books.finish(failing_copies={copy.dst for copy in planned})
    books.run_to_end()
    assert [books.finished(i).cached_tokens for i in range(8)] == [0] * 8


def test_nobody_waits_for_what_is_computed_but_cannot_be_copied() -> None:
    books = CheckedScheduler(n_ctx=400)
    leader, follower = books.submit([*A, 5], max_tokens=60), books.submit([*A, 6])
    books.step()
    (copy,) = copies(books.plan())
    books.finish(failing_copies={copy.dst})
    third = books.submit([*A, 7])
    plan = books.plan()
    assert plan is not None
    assert [w.request_id for w in plan.work] == [leader, follower]
    books.finish()
    books.steps(15)
    assert books.finished(third).generated_tokens == 10
    assert leader in books.running
    books.run_to_end()


def test_a_paused_request_that_several_count_on_makes_way_without_harm() -> None:
    books = CheckedScheduler(n_ctx=66, n_slots=3, n_batch=16, reuse=Reuse.WHOLE)
    oldest = books.submit(D, max_tokens=4)
    books.pause(oldest)
    paused = books.submit(A[:10], max_tokens=30)
    books.steps(3)
    books.pause(paused)
    books.resume(oldest)
    tokens = [*books.requests[paused].history[:-1], 9, 9, 9, 9, 9]
    for _ in range(3):
        books.submit(tokens, max_tokens=15)
    books.run_to_end()
    assert all(books.finished(i).generated_tokens for i in range(5))


def test_a_newer_request_is_never_waited_for() -> None:
    books = CheckedScheduler(n_ctx=3000, n_batch=64)
    older = books.submit([*SHARED, 1])
    books.pause(older)
    newer = books.submit([*SHARED, 2])
    books.steps(3)
    books.resume(older)
    plan = books.plan()
    assert plan is not None
    assert [c.n for c in copies(plan)] == [192]
    assert [(w.request_id, len(w.tokens)) for w in plan.work] == [(older, 64)]
    assert books.running == [older, newer]
    books.run_to_end()


def test_a_shared_prefix_counts_once_at_admission() -> None:
    books = CheckedScheduler(n_ctx=150, n_batch=64)
    for i in range(4):
        books.submit([*SHARED[:80], *own(i)[:10]], max_tokens=7)
    books.plan()
    assert books.running == [0, 1, 2, 3]
    books.finish()
    books.drain()
    assert books.preempted == []
    assert spent(books) == 80 + 4 * 10


def test_a_resident_prefix_counts_once_at_admission() -> None:
    books = CheckedScheduler(n_ctx=150, n_batch=128)
    books.submit([*SHARED[:80], *own(0)[:10]], max_tokens=20)
    books.step()
    for i in (1, 2, 3):
        books.submit([*SHARED[:80], *own(i)[:10]], max_tokens=1)
    books.step()
    assert spent(books) == 80 + 4 * 10
    books.run_to_end()
    assert books.preempted == []


def test_where_nothing_is_shared_every_prompt_counts_whole_at_admission() -> None:
    books = CheckedScheduler(n_ctx=150, n_batch=64, reuse=Reuse.NOTHING)
    for i in range(4):
        books.submit([*SHARED[:80], *own(i)[:10]], max_tokens=7)
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
            request = books.submit(conversations[i], max_tokens=random.randint(1, 12))
            turns[i] = request
            if random.random() < 0.2:
                books.step()
                books.cancel(request)
        books.drain()
        for i, request in turns.items():
            conversations[i] = [*books.requests[request].history, *own(i)[: 1 + i]]
    books.run_to_end()
    pool = books.pool
    assert len(pool._free) + len(books.retained) == books.n_seqs
    assert books.scheduler.stats().cached_tokens > spent(books) / 5


def test_without_a_free_sequence_the_least_wanted_prefix_goes() -> None:
    books = CheckedScheduler(n_slots=1, n_seqs=2, n_ctx=200)
    for prompt in (A, B, C):
        books.submit(prompt, max_tokens=1)
        books.drain()
    assert books.retained == [B, C]


# -- models that cannot go back -------------------------------------------------------------


def whole(n_seqs: int | None = None) -> CheckedScheduler:
    return CheckedScheduler(n_ctx=300, n_seqs=n_seqs, reuse=Reuse.WHOLE)


def test_an_exact_continuation_goes_on_from_where_a_request_ended() -> None:
    books = whole()
    first = books.submit(A, max_tokens=5)
    books.drain()
    second = books.submit([*books.requests[first].history, 7, 8])
    books.run_to_end()
    assert books.finished(second).cached_tokens == 24


def test_another_answer_to_the_same_conversation_goes_on_from_the_prompts_end() -> None:
    books = whole()
    books.submit(A, max_tokens=5)
    books.drain()
    assert sorted(map(len, books.retained)) == [20, 24]
    other = books.submit([*A, 9, 9, 9])
    third = books.submit([*A, 8])
    books.run_to_end()
    assert books.finished(other).cached_tokens == 20
    assert books.finished(third).cached_tokens == 20, "a checkpoint is not used up"


def test_the_checkpoint_of_a_running_request_can_be_gone_on_from() -> None:
    books = whole()
    books.submit(A, max_tokens=50)
    books.steps(5)
    branch = books.submit([*A, 9])
    books.step()
    assert books.running == [0, branch]
    books.run_to_end()
    assert books.finished(branch).cached_tokens == 20


def test_a_changed_prompt_is_computed_from_its_beginning() -> None:
    books = whole()
    books.submit(A, max_tokens=5)
    books.drain()
    changed, same = books.submit([*A[:-1], 9, 9]), books.submit(A)
    books.run_to_end()
    assert books.finished(changed).cached_tokens == 0
    assert books.finished(same).cached_tokens == 0, "the state after its last token is too late"


def test_a_state_that_cannot_be_cut_is_not_waited_for() -> None:
    books = whole()
    for i in range(3):
        books.submit([*A, i])
    plan = books.plan()
    assert plan is not None
    assert [(w.request_id, w.pos, len(w.tokens)) for w in plan.work] == [
        (0, 0, 21),
        (1, 0, 21),
        (2, 0, 21),
    ]


def test_a_checkpoint_takes_the_sequence_of_the_least_wanted_prefix() -> None:
    books = CheckedScheduler(n_slots=1, n_seqs=2, n_ctx=300, reuse=Reuse.WHOLE)
    books.submit(A, max_tokens=5)
    books.submit(B, max_tokens=50)
    books.steps(10)
    assert books.retained == [B]
    books.run_to_end()


def test_a_short_prompt_is_not_worth_a_checkpoint() -> None:
    books = whole()
    books.submit(A[:15], max_tokens=5)
    books.drain()
    assert [len(tokens) for tokens in books.retained] == [19]


def test_a_checkpoint_that_cannot_be_copied_is_as_if_never_made() -> None:
    books = whole()
    books.submit(A, max_tokens=5)
    books.step()
    (copy,) = copies(books.plan())
    books.finish(failing_copies={copy.dst})
    assert books.retained == []
    books.run_to_end()


def test_a_state_that_the_step_in_flight_goes_on_from_cannot_be_held() -> None:
    books = whole()
    request = books.submit(A, max_tokens=50)
    books.steps(3)
    books.plan()
    tokens = books.requests[request].history[:-1]
    assert not books.hold("h", tokens), "when the copy is made, it will be gone"
    books.finish()
    assert not books.hold("h", tokens)
    assert books.hold("h", books.requests[request].history[:-1])
    books.run_to_end()


def test_a_copy_to_hold_that_fails_takes_nothing_along_that_was_held_since() -> None:
    books = CheckedScheduler(n_ctx=300, n_seqs=7)
    books.submit(A, max_tokens=5)
    books.drain()
    books.submit(B, max_tokens=50)
    books.step()
    assert books.hold("h", A[:15])
    (copy,) = copies(books.plan())
    books.hold("h", B[:10])
    books.hold("h", B[:5])
    books.finish(failing_copies={copy.dst})
    books.step()
    assert books.hold("h", B[:5])
    books.run_to_end()


def test_what_the_step_in_flight_goes_on_from_can_be_held_if_it_can_be_cut() -> None:
    books = CheckedScheduler(n_ctx=300)
    request = books.submit(A, max_tokens=50)
    books.steps(3)
    books.plan()
    assert books.hold("h", books.requests[request].history[:-1])
    books.run_to_end()


# -- the step -----------------------------------------------------------------------------


def test_alone_a_prompt_takes_the_whole_batch() -> None:
    books = CheckedScheduler(n_ctx=1000, n_batch=512, step_target_s=0.001)
    books.submit([1] * 600)
    sizes = []
    while (plan := books.plan()) and not books.requests[0].generated:
        sizes.append(plan.n_tokens)
        books.finish(elapsed_s=9.0)
    assert sizes == [512, 88]


def test_beside_a_stream_the_prompt_is_cut_to_the_target_time() -> None:
    books = CheckedScheduler(n_ctx=2000, n_batch=512, step_target_s=0.1)
    stream = books.submit(A, max_tokens=500)
    books.plan()
    books.finish(elapsed_s=0.020)
    books.plan()
    books.finish(elapsed_s=0.010)
    reader = books.submit([2] * 900)
    sizes = []
    while not books.requests[reader].generated:
        plan = books.plan()
        assert plan is not None
        row, prompt = plan.work
        assert (row.request_id, prompt.request_id) == (stream, reader)
        sizes.append(len(prompt.tokens))
        books.finish(elapsed_s=0.010 + 0.001 * len(prompt.tokens))
    assert sizes == [90] * 10, "10 ms for the row and 1 ms for each prompt token make 100 ms"


def test_rows_that_decode_come_before_prompts_and_older_prompts_before_newer() -> None:
    books = CheckedScheduler(n_ctx=400, n_batch=24)
    first = books.submit(A, max_tokens=50)
    books.step()
    second, third = books.submit(B), books.submit(C)
    plan = books.plan()
    assert plan is not None
    assert [(w.request_id, len(w.tokens)) for w in plan.work] == [
        (first, 1),
        (second, 20),
        (third, 3),
    ]


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
    paused, other = books.submit(A), books.submit(B)
    books.steps(2)
    books.pause(paused)
    plan = books.plan()
    assert plan is not None
    assert [work.request_id for work in plan.work] == [other]
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
    plan = books.plan()
    assert plan is not None
    assert plan.old_samplers == (0,)


# -- cancelling ---------------------------------------------------------------------------


def test_a_cancelled_waiting_request_never_runs() -> None:
    books = CheckedScheduler()
    books.submit(A)
    books.cancel(0)
    assert books.plan() is None


def test_a_cancelled_running_request_frees_its_slot_at_once() -> None:
    books = CheckedScheduler(n_slots=1)
    books.submit(A)
    books.step()
    books.cancel(0)
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
    books.scheduler.cancel(99)
    books.scheduler.pause(99)
    books.scheduler.resume(99)
    books.run_to_end()


def test_a_step_is_unwanted_when_everybody_in_it_has_cancelled() -> None:
    books = CheckedScheduler()

    def unwanted() -> bool:
        return books.scheduler.in_flight_is_unwanted

    books.submit(A)
    books.submit(B)
    assert not unwanted(), "no step"
    books.plan()
    books.submit(C)  # waits, and has no part in the step
    assert not unwanted()
    books.cancel(0)
    assert not unwanted()
    books.cancel(1)
    assert unwanted()
    books.finish(StepStatus.ABORTED)
    assert not unwanted()
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
    bad, good = books.submit(A), books.submit(B)
    books.plan()
    books.finish(failing=[bad])
    assert isinstance(books.error(bad), InferenceError)
    books.run_to_end()
    assert books.finished(good).generated_tokens == 10


def test_a_failed_step_fails_those_who_are_in_it() -> None:
    books = CheckedScheduler()
    inside, paused, waiting = books.submit(A), books.submit(B), books.submit([3] * 70)
    books.step()
    books.pause(paused)
    books.plan()
    books.finish(StepStatus.FAILED)
    assert str(books.error(inside)) == "inference: the backend failed"
    books.run_to_end()
    assert {books.finished(id_).generated_tokens for id_ in (paused, waiting)} == {10}


def test_no_room_costs_retained_prefixes_first() -> None:
    books = CheckedScheduler()
    books.submit(A, max_tokens=1)
    books.drain()
    books.submit(B)
    books.submit(C)
    books.plan()
    books.finish(StepStatus.NO_ROOM)
    assert books.scheduler.stats().kv_retained_tokens == 0
    assert books.preempted == []
    books.run_to_end()


def test_no_room_preempts_the_newest() -> None:
    books = CheckedScheduler()
    for prompt in (A, B, C):
        books.submit(prompt)
    books.plan()
    books.finish(StepStatus.NO_ROOM)
    assert books.preempted == [2]
    books.run_to_end()


def test_no_room_preempts_the_paused_first() -> None:
    books = CheckedScheduler()
    paused = books.submit(A)
    books.submit(B)
    books.steps(2)
    books.pause(paused)
    books.plan()
    books.finish(StepStatus.NO_ROOM)
    assert books.preempted == [paused]
    books.run_to_end()


def test_no_room_preempts_nobody_when_a_cancelled_request_leaves() -> None:
    books = CheckedScheduler()
    books.submit(A)
    books.submit(B)
    books.plan()
    books.cancel(0)
    books.finish(StepStatus.NO_ROOM)
    assert books.preempted == []
    books.run_to_end()


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
    for prompt in (A, B, C, D):
        books.submit(prompt, max_tokens=39)
    too_long = books.submit([5] * 70)
    books.run_to_end()
    assert [books.finished(id_).generated_tokens for id_ in range(4)] == [39] * 4
    assert isinstance(books.error(too_long), ContextOverflow)


def test_after_no_room_a_paused_request_does_not_keep_others_out() -> None:
    books = CheckedScheduler()
    paused, other = books.submit(A), books.submit(B)
    books.plan()
    books.finish(StepStatus.NO_ROOM)
    assert books.running == [paused]
    books.step()
    assert books.running == [paused], "until it ends, nobody comes back"
    books.pause(paused)
    books.plan()
    assert other in books.running


def test_when_the_engine_closes_everybody_gets_its_error() -> None:
    books = CheckedScheduler(n_slots=2)
    for prompt in (A, B, C, D):
        books.submit(prompt)
    books.plan()
    books.cancel(0)
    error = EngineClosed()
    assert books.fail_all(error) == [Failed(1, error), Failed(2, error), Failed(3, error)]
    assert books.fail_all(error) == []


# -- text ---------------------------------------------------------------------------------


def said(*pieces: bytes, **fields: object) -> tuple[list[str], Finished]:
    """What a reader gets of a model that says `pieces` and ends."""
    books = CheckedScheduler(model=ScriptModel(pieces))
    books.submit(A, **fields)  # type: ignore[arg-type]
    events = []
    while books.plan():
        events += books.finish()
    assert isinstance(events[-1], Finished)
    return [event.text for event in events if isinstance(event, Piece)], events[-1]


def test_every_token_that_has_text_is_a_piece() -> None:
    pieces, finished = said(b"one", b"", b" two")
    assert pieces == ["one", " two"]
    assert (finished.text, finished.finish_reason) == ("one two", "stop")
    assert finished.generated_tokens == 4, "the token that ended it counts"


def test_a_character_is_never_cut() -> None:
    smile = "🙂".encode()
    assert said(smile[:1], smile[1:3], smile[3:] + b"!")[0] == ["🙂!"]


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    pieces, finished = said(b"ok", b"\xf0\x9f")
    assert pieces == ["ok", "\ufffd"]
    assert finished.text == "ok\ufffd"


def test_a_stop_sequence_across_tokens_ends_the_text_before_it() -> None:
    pieces, finished = said(b"a S", b"TO", b"P b", stop=["STOP"])
    assert pieces == ["a "]
    assert (finished.text, finished.stop_sequence) == ("a ", "STOP")
    assert (finished.finish_reason, finished.generated_tokens) == ("stop", 3)


def test_what_only_looked_like_a_stop_sequence_is_shown_at_the_end() -> None:
    pieces, finished = said(b"a ST", stop=["STOP"])
    assert pieces == ["a ", "ST"]
    assert finished.stop_sequence is None


def test_a_stop_sequence_may_be_completed_by_the_end_of_half_a_character() -> None:
    _, finished = said(b"a", b"\xf0\x9f", stop=["\ufffd"], max_tokens=2)
    assert (finished.text, finished.finish_reason) == ("a", "stop")
    assert finished.stop_sequence == "\ufffd"


def test_the_limit_of_tokens_is_a_length_end() -> None:
    _, finished = said(b"a", b"b", b"c", max_tokens=2)
    assert (finished.text, finished.finish_reason) == ("ab", "length")
    assert finished.generated_tokens == 2


def test_who_does_not_stream_gets_no_pieces() -> None:
    pieces, finished = said(b"a", b"b", streams=False)
    assert pieces == []
    assert finished.text == "ab"
