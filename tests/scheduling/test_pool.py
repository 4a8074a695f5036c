"""What the pool keeps, gives and takes away, without a scheduler around it.

Whole histories of it are in `test_scheduler_machine`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llamad_trio.scheduling.plan import Copy, Drop
from llamad_trio.scheduling.pool import MIN_CHECKPOINT_TOKENS, Pool, Reuse
from llamad_trio.scheduling.prefix import Match
from llamad_trio.scheduling.shelf import Shelf

LONG = list(range(100, 100 + MIN_CHECKPOINT_TOKENS))
"""The shortest prompt that is worth a checkpoint."""


def pool_of(n_seqs: int = 4, *, reuse: Reuse = Reuse.PREFIX) -> Pool:
    return Pool(n_ctx=100, n_seqs=n_seqs, reuse=reuse, shelf=Shelf())


def find(pool: Pool, *tokens: int) -> Match:
    """What the pool has of a prompt, the last token of which must be computed."""
    return pool.find(tokens, len(tokens) - 1)


def n_used(pool: Pool) -> int:
    return pool.n_ctx - pool.free_cells


def compute(pool: Pool, *tokens: int) -> int:
    """A sequence that has computed `tokens`, with nothing of others."""
    seq = pool.open()
    pool.extend(seq, tokens)
    return seq


def retain(pool: Pool, *tokens: int, session: str | None = None) -> int:
    """The sequence of a request that has ended."""
    seq = compute(pool, *tokens)
    pool.close(seq, session=session)
    return seq


def branch(pool: Pool, match: Match, *tokens: int) -> int:
    """A sequence that goes on from another with `tokens`."""
    seq = pool.open()
    pool.share(match, seq)
    if tokens:
        pool.extend(seq, tokens)
    return seq


def evict_all_in_turn(pool: Pool) -> list[int]:
    """Evict until nothing is left; return the sequences in the order they went."""
    pool.take_ops()
    while pool.evict():
        pass
    return [op.seq for op in pool.take_ops() if isinstance(op, Drop)]


def test_operations_come_in_order_and_once() -> None:
    pool = pool_of()
    first = retain(pool, 1, 2, 3)
    match = find(pool, 1, 2, 3, 4)
    assert match == Match(first, 3)
    second = branch(pool, match)
    pool.close(second, keep=False)
    assert pool.take_ops() == (Copy(first, second, 3), Drop(first), Drop(second))
    assert pool.take_ops() == ()
    assert pool.free_cells == 100


def test_a_prefix_that_goes_on_elsewhere_is_given_up_only_when_all_of_it_is_taken() -> None:
    pool = pool_of()
    first = retain(pool, 1, 2, 3)
    second = branch(pool, Match(first, 2), 7)
    assert pool.take_ops() == (Copy(first, second, 2),)
    assert n_used(pool) == 4
    assert find(pool, 1, 2, 3, 4) == Match(first, 3)


def test_a_sequence_that_somebody_runs_on_is_never_given_up() -> None:
    pool = pool_of()
    first = compute(pool, 1, 2, 3)
    second = branch(pool, Match(first, 3))
    assert pool.take_ops() == (Copy(first, second, 3),)
    assert not pool.evict()
    assert not pool.evict_all()


def test_what_is_inside_another_sequence_is_not_retained() -> None:
    pool = pool_of()
    first = compute(pool, 1, 2, 3)
    second = branch(pool, Match(first, 3), 4)
    pool.close(first)
    assert pool.take_ops()[-1] == Drop(first)
    assert find(pool, 1, 2, 3, 9) == Match(second, 3)
    assert not pool.evict()


def test_a_sequence_that_holds_nothing_is_not_retained() -> None:
    pool = pool_of(1)
    pool.close(pool.open())
    assert not pool.evict_all()
    assert pool.open() == 0
    assert pool.take_ops() == ()


@pytest.mark.parametrize(
    ("reuse", "n_of_the_same", "n_of_a_longer", "n_of_another"),
    [(Reuse.NOTHING, 0, 0, 0), (Reuse.WHOLE, 0, 3, 0), (Reuse.PREFIX, 2, 3, 2)],
)
def test_what_is_found_is_what_can_be_gone_on_from(
    reuse: Reuse, n_of_the_same: int, n_of_a_longer: int, n_of_another: int
) -> None:
    pool = pool_of(reuse=reuse)
    seq = compute(pool, 1, 2, 3)
    assert find(pool, 1, 2, 3).n == n_of_the_same
    assert find(pool, 1, 2, 3, 4).n == n_of_a_longer
    assert find(pool, 1, 2, 4, 5).n == n_of_another
    pool.close(seq)
    assert n_used(pool) == (0 if reuse is Reuse.NOTHING else 3)


# -- who gives way ------------------------------------------------------------------------


def test_the_least_recently_used_goes_first() -> None:
    pool = pool_of()
    seqs = [retain(pool, i, i) for i in (1, 2, 3)]
    assert find(pool, 1, 1, 9) == Match(seqs[0], 2)
    assert find(pool, 3, 1, 1).n == 1
    assert find(pool, 4, 2, 2) == Match(), "which is not touched by that"
    assert evict_all_in_turn(pool) == [seqs[1], seqs[0], seqs[2]]


@pytest.mark.parametrize("session", ["s", ""])
def test_what_belongs_to_a_session_goes_last_but_for_what_is_held(session: str) -> None:
    pool = pool_of(5)
    held = compute(pool, 1, 1)
    pool.hold(held, "holder")
    ours = retain(pool, 2, 2, session=session)
    others = [retain(pool, i, i) for i in (3, 4)]
    assert evict_all_in_turn(pool) == [*others, ours, held]


def test_what_frees_no_cell_is_not_evicted() -> None:
    pool = pool_of(reuse=Reuse.WHOLE)
    running = compute(pool, *LONG)
    pool.checkpoint(running)
    pool.extend(running, [1])
    other = retain(pool, 2, 2)
    assert evict_all_in_turn(pool) == [other], "the checkpoint lies inside of what runs"
    pool.close(running, keep=False)
    assert pool.evict(), "now it does not"
    assert n_used(pool) == 0


def test_everything_retained_can_be_let_go_at_once() -> None:
    pool = pool_of(reuse=Reuse.WHOLE)
    running = compute(pool, *LONG)
    pool.checkpoint(running)
    retain(pool, 2, 2)
    assert pool.evict_all()
    assert not pool.evict_all()
    assert n_used(pool) == pool.length(running) == len(LONG)


def test_a_sequence_is_always_to_be_had_while_one_is_retained() -> None:
    pool = pool_of(2)
    old, new = retain(pool, 1, 1), retain(pool, 2, 2)
    assert [pool.open(), pool.open()] == [old, new]
    assert n_used(pool) == 0


# -- what somebody holds on to --------------------------------------------------------------


def test_a_holder_holds_one_thing_at_a_time() -> None:
    pool = pool_of()
    first, second = compute(pool, 1, 1), compute(pool, 2, 2)
    pool.hold(first, "holder")
    pool.hold(second, "holder")
    new = retain(pool, 3, 3, session="s")
    assert evict_all_in_turn(pool) == [first, new, second]


@pytest.mark.parametrize("reuse", [Reuse.WHOLE, Reuse.PREFIX])
def test_what_several_hold_on_to_can_still_give_way(reuse: Reuse) -> None:
    pool = pool_of(reuse=reuse)
    retain(pool, 1, 2, 3)
    assert pool.hold_resident("a", [1, 2, 3])
    assert pool.hold_resident("b", [1, 2, 3])
    assert n_used(pool) == 3
    assert pool.evict()
    assert n_used(pool) == 0
    assert sorted(pool.open() for _ in range(4)) == [0, 1, 2, 3]


def test_what_is_held_is_not_given_up_when_somebody_goes_on_from_it() -> None:
    pool = pool_of()
    held = compute(pool, 1, 2)
    pool.hold(held, "holder")
    pool.close(branch(pool, Match(held, 2), 3), keep=False)
    assert find(pool, 1, 2, 4) == Match(held, 2)


def test_what_is_not_all_resident_cannot_be_held() -> None:
    pool = pool_of()
    retain(pool, 1, 2, 3)
    assert not pool.hold_resident("holder", [1, 2, 3, 4])
    assert pool.take_ops() == ()


def test_a_holder_whose_hold_was_lost_has_no_say_over_who_came_after() -> None:
    pool = pool_of(2)
    seq = compute(pool, 1, 1)
    pool.hold(seq, "old")
    assert pool.evict()
    again = compute(pool, 2, 2)
    assert again == seq
    pool.hold(again, "new")
    pool.let_go("old")
    other = retain(pool, 3, 3, session="s")
    assert evict_all_in_turn(pool) == [other, again]


# -- checkpoints --------------------------------------------------------------------------


def test_a_checkpoint_stays_where_it_was_made() -> None:
    pool = pool_of(reuse=Reuse.WHOLE)
    seq = compute(pool, *LONG)
    pool.checkpoint(seq)
    pool.extend(seq, [1, 2])
    found = find(pool, *LONG, 9)
    assert (found.seq != seq, found.n) == (True, len(LONG))
    assert pool.take_ops() == (Copy(seq, found.seq, len(LONG)),)
    branch(pool, found, 3)
    assert find(pool, *LONG, 9) == found, "it is not used up"


@pytest.mark.parametrize(
    ("reuse", "n_seqs", "prompt"),
    [
        (Reuse.NOTHING, 4, LONG),  # where none is needed
        (Reuse.PREFIX, 4, LONG),
        (Reuse.WHOLE, 4, LONG[1:]),  # a short prompt
        (Reuse.WHOLE, 1, LONG),  # without a spare sequence
    ],
)
def test_no_checkpoint_is_made_for_nothing(
    reuse: Reuse, n_seqs: int, prompt: Sequence[int]
) -> None:
    pool = pool_of(n_seqs, reuse=reuse)
    pool.checkpoint(compute(pool, *prompt))
    assert pool.take_ops() == ()


def test_a_checkpoint_nobody_went_on_from_is_kept_once() -> None:
    pool = pool_of(reuse=Reuse.WHOLE)
    seq = compute(pool, *LONG)
    pool.checkpoint(seq)
    pool.close(seq)
    assert pool.evict()
    assert not pool.evict_all()


def test_a_checkpoint_belongs_to_the_session_of_its_request() -> None:
    pool = pool_of(reuse=Reuse.WHOLE)
    seq = compute(pool, *LONG)
    pool.checkpoint(seq, "s")
    checkpoint = find(pool, *LONG, 9).seq
    pool.close(seq, keep=False)
    other = retain(pool, 1, 2)
    assert evict_all_in_turn(pool) == [other, checkpoint]


# -- what llama.cpp lost --------------------------------------------------------------------


def test_what_is_lost_is_not_dropped_again() -> None:
    pool = pool_of()
    seq = compute(pool, 1, 2, 3)
    pool.lose(seq)
    assert (n_used(pool), pool.length(seq)) == (0, 0)
    pool.close(seq)
    assert pool.take_ops() == ()


def test_a_retained_prefix_that_is_lost_gives_its_sequence_back() -> None:
    pool = pool_of(1)
    seq = retain(pool, 1, 2, 3)
    pool.lose(seq)
    assert not pool.evict_all()
    assert pool.open() == seq
    assert pool.take_ops() == ()


def test_what_was_to_be_copied_from_a_lost_sequence_is_lost_with_it() -> None:
    pool = pool_of()
    seq = compute(pool, 1, 2, 3)
    assert pool.hold_resident("holder", [1, 2])
    pool.lose(seq)
    assert n_used(pool) == 0
    assert pool.take_ops() == ()
    assert not pool.evict_all()


def test_a_sequence_that_could_not_be_copied_is_trusted_again_with_new_tokens() -> None:
    pool = pool_of(2)
    bad = retain(pool, 1, 2, 3)
    copy = branch(pool, Match(bad, 2))
    pool.lose(copy)
    pool.close(copy)
    assert find(pool, 1, 2, 9) == Match(), "it would fail again"
    assert find(pool, 1, 2, 3, 9) == Match(bad, 3), "more of it may do"
    pool.evict()
    new = compute(pool, 1, 2, 3)
    assert new == bad
    assert find(pool, 1, 2, 9) == Match(new, 2)


def test_cells_held_by_some_count_shared_ones_once() -> None:
    pool = pool_of()
    first = compute(pool, 1, 2, 3)
    second = branch(pool, Match(first, 2), 7, 8)
    assert pool.n_held([first]) == 3
    assert pool.n_held([first, second]) == n_used(pool) == 5
    assert pool.n_cells([(first, 3), (second, 2)]) == 3
