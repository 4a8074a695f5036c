"""llama.cpp's grammar notation (GBNF): source text to a small tree, and what is refused.

What llama.cpp (0.3.36 of llama-cpp-python) accepts is accepted and means the same.  What
it refuses is refused, and so is what would crash it, hang it, or leave a text that cannot
end.  Every refusal is a `ProtocolError` with the line.  All work is linear in the size of
the source, and no recursion is deeper than the limits below.

Knows nothing of what the grammar is used for.
"""

from __future__ import annotations

import bisect
import contextlib
import graphlib
import heapq
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NoReturn

import attrs

from llamad_trio.core.errors import ProtocolError

MAX_SOURCE = 100_000
"""Characters of source.  Parsed in 0.2 s; the largest grammar that llama.cpp ships has 2,000."""

MAX_RULES = 5_000
"""Rules of a grammar: room for a generated one, and a bound on every walk from rule to rule."""

MAX_NESTING = 30
"""Groups inside groups.  A walk takes up to ten Python frames for each, of the 1,000 there are."""

MAX_STACKED = 3
"""Repetitions of a repetition, as in `x+?`, for the same reason."""

MAX_REPETITIONS = 2_000
"""llama.cpp's own bound (MAX_REPETITION_THRESHOLD), and how it applies it: see `_repeat`."""

MAX_EXPANSION = 1_000_000
"""Characters of a rule, repetitions and rules in it written out: more than any context holds."""

MAX_TEXT = 100_000
"""Characters of the shortest text that matches: more would not be finished."""

MAX_RANGES = 2_000
"""Ranges of one character class.  llguidance takes 0.03 s to compile that many, 7 s for 20,000."""

Ranges = tuple[tuple[int, int], ...]

_NOT_TEXT: Ranges = ((0, 0), (0xD800, 0xDFFF), (0x110000, 0xFFFFFFFF))
"""What an escape can say, but no text has: llama.cpp never generates NUL, UTF-8 no surrogates."""


@attrs.frozen(eq=False)
class Chars:
    """One character.  `ranges` are inclusive, sorted, apart from each other, and not empty."""

    ranges: Ranges


@attrs.frozen(eq=False)
class Concatenation:
    """One item after the other.  Without items: the empty text."""

    items: tuple[Node, ...]


@attrs.frozen(eq=False)
class Alternation:
    """Any of the options."""

    options: tuple[Node, ...]


@attrs.frozen(eq=False)
class Repetition:
    """`low` to `high` times; without end if `high` is `None`."""

    item: Node
    low: int
    high: int | None


@attrs.frozen(eq=False)
class Reference:
    """What the rule of that name matches."""

    name: str


Node = Chars | Concatenation | Alternation | Repetition | Reference


@attrs.frozen
class GbnfGrammar:
    """A grammar that some text matches.  `nullable`: the rules that match the empty text."""

    root: str
    rules: Mapping[str, Node]
    nullable: frozenset[str]


def parse_gbnf(source: str, root: str) -> GbnfGrammar:
    """Read a grammar; `ProtocolError` if it is wrong, unsafe, or beyond this module's limits."""
    if len(source) > MAX_SOURCE:
        raise ProtocolError(f"grammar: has more than {MAX_SOURCE} characters")
    parser = _Parser(source)
    parser.parse()
    rules = parser.rules
    for name in parser.names:
        if name not in rules:
            parser.refuse_rule(name, "is not defined")
    if root not in rules:
        raise ProtocolError(f"grammar: there is no rule {root!r} to start from")
    shortest = _shortest(rules)
    for name in rules:
        if name not in shortest:
            parser.refuse_rule(name, "never ends: no text matches it")
        if shortest[name] > MAX_TEXT:
            parser.refuse_rule(name, f"matches no text of less than {MAX_TEXT} characters")
    nullable = frozenset(name for name, length in shortest.items() if length == 0)
    _refuse_left_recursion(parser, nullable)
    _refuse_expansion(parser)
    return GbnfGrammar(root, rules, nullable)


def matches_empty(node: Node, nullable: frozenset[str]) -> bool:
    """Whether the node matches the empty text, given the rules that do."""
    match node:
        case Chars():
            return False
        case Reference(name):
            return name in nullable
        case Concatenation(items):
            return all(matches_empty(item, nullable) for item in items)
        case Alternation(options):
            return any(matches_empty(option, nullable) for option in options)
        case Repetition(item, low):
            return low == 0 or matches_empty(item, nullable)


def children(node: Node) -> tuple[Node, ...]:
    """The nodes that a node is made of; a reference and a character are of none."""
    match node:
        case Concatenation(nodes) | Alternation(nodes):
            return nodes
        case Repetition(item):
            return (item,)
        case _:
            return ()


def node_of(kind: type[Concatenation | Alternation], nodes: Iterable[Node]) -> Node:
    """The nodes as one of that kind; one alone as it is."""
    parts = tuple(nodes)
    return parts[0] if len(parts) == 1 else kind(parts)


def references(node: Node) -> Iterator[str]:
    """The rules a node refers to, in order, as often as it does."""
    return (part.name for part in _nodes_within([node]) if isinstance(part, Reference))


def bottom_up(rules: Mapping[str, Node]) -> list[str]:
    """The rules from which no recursion is reached, each after all that it refers to."""
    sorter = graphlib.TopologicalSorter(dict.fromkeys(rules, ()))
    for name, node in rules.items():
        sorter.add(name, *references(node))
    # What leads to a cycle is never ready.
    with contextlib.suppress(graphlib.CycleError):
        sorter.prepare()
    order: list[str] = []
    while ready := sorter.get_ready():
        order.extend(ready)
        sorter.done(*ready)
    return order


def _nodes_within(nodes: Iterable[Node]) -> Iterator[Node]:
    """The nodes and all that is in them, from left to right."""
    waiting = list(nodes)[::-1]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(reversed(children(node)))


def _shortest(rules: Mapping[str, Node]) -> dict[str, int]:
    """How long the shortest text of each rule is, for those that have one.

    Nodes are settled in the order of that length, as in Dijkstra's shortest paths: what a
    node costs follows from parts that cost no more.  Lengths beyond the limit are cut.
    """
    users: defaultdict[Node, list[Node]] = defaultdict(list)
    cost: dict[Node, int] = {}
    missing: dict[Node, int] = {}
    for node in _nodes_within(rules.values()):
        parts = (rules[node.name],) if isinstance(node, Reference) else children(node)
        for part in parts:
            users[part].append(node)
        cost[node] = 1 if isinstance(node, Chars) else 0
        # Of other nodes the first part that is settled is the shortest.
        missing[node] = len(parts) if isinstance(node, Concatenation) else min(len(parts), 1)
        if isinstance(node, Repetition) and node.low == 0:
            missing[node] = 0
    settled: dict[Node, int] = {}
    # The number decides between equals: nodes do not compare.
    heap = [(cost[node], id(node), node) for node, count in missing.items() if count == 0]
    heapq.heapify(heap)
    while heap:
        length, _, node = heapq.heappop(heap)
        settled[node] = length
        for user in users[node]:
            missing[user] -= 1
            cost[user] += length * (user.low if isinstance(user, Repetition) else 1)
            if missing[user] == 0:
                heapq.heappush(heap, (min(cost[user], MAX_TEXT + 1), id(user), user))
    return {name: settled[node] for name, node in rules.items() if node in settled}


def _leftmost(node: Node, nullable: frozenset[str]) -> Iterator[str]:
    """The rules that may begin a node's text, with nothing before them."""
    if isinstance(node, Reference):
        yield node.name
    for part in children(node):
        yield from _leftmost(part, nullable)
        if isinstance(node, Concatenation) and not matches_empty(part, nullable):
            break


def _refuse_left_recursion(parser: _Parser, nullable: frozenset[str]) -> None:
    for name, line in parser.loops:
        if parser.hollow[name]:
            raise ProtocolError(
                f"grammar line {line}: left recursion: {name!r} is repeated without end, "
                "and has an empty alternative"
            )
    begins = {name: set(_leftmost(node, nullable)) for name, node in parser.rules.items()}
    try:
        graphlib.TopologicalSorter(begins).prepare()
    except graphlib.CycleError as error:
        parser.refuse_rule(error.args[1][0], "begins with itself: left recursion")


def _refuse_expansion(parser: _Parser) -> None:
    sizes: dict[str, int] = {}

    def size(node: Node) -> int:
        match node:
            case Reference(name):
                # What recurs is counted once: it repeats by recurring, not by a count.
                return sizes.get(name, 1)
            case Concatenation(items):
                return sum(map(size, items))
            case Repetition(item, low, high):
                return size(item) * max(low, high or 1)
            case _:
                return max(map(size, children(node)), default=1)

    for name in dict.fromkeys([*bottom_up(parser.rules), *parser.rules]):
        sizes[name] = size(parser.rules[name])
        if sizes[name] > MAX_EXPANSION:
            parser.refuse_rule(name, f"has, repetitions counted, more than {MAX_EXPANSION} parts")


_SPACE = re.compile(r"(?:[ \t]+|#[^\r\n]*)*")
_LINES = re.compile(r"(?:[ \t\r\n]+|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_ITEM = re.compile(r'["\[(.*+?{<!a-zA-Z0-9-]')
_DIGITS = re.compile(r"[0-9]+")
_HEX = re.compile(r"[0-9a-fA-F]+")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{char: char for char in '\\"[]-'}}
_SIGNS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _Parser:
    """One pass over the source; what needs all rules at once is checked afterwards."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.at = 0
        self.newlines = [found.start() for found in re.finditer("\n", source)]
        self.rules: dict[str, Node] = {}
        self.names: dict[str, int] = {}  # defined or referred to, and the line of the first time
        self.hollow: dict[str, bool] = {}  # has an alternative with nothing in it
        self.loops: list[tuple[str, int]] = []  # repeated without end, and where
        self.generated = 0

    def parse(self) -> None:
        if "\0" in self.source:
            self.at = self.source.index("\0")
            self.refuse("NUL character")
        self.skip(_LINES)
        while self.peek():
            name = self.name()
            self.skip(_SPACE)
            self.expect("::=")
            self.skip(_LINES)
            # Of two definitions llama.cpp takes the last.
            self.rules[name], self.hollow[name] = self.alternation(depth=0)
            if self.peek() not in {"", "\r", "\n"}:
                self.refuse(f"unexpected {self.peek()!r}")
            self.skip(_LINES)
        if not self.rules:
            self.refuse("has no rules")

    def alternation(self, depth: int) -> tuple[Node, bool]:
        """Alternatives, and whether one of them has nothing in it."""
        options = [self.concatenation(depth)]
        while self.take("|"):
            self.skip(_LINES)
            options.append(self.concatenation(depth))
        nodes = [node_of(Concatenation, option) for option in options]
        return node_of(Alternation, nodes), not all(options)

    def concatenation(self, depth: int) -> list[Node]:
        space = _LINES if depth else _SPACE
        items: list[Node] = []
        last: _Last | None = None
        while found := _ITEM.match(self.source, self.at):
            char = found[0]
            if char in "*+?{":
                if last is None:
                    self.refuse(f"nothing to repeat before {char!r}")
                node = self.repeat(items.pop(), last, space)
            else:
                symbols = self.symbols
                node, head = self.item(char, depth)
                last = _Last(head, max(1, self.symbols - symbols) if char == "(" else 1)
            if isinstance(node, Concatenation) and not node.items and char != "(":
                last = None
            else:
                items.append(node)
            self.skip(space)
        return items

    def item(self, char: str, depth: int) -> tuple[Node, str | bool]:
        """One item, and how it may begin: see `_Last`."""
        if char in "<!":
            self.refuse("token references are not supported")
        if _NAME.match(char):
            name = self.name()
            return Reference(name), name
        self.at += 1
        match char:
            case '"':
                return self.literal(), False
            case "[":
                return self.char_class(), False
            case ".":
                return self.chars_but(()), False
            case _:
                return self.group(depth + 1)

    def group(self, depth: int) -> tuple[Node, bool]:
        if depth > MAX_NESTING:
            self.refuse(f"more than {MAX_NESTING} groups inside each other")
        self.generated += 1
        self.skip(_LINES)
        node, hollow = self.alternation(depth)
        self.expect(")")
        return node, hollow

    def literal(self) -> Node:
        items: list[Node] = []
        while not self.take('"'):
            code = self.character()
            items.append(self.chars_but([(0, code - 1), (code + 1, 2**32)]))
        return node_of(Concatenation, items)

    def char_class(self) -> Node:
        negated = self.take("^")
        ranges: list[tuple[int, int]] = []
        while not self.take("]"):
            low = high = self.character()
            if not self.source.startswith("-]", self.at) and self.take("-"):
                high = self.character()
                if high < low:
                    self.refuse("character range ends before it begins")
            ranges.append((low, high))
        if not ranges:
            return Concatenation(())
        return self.chars_but(ranges if negated else _complement(ranges))

    def chars_but(self, excluded: Iterable[tuple[int, int]]) -> Chars:
        """Any character of text but these."""
        ranges = tuple(_complement([*excluded, *_NOT_TEXT]))
        if not ranges:
            self.refuse("matches no character that a text can have")
        if len(ranges) > MAX_RANGES:
            self.refuse(f"more than {MAX_RANGES} ranges in a class")
        return Chars(ranges)

    def character(self) -> int:
        """One character of a literal or a class, escaped or not."""
        char = self.peek()
        if not char:
            self.refuse("unexpected end")
        self.at += 1
        if char != "\\":
            return ord(char)
        kind = self.peek()
        if kind in _ESCAPES:
            self.at += 1
            return ord(_ESCAPES[kind])
        if kind not in _HEX_DIGITS:
            self.refuse(f"unknown escape '\\{kind}'")
        self.at += 1
        n_digits = _HEX_DIGITS[kind]
        digits = self.source[self.at : self.at + n_digits]
        if len(digits) < n_digits or not _HEX.fullmatch(digits):
            self.refuse(f"'\\{kind}' needs {n_digits} hexadecimal digits")
        self.at += n_digits
        return int(digits, 16)

    def repeat(self, item: Node, last: _Last, space: re.Pattern[str]) -> Node:
        """Apply the repetition that stands here to `item`.

        llama.cpp unrolls repetitions into rules, and bounds the rules that one item becomes.
        """
        low, high = self.bounds(space)
        last.rules *= high or low or 1
        if last.rules > MAX_REPETITIONS:
            self.refuse(f"more than {MAX_REPETITIONS} repetitions")
        self.generated += 1 if high is None else high - low
        if high is None:
            # Unrolled, it is `loop ::= item loop |`, which llama.cpp finds left-recursive.
            if last.head is True:
                self.refuse("left recursion: repeats without end what has an empty alternative")
            if isinstance(last.head, str):
                self.loops.append((last.head, self.line()))
        last.stacked += 1
        if last.stacked > MAX_STACKED:
            self.refuse(f"more than {MAX_STACKED} repetitions of one item")
        if high == 0:
            return Concatenation(())
        if low == 0:
            last.head = True
        return Repetition(item, low, high)

    def bounds(self, space: re.Pattern[str]) -> tuple[int, int | None]:
        sign = self.peek()
        self.at += 1
        if sign in _SIGNS:
            return _SIGNS[sign]
        self.skip(space)
        low = self.count()
        high: int | None = low
        self.skip(space)
        if self.take(","):
            self.skip(space)
            high = self.count() if _DIGITS.match(self.peek()) else None
            self.skip(space)
        self.expect("}")
        if low > MAX_REPETITIONS:
            self.refuse(f"more than {MAX_REPETITIONS} repetitions")
        if high is not None and high < low:
            self.refuse("repetition ends before it begins")
        # llama.cpp takes a larger maximum for none.
        return low, None if high is None or high > MAX_REPETITIONS else high

    def count(self) -> int:
        digits = self.token(_DIGITS, "expected a number")
        # 64 bits, as in llama.cpp; and int() refuses thousands of digits.
        if len(digits.lstrip("0")) > 20 or int(digits) >= 2**64:
            self.refuse("number too large")
        return int(digits)

    def name(self) -> str:
        name = self.token(_NAME, "expected the name of a rule")
        if name not in self.names:
            self.names[name] = self.line()
            if len(self.names) > MAX_RULES:
                self.refuse(f"more than {MAX_RULES} rules")
        return name

    @property
    def symbols(self) -> int:
        """How many rules llama.cpp would have by now."""
        return len(self.names) + self.generated

    def token(self, pattern: re.Pattern[str], missing: str) -> str:
        found = pattern.match(self.source, self.at)
        if found is None:
            self.refuse(missing)
        self.at = found.end()
        return found[0]

    def skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self.source, self.at)
        assert found is not None  # both match nothing, too
        self.at = found.end()

    def expect(self, text: str) -> None:
        if not self.take(text):
            self.refuse(f"expected {text!r}")

    def take(self, text: str) -> bool:
        """Go past `text`, if it stands here."""
        found = self.source.startswith(text, self.at)
        if found:
            self.at += len(text)
        return found

    def peek(self) -> str:
        return self.source[self.at : self.at + 1]

    def line(self) -> int:
        return 1 + bisect.bisect_left(self.newlines, self.at)

    def refuse_rule(self, name: str, reason: str) -> NoReturn:
        raise ProtocolError(f"grammar line {self.names[name]}: rule {name!r} {reason}")

    def refuse(self, reason: str) -> NoReturn:
        raise ProtocolError(f"grammar line {self.line()}: {reason}")


@attrs.define
class _Last:
    """The item that a repetition sign would apply to, as llama.cpp sees it.

    Attributes:
        head: the rule it begins with; `True` for a group or a repetition with an empty
            alternative, `False` where it has none.
        rules: how many rules it is.
        stacked: how many repetitions apply to it already.
    """

    head: str | bool
    rules: int
    stacked: int = 0


def _complement(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """All numbers of 32 bits that are in none of the ranges, as `Chars` has them."""
    start = 0
    for low, high in sorted([*ranges, (2**32, 2**32)]):
        if low > start:
            yield start, low - 1
        start = max(start, high + 1)
