"""Which sequence holds which tokens in the KV pool, and which cells they share.

A tree of runs of cells.  A sequence is the path from the root to where it ends;
sequences that share cells share that part of their paths.  So the tree is both the
books of the pool (its size is the cells in use, each counted once) and the index by
which a new prompt finds the longest prefix that somebody has computed already.

Two sequences that computed the same tokens apart hold different cells: then a node has
two children that begin alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs


def common_length(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """How many of their first `limit` tokens are the same.  Both of one type."""
    low, high = 0, min(limit, len(a), len(b))
    # Slices compare at the speed of C: halve instead of walking.
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@attrs.frozen
class Match:
    """The first `n` tokens of sequence `seq` are what was looked for; by default, none of any."""

    seq: int = -1
    n: int = 0


@attrs.define(eq=False)
class _Node:
    """A run of cells: positions `start` to `end` of every sequence that passes through."""

    tokens: list[int]
    start: int
    parent: _Node | None
    children: list[_Node] = attrs.field(factory=list)
    seqs: set[int] = attrs.field(factory=set)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def any_seq(self) -> int:
        """Some sequence that passes through this node."""
        node = self
        while not node.seqs:
            node = node.children[0]
        return next(iter(node.seqs))


class PrefixTree:
    """The sequences in a pool.  Lengths and positions in tokens."""

    def __init__(self) -> None:
        self._root = _Node([], 0, None)
        self._ends: dict[int, _Node] = {}
        self.size = 0
        """Cells in use, a shared one counted once."""

    def length(self, seq: int) -> int:
        """Tokens the sequence holds; 0 if it is unknown."""
        node = self._ends.get(seq)
        return node.end if node else 0

    def tokens(self, seq: int) -> list[int]:
        """What the sequence holds."""
        path = list(self._path(seq))
        return [token for node in reversed(path) for token in node.tokens]

    def is_inside_another(self, seq: int, *, whole: bool = False) -> bool:
        """Whether another holds these same cells; if `whole`, these and no others."""
        node = self._ends[seq]
        return len(node.seqs) > 1 or (bool(node.children) and not whole)

    def holders(self, seq: int) -> set[int]:
        """The sequences that hold the last cell of this one: itself, and who shares all of it."""
        found: set[int] = set()
        stack = [self._ends[seq]]
        while stack:
            node = stack.pop()
            found |= node.seqs
            stack += node.children
        return found

    def n_cells(self, prefixes: Iterable[tuple[int, int]]) -> int:
        """Cells held by the first `n` tokens of each `(seq, n)` together."""
        covered: dict[int, int] = {}
        for seq, n in prefixes:
            for node in self._path(seq):
                part = min(node.end, n) - node.start
                if part > 0:
                    covered[id(node)] = max(part, covered.get(id(node), 0))
        return sum(covered.values())

    def match(self, tokens: Sequence[int], limit: int, *, whole: bool = False) -> Match:
        """The longest prefix of `tokens`, at most `limit`, that a sequence holds.

        If `whole`, only sequences count that hold nothing but the prefix.
        """
        tokens = list(tokens[:limit])  # a list equals no tuple
        limit = len(tokens)
        best_node, best = self._root, 0
        stack = [self._root]
        while stack:
            node = stack.pop()
            for child in node.children:
                if child.start >= limit or child.tokens[0] != tokens[child.start]:
                    continue
                part = tokens[child.start : min(child.end, limit)]
                shared = common_length(child.tokens, part, len(part))
                complete = shared == len(child.tokens)
                if complete:
                    stack.append(child)
                if child.start + shared > best and (not whole or (complete and child.seqs)):
                    best_node, best = child, child.start + shared
        if best == 0:
            return Match()
        return Match(next(iter(best_node.seqs)) if whole else best_node.any_seq(), best)

    def copy(self, src: int, dst: int, n: int) -> None:
        """Let `dst`, which holds nothing, share the first `n` tokens of `src`."""
        assert self.length(dst) == 0
        self.drop(dst)
        node = self._ends[src]
        while node.start >= n and node.parent is not None:
            node = node.parent
        if node.end > n:
            node = self._split(node, n)
        self._settle(dst, node)

    def extend(self, seq: int, tokens: Sequence[int]) -> None:
        """Append tokens to a sequence, known or new."""
        node = self._ends.get(seq, self._root)
        if node.parent is None or node.children or len(node.seqs) > 1:
            node.seqs.discard(seq)
            child = _Node([], node.end, node)
            node.children.append(child)
            self._settle(seq, child)
            node = child
        node.tokens.extend(tokens)
        self.size += len(tokens)

    def drop(self, seq: int) -> None:
        """Forget a sequence, known or not."""
        if (node := self._ends.pop(seq, None)) is None:
            return
        node.seqs.discard(seq)
        while node.parent is not None and not node.seqs and not node.children:
            node.parent.children.remove(node)
            self.size -= len(node.tokens)
            node = node.parent

    def _path(self, seq: int) -> Iterator[_Node]:
        """From where the sequence ends up to the root, which is left out."""
        node = self._ends.get(seq)
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def _settle(self, seq: int, node: _Node) -> None:
        node.seqs.add(seq)
        self._ends[seq] = node

    def _split(self, node: _Node, n: int) -> _Node:
        """Cut a node at position `n`; return the upper part, in which nobody ends."""
        assert node.parent is not None
        upper = _Node(node.tokens[: n - node.start], node.start, node.parent, [node])
        node.parent.children[node.parent.children.index(node)] = upper
        node.tokens = node.tokens[n - node.start :]
        node.start, node.parent = n, upper
        return upper
