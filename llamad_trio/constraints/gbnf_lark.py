"""A GBNF grammar as a Lark grammar for llguidance: other notation, the same texts.

llguidance cuts the text into *lexemes* and parses those.  Its lexer is greedy: a lexeme goes
on while any lexeme that is possible at this place can take the next character.  GBNF knows
no such rule.  Lexemes of one character are always exact, but parsing each character costs
fifty times as much as a lexer's step.  So the lexemes are made as large as is exact: first
every part without recursion is one, then those that can run on over what may follow a
lexeme are cut, until none can.

What can run on is over-estimated (counts are taken for `*`, what follows a rule here is
taken to follow it everywhere): a lexeme may be cut in vain, but none is kept in error.

Knows llguidance's notation and lexer, but not llguidance.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from math import inf

import attrs

from llamad_trio.constraints.gbnf import (
    Alternation,
    Chars,
    Concatenation,
    GbnfGrammar,
    Node,
    Ranges,
    Reference,
    Repetition,
    bottom_up,
    children,
    matches_empty,
    node_of,
    parse_gbnf,
    references,
)
from llamad_trio.core.errors import ProtocolError

MAX_LEXEME = 2_500
"""Size of a lexeme's expression, repetitions multiplied out: room for the 2,000 repetitions
of a character that llama.cpp allows.  llguidance compiles it in 0.1 s at worst; at 5,000 it may run out of fuel."""

MAX_LEXEME_NESTING = 60
"""Parentheses in each other in a lexeme.  llguidance refuses 250, a walk takes three frames."""

MAX_EFFORT = 150_000
"""Steps of looking for large lexemes: 0.3 s.  Then every character is a lexeme.  The
grammars that llama.cpp ships take at most 14,000."""

MAX_PLACES = 2_000
"""Places of lexemes that are looked at; each is a bit of every set, so the time is quadratic."""

MAX_LEXEMES = 2_000
"""Different lexemes.  llguidance's first mask takes 0.1 s with that many."""

MAX_ALTERNATIVES = 4_000
"""Alternatives of all rules.  llguidance compares those that are possible at a place with each
other: 0.2 s for that many, and 8 s for 24,000."""

MAX_RULE_NESTING = 200
"""Rules that llguidance enters before it leaves one.  It recurses, with 3.3 KB of stack for
each: 2,400 overflow the usual 8 MB and end the process; 200 are safe in a thread of 1 MB."""


def gbnf_to_lark(source: str, root: str = "root") -> str:
    """Convert a grammar to one of exactly the same texts: those that the rule `root` matches.

    Raises `ProtocolError` if it is wrong, unsafe or too large; see `parse_gbnf`.
    """
    grammar = _without_tail_recursion(parse_gbnf(source, root))
    try:
        cut = _Cut(grammar, _Effort(MAX_EFFORT), MAX_LEXEME)
        while running_on := _Places(cut).find_running_on():
            for node in running_on:
                cut.divide(node)
        return _Writer(cut).text()
    except _TooMuchEffortError:
        return _Writer(_Cut(grammar, _Effort(inf), max_lexeme=0)).text()


class _TooMuchEffortError(Exception):
    pass


@attrs.define
class _Effort:
    """Steps that may still be taken."""

    left: float

    def spend(self, steps: int = 1) -> None:
        self.left -= steps
        if self.left < 0:
            raise _TooMuchEffortError


# -- recursion ------------------------------------------------------------------------------


def _without_tail_recursion(grammar: GbnfGrammar) -> GbnfGrammar:
    """`r ::= a r | b` becomes `r ::= a* b`: llguidance is slow, and limited, at the former."""
    used = [grammar.root]
    rules: dict[str, Node] = {}
    for name in used:
        if name not in rules:
            loops, ends = _split_at_tail(grammar.rules[name], name)
            again = [Repetition(node_of(Alternation, loops), 0, None)] if loops else []
            rules[name] = node_of(Concatenation, [*again, node_of(Alternation, ends)])
            used.extend(references(rules[name]))
    return attrs.evolve(grammar, rules=rules)


def _split_at_tail(node: Node, rule: str) -> tuple[list[Node], list[Node]]:
    """Split the node's texts: what comes before the rule itself at their end; and the others."""
    match node:
        case Reference(name) if name == rule:
            return [Concatenation(())], []
        case Alternation(options):
            split = [_split_at_tail(option, rule) for option in options]
            return [n for loops, _ in split for n in loops], [n for _, ends in split for n in ends]
        case Repetition(item, 0, 1):
            loops, ends = _split_at_tail(item, rule)
            return (loops, [*ends, Concatenation(())]) if loops else ([], [node])
        case Concatenation([*before, last]):
            loops, ends = _split_at_tail(last, rule)
            if loops:
                return [_append(before, n) for n in loops], [_append(before, n) for n in ends]
    return [], [node]


def _append(items: list[Node], last: Node) -> Node:
    return node_of(
        Concatenation, [*items, *(last.items if isinstance(last, Concatenation) else [last])]
    )


# -- lexemes --------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class _Lexeme:
    """A regular expression, and at which place of the grammar it stands."""

    node: Node
    text: str
    nullable: bool


class _Cut:
    """Which nodes of the grammar are lexemes: of size `max_lexeme`, or less; or one character."""

    def __init__(self, grammar: GbnfGrammar, effort: _Effort, max_lexeme: int) -> None:
        self.grammar = grammar
        self.effort = effort
        self._max_lexeme = max_lexeme
        self._parts: dict[Node, tuple[Node, ...]] = {}
        self._beginnings: set[Node] = set()
        self._lexemes: dict[Node, _Lexeme] = {}
        self._automata: dict[str, _Automaton] = {}
        self._extents: dict[Node, tuple[float, int]] = {}
        for name in bottom_up(grammar.rules):
            self._extent(grammar.rules[name])

    def _extent(self, node: Node) -> tuple[float, int]:
        """Size and nesting of the regular expression that a node would be."""
        found = self._extents.get(node)
        if found is not None:
            return found
        match node:
            case Chars(ranges):
                found = len(ranges), 0
            case Reference(name):
                # The rules before it have theirs, so this one recurs.
                size, nesting = self._extents.get(self.grammar.rules[name], (inf, 0))
                found = size, nesting + 1
            case Repetition(item, low, high):
                size, nesting = self._extent(item)
                found = size * max(low, high or 1), nesting + 1
            case Alternation(nodes) | Concatenation(nodes):
                extents = [self._extent(child) for child in nodes]
                size = sum(size for size, _ in extents)
                found = size, 1 + max((nesting for _, nesting in extents), default=0)
        self._extents[node] = found
        return found

    def is_empty(self, node: Node) -> bool:
        """Whether only the empty text matches."""
        return self._extent(node)[0] == 0

    def lexeme(self, node: Node) -> _Lexeme | None:
        """The lexeme that this node is, if it is one."""
        size, nesting = self._extent(node)
        fits = 0 < size <= self._max_lexeme and nesting <= MAX_LEXEME_NESTING
        if node in self._parts or not (fits or isinstance(node, Chars)):
            return None
        if node not in self._lexemes:
            text = self._regex(node)
            self.effort.spend(len(text) // 10)
            nullable = matches_empty(node, self.grammar.nullable)
            self._lexemes[node] = _Lexeme(node, text, nullable)
        return self._lexemes[node]

    def automaton(self, lexeme: _Lexeme) -> _Automaton:
        if lexeme.text not in self._automata:
            automaton = _Automaton(lexeme.node, self.grammar.rules, self.effort)
            self._automata[lexeme.text] = automaton
        return self._automata[lexeme.text]

    def divide(self, node: Node) -> None:
        """Let this node, which is a lexeme, be none; its parts may be."""
        parts = self.parts(node)
        is_literal = all(isinstance(part, Chars) for part in parts)
        whole = isinstance(node, Concatenation) and node not in self._beginnings
        if whole and len(parts) > 2 and not is_literal:
            # Mostly it is only the end that runs on.
            beginning = Concatenation(parts[:-1])
            self._beginnings.add(beginning)
            parts = (beginning, parts[-1])
        self._parts[node] = parts

    def parts(self, node: Node) -> tuple[Node, ...]:
        """The nodes that stand for this one, which is no lexeme, in the grammar."""
        assert not isinstance(node, Chars), "a character is always a lexeme"
        if isinstance(node, Reference):
            return (self.grammar.rules[node.name],)
        return self._parts.get(node, children(node))

    def _regex(self, node: Node) -> str:
        match node:
            case Chars(ranges):
                spans = [_character(a) + (f"-{_character(b)}" if b > a else "") for a, b in ranges]
                alone = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
                return spans[0] if alone else f"[{''.join(spans)}]"
            case Reference(name):
                return self._regex(self.grammar.rules[name])
            case Concatenation(items):
                return "".join(map(self._regex, items))
            case Alternation(options):
                return f"(?:{'|'.join(map(self._regex, options))})"
            case Repetition(item, low, high):
                inner = self._regex(item)
                if not isinstance(item, Chars | Alternation):
                    inner = f"(?:{inner})"
                return inner + _quantifier(low, high)


def _character(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:X}}}"


def _quantifier(low: int, high: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high))
    if short is not None:
        return short
    return f"{{{low}}}" if low == high else f"{{{low},{'' if high is None else high}}}"


# -- whether the lexemes are exact ----------------------------------------------------------


class _Places:
    """The places in the text where lexemes are possible, for one way to cut the grammar.

    Lexemes are numbered; a set of them is an integer with their bits.
    """

    def __init__(self, cut: _Cut) -> None:
        self._cut = cut
        self._rules = cut.grammar.rules
        self._numbers: dict[_Lexeme, int] = {}
        self._first = dict.fromkeys(self._rules, 0)
        """For each rule, the lexemes that may begin it."""
        self._find_first()
        self._lexemes = list(self._numbers)
        self._follow = [0] * len(self._lexemes)
        """For each lexeme, those that may follow it."""
        self._after = dict.fromkeys(self._rules, 0)
        self._find_following()

    def find_running_on(self) -> list[Node]:
        """The lexemes that can take a character that may follow a lexeme ending there."""
        found: dict[Node, None] = {}
        leads = {
            follow: _union((self._automaton(n).begins for n in _members(follow)), self._cut.effort)
            for follow in set(self._follow)
        }
        for a, b in self._pairs_at_one_place():
            led = leads[self._follow[a]]
            # No text continues after the last lexeme.
            if led and self._overlap(a, b).continues & led:
                found[self._lexemes[b].node] = None
        return list(found)

    def _pairs_at_one_place(self) -> Iterator[tuple[int, int]]:
        """Each two lexemes that may both be possible at one place in a text, in both orders.

        Those are the ones that may begin it, and then those that follow two that may both be
        possible at a place, and match the same text; such as one and itself.
        """
        seen = [0] * len(self._lexemes)
        begin = self._first[self._cut.grammar.root]
        waiting = [(begin, begin), *((follow, follow) for follow in self._follow)]
        while waiting:
            some, others = waiting.pop()
            for a in _members(some):
                self._cut.effort.spend()
                new = others & ~seen[a]
                seen[a] |= new
                for b in _members(new):
                    self._cut.effort.spend()
                    yield a, b
                    followed = self._follow[a] and self._follow[b]
                    if a != b and followed and self._overlap(a, b).meets:
                        waiting.append((self._follow[a], self._follow[b]))

    def _overlap(self, a: int, b: int) -> _Overlap:
        return self._automaton(a).overlap(self._automaton(b))

    def _automaton(self, number: int) -> _Automaton:
        return self._cut.automaton(self._lexemes[number])

    def _find_first(self) -> None:
        before: dict[str, int] = {}
        while self._first != before:
            before = dict(self._first)
            # Later rules are mostly used by earlier ones.
            for name in reversed(before):
                self._first[name] = self._begin(self._rules[name])

    def _begin(self, node: Node) -> int:
        """The lexemes that may begin a node, as far as is known."""
        self._cut.effort.spend()
        if lexeme := self._cut.lexeme(node):
            number = self._numbers.setdefault(lexeme, len(self._numbers))
            if number == MAX_PLACES:
                raise _TooMuchEffortError
            return 1 << number
        if isinstance(node, Reference):
            return self._first[node.name]
        first = 0
        open_ = True
        for part in self._cut.parts(node):
            begin = self._begin(part)
            # All parts are visited: each lexeme needs its number.
            first |= begin if open_ else 0
            if isinstance(node, Concatenation):
                open_ = open_ and matches_empty(part, self._cut.grammar.nullable)
        return first

    def _find_following(self) -> None:
        waiting = dict.fromkeys(self._rules)
        while waiting:
            name = next(iter(waiting))
            del waiting[name]
            waiting.update(
                dict.fromkeys(self._note_following(self._rules[name], self._after[name]))
            )

    def _note_following(self, node: Node, then: int) -> Iterator[str]:
        """Note that `then` may follow the node; yield the rules for which that is news."""
        self._cut.effort.spend()
        if lexeme := self._cut.lexeme(node):
            self._follow[self._numbers[lexeme]] |= then
        elif isinstance(node, Reference):
            if then & ~self._after[node.name]:
                self._after[node.name] |= then
                yield node.name
        else:
            if isinstance(node, Repetition) and node.high != 1:
                then |= self._begin(node.item)
            for part in reversed(self._cut.parts(node)):
                yield from self._note_following(part, then)
                if isinstance(node, Concatenation):
                    open_ = matches_empty(part, self._cut.grammar.nullable)
                    then = self._begin(part) | (then if open_ else 0)


@attrs.frozen
class _Overlap:
    """What two lexemes have in common."""

    continues: int
    """Where the one may end, the bytes with which the other may go on."""
    meets: bool
    """Whether a text matches both."""


class _Automaton:
    """A lexeme's expression as positions: its characters, and which may come after which.

    Sets of positions, and of bytes, are integers with their bits.
    """

    def __init__(self, node: Node, rules: Mapping[str, Node], effort: _Effort) -> None:
        self._rules = rules
        self._effort = effort
        self._ranges: list[Ranges] = []
        self._follow: list[int] = []
        self._overlaps: dict[_Automaton, _Overlap] = {}
        self._first, self._last, _ = self._build(node)
        leads = [_leads(ranges) for ranges in self._ranges]
        self._next_leads = [
            _union((leads[position] for position in _members(follow)), effort)
            for follow in self._follow
        ]
        self.begins = _union((leads[position] for position in _members(self._first)), effort)
        """The bytes with which its text may begin."""

    def _build(self, node: Node) -> tuple[int, int, bool]:
        """Add the node; return its first and last positions, and whether it may be empty."""
        self._effort.spend()
        first, last, empty = 0, 0, isinstance(node, Concatenation)
        match node:
            case Chars(ranges):
                self._ranges.append(ranges)
                self._follow.append(0)
                first = last = 1 << (len(self._ranges) - 1)
            case Reference(name):
                return self._build(self._rules[name])
            case Alternation(options):
                for begin, end, nothing in map(self._build, options):
                    first, last, empty = first | begin, last | end, empty or nothing
            case Concatenation(items):
                for begin, end, nothing in map(self._build, items):
                    self._link(last, begin)
                    first |= begin if empty else 0
                    last = end | (last if nothing else 0)
                    empty = empty and nothing
            case Repetition(item, low, high):
                first, last, empty = self._build(item)
                if high != 1:
                    self._link(last, first)
                empty = empty or low == 0
        return first, last, empty

    def _link(self, before: int, after: int) -> None:
        for position in _members(before):
            self._effort.spend()
            self._follow[position] |= after

    def overlap(self, other: _Automaton) -> _Overlap:
        """Read the same text with both, in every way."""
        if other in self._overlaps:
            return self._overlaps[other]
        continues, meets = 0, False
        seen: set[tuple[int, int]] = set()
        waiting = [(self._first, other._first)] if self.begins & other.begins else []
        while waiting:
            mine, others = waiting.pop()
            for a, b in itertools.product(_members(mine), _members(others)):
                self._effort.spend()
                if (a, b) in seen or not self._both(self._ranges[a], other._ranges[b]):
                    continue
                seen.add((a, b))
                if self._last >> a & 1:
                    continues |= other._next_leads[b]
                    meets = meets or bool(other._last >> b & 1)
                waiting.append((self._follow[a], other._follow[b]))
        self._overlaps[other] = _Overlap(continues, meets)
        return self._overlaps[other]

    def _both(self, some: Ranges, others: Ranges) -> bool:
        self._effort.spend(len(some) * len(others) // 4)
        return any(a <= d and c <= b for a, b in some for c, d in others)


def _leads(ranges: Ranges) -> int:
    """The bytes with which these characters begin in UTF-8, which has them in the same order."""
    found = 0
    for low, high in ranges:
        found |= (2 << chr(high).encode()[0]) - (1 << chr(low).encode()[0])
    return found


def _union(sets: Iterable[int], effort: _Effort) -> int:
    found = 0
    for each in sets:
        effort.spend()
        found |= each
    return found


def _members(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


# -- notation -------------------------------------------------------------------------------

_RULE = re.compile(r"r[0-9]+")


class _Writer:
    """Writes rules without nested groups: llguidance allows few of those."""

    def __init__(self, cut: _Cut) -> None:
        self._cut = cut
        self._terminals: dict[str, str] = {}
        self._names: dict[Node, str] = {}
        self._waiting: list[Node] = []
        self._rules: dict[str, str] = {}
        self._alternatives = 0

    def text(self) -> str:
        self._rules["start"] = self._term(Reference(self._cut.grammar.root))
        for node in self._waiting:
            self._rules[self._names[node]] = self._body(node)
        self._refuse_nesting()
        lines = [f"{name}: {body}\n" for name, body in self._rules.items()]
        lines += [f"{name}: {regex}\n" for regex, name in self._terminals.items()]
        return "".join(lines)

    def _body(self, node: Node) -> str:
        alternatives = node.options if isinstance(node, Alternation) else (node,)
        options = dict.fromkeys(map(self._items, alternatives))
        self._alternatives += len(options)
        if self._alternatives > MAX_ALTERNATIVES:
            raise ProtocolError(f"grammar: has more than {MAX_ALTERNATIVES} alternatives")
        return " | ".join(options)

    def _items(self, node: Node) -> str:
        if isinstance(node, Concatenation) and node.items and self._cut.lexeme(node) is None:
            return " ".join(map(self._items, self._cut.parts(node)))
        return self._term(node)

    def _term(self, node: Node) -> str:
        if self._cut.is_empty(node):
            return '""'
        if lexeme := self._cut.lexeme(node):
            # One that may be empty is one that is not, or nothing.
            regex = f"/{lexeme.text}/" + (" & /(?s:.)+/" if lexeme.nullable else "")
            name = self._terminals.setdefault(regex, f"T{len(self._terminals)}")
            if len(self._terminals) > MAX_LEXEMES:
                raise ProtocolError(f"grammar: has more than {MAX_LEXEMES} different literals")
            return name + ("?" if lexeme.nullable else "")
        match node:
            case Repetition(item, low, high):
                inner = self._term(item)
                if not inner[-1].isalnum():
                    inner = f"({inner})"
                return inner + _quantifier(low, high)
            case Reference(name):
                return self._rule(self._cut.grammar.rules[name])
            case _:
                return self._rule(node)

    def _rule(self, node: Node) -> str:
        if node not in self._names:
            self._names[node] = f"r{len(self._names)}"
            self._waiting.append(node)
        return self._names[node]

    def _refuse_nesting(self) -> None:
        entered: set[str] = set()

        def enter(rule: str, depth: int) -> None:
            """Enter the rules as llguidance does when it compiles them."""
            if depth > MAX_RULE_NESTING:
                raise ProtocolError(
                    f"grammar: more than {MAX_RULE_NESTING} rules lead from one to the next"
                )
            entered.add(rule)
            for name in _RULE.findall(self._rules[rule]):
                if name not in entered:
                    enter(name, depth + 1)

        enter("start", 1)
