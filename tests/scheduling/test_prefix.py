"""The prefix tree against a brute-force pool that knows every cell by number."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from llamad_trio.scheduling.prefix import Match, PrefixTree, common_length
from tests.scheduling.oracles import longest_prefix

SEQS = st.integers(0, 5)
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


class PrefixMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.held: dict[int, list[tuple[int, int]]] = {}  # (cell, token) by sequence
        self.cells = count()

    @rule(seq=SEQS, tokens=TOKENS)
    def extend(self, seq: int, tokens: list[int]) -> None:
        self.tree.extend(seq, tokens)
        self.held.setdefault(seq, []).extend((next(self.cells), t) for t in tokens)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), dst=SEQS)
    def copy(self, data: st.DataObject, dst: int) -> None:
        src = data.draw(st.sampled_from(sorted(self.held)))
        if src == dst:
            return
        n = data.draw(st.integers(0, len(self.held[src])))
        self.drop(dst)
        self.tree.copy(src, dst, n)
        self.held[dst] = self.held[src][:n]

    @rule(seq=SEQS)
    def drop(self, seq: int) -> None:
        self.tree.drop(seq)
        self.held.pop(seq, None)

    @rule(tokens=TOKENS, whole=st.booleans(), limit=st.integers(0, 7))
    def match(self, tokens: list[int], whole: bool, limit: int) -> None:
        contents = [[token for _, token in held] for held in self.held.values()]
        found = self.tree.match(tokens, limit, whole=whole)
        assert found.n == longest_prefix(contents, tokens[:limit], whole=whole)
        if found.n:
            held = self.held[found.seq]
            assert [token for _, token in held[: found.n]] == tokens[: found.n]
            assert not whole or len(held) == found.n

    @rule(data=st.data())
    def cells_of_prefixes(self, data: st.DataObject) -> None:
        prefixes = [
            (seq, data.draw(st.integers(0, len(held) + 1))) for seq, held in self.held.items()
        ]
        expected = {cell for seq, n in prefixes for cell, _ in self.held[seq][:n]}
        assert self.tree.n_cells(prefixes) == len(expected)

    @invariant()
    def every_cell_is_counted_once(self) -> None:
        assert self.tree.size == len({cell for held in self.held.values() for cell, _ in held})

    @invariant()
    def every_sequence_holds_its_tokens(self) -> None:
        for seq, held in self.held.items():
            assert self.tree.tokens(seq) == [token for _, token in held]
            assert self.tree.length(seq) == len(held)

    @invariant()
    def who_is_inside_another_shares_its_last_cell(self) -> None:
        for seq, held in self.held.items():
            if not held:
                continue
            others = [h for s, h in self.held.items() if s != seq]
            assert self.tree.is_inside_another(seq) == any(held[-1] in h for h in others)
            assert self.tree.is_inside_another(seq, whole=True) == (held in others)
            assert self.tree.holders(seq) == {s for s, h in self.held.items() if held[-1] in h}


TestPrefixTree = PrefixMachine.TestCase
TestPrefixTree.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


@pytest.mark.slow
def test_the_tree_agrees_with_a_list_at_length() -> None:
    run_state_machine_as_test(
        PrefixMachine, settings=settings(max_examples=2_000, stateful_step_count=60, deadline=None)
    )


@given(TOKENS, TOKENS, st.integers(0, 8))
def test_common_length_is_where_they_part(a: list[int], b: list[int], limit: int) -> None:
    n = common_length(a, b, limit)
    assert a[:n] == b[:n]
    assert n == min(limit, len(a), len(b)) or a[n] != b[n]


def test_an_unknown_sequence_holds_nothing() -> None:
    tree = PrefixTree()
    assert tree.length(3) == 0
    assert tree.match([1, 2], 2) == Match()
