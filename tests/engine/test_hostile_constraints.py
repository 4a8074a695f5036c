"""Constraints made to break things break nothing but themselves.

All run against one engine in a process of its own, while another request generates there:
a crash of that process is a failed test, and not the end of all of them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import trio

from llamad_trio import InferenceError, LlamadError, ProtocolError, Request, open_engine
from tests.apart import run_apart
from tests.support import EXACT

if TYPE_CHECKING:
    from tests.models import TinyModels


def nested(n: int, leaf: object = None) -> Any:
    schema: Any = {"type": "integer"} if leaf is None else leaf
    for _ in range(n):
        schema = {"type": "array", "items": schema}
    return schema


def chain_of_refs(n: int, leaf: Any) -> dict[str, Any]:
    links = {f"r{i}": nested(20, {"$ref": f"#/$defs/r{i + 1}"}) for i in range(n)}
    return {"$ref": "#/$defs/r0", "$defs": {**links, f"r{n}": leaf}}


def rules(n: int, separator: str) -> str:
    return "\n".join(f"r{i}{separator}r{i + 1}" for i in range(n))


REFUSED: dict[str, dict[str, Any]] = {
    "gbnf: 60,000 parentheses": {"grammar": "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000},
    "gbnf: open parentheses": {"grammar": "root ::= " + "(" * 60_000},
    "gbnf: chain of 200,000 rules": {
        "grammar": f'root ::= r0\n{rules(200_000, " ::= ")}\nr200000 ::= "a"'
    },
    "gbnf: nested repetition": {"grammar": 'root ::= ((("a"{2000}){2000}){2000}){2000}'},
    "gbnf: endless": {"grammar": 'root ::= "a" root'},
    "lark: 60,000 parentheses": {"lark": "start: " + "(" * 60_000 + '"a"' + ")" * 60_000},
    "lark: chain of 200,000 rules": {"lark": f'start: r0\n{rules(20_000, ": ")}\nr20000: "a"'},
    "lark: chain of terminals": {
        "lark": "start: R0\n" + rules(5_000, ": ").replace("r", "R") + '\nR5000: "a"'
    },
    "lark: empty": {"lark": ""},
    "lark: undefined": {"lark": "start: a"},
    "lark: bad json": {"lark": "start: %json {bad"},
    "lark: deep json": {"lark": "start: %json " + json.dumps(nested(900))},
    "lark: huge multiple": {"lark": 'start: %json {"type": "integer", "multipleOf": 1000003}'},
    "lark: other grammar": {"lark": "start: @other"},
    "lark: no such token": {"lark": "start: <[99999999]>"},
    "regex: 60,000 parentheses": {"regex": "(" * 60_000 + "a" + ")" * 60_000},
    "regex: look-ahead": {"regex": "(?=a)b"},
    "regex: back reference": {"regex": r"(a)\1"},
    "regex: empty": {"regex": ""},
    "schema: deep": {"json_schema": nested(900)},
    "schema: deeper than Python": {"json_schema": nested(100_000)},
    "schema: chain of references": {"json_schema": chain_of_refs(200, {"type": "null"})},
    "schema: only itself": {"json_schema": {"$ref": "#"}},
    "schema: unsatisfiable": {"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}},
    "schema: no choice": {"json_schema": {"enum": []}},
    "schema: multipleOf": {"json_schema": {"type": "integer", "multipleOf": 1_000_003}},
    "schema: common multiple": {
        "json_schema": {"allOf": [{"multipleOf": 997}, {"multipleOf": 1009}], "type": "integer"}
    },
    "schema: a megabyte": {"json_schema": {"enum": ["x" * 1000 + str(i) for i in range(1000)]}},
    "schema: unknown keyword": {"json_schema": {"type": "string", "minimumLength": 3}},
    "schema: unsupported keyword": {"json_schema": {"type": "array", "uniqueItems": True}},
}

BOUNDED: dict[str, dict[str, Any]] = {
    "gbnf: exponential stacks": {
        "grammar": 'root ::= s\ns ::= "a" s "b" | "a" s "c" | "a"',
        "max_tokens": 60,
    },
    "gbnf: doubling": {
        "grammar": "root ::= r0\n"
        + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60))
        + '\nr60 ::= "a"'
    },
    "gbnf: ambiguous": {"grammar": 'root ::= (.* .* "x" .* | "(" root ")")', "max_tokens": 20},
    "lark: ambiguous": {"lark": 'start: a\na: a a | "x" | ', "max_tokens": 40},
    "lark: doubling": {
        "lark": "start: r0\n"
        + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60))
        + '\nr60: "a"'
    },
    "lark: doubling terminals": {
        "lark": "start: R0\n"
        + "\n".join(f'R{i}: R{i + 1} "b" R{i + 1}' for i in range(60))
        + '\nR60: "a"'
    },
    "lark: never ends": {"lark": 'start: "a" start'},
    "lark: all of it forced": {"lark": 'start: "ab"{100000}', "max_tokens": 30},
    "lark: automata multiplied": {
        "lark": "start: X\nX: /(a|b)*a(a|b){30}/ & /(a|b)*b(a|b){29}/ & ~/.*abab.*/"
    },
    "regex: repetitions": {"regex": "((((a{50}){50}){50}){50})"},
    "regex: exponential": {"regex": "(a|b)*a(a|b){40}"},
    "regex: alternatives": {"regex": "(" * 60 + "a" + "|b)*" * 60},
    "schema: recursive": {
        "json_schema": {
            "type": "object",
            "properties": {"x": {"$ref": "#"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
    "schema: thousands of properties": {
        "json_schema": {
            "type": "object",
            "properties": {f"k{i}": {"type": "string"} for i in range(4000)},
        }
    },
    "schema: all of any": {
        "json_schema": {
            "allOf": [
                {"anyOf": [{"properties": {f"a{i}{j}": {"type": "string"}}} for j in range(4)]}
                for i in range(8)
            ],
            "type": "object",
        }
    },
}


def print_outcomes(path: str) -> None:
    """What the process of its own does: prints the outcomes, by name, as JSON."""
    print(json.dumps(trio.run(attack, path)))


async def attack(path: str) -> dict[str, str]:
    told: dict[str, str] = {}
    calm = Request("calm", raw=True, temperature=0, max_tokens=150)
    async with open_engine(path, EXACT, n_slots=4) as engine:
        alone = (await engine.complete(calm)).text
        beside: list[str] = []
        generated = trio.Event()

        async def generate() -> None:
            while True:
                beside.append((await engine.complete(calm)).text)
                generated.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            for name, fields in {**REFUSED, **BOUNDED}.items():
                fields = {"max_tokens": 30, "temperature": 1.0, **fields}
                try:
                    await engine.complete("x", raw=True, **fields)
                    told[name] = "completed"
                except LlamadError as error:
                    told[name] = type(error).__name__
            good = await engine.complete("x", raw=True, regex="good", max_tokens=10)
            await generated.wait()
            nursery.cancel_scope.cancel()
        told["good"] = good.text
        told["beside"] = "undisturbed" if set(beside) == {alone} else "disturbed"
    return told


@pytest.fixture(scope="module")
def told(tiny_model: TinyModels) -> dict[str, str]:
    path = tiny_model("attention", n_ctx_train=100_000)
    outcomes: dict[str, str] = run_apart(print_outcomes, str(path))
    return outcomes


@pytest.mark.parametrize("name", REFUSED)
async def test_it_is_refused(told: dict[str, str], name: str) -> None:
    assert told[name] == ProtocolError.__name__


@pytest.mark.parametrize("name", BOUNDED)
async def test_it_ends(told: dict[str, str], name: str) -> None:
    assert told[name] in {"completed", ProtocolError.__name__, InferenceError.__name__}


async def test_the_engine_goes_on_and_the_stream_beside_them_is_undisturbed(
    told: dict[str, str],
) -> None:
    assert (told["good"], told["beside"]) == ("good", "undisturbed")
