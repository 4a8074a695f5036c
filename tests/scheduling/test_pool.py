"""What the pool keeps, gives and takes away, without a scheduler around it.

Whole histories of it are in `test_scheduler_machine`.
"""

from __future__ import annotations

import pytest

from llamad_trio.scheduling.plan import Copy, Drop
from llamad_trio.scheduling.pool import MIN_CHECKPOINT_TOKENS, Pool, Reuse
from llamad_trio.scheduling.prefix import Match
from llamad_trio.scheduling.shelf import Shelf

LONG = list(range(100, 100 + MIN_CHECKPOINT_TOKENS))
"""The shortest prompt that is worth a checkpoint."""


def pool_of(n_seqs: int = 4, *, n_ctx: int = 100, reuse: Reuse = Reuse.PREFIX) -> Pool:
    return Pool(n_ctx=n_ctx, n_seqs=n_seqs, reuse=reuse, shelf=Shelf())


def computed(pool: Pool, *tokens: int) -> int:
    """A sequence that has computed `tokens`, with nothing of others."""
    seq = pool.open()
    pool.extend(seq, tokens)
    return seq


def retained(pool: Pool, *tokens: int, session: str | None = None) -> int:
    """The sequence of a request that has ended."""
    seq = computed(pool, *tokens)
    pool.close(seq, session=session)
    return seq


def find(pool: Pool, *tokens: int) -> Match:
    """What the pool has of a prompt, the last token of which must be computed."""
    return pool.find(tokens, len(tokens) - 1)


def n_used(pool: Pool) -> int:
    return pool.n_ctx - pool.free_cells


def test_every_sequence_can_be_had_once() -> None:
    pool = pool_of(4)
    assert sorted(pool.open() for _ in range(4)) == [0, 1, 2, 3]
    assert pool.take_ops() == ()


def test_operations_come_in_order_and_once() -> None:
    pool = pool_of()
    first = retained(pool, 1, 2, 3)
    second = pool.open()
    match = find(pool, 1, 2, 3, 4)
    assert match == Match(first, 3)
    pool.share(match, second)
    pool.close(second, keep=False)
    assert pool.take_ops() == (Copy(first, second, 3), Drop(first), Drop(second))
    assert pool.take_ops() == ()
    assert pool.free_cells == 100


def test_a_prefix_that_goes_on_elsewhere_is_given_up_only_when_all_of_it_is_taken() -> None:
    pool = pool_of()
    first = retained(pool, 1, 2, 3)
    second = pool.open()
    pool.share(Match(first, 2), second)
    pool.extend(second, [7])
    assert pool.take_ops() == (Copy(first, second, 2),)
    assert n_used(pool) == 4
    assert find(pool, 1, 2, 3, 4) == Match(first, 3)


def test_a_sequence_that_somebody_runs_on_is_never_given_up() -> None:
    pool = pool_of()
    first = computed(pool, 1, 2, 3)
    second = pool.open()
    pool.share(Match(first, 3), second)
    assert pool.take_ops() == (Copy(first, second, 3),)
    assert not pool.evict()
    assert not pool.evict_all()


def test_what_is_inside_another_sequence_is_not_retained() -> None:
    pool = pool_of()
    first = computed(pool, 1, 2, 3)
    second = pool.open()
    pool.share(Match(first, 3), second)
    pool.extend(second, [4])
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


@pytest.mark.parametrize("reuse", Reuse)
def test_the_last_token_is_never_found(reuse: Reuse) -> None:
    pool = pool_of(reuse=reuse)
    seq = computed(pool, 1, 2, 3)
    expected = {Reuse.NOTHING: Match(), Reuse.WHOLE: Match(), Reuse.PREFIX: Match(seq, 2)}
    assert find(pool, 1, 2, 3) == expected[reuse]
    assert find(pool, 1) == Match()


def test_where_a_sequence_cannot_be_cut_only_its_end_is_found() -> None:
    pool = pool_of(reuse=Reuse.WHOLE)
    seq = retained(pool, 1, 2, 3)
    assert find(pool, 1, 2, 4, 5) == Match()
    assert find(pool, 1, 2, 3, 4) == Match(seq, 3)


def test_without_reuse_nothing_is_found_and_nothing_retained() -> None:
    pool = pool_of(reuse=Reuse.NOTHING)
    seq = computed(pool, 1, 2, 3)
    assert find(pool, 1, 2, 3, 4) == Match()
    pool.close(seq)
    assert n_used(pool) == 0
    assert pool.take_ops() == (Drop(seq),)


# -- who gives way ------------------------------------------------------------------------


def test_the_least_recently_used_goes_first() -> None:
    pool = pool_of()
    seqs = [retained(pool, i, i) for i in (1, 2, 3)]
    assert find(pool, 1, 1, 9) == Match(seqs[0], 2)
    assert [pool.evict() for _ in range(4)] == [True, True, True, False]
    assert pool.take_ops() == (Drop(seqs[1]), Drop(seqs[2]), Drop(seqs[0]))


def test_what_was_looked_for_in_vain_is_not_touched() -> None:
    pool = pool_of()
    seqs = [retained(pool, i, i) for i in (1, 2)]
    assert find(pool, 3, 1, 1) == Match()
    pool.evict()
    assert pool.take_ops() == (Drop(seqs[0]),)


@pytest.mark.parametrize("session", ["s", ""])
def test_what_belongs_to_a_session_goes_last_however_old(session: str) -> None:
    pool = pool_of()
    ours = retained(pool, 1, 1, session=session)
    others = [retained(pool, i, i) for i in (2, 3)]
    while pool.evict():
        pass
    assert pool.take_ops() == (Drop(others[0]), Drop(others[1]), Drop(ours))


def test_what_frees_no_cell_is_not_evicted() -> None:
    pool = pool_of(reuse=Reuse.WHOLE)
    running = computed(pool, *LONG)
    pool.checkpoint(running)
    pool.extend(running, [1])
    other = retained(pool, 2, 2)
    pool.take_ops()
    assert pool.evict()
    assert pool.take_ops() == (Drop(other),)
    assert not pool.evict(), "the checkpoint lies inside of what runs"
    pool.close(running, keep=False)
    assert pool.evict(), "now it does not"
    assert n_used(pool) == 0


def test_everything_retained_can_be_let_go_at_once() -> None:
    pool = pool_of(reuse=Reuse.WHOLE)
    running = computed(pool, *LONG)
    pool.checkpoint(running)
    retained(pool, 2, 2)
    assert pool.evict_all()
    assert not pool.evict_all()
    assert n_used(pool) == pool.length(running) == len(LONG)


def test_a_sequence_is_always_to_be_had_while_one_is_retained() -> None:
    pool = pool_of(2)
    old, new = retained(pool, 1, 1), retained(pool, 2, 2)
    assert pool.open() == old
    assert pool.open() == new
    assert n_used(pool) == 0


# -- what somebody holds on to --------------------------------------------------------------


def test_what_is_held_goes_last_of_all() -> None:
    pool = pool_of(5)
    held = computed(pool, 1, 1)
    pool.hold(held, "holder")
    ours = retained(pool, 2, 2, session="s")
    other = retained(pool, 3, 3)
    while pool.evict():
        pass
    assert pool.take_ops() == (Drop(other), Drop(ours), Drop(held))


def test_a_holder_holds_one_thing_at_a_time() -> None:
    pool = pool_of()
    first, second = computed(pool, 1, 1), computed(pool, 2, 2)
    pool.hold(first, "holder")
    pool.hold(second, "holder")
    new = retained(pool, 3, 3, session="s")
    while pool.evict():
        pass
    assert pool.take_ops() == (Drop(first), Drop(new), Drop(second))


@pytest.mark.parametrize("reuse", [Reuse.WHOLE, Reuse.PREFIX])
def test_what_several_hold_on_to_can_still_give_way(reuse: Reuse) -> None:
    pool = pool_of(reuse=reuse)
    retained(pool, 1, 2, 3)
    assert pool.hold_resident("a", [1, 2, 3])
    assert pool.hold_resident("b", [1, 2, 3])
    assert n_used(pool) == 3
    assert pool.evict()
    assert n_used(pool) == 0
    assert sorted(pool.open() for _ in range(4)) == [0, 1, 2, 3]


def test_what_is_held_is_not_given_up_when_somebody_goes_on_from_it() -> None:
    pool = pool_of()
    held = computed(pool, 1, 2)
    pool.hold(held, "holder")
    seq = pool.open()
    pool.share(Match(held, 2), seq)
    pool.extend(seq, [3])
    pool.close(seq, keep=False)
    assert find(pool, 1, 2, 4) == Match(held, 2)


def test_what_is_not_all_resident_cannot_be_held() -> None:
    pool = pool_of()
    retained(pool, 1, 2, 3)
    pool.take_ops()
    assert not pool.hold_resident("holder", [1, 2, 3, 4])
    assert pool.take_ops() == ()


def test_a_holder_whose_hold_was_lost_has_no_say_over_who_came_after() -> None:
    pool = pool_of(2)
    seq = computed(pool, 1, 1)
    pool.hold(seq, "old")
    assert pool.evict()
    again = computed(pool, 2, 2)
    assert again == seq
    pool.hold(again, "new")
    pool.let_go("old")
    other = retained(pool, 3, 3, session="s")
    pool.take_ops()
    pool.evict()
    assert pool.take_ops() == (Drop(other),)


# -- checkpoints --------------------------------------------------------------------------


def test_a_checkpoint_stays_where_it_was_made() -> None:
    pool = pool_of(reuse=Reuse.WHOLE)
    seq = computed(pool, *LONG)
    pool.checkpoint(seq)
    pool.extend(seq, [1, 2])
    found = find(pool, *LONG, 9)
    assert (found.seq != seq, found.n) == (True, len(LONG))
    assert pool.take_ops() == (Copy(seq, found.seq, len(LONG)),)
    branch = pool.open()
    pool.share(found, branch)
    pool.extend(branch, [3])
    assert find(pool, *LONG, 9) == found, "it is not used up"


@pytest.mark.parametrize("reuse", [Reuse.NOTHING, Reuse.PREFIX])
def test_no_checkpoint_is_made_where_none_is_needed(reuse: Reuse) -> None:
    pool = pool_of(reuse=reuse)
    pool.checkpoint(computed(pool, *LONG))
    assert pool.take_ops() == ()


def test_no_checkpoint_is_made_of_a_short_prompt() -> None:
    pool = pool_of(reuse=Reuse.WHOLE)
    pool.checkpoint(computed(pool, *LONG[1:]))
    assert pool.take_ops() == ()


def test_no_checkpoint_is_made_without_a_spare_sequence() -> None:
    pool = pool_of(2, reuse=Reuse.WHOLE)
    seq = computed(pool, *LONG)
    computed(pool, 1)
    pool.checkpoint(seq)
    assert pool.take_ops() == ()


def test_a_checkpoint_nobody_went_on_from_is_kept_once() -> None:
    pool = pool_of(reuse=Reuse.WHOLE)
    seq = computed(pool, *LONG)
    pool.checkpoint(seq)
    pool.close(seq)
    assert pool.evict()
    assert not pool.evict_all()


def test_a_checkpoint_belongs_to_the_session_of_its_request() -> None:
    pool = pool_of(reuse=Reuse.WHOLE)
    seq = computed(pool, *LONG)
    pool.checkpoint(seq, "s")
    pool.close(seq, keep=False)
    other = retained(pool, 1, 2)
    pool.take_ops()
    pool.evict()
    assert pool.take_ops() == (Drop(other),)


# -- what llama.cpp lost --------------------------------------------------------------------


def test_what_is_lost_is_not_dropped_again() -> None:
    pool = pool_of()
    seq = computed(pool, 1, 2, 3)
    pool.lose(seq)
    assert (n_used(pool), pool.length(seq)) == (0, 0)
    pool.close(seq)
    assert pool.take_ops() == ()


def test_a_retained_prefix_that_is_lost_gives_its_sequence_back() -> None:
    pool = pool_of(1)
    seq = retained(pool, 1, 2, 3)
    pool.lose(seq)
    assert not pool.evict_all()
    assert pool.open() == seq
    assert pool.take_ops() == ()


def test_what_was_to_be_copied_from_a_lost_sequence_is_lost_with_it() -> None:
    pool = pool_of()
    seq = computed(pool, 1, 2, 3)
    assert pool.hold_resident("holder", [1, 2])
    pool.lose(seq)
    assert n_used(pool) == 0
    assert pool.take_ops() == ()
    assert not pool.evict_all()


def test_a_sequence_that_could_not_be_copied_is_trusted_again_with_new_tokens() -> None:
    pool = pool_of(2)
    bad = retained(pool, 1, 2, 3)
    copy = pool.open()
    pool.share(Match(bad, 2), copy)
    pool.lose(copy)
    pool.close(copy)
    assert find(pool, 1, 2, 9) == Match(), "it would fail again"
    assert find(pool, 1, 2, 3, 9) == Match(bad, 3), "more of it may do"
    pool.evict()
    new = computed(pool, 1, 2, 3)
    assert new == bad
    assert find(pool, 1, 2, 9) == Match(new, 2)


def test_cells_held_by_some_count_shared_ones_once() -> None:
    pool = pool_of()
    first = computed(pool, 1, 2, 3)
    second = pool.open()
    pool.share(Match(first, 2), second)
    pool.extend(second, [7, 8])
    assert pool.n_held([first]) == 3
    assert pool.n_held([first, second]) == n_used(pool) == 5
    assert pool.n_cells([(first, 3), (second, 2)]) == 3
    assert pool.free_cells == 95
