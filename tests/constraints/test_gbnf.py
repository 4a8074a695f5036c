"""The grammar parser: what each notation means, what is refused and why, and hostile sources."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings, strategies as st

from llamad_trio.constraints import gbnf
from llamad_trio.constraints.gbnf import (
    Alternation,
    Chars,
    Concatenation,
    Node,
    Reference,
    Repetition,
    parse_gbnf,
)
from llamad_trio.core.errors import ProtocolError
from tests.effort import assert_linear

if TYPE_CHECKING:
    from collections.abc import Callable


def show(node: Node) -> str:
    """The tree in a notation of its own: `(a b)` a sequence, `(a | b)` a choice."""
    match node:
        case Chars(ranges):
            return "".join(chr(a) if a == b else f"<{a:x}-{b:x}>" for a, b in ranges)
        case Concatenation(items):
            return f"({' '.join(map(show, items))})"
        case Alternation(options):
            return f"({' | '.join(map(show, options))})"
        case Repetition(item, low, high):
            return f"{show(item)}{{{low},{'' if high is None else high}}}"
        case Reference(name):
            return f"${name}"


def parsed(source: str) -> str:
    return show(parse_gbnf(f"root ::= {source}", "root").rules["root"])


@pytest.mark.parametrize(
    ("source", "tree"),
    [
        ('"a"', "a"),
        ('"abc"', "(a b c)"),
        ('""', "()"),
        ("[]", "()"),
        ("[^]", "()"),
        ("()", "()"),
        ('"a" "b"', "(a b)"),
        ('"a"|"b" | ', "(a | b | ())"),
        ('("a" "b")', "(a b)"),
        ('(\n"a"\n|\n"b"\n)', "(a | b)"),
        ('"a"*', "a{0,}"),
        ('"a"+', "a{1,}"),
        ('"a"?', "a{0,1}"),
        ('"a"{3}', "a{3,3}"),
        ('"a"{3,}', "a{3,}"),
        ('"a"{ 3 , 5 }', "a{3,5}"),
        ('"a"{0}', "()"),
        ('"a"{1,2001}', "a{1,}"),
        ('"ab"+', "(a b){1,}"),
        ('"a"+?', "a{1,}{0,1}"),
        ("[a-c]", "<61-63>"),
        ("[c-da-bx]", "<61-64>x"),
        ("[-a]", "-a"),
        ("[a-]", "-a"),
        (r"[\]\[\\\"\-]", '"-<5b-5d>'),
        (r"[\t\r\n]", "<9-a>\r"),
        (r'"\x41\u00e9\U0001F642"', "(A é 🙂)"),
        ("[^a]", "<1-60><62-d7ff><e000-10ffff>"),
        (".", "<1-d7ff><e000-10ffff>"),
        (r"[\x00-\x02]", "<1-2>"),
        (r"[\uD700-\uE000]", "<d700-d7ff>\ue000"),
        (r"[a\UFFFFFFFF]", "a"),
        ('"a" # "b"\n', "a"),
        ('"a\nb"', "(a \n b)"),
        ('"a"\nroot ::= "b"', "b"),  # of two definitions the last counts
        # What recurs does not multiply.
        ('"(" root{2000} ")" | "x"{2000}', "((( $root{2000,2000} )) | x{2000,2000})"),
    ],
)
def test_what_the_notation_means(source: str, tree: str) -> None:
    assert parsed(source) == tree


def test_rules_are_found_by_name() -> None:
    grammar = parse_gbnf('start ::= x-1 | 2\n\nx-1::="a"\r\n2\t::= "b"?', "start")
    assert {name: show(node) for name, node in grammar.rules.items()} == {
        "start": "($x-1 | $2)",
        "x-1": "a",
        "2": "b{0,1}",
    }
    assert grammar.root == "start"
    assert grammar.nullable == {"start", "2"}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", "line 1: has no rules"),
        ("# only\n# comments\n", "line 3: has no rules"),
        ('rot ::= "a"', "there is no rule 'root'"),
        ('root ::= "a"\nx ::= "b" |\n   y', "line 3: rule 'y' is not defined"),
        ('root = "a"', "line 1: expected '::='"),
        ('root ::= "a"\n| "b"', "line 2: expected the name of a rule"),
        ('root ::= "a" ; "b"', "line 1: unexpected ';'"),
        ('root ::= "a" )', r"line 1: unexpected '\)'"),
        ('root ::= ("a" "b"\n', r"line 2: expected '\)'"),
        ('root ::= "a', "line 1: unexpected end"),
        ("root ::= [a", "line 1: unexpected end"),
        ("root ::= [a-", "line 1: unexpected end"),
        ('root ::= "\\', "unknown escape"),
        (r'root ::= "\q"', r"unknown escape '\\q'"),
        (r'root ::= "\x4"', "needs 2 hexadecimal digits"),
        (r'root ::= "\u12_4"', "needs 4 hexadecimal digits"),
        (r"root ::= [\U0001F64]", "needs 8 hexadecimal digits"),
        (r'root ::= "a\x00"', "no character that a text can have"),
        (r'root ::= "\uD800"', "no character that a text can have"),
        (r'root ::= "\U00110000"', "no character that a text can have"),
        (r"root ::= [^\x01-\U0010FFFF]", "no character that a text can have"),
        ("root ::= [z-a]", "range ends before it begins"),
        ('root ::= "a"\0', "NUL"),
        ('root ::= "\ud800"', "no character that a text can have"),
        ("root ::= *", r"nothing to repeat before '\*'"),
        ('root ::= "a" | +', "nothing to repeat"),
        ('root ::= ""?', "nothing to repeat"),
        ('root ::= "a"{0}*', "nothing to repeat"),
        ('root ::= "a"{}', "expected a number"),
        ('root ::= "a"{,3}', "expected a number"),
        ('root ::= "a"{1', "expected '}'"),
        ('root ::= "a"{1-2}', "expected '}'"),
        ('root ::= "a"{3,2}', "ends before it begins"),
        ('root ::= "a"{2001}', "more than 2000 repetitions"),
        ('root ::= "a"{50}{50}', "more than 2000 repetitions"),
        ('root ::= ("a"{0,50}){50}', "more than 2000 repetitions"),
        ('root ::= "a"{18446744073709551616}', "number too large"),
        ('root ::= "a"???+', "left recursion"),
        ('root ::= "a"{2}{2}{2}{2}', "more than 3 repetitions of one item"),
        ("root ::= <[5]>", "token references are not supported"),
        ("root ::= !<think>", "token references are not supported"),
        ("root ::= root", "never ends"),
        ('root ::= root | "a"', "rule 'root' begins with itself"),
        ('root ::= "b"? x | "a"\nx ::= root "c"', "left recursion"),
        ('root ::= ("b"?) root "c" | "a"', "left recursion"),
        ('root ::= x* \nx ::= "a" |', "line 1: left recursion: 'x' is repeated"),
        ('root ::= ("a" |)+', "left recursion"),
        ('root ::= "a" root', "line 1: rule 'root' never ends"),
        ('root ::= "a" x\nx ::= "b" y | "c" x\ny ::= x', "line 1: rule 'root' never ends"),
        ('root ::= "a" | x\nx ::= "b" x', "line 1: rule 'x' never ends"),
    ],
)
def test_what_is_refused(source: str, reason: str) -> None:
    with pytest.raises(ProtocolError, match=f"grammar.*{reason}"):
        parse_gbnf(source, "root")


def test_repetitions_multiply_through_rules() -> None:
    # 100 * 100 * 100 is the limit.
    source = 'root ::= a{100}\na ::= "x" | b{0,100}\nb ::= "c"{100}'
    parse_gbnf(source, "root")
    with pytest.raises(ProtocolError, match="line 1: rule 'root' has, repetitions counted,"):
        parse_gbnf(source.replace("a{100}", "a{101}"), "root")


def test_a_text_that_is_too_long_to_finish_is_refused() -> None:
    source = 'root ::= "a" x{50} | root{3}\nx ::= "b" y "c"\ny ::= "d"{1997} root?'
    with pytest.raises(ProtocolError, match="left recursion"):
        parse_gbnf(source, "root")
    source = source.replace("root{3}", "y root")
    parse_gbnf(source, "root")
    with pytest.raises(ProtocolError, match="rule 'root' matches no text of less than 100000"):
        parse_gbnf(source.replace("x{50}", "x{51}"), "root")


def chain(n: int, body: str, *, end: str = "", ring: bool = False) -> str:
    """Rules `r0`, `r1` and so on of the same body, in which NEXT is the next of them."""
    last = 0 if ring else n
    lines = [
        f"r{i} ::= {body}".replace("NEXT", f"r{i + 1 if i + 1 < n else last}") for i in range(n)
    ]
    return "\n".join([*lines, f"r{n} ::= {end}" if end else ""])


def growth(n: int, first: str, body: str) -> str:
    """Rules, of which each, LAST in the body, is in the one after it."""
    lines = (f"r{i + 1} ::= {body}\n".replace("LAST", f"r{i}") for i in range(n))
    return f"r0 ::= {first}\n{''.join(lines)}"


def characters(n: int, step: int = 1) -> str:
    return f"[{''.join(map(chr, range(0x10000, 0x10000 + step * n, step)))}]"


# Of any size, and how large each is tried.
HOSTILE: dict[str, tuple[Callable[[int], str], int]] = {
    "nested groups": (lambda n: "root ::= " + "(" * n, 60_000),
    "closed groups": (lambda n: "root ::= " + "(" * n + '"a"' + ")" * n, 40_000),
    "many rules": (lambda n: chain(n, "NEXT"), 200_000),
    "a chain": (lambda n: "root ::= r0\n" + chain(n, "NEXT"), 4_990),
    "a cycle": (lambda n: 'root ::= r0 | "a"\n' + chain(n, "NEXT", ring=True), 4_000),
    "a left cycle": (lambda n: 'root ::= r0 | "a"\n' + chain(n, 'NEXT | "a"', ring=True), 4_000),
    "a megabyte": (lambda n: f'root ::= "{"a" * n}"', 1_000_000),
    "repetitions": (lambda n: "root ::= " + '"a"' + "+" * n, 90_000),
    "digits": (lambda n: 'root ::= "a"{' + "9" * n + "}", 90_000),
    "powers": (lambda n: growth(n, '"a"{2}', "LAST{2000}") + f"root ::= r{n}", 1_000),
    "an unclosed class": (lambda n: "root ::= [" + "a-z" * n, 30_000),
    "an unclosed literal": (lambda n: 'root ::= "' + "\\\\" * n, 45_000),
    "references": (lambda n: "root ::= " + "a " * n, 49_000),
    "a class": (lambda n: f"root ::= {characters(n, 2)}", 53_248),
    "doublings": (lambda n: growth(n, '"a" | root', "LAST LAST") + f'root ::= "(" r{n}', 60),
    "optional doublings": (lambda n: growth(n, '"a"', "LAST LAST?") + f"root ::= r{n}", 60),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_sources_are_refused(name: str) -> None:
    source_of, n = HOSTILE[name]
    with pytest.raises(ProtocolError):
        parse_gbnf(source_of(n), "root")


def web(n: int) -> str:
    rules = (f'r{i} ::= "a" r{7 * i % n} | "a" r{(7 * i + 1) % n} | "b"\n' for i in range(n))
    return f"root ::= r0\n{''.join(rules)}"


LARGE: dict[str, tuple[Callable[[int], str], int]] = {
    "literals": (lambda n: "root ::= " + '"a" ' * n, 24_000),
    "alternatives": (lambda n: "root ::= " + '"a"|' * n + '"b"', 24_000),
    "a class": (lambda n: f"root ::= {characters(n)}", 0x10000),
    "comments": (lambda n: "#" * n + '\nroot ::= "a"', 99_000),
    "lines": (lambda n: 'root ::= ("a"' + "\n" * n + ")", 99_000),
    "a chain": (lambda n: "root ::= r0\n" + chain(n, "NEXT", end='"a"'), 4_000),
    "a chain backwards": (lambda n: growth(n, '"a"?', "LAST") + f"root ::= r{n}", 4_000),
    "a web": (web, 2_500),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_sources_are_read(name: str) -> None:
    source_of, n = LARGE[name]
    source = source_of(n)
    assert 40_000 < len(source) <= gbnf.MAX_SOURCE
    parse_gbnf(source, "root")


@pytest.mark.parametrize(
    "source_of",
    [source_of for source_of, _ in (*HOSTILE.values(), *LARGE.values())],
    ids=[*HOSTILE, *(f"{name}, taken" for name in LARGE)],
)
def test_reading_is_linear(source_of: Callable[[int], str]) -> None:
    def read(source: str) -> None:
        with contextlib.suppress(ProtocolError):
            parse_gbnf(source, "root")

    assert_linear(read, source_of, 200)


def test_groups_may_nest_to_the_limit() -> None:
    def nested(depth: int) -> str:
        return "root ::= " + '("a" | "b" ' * depth + '"c"' + ")+?{2}" * depth

    with pytest.raises(ProtocolError, match="more than 30 groups"):
        parse_gbnf(nested(gbnf.MAX_NESTING + 1), "root")
    # Deep for every walk, but refused only for what it would come to.
    with pytest.raises(ProtocolError, match="repetitions counted"):
        parse_gbnf(nested(gbnf.MAX_NESTING), "root")
    parse_gbnf(nested(gbnf.MAX_NESTING).replace("{2}", ""), "root")


SCRAPS = st.sampled_from(
    [*'"[](){}|*+?,1\\^-.# <\n', "root", "a", " ::= ", "\\x", '"b"', "'a'", "é", "::="]
)


@settings(max_examples=350)
@given(st.lists(SCRAPS, max_size=25).map("".join) | st.text())
def test_any_text_is_read_or_refused(source: str) -> None:
    for text in (source, f'root ::= {source}\na ::= "x"'):
        try:
            parse_gbnf(text, "root")
        except ProtocolError as error:
            assert error.reason.startswith("grammar")  # noqa: PT017
