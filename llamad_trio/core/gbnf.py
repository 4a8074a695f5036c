"""llama.cpp's grammar notation (GBNF): source text to a small tree, and what is refused.

What llama.cpp (0.3.36 of llama-cpp-python) accepts is accepted and means the same.  What
it refuses is refused, and so is what would crash it, hang it, or leave a text that cannot
end.  Every refusal is a `ProtocolError` with the line.  All work is linear in the size of
the source, and no recursion is deeper than the limits below.

Knows nothing of what the grammar is used for.
"""

from __future__ import annotations

import graphlib
import heapq
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NoReturn

import attrs

from llamad_trio.core.errors import ProtocolError

__all__ = [
    "Chars",
    "Choice",
    "Grammar",
    "Node",
    "Ranges",
    "Ref",
    "Repeat",
    "Sequence",
    "bottom_up",
    "matches_empty",
    "parse_gbnf",
    "references",
]

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

_TEXT: Ranges = ((1, 0xD7FF), (0xE000, 0x10FFFF))
"""The characters of generated text: llama.cpp never generates NUL, UTF-8 has no surrogates."""


@attrs.frozen(eq=False)
class Chars:
    """One character.  `ranges` are inclusive, sorted, apart from each other, and not empty."""

    ranges: Ranges


@attrs.frozen(eq=False)
class Sequence:
    """One item after the other.  Without items: the empty text."""

    items: tuple[Node, ...]


@attrs.frozen(eq=False)
class Choice:
    """Any of the options."""

    options: tuple[Node, ...]


@attrs.frozen(eq=False)
class Repeat:
    """`low` to `high` times; without end if `high` is `None`."""

    item: Node
    low: int
    high: int | None


@attrs.frozen(eq=False)
class Ref:
    """What the rule of that name matches."""

    name: str


Node = Chars | Sequence | Choice | Repeat | Ref


@attrs.frozen
class Grammar:
    """A grammar that some text matches.  `nullable`: the rules that match the empty text."""

    root: str
    rules: Mapping[str, Node]
    nullable: frozenset[str]


def parse_gbnf(source: str, root: str) -> Grammar:
    """Read a grammar.

    Raises:
        ProtocolError: it is wrong, unsafe, or more than the limits of this module.
    """
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
    return Grammar(root, rules, nullable)


def matches_empty(node: Node, nullable: frozenset[str]) -> bool:
    """Whether the node matches the empty text, given the rules that do."""
    match node:
        case Chars():
            return False
        case Ref(name):
            return name in nullable
        case Sequence(items):
            return all(matches_empty(item, nullable) for item in items)
        case Choice(options):
            return any(matches_empty(option, nullable) for option in options)
        case Repeat(item, low):
            return low == 0 or matches_empty(item, nullable)


def references(node: Node) -> Iterator[str]:
    """The rules a node refers to, in order, as often as it does."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Ref):
            yield node.name
        waiting.extend(reversed(_children(node)))


def bottom_up(rules: Mapping[str, Node]) -> list[str]:
    """The rules from which no recursion is reached, each after all that it refers to."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    waits: dict[str, int] = {}
    for name, node in rules.items():
        used = set(references(node))
        waits[name] = len(used)
        for other in used:
            users[other].append(name)
    order = [name for name, count in waits.items() if count == 0]
    for name in order:
        for user in users[name]:
            waits[user] -= 1
            if waits[user] == 0:
                order.append(user)
    return order


def _children(node: Node) -> tuple[Node, ...]:
    match node:
        case Sequence(nodes) | Choice(nodes):
            return nodes
        case Repeat(item):
            return (item,)
        case _:
            return ()


def _shortest(rules: Mapping[str, Node]) -> dict[str, int]:
    """How long the shortest text of each rule is, for those that have one.

    Nodes are settled in the order of that length, as in Dijkstra's shortest paths: what a
    node costs follows from parts that cost no more.  Lengths beyond the limit are cut.
    """
    users: dict[Node, list[Node]] = {}
    open_parts: dict[Node, int] = {}
    cost: dict[Node, int] = {}
    settled: dict[Node, int] = {}
    heap: list[tuple[int, int, Node]] = []
    tickets = itertools.count()

    def reach(node: Node, length: int) -> None:
        # The ticket decides between equals: nodes do not compare.
        heapq.heappush(heap, (min(length, MAX_TEXT + 1), next(tickets), node))

    waiting = list(rules.values())
    while waiting:
        node = waiting.pop()
        children = (rules[node.name],) if isinstance(node, Ref) else _children(node)
        for child in children:
            users.setdefault(child, []).append(node)
        open_parts[node], cost[node] = len(children), 0
        if isinstance(node, Chars):
            reach(node, 1)
        elif matches_empty(node, frozenset()):
            reach(node, 0)
        waiting.extend(_children(node))
    while heap:
        length, _, node = heapq.heappop(heap)
        if node in settled:
            continue
        settled[node] = length
        for user in users.get(node, ()):
            match user:
                case Sequence():
                    cost[user] += length
                    open_parts[user] -= 1
                    if open_parts[user] == 0:
                        reach(user, cost[user])
                case Repeat(_, low):
                    reach(user, length * low)
                case _:
                    reach(user, length)
    return {name: settled[node] for name, node in rules.items() if node in settled}


def _leftmost(node: Node, nullable: frozenset[str]) -> Iterator[str]:
    """The rules that may begin a node's text, with nothing before them."""
    match node:
        case Ref(name):
            yield name
        case Choice(options):
            for option in options:
                yield from _leftmost(option, nullable)
        case Repeat(item):
            yield from _leftmost(item, nullable)
        case Sequence(items):
            for item in items:
                yield from _leftmost(item, nullable)
                if not matches_empty(item, nullable):
                    break


def _refuse_left_recursion(parser: _Parser, nullable: frozenset[str]) -> None:
    for name, line in parser.loops:
        if name in parser.hollow:
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
            case Ref(name):
                # What recurs is counted once: it repeats by recurring, not by a count.
                return sizes.get(name, 1)
            case Sequence(items):
                return sum(map(size, items))
            case Repeat(item, low, high):
                return size(item) * max(low, high or 1)
            case _:
                return max(map(size, _children(node)), default=1)

    for name in [*bottom_up(parser.rules), *parser.rules]:
        if name not in sizes:
            sizes[name] = size(parser.rules[name])
        if sizes[name] > MAX_EXPANSION:
            parser.refuse_rule(name, f"has, repetitions counted, more than {MAX_EXPANSION} parts")


_SPACE = re.compile(r"(?:[ \t]+|#[^\r\n]*)*")
_LINES = re.compile(r"(?:[ \t\r\n]+|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_DIGITS = re.compile(r"[0-9]+")
_HEX = re.compile(r"[0-9a-fA-F]*")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{char: char for char in '\\"[]-'}}


class _Parser:
    """One pass over the source; what needs all rules at once is checked afterwards.

    Attributes:
        names: every rule that is defined or referred to, and the line of the first time.
        hollow: the rules with an alternative that has nothing in it.
        loops: the rules that are repeated without end, and where.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.at = 0
        self.line_of = (0, 1)
        self.rules: dict[str, Node] = {}
        self.names: dict[str, int] = {}
        self.hollow: set[str] = set()
        self.loops: list[tuple[str, int]] = []
        self.generated = 0

    def parse(self) -> None:
        if "\0" in self.source:
            self.at = self.source.index("\0")
            self.refuse("NUL character")
        self.skip(_LINES)
        while self.at < len(self.source):
            self.rule()
        if not self.rules:
            self.refuse("has no rules")

    def rule(self) -> None:
        name = self.name()
        self.skip(_SPACE)
        if not self.source.startswith("::=", self.at):
            self.refuse("expected '::='")
        self.at += 3
        self.skip(_LINES)
        # Of two definitions llama.cpp takes the last.
        self.rules[name], hollow = self.choice(depth=0)
        (self.hollow.add if hollow else self.hollow.discard)(name)
        if self.peek() not in {"", "\r", "\n"}:
            self.refuse(f"unexpected {self.peek()!r}")
        self.skip(_LINES)

    def choice(self, depth: int) -> tuple[Node, bool]:
        """Alternatives, and whether one of them has nothing in it."""
        options = [self.sequence(depth)]
        while self.peek() == "|":
            self.at += 1
            self.skip(_LINES)
            options.append(self.sequence(depth))
        hollow = any(not option for option in options)
        nodes = tuple(_joined(option) for option in options)
        return (nodes[0] if len(nodes) == 1 else Choice(nodes)), hollow

    def sequence(self, depth: int) -> list[Node]:
        space = _LINES if depth else _SPACE
        items: list[Node] = []
        last: _Last | None = None
        while (char := self.peek()) and (char in '"[(.*+?{<!' or _NAME.match(char)):
            if char in "*+?{":
                if last is None:
                    self.refuse(f"nothing to repeat before {char!r}")
                node = self.repeat(items.pop(), last, space)
                last.stacked += 1
                if last.stacked > MAX_STACKED:
                    self.refuse(f"more than {MAX_STACKED} repetitions of one item")
            else:
                symbols = self.symbols
                node, head = self.item(char, depth)
                added = self.symbols - symbols if char == "(" else 1
                last = _Last(head, max(1, added))
            if isinstance(node, Sequence) and not node.items and char != "(":
                last = None
            else:
                items.append(node)
            self.skip(space)
        return items

    def item(self, char: str, depth: int) -> tuple[Node, str | bool]:
        """One item, and how it may begin: see `_Last`."""
        if char in "<!":
            self.refuse("token references are not supported")
        match char:
            case '"':
                return self.literal(), False
            case "[":
                return self.char_class(), False
            case ".":
                self.at += 1
                return Chars(_TEXT), False
            case "(":
                return self.group(depth + 1)
            case _:
                name = self.name()
                return Ref(name), name

    def group(self, depth: int) -> tuple[Node, bool]:
        if depth > MAX_NESTING:
            self.refuse(f"more than {MAX_NESTING} groups inside each other")
        self.generated += 1
        self.at += 1
        self.skip(_LINES)
        node, hollow = self.choice(depth)
        if self.peek() != ")":
            self.refuse("expected ')'")
        self.at += 1
        return node, hollow

    def literal(self) -> Node:
        self.at += 1
        items: list[Node] = []
        while self.peek() != '"':
            code = self.character()
            items.append(self.chars([(code, code)]))
        self.at += 1
        return _joined(items)

    def char_class(self) -> Node:
        self.at += 1
        negated = self.peek() == "^"
        self.at += negated
        ranges: list[tuple[int, int]] = []
        while self.peek() != "]":
            low = high = self.character()
            if self.peek() == "-" and not self.source.startswith("-]", self.at):
                self.at += 1
                high = self.character()
                if high < low:
                    self.refuse("character range ends before it begins")
            ranges.append((low, high))
        node = self.chars(ranges, negated=negated) if ranges else Sequence(())
        self.at += 1
        return node

    def chars(self, ranges: list[tuple[int, int]], *, negated: bool = False) -> Chars:
        ranges = list(_merged(ranges))
        if negated:
            ranges = list(_gaps(ranges))
        # Both are few: _TEXT has two.
        found = [(max(a, c), min(b, d)) for a, b in ranges for c, d in _TEXT if a <= d and c <= b]
        if not found:
            self.refuse("matches no character that a text can have")
        if len(found) > MAX_RANGES:
            self.refuse(f"more than {MAX_RANGES} ranges in a class")
        return Chars(tuple(found))

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
        digits = self.source[self.at + 1 : self.at + 1 + _HEX_DIGITS[kind]]
        if len(digits) != _HEX_DIGITS[kind] or not _HEX.fullmatch(digits):
            self.refuse(f"'\\{kind}' needs {_HEX_DIGITS[kind]} hexadecimal digits")
        self.at += 1 + len(digits)
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
        if high == 0:
            return Sequence(())
        if low == 0:
            last.head = True
        return Repeat(item, low, high)

    def bounds(self, space: re.Pattern[str]) -> tuple[int, int | None]:
        sign = self.peek()
        self.at += 1
        if sign != "{":
            return (1 if sign == "+" else 0), (1 if sign == "?" else None)
        self.skip(space)
        low = self.count()
        high: int | None = low
        self.skip(space)
        if self.peek() == ",":
            self.at += 1
            self.skip(space)
            high = self.count() if _DIGITS.match(self.peek()) else None
            self.skip(space)
        if self.peek() != "}":
            self.refuse("expected '}'")
        self.at += 1
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

    def peek(self) -> str:
        return self.source[self.at : self.at + 1]

    def line(self) -> int:
        """The line that is being read; counted on from the last time."""
        at, line = self.line_of
        self.line_of = (self.at, line + self.source.count("\n", at, self.at))
        return self.line_of[1]

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


def _joined(items: list[Node]) -> Node:
    return items[0] if len(items) == 1 else Sequence(tuple(items))


def _merged(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The same characters, sorted, each once."""
    low, high = -1, -2
    for a, b in sorted(ranges):
        if a <= high + 1:
            high = max(high, b)
        else:
            if high >= low:
                yield low, high
            low, high = a, b
    yield low, high


def _gaps(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """All other characters, for ranges that are sorted."""
    start = 0
    for a, b in ranges:
        if a > start:
            yield start, a - 1
        start = b + 1
    if start <= 0x10FFFF:
        yield start, 0x10FFFF
