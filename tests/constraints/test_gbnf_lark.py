"""The conversion to Lark: how large the lexemes are, and that any grammar is converted in time.

That the result means the same is tested against llama.cpp in tests/llama.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings, strategies as st

from llamad_trio.constraints import gbnf_lark
from llamad_trio.constraints.gbnf_lark import gbnf_to_lark
from llamad_trio.core.errors import ProtocolError
from tests.effort import assert_linear

if TYPE_CHECKING:
    from collections.abc import Callable

NON_EMPTY = " & /(?s:.)+/"


def lexemes(source: str) -> set[str]:
    """The expressions of the terminals, which are never empty."""
    found = re.findall(r"^T\d+: /(.*?)/(?: & /\(\?s:\.\)\+/)?$", gbnf_to_lark(source), re.MULTILINE)
    return {re.sub(r"\\x\{([0-9A-F]+)\}", lambda m: chr(int(m[1], 16)), text) for text in found}


@pytest.mark.parametrize(
    ("source", "regex"),
    [
        ('root ::= "a"', "a"),
        ('root ::= "ab" | [c-e]+', "(?:ab|[c-e]+)"),
        ('root ::= x x\nx ::= "a" | "b"{2,3}', "(?:a|b{2,3})(?:a|b{2,3})"),
        (r'root ::= "\"/\\ \n" .', r"\x{22}\x{2F}\x{5C}\x{20}\x{A}[\x{1}-\x{D7FF}\x{E000}-\x{10FFFF}]"),
        ("root ::= [-^a\\]]", r"[\x{2D}\x{5D}-\x{5E}a]"),
        ('root ::= ("ab")+ "c"?', "(?:ab)+c?"),
        ('root ::= "a" root | "b"', "a*b"),
        ('root ::= ("a" root | "b" ("c" root)?)', "(?:a|bc)*b"),
        ('root ::= "é🙂"', r"\x{E9}\x{1F642}"),
        ('root ::= "a"{2} "b"{3,} "c"{0,4}', "a{2}b{3,}c{0,4}"),
    ],
)  # fmt: skip
def test_without_recursion_a_grammar_is_one_lexeme(source: str, regex: str) -> None:
    assert gbnf_to_lark(source) == f"start: T0\nT0: /{regex}/\n"


@pytest.mark.parametrize("source", ['root ::= "a"*', 'root ::= | "a"', 'root ::= ("a" root)?'])
def test_a_lexeme_is_never_empty(source: str) -> None:
    lark = gbnf_to_lark(source)
    assert lark.startswith("start: T0?\n")
    assert lark.endswith(NON_EMPTY + "\n")


@pytest.mark.parametrize("source", ['root ::= ""', "root ::= []", 'root ::= "a"{0} x\nx ::= ()'])
def test_a_grammar_of_the_empty_text(source: str) -> None:
    assert gbnf_to_lark(source) == 'start: ""\n'


def test_strings_numbers_and_words_stay_lexemes() -> None:
    source = r"""
        root   ::= object
        object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
        value  ::= object | string | number | "true" ws
        string ::= "\"" [^"]* "\"" ws
        number ::= "-"? [0-9]+ ws
        ws     ::= | " " | "\n" [ \t]{0,20}
    """
    ws = "(?:| |\n[\t ]{0,20})"
    assert lexemes(source) == {
        *"{}:,",
        ws,
        f'"[\x01-!#-\ud7ff\ue000-\U0010ffff]*"{ws}',
        f"-?[0-9]+{ws}",
        f"true{ws}",
    }


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # What follows cannot go on with the lexeme; or it can.
        ('root ::= "(" root? [a-c]+ root? "x)"', {"(", "[a-c]+", "x)"}),
        ('root ::= "(" root? [a-c]+ root? "b)"', {"(", "[a-c]", "b)"}),
        # Only the end goes on.
        ('root ::= "(" root? [a-c]+ [d-f]* root? "e"', {"(", "[a-c]+", "[d-f]", "e"}),
        # Another lexeme goes on, where this one ends.
        ('root ::= "(" (root "x" | "a" root? "b" | "ab" root? "c")', {"(", *"abcx"}),
        ('root ::= "(" (root "x" | "a" root? "d" | "ab" root? "c")', {"(", "a", "ab", *"cdx"}),
        # They are never possible at one place.
        ('root ::= "(" (root "x" | "a" root? "b") | "[" "ab" root "c"', {*"([", "a", "ab", *"bcx"}),
        # The characters differ, but begin with the same byte.
        ('root ::= "(" root? [é]+ root? "è"', {"(", "é", "è"}),
        ('root ::= "(" root? [é]+ root? "€"', {"(", "é+", "€"}),
        # Recursion at the end becomes repetition.
        ('root ::= "(" root ")" | ws "x"\nws ::= ([ \\t] ws)?', {*"()", "[\t ]*x"}),
    ],
)
def test_lexemes_are_as_large_as_is_exact(source: str, expected: set[str]) -> None:
    assert lexemes(source) == expected


def test_a_large_grammar_is_cut_into_rules() -> None:
    lark = gbnf_to_lark('root ::= word{1000}\nword ::= [a-z]{10} ","')
    assert lark == "start: r0\nr0: T0{1000}\nT0: /[a-z]{10}\\x{2C}/\n"


RECURSIVE = 'root ::= "(" root ")" | '


def long_way(n: int) -> str:
    rules = (f'r{i} ::= "a" r{i + 1} "b" | "c" root "d"\n' for i in range(n))
    return f'root ::= r0\n{"".join(rules)}r{n} ::= "x"'


def each(n: int, expression: Callable[[int], str], between: str = " ") -> str:
    return RECURSIVE + between.join(map(expression, range(n)))


# Of any size, and how large each is tried.
LARGE: dict[str, tuple[Callable[[int], str], int]] = {
    "literals": (lambda n: RECURSIVE + '"a" ' * n, 24_000),
    "alternatives": (lambda n: RECURSIVE + '"a"|' * n + '"b"', 24_000),
    "a class": (
        lambda n: RECURSIVE + f"[{''.join(chr(0x10000 + 2 * i) for i in range(n))}]+ root?",
        2_000,
    ),
    "words that meet": (lambda n: each(n, lambda i: f'"w{i:x}" root?', "|"), 1_500),
    "words that run on": (
        lambda n: each(n, lambda i: f'"{"ab" * (1 + i % 7)}{i:x}" root? "ab"', "|"),
        3_000,
    ),
    "classes": (lambda n: each(n, lambda i: f"[a-z{chr(0x4E00 + i)}]+ root?"), 1_800),
    "repetitions": (lambda n: each(n, lambda _: "[a-z]+ [a-z0-9]*"), 3_000),
    "counts": (
        lambda n: f'root ::= [a-z]{{0,{5 * n}}} x{{{n}}} | "(" root ")"\nx ::= [a-c] [a-d]',
        400,
    ),
    "a long way": (long_way, 190),
}


@pytest.mark.parametrize("part", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LARGE)
def test_large_grammars_are_converted(name: str, part: int) -> None:
    source_of, n = LARGE[name]
    assert gbnf_to_lark(source_of(n // part)).startswith("start: ")


@pytest.mark.parametrize(
    "root",
    [
        '("a" | "b" root? ' * 30 + '"c"' + ")+?" * 30,
        '("a" | "b" ' * 30 + '"c"' + ")+?" * 30,
        "(" * 30 + '"c"' + ")*" + ")?" * 29,
    ],
    ids=["nested", "optional", "empty"],
)
def test_deep_grammars_are_converted(root: str) -> None:
    assert gbnf_to_lark(f"root ::= {root}").startswith("start: ")


@pytest.mark.parametrize("name", LARGE)
def test_the_effort_is_linear_in_the_source_and_in_its_limit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_size(n: int) -> tuple[int, str]:
        return 20 * n, LARGE[name][0](n)

    def convert(limit_and_source: tuple[int, str]) -> None:
        limit, source = limit_and_source
        monkeypatch.setattr(gbnf_lark, "MAX_EFFORT", limit)
        gbnf_to_lark(source)

    assert_linear(convert, of_size, 30)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (long_way(300), f"more than {gbnf_lark.MAX_RULE_NESTING} rules lead from one to the next"),
        (each(2_500, lambda i: f'"{chr(0x4E00 + i)}" root?', "|"), "different literals"),
        (each(4_000, lambda i: f'"{i:03x}" root?', "|"), "4000 alternatives"),
        ('root ::= "a', "line 1: unexpected end"),
    ],
)  # fmt: skip
def test_what_llguidance_could_not_bear_is_refused(source: str, reason: str) -> None:
    with pytest.raises(ProtocolError, match=f"grammar.*{reason}"):
        gbnf_to_lark(source)


SCRAPS = [*"xy|()*+?", '"a"', '"ab"', "[b-d]", "root", "{2,3}", '"c"root']
BODIES = st.lists(st.sampled_from(SCRAPS), max_size=12).map(" ".join)


@settings(deadline=None, max_examples=200)
@given(BODIES, BODIES, BODIES)
def test_any_grammar_is_converted_or_refused(root: str, x: str, y: str) -> None:
    try:
        lark = gbnf_to_lark(f'root ::= {root} "r"\nx ::= {x} "x"\ny ::= {y} "y"')
    except ProtocolError:
        return
    defined = re.findall(r"^(\w+):", lark, re.MULTILINE)
    used = re.findall(r"\b[rT]\d+\b", re.sub(r"/.*/", "", lark))
    assert defined[0] == "start"
    assert set(defined[1:]) == set(used)
