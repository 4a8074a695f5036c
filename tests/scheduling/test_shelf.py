"""What the shelf keeps within its bytes, what leaves, and what is found again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llamad_trio.scheduling.prefix import Match
from llamad_trio.scheduling.shelf import Shelf, Snapshot
from tests.scheduling.oracles import longest_prefix, n_common

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
ANY_PREFIX = pytest.mark.parametrize("any_prefix", [True, False])


def snapshot(*tokens: int, n_bytes: int = 100) -> Snapshot:
    """A snapshot that takes `n_bytes` in all."""
    return Snapshot(tokens, bytes(n_bytes - 4 * len(tokens)))


def shelf_of(n_bytes: int = 300, *, any_prefix: bool = True) -> Shelf:
    return Shelf(max_bytes=n_bytes, has_disk=True, any_prefix=any_prefix)


def put(shelf: Shelf, new: Snapshot) -> list[Snapshot]:
    """Put a snapshot on the shelf; return what leaves RAM for it."""
    shelf.put(new)
    return shelf.take_leaving()


def add_read(shelf: Shelf, key: int, found: Snapshot | None) -> list[Snapshot]:
    """Read an entry from disk; return what leaves RAM for it."""
    shelf.add_read(key, found)
    return shelf.take_leaving()


def find(shelf: Shelf, tokens: Sequence[int]) -> Match:
    """What the shelf has of a prompt, the last token of which must be computed."""
    return shelf.match(tokens, len(tokens) - 1)


def test_a_snapshot_takes_its_state_and_four_bytes_a_token() -> None:
    assert Snapshot((1, 2, 3), b"12345").n_bytes == 17


@ANY_PREFIX
def test_what_was_put_is_found_and_is_what_was_put(any_prefix: bool) -> None:
    shelf, kept = shelf_of(any_prefix=any_prefix), snapshot(1, 2, 3)
    assert put(shelf, kept) == []
    match = find(shelf, [1, 2, 3, 4])
    assert (match.n, shelf.length(match.seq)) == (3, 3)
    assert shelf.snapshot(match.seq) is kept
    assert put(shelf, snapshot(1, 2, 3)) == []
    assert shelf.take_all() == [kept], "the same is kept once"


def test_the_least_recently_used_leave_until_the_rest_fits() -> None:
    shelf = shelf_of(300)
    first, second, third = snapshot(1), snapshot(2), snapshot(3)
    for each in (first, second, third):
        assert put(shelf, each) == []
    match = find(shelf, [1, 9])
    assert shelf.snapshot(match.seq) is first  # used now
    assert put(shelf, snapshot(4, n_bytes=200)) == [second, third]
    assert find(shelf, [2, 9]) == Match()
    assert find(shelf, [1, 9]).n == 1
    assert shelf.n_bytes == 300


def test_only_a_look_does_not_count_as_use() -> None:
    shelf = shelf_of(200)
    first, second = snapshot(1), snapshot(2)
    shelf.put(first)
    shelf.put(second)
    assert find(shelf, [1, 9]).n == 1
    assert not shelf.wants([1])
    assert put(shelf, snapshot(3)) == [first]


@pytest.mark.parametrize("n_bytes", [0, 300])
def test_what_is_larger_than_the_shelf_leaves_at_once(n_bytes: int) -> None:
    shelf, huge = shelf_of(n_bytes), snapshot(9, n_bytes=n_bytes + 4)
    assert put(shelf, huge) == [huge]
    assert (shelf.n_bytes, shelf.take_all()) == (0, [])
    assert find(shelf, [9, 1]) == Match()
    assert shelf.wants([9])


def test_what_has_left_is_taken_once_and_not_lost_by_the_next_that_leaves() -> None:
    shelf = shelf_of(0)
    left = [snapshot(1), snapshot(2), snapshot(3)]
    for each in left[:2]:
        shelf.put(each)
    assert shelf.take_leaving() == left[:2]
    shelf.put(left[2])
    assert shelf.take_all() == left[2:]
    assert shelf.take_leaving() == []


def test_a_shelf_without_ram_or_disk_wants_nothing() -> None:
    shelf = Shelf()
    assert not shelf.wants([1])
    assert put(shelf, snapshot(1)) == []


def test_a_part_of_what_is_there_is_new_only_where_nothing_but_the_whole_serves() -> None:
    for any_prefix in (True, False):
        shelf = shelf_of(any_prefix=any_prefix)
        shelf.put(snapshot(1, 2, 3))
        assert shelf.wants([1, 2]) == (not any_prefix)
        shelf.put(snapshot(1, 2))
        assert len(shelf.take_all()) == (1 if any_prefix else 2)


def test_what_a_longer_one_gives_as_well_makes_way_for_it() -> None:
    shelf, longer, other = shelf_of(200), snapshot(1, 2, 3), snapshot(7)
    shelf.put(snapshot(1, 2))
    shelf.put(other)
    assert put(shelf, longer) == []  # there is room: the shorter one is no longer needed
    assert shelf.take_all() == [other, longer]


@ANY_PREFIX
def test_the_last_token_is_never_found(any_prefix: bool) -> None:
    shelf = shelf_of(any_prefix=any_prefix)
    shelf.put(snapshot(1, 2, 3))
    match = find(shelf, [1, 2, 3])
    assert match.n == (2 if any_prefix else 0)


# -- on disk --------------------------------------------------------------------------------


def test_what_is_on_disk_is_known_and_takes_no_ram() -> None:
    shelf = shelf_of()
    key = shelf.add_stored([1, 2, 3])
    assert find(shelf, [1, 2, 3, 4]) == Match(key, 3)
    assert shelf.length(key) == 3
    assert shelf.snapshot(key) is None
    assert not shelf.wants([1, 2, 3])
    assert (shelf.n_bytes, shelf.take_all()) == (0, [])


@pytest.mark.parametrize("n_bytes", [0, 1000])
def test_what_was_read_is_held_until_it_has_been_used(n_bytes: int) -> None:
    shelf, found = shelf_of(n_bytes), snapshot(1, 2, 3)
    key = shelf.add_stored(found.tokens)
    assert add_read(shelf, key, found) == []
    assert shelf.snapshot(key) is found
    assert shelf.take_all() == []  # it is on disk already


@pytest.mark.parametrize("next_", ["put", "read"])
def test_what_was_read_stays_known_when_it_leaves_ram(next_: str) -> None:
    shelf, found = shelf_of(0), snapshot(1, 2, 3)
    key, other = shelf.add_stored(found.tokens), shelf.add_stored([7])
    shelf.add_read(key, found)
    if next_ == "put":
        small = snapshot(5)
        assert put(shelf, small) == [small]  # and not what was read: that is on disk
    else:
        assert add_read(shelf, other, snapshot(7)) == []
        assert shelf.n_bytes == 100
    assert shelf.snapshot(key) is None
    assert find(shelf, [1, 2, 3, 4]) == Match(key, 3)


def test_what_was_read_stays_while_there_is_room() -> None:
    shelf = shelf_of(300)
    for token in (1, 2, 3, 4):
        shelf.add_read(shelf.add_stored([token]), snapshot(token))
        assert shelf.n_bytes == min(300, 100 * token)


def test_what_a_read_drives_out_is_given_on_unless_it_is_on_disk() -> None:
    shelf, kept = shelf_of(100), snapshot(1)
    shelf.put(kept)
    key = shelf.add_stored([2])
    assert add_read(shelf, key, snapshot(2)) == [kept]
    assert find(shelf, [1, 9]) == Match()


@pytest.mark.parametrize("found", [None, snapshot(1, 2, 4)], ids=["gone", "another one"])
def test_a_file_that_is_not_what_was_stored_is_forgotten(found: Snapshot | None) -> None:
    shelf = shelf_of()
    key = shelf.add_stored([1, 2, 3])
    for _ in range(2):  # the second time it is known no more
        assert add_read(shelf, key, found) == []
        assert find(shelf, [1, 2, 3, 4]) == Match()
    assert add_read(shelf, key, snapshot(1, 2, 3)) == []
    assert shelf.n_bytes == 0


def test_a_longer_one_in_ram_leaves_the_shorter_one_on_disk_known() -> None:
    shelf = shelf_of(100)
    key, longer = shelf.add_stored([1, 2]), snapshot(1, 2, 3)
    shelf.put(longer)
    assert put(shelf, snapshot(7)) == [longer]
    assert find(shelf, [1, 2, 3, 4]) == Match(key, 2)


# -- against a brute-force search -----------------------------------------------------------


@given(st.lists(TOKENS, max_size=8), TOKENS, st.booleans())
def test_the_longest_prefix_is_found(
    held: list[tuple[int, ...]], wanted: tuple[int, ...], any_prefix: bool
) -> None:
    shelf = shelf_of(10_000, any_prefix=any_prefix)
    keys = {shelf.add_stored(tokens): tokens for tokens in held}
    match = find(shelf, wanted)
    assert match.n == longest_prefix(held, wanted[:-1], whole=not any_prefix)
    if match.n:
        assert n_common(keys[match.seq], wanted) >= match.n
        assert any_prefix or len(keys[match.seq]) == match.n
    longest = longest_prefix(held, wanted, whole=not any_prefix)
    assert shelf.wants(wanted) == (longest < len(wanted))


class ShelfMachine(RuleBasedStateMachine):
    """Random use of a shelf, beside a list of what it ought to hold."""

    any_prefix = True
    max_bytes = 120

    def __init__(self) -> None:
        super().__init__()
        self.shelf = shelf_of(self.max_bytes, any_prefix=self.any_prefix)
        self.in_ram: list[Snapshot] = []
        self.on_disk: dict[int, tuple[int, ...]] = {}
        self.read_last = 0

    @rule(tokens=TOKENS, n=st.integers(0, 100))
    def put(self, tokens: tuple[int, ...], n: int) -> None:
        new = Snapshot(tokens, bytes(n))
        is_new = self.shelf.wants(tokens)
        left = put(self.shelf, new)
        if is_new:
            self.in_ram.append(new)
            if self.any_prefix:
                self.in_ram = [
                    s for s in self.in_ram if s is new or tokens[: len(s.tokens)] != s.tokens
                ]
            assert all(each in self.in_ram for each in left)
            self.in_ram = [s for s in self.in_ram if s not in left]
            self.read_last = 0
        else:
            assert left == []

    @rule(tokens=TOKENS)
    def store(self, tokens: tuple[int, ...]) -> None:
        self.on_disk[self.shelf.add_stored(tokens)] = tokens

    @precondition(lambda self: self.on_disk)
    @rule(data=st.data(), n=st.integers(0, 150))
    def read(self, data: st.DataObject, n: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.on_disk)))
        found = Snapshot(self.on_disk[key], bytes(n))
        left = add_read(self.shelf, key, found)
        assert self.shelf.snapshot(key) is found
        self.in_ram = [s for s in self.in_ram if s not in left]
        self.read_last = found.n_bytes

    @precondition(lambda self: self.on_disk)
    @rule(data=st.data())
    def lose_file(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.on_disk)))
        del self.on_disk[key]
        self.shelf.add_read(key, None)

    @rule(tokens=TOKENS)
    def match(self, tokens: tuple[int, ...]) -> None:
        held = [s.tokens for s in self.in_ram] + list(self.on_disk.values())
        match = find(self.shelf, tokens)
        expected = longest_prefix(held, tokens[:-1], whole=not self.any_prefix)
        assert match.n == expected
        if match.n and match.seq not in self.on_disk:
            found = self.shelf.snapshot(match.seq)
            assert found in self.in_ram

    @invariant()
    def everything_not_on_disk_is_there_or_was_given_on(self) -> None:
        assert set(map(id, self.shelf.take_all())) == set(map(id, self.in_ram))
        assert len(self.shelf._entries) == len(self.in_ram) + len(self.on_disk)

    @invariant()
    def it_stays_within_its_bytes_but_for_what_was_just_read(self) -> None:
        assert self.shelf.n_bytes <= max(self.max_bytes, self.read_last)


class WholeShelfMachine(ShelfMachine):
    any_prefix = False


TestShelf = ShelfMachine.TestCase
TestWholeShelf = WholeShelfMachine.TestCase
