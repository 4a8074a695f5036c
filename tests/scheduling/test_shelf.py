"""What the shelf keeps within its bytes, what leaves, and what is found again."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llamad_trio.scheduling.prefix import Match
from llamad_trio.scheduling.shelf import Shelf, Snapshot
from tests.scheduling.oracles import longest_prefix, n_common

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
ANY_PREFIX = pytest.mark.parametrize("any_prefix", [True, False])


def snapshot(*tokens: int, n_bytes: int = 100) -> Snapshot:
    """A snapshot that takes `n_bytes` in all."""
    return Snapshot(tokens, bytes(n_bytes - 4 * len(tokens)))


def shelf_of(n_bytes: int = 300, *, any_prefix: bool = True) -> Shelf:
    return Shelf(max_bytes=n_bytes, any_prefix=any_prefix)


def test_a_snapshot_takes_its_state_and_four_bytes_a_token() -> None:
    assert Snapshot((1, 2, 3), b"12345").n_bytes == 17


@ANY_PREFIX
def test_what_was_put_is_found_and_is_what_was_put(any_prefix: bool) -> None:
    shelf, kept = shelf_of(any_prefix=any_prefix), snapshot(1, 2, 3)
    assert shelf.put(kept) == []
    match = shelf.match([1, 2, 3, 4])
    assert match is not None
    assert (match.n, shelf.length(match.seq)) == (3, 3)
    assert shelf.snapshot(match.seq) is kept
    assert shelf.take_all() == [kept]


def test_the_least_recently_used_leave_until_the_rest_fits() -> None:
    shelf = shelf_of(300)
    first, second, third = snapshot(1), snapshot(2), snapshot(3)
    for each in (first, second, third):
        assert shelf.put(each) == []
    match = shelf.match([1, 9])
    assert match is not None
    assert shelf.snapshot(match.seq) is first  # used now
    assert shelf.put(snapshot(4, n_bytes=200)) == [second, third]
    assert shelf.match([2, 9]) is None
    assert shelf.match([1, 9]) is not None
    assert shelf.n_bytes == 300


def test_only_a_look_does_not_count_as_use() -> None:
    shelf = shelf_of(200)
    first, second = snapshot(1), snapshot(2)
    shelf.put(first)
    shelf.put(second)
    assert shelf.match([1, 9]) is not None
    assert shelf.covers([1])
    assert shelf.put(snapshot(3)) == [first]


def test_what_is_larger_than_the_shelf_leaves_at_once() -> None:
    shelf = shelf_of(300)
    huge = snapshot(9, n_bytes=301)
    assert shelf.put(huge) == [huge]
    assert (len(shelf), shelf.n_bytes) == (0, 0)
    assert shelf.match([9, 1]) is None
    assert not shelf.covers([9])


def test_a_shelf_without_room_gives_everything_on() -> None:
    shelf, small = shelf_of(0), snapshot(1, n_bytes=5)
    assert shelf.put(small) == [small]
    assert shelf.take_all() == []


def test_a_part_of_what_is_there_is_nothing_new_where_any_prefix_serves() -> None:
    shelf = shelf_of(any_prefix=True)
    shelf.put(snapshot(1, 2, 3))
    assert shelf.covers([1, 2])
    assert shelf.put(snapshot(1, 2)) == []
    assert len(shelf) == 1


def test_a_part_of_what_is_there_is_new_where_only_the_whole_serves() -> None:
    shelf = shelf_of(any_prefix=False)
    shelf.put(snapshot(1, 2, 3))
    assert not shelf.covers([1, 2])
    shelf.put(snapshot(1, 2))
    assert len(shelf) == 2
    match = shelf.match([1, 2, 9])
    assert match is not None
    assert (match.n, shelf.length(match.seq)) == (2, 2)


def test_what_a_longer_one_gives_as_well_makes_way_for_it() -> None:
    shelf, longer = shelf_of(200), snapshot(1, 2, 3)
    shelf.put(snapshot(1, 2))
    shelf.put(snapshot(7))
    assert shelf.put(longer) == []  # there is room: the shorter one is no longer needed
    assert longer in shelf.take_all()
    assert len(shelf) == 2


@ANY_PREFIX
def test_the_same_is_kept_once(any_prefix: bool) -> None:
    shelf, first = shelf_of(any_prefix=any_prefix), snapshot(1, 2)
    assert shelf.put(first) == []
    assert shelf.put(snapshot(1, 2)) == []
    assert shelf.take_all() == [first]


@ANY_PREFIX
def test_the_last_token_is_never_found(any_prefix: bool) -> None:
    shelf = shelf_of(any_prefix=any_prefix)
    shelf.put(snapshot(1, 2, 3))
    match = shelf.match([1, 2, 3])
    assert (match.n if match else 0) == (2 if any_prefix else 0)


# -- on disk --------------------------------------------------------------------------------


def test_what_is_on_disk_is_known_and_takes_no_ram() -> None:
    shelf = shelf_of()
    key = shelf.add_stored([1, 2, 3])
    assert shelf.match([1, 2, 3, 4]) == Match(key, 3)
    assert shelf.length(key) == 3
    assert shelf.snapshot(key) is None
    assert shelf.covers([1, 2, 3])
    assert (shelf.n_bytes, shelf.take_all()) == (0, [])


@pytest.mark.parametrize("n_bytes", [0, 1000])
def test_what_was_read_is_held_until_it_has_been_used(n_bytes: int) -> None:
    shelf, read = shelf_of(n_bytes), snapshot(1, 2, 3)
    key = shelf.add_stored(read.tokens)
    assert shelf.read(key, read) == []
    assert shelf.snapshot(key) is read
    assert shelf.take_all() == []  # it is on disk already


@pytest.mark.parametrize("next_", ["put", "read"])
def test_what_was_read_stays_known_when_it_leaves_ram(next_: str) -> None:
    shelf, read = shelf_of(0), snapshot(1, 2, 3)
    key, other = shelf.add_stored(read.tokens), shelf.add_stored([7])
    shelf.read(key, read)
    if next_ == "put":
        small = snapshot(5)
        assert shelf.put(small) == [small]  # and not what was read: that is on disk
    else:
        assert shelf.read(other, snapshot(7)) == []
        assert shelf.n_bytes == 100
    assert shelf.snapshot(key) is None
    assert shelf.match([1, 2, 3, 4]) == Match(key, 3)


def test_what_was_read_stays_while_there_is_room() -> None:
    shelf = shelf_of(300)
    for token in (1, 2, 3):
        key = shelf.add_stored([token])
        shelf.read(key, snapshot(token))
    assert shelf.n_bytes == 300
    shelf.read(shelf.add_stored([4]), snapshot(4))
    assert shelf.n_bytes == 300


def test_what_a_read_drives_out_is_given_on_unless_it_is_on_disk() -> None:
    shelf, kept = shelf_of(100), snapshot(1)
    shelf.put(kept)
    key = shelf.add_stored([2])
    assert shelf.read(key, snapshot(2)) == [kept]
    assert shelf.match([1, 9]) is None


def test_a_file_that_turned_into_another_is_not_taken_for_the_old_one() -> None:
    shelf = shelf_of()
    key = shelf.add_stored([1, 2, 3])
    shelf.read(key, snapshot(1, 2, 4))
    assert len(shelf) == 0
    assert shelf.match([1, 2, 3, 4]) is None


def test_what_is_gone_from_disk_is_gone() -> None:
    shelf = shelf_of()
    key = shelf.add_stored([1, 2, 3])
    shelf.remove(key)
    shelf.remove(key)
    assert shelf.read(key, snapshot(1, 2, 3)) == []
    assert (len(shelf), shelf.match([1, 2, 3, 4])) == (0, None)


def test_a_longer_one_in_ram_leaves_the_shorter_one_on_disk_known() -> None:
    shelf = shelf_of(100)
    key, longer = shelf.add_stored([1, 2]), snapshot(1, 2, 3)
    shelf.put(longer)
    assert len(shelf) == 2
    assert shelf.put(snapshot(7)) == [longer]
    assert shelf.match([1, 2, 3, 4]) == Match(key, 2)


# -- against a brute-force search -----------------------------------------------------------


@given(st.lists(TOKENS, max_size=8), TOKENS, st.booleans())
def test_the_longest_prefix_is_found(
    held: list[tuple[int, ...]], wanted: tuple[int, ...], any_prefix: bool
) -> None:
    shelf = shelf_of(10_000, any_prefix=any_prefix)
    keys = {shelf.add_stored(tokens): tokens for tokens in held}
    match = shelf.match(wanted)
    assert (match.n if match else 0) == longest_prefix(held, wanted[:-1], whole=not any_prefix)
    if match:
        assert n_common(keys[match.seq], wanted) >= match.n
        assert any_prefix or len(keys[match.seq]) == match.n
    assert shelf.covers(wanted) == (
        longest_prefix(held, wanted, whole=not any_prefix) == len(wanted)
    )


class ShelfMachine(RuleBasedStateMachine):
    """Random use of a shelf, beside a list of what it ought to hold."""

    any_prefix = True
    max_bytes = 120

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(max_bytes=self.max_bytes, any_prefix=self.any_prefix)
        self.in_ram: list[Snapshot] = []
        self.on_disk: dict[int, tuple[int, ...]] = {}
        self.read_last = 0

    @rule(tokens=TOKENS, n=st.integers(0, 100))
    def put(self, tokens: tuple[int, ...], n: int) -> None:
        new = Snapshot(tokens, bytes(n))
        is_new = not self.shelf.covers(tokens)
        left = self.shelf.put(new)
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
        read = Snapshot(self.on_disk[key], bytes(n))
        left = self.shelf.read(key, read)
        assert self.shelf.snapshot(key) is read
        self.in_ram = [s for s in self.in_ram if s not in left]
        self.read_last = read.n_bytes

    @precondition(lambda self: self.on_disk)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.on_disk)))
        del self.on_disk[key]
        self.shelf.remove(key)

    @rule(tokens=TOKENS)
    def match(self, tokens: tuple[int, ...]) -> None:
        held = [s.tokens for s in self.in_ram] + list(self.on_disk.values())
        match = self.shelf.match(tokens)
        expected = longest_prefix(held, tokens[:-1], whole=not self.any_prefix)
        assert (match.n if match else 0) == expected
        if match and match.seq not in self.on_disk:
            found = self.shelf.snapshot(match.seq)
            assert found in self.in_ram

    @invariant()
    def everything_not_on_disk_is_there_or_was_given_on(self) -> None:
        assert set(map(id, self.shelf.take_all())) == set(map(id, self.in_ram))
        assert len(self.shelf) == len(self.in_ram) + len(self.on_disk)

    @invariant()
    def it_stays_within_its_bytes_but_for_what_was_just_read(self) -> None:
        assert self.shelf.n_bytes <= max(self.max_bytes, self.read_last)


class WholeShelfMachine(ShelfMachine):
    any_prefix = False


TestShelf = ShelfMachine.TestCase
TestWholeShelf = WholeShelfMachine.TestCase
