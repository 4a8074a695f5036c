from __future__ import annotations

import json
import re
from math import isqrt
from typing import TYPE_CHECKING, Any

import pytest

from llamad_trio.constraints.constraint import MAX_SOURCE_BYTES, Constraint, check_constraint
from llamad_trio.constraints.schema_vetting import MAX_DEPTH, MAX_MULTIPLE, depth_bound
from llamad_trio.core.errors import ProtocolError
from tests.effort import assert_linear

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

JSON = json.dumps


def check(schema: dict[str, Any]) -> None:
    check_constraint(Constraint("json_schema", json.loads(JSON(schema))))


def depth(schema: dict[str, Any]) -> int:
    return depth_bound(json.loads(JSON(schema)))


def nested(n: int, keyword: str = "items") -> str:
    return f'{{"{keyword}":' * n + "{}" + "}" * n


def ref(name: object) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


def defined(*options: Sequence[object]) -> dict[str, dict[str, Any]]:
    """Definitions of lists, by number, each of those of some others."""
    return {
        str(i): {"items": {"anyOf": [ref(name) for name in names]}}
        for i, names in enumerate(options)
    }


# -- Sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["regex", "lark"])
def test_sources_are_limited_in_bytes(kind: Any) -> None:
    with pytest.raises(ProtocolError, match=f"{kind} has .* bytes"):
        check_constraint(Constraint(kind, "é" * (MAX_SOURCE_BYTES // 2 + 1)))
    with pytest.raises(ProtocolError, match="empty"):
        check_constraint(Constraint(kind, ""))
    check_constraint(Constraint("regex", "a" * MAX_SOURCE_BYTES))


def test_schemas_are_limited_in_bytes() -> None:
    check({"const": "a" * (MAX_SOURCE_BYTES - 20)})
    with pytest.raises(ProtocolError, match=r"json_schema has \d+ bytes"):
        check({"const": "a" * MAX_SOURCE_BYTES})


def test_multiples_are_limited_by_their_product() -> None:
    check({"multipleOf": MAX_MULTIPLE})
    check({"items": {"multipleOf": 2}, "allOf": [{"multipleOf": MAX_MULTIPLE // 2}] * 5})
    for schema in (
        {"multipleOf": MAX_MULTIPLE + 1},
        {"items": {"multipleOf": 3}, "allOf": [{"multipleOf": MAX_MULTIPLE // 2}]},
        {"allOf": [{"multipleOf": 0.125}, {"multipleOf": 801}]},
    ):
        with pytest.raises(ProtocolError, match="multipleOf"):
            check(schema)


def test_what_only_looks_like_a_multiple_does_not_count() -> None:
    check({"properties": {"multipleOf": {"const": 5}}, "multipleOf": 3})


# -- Depth ------------------------------------------------------------------------------------


def test_nesting_is_limited() -> None:
    check(json.loads(nested(MAX_DEPTH - 1)))
    with pytest.raises(ProtocolError, match="deep"):
        check(json.loads(nested(MAX_DEPTH)))


def test_references_count_as_what_they_lead_to() -> None:
    assert depth({}) == 1
    assert depth({"items": {}}) == 2
    assert depth({"$defs": {"a": {"items": {"items": {}}}}, "items": {"items": ref("a")}}) == 6
    chain = {str(i): {"items": ref(i + 1)} for i in range(MAX_DEPTH)} | {str(MAX_DEPTH): {}}
    with pytest.raises(ProtocolError, match="deep"):
        check({"$defs": chain, **ref(0)})
    # The other way about, so that no order of reading finds it by luck.
    backwards = {str(i): {"items": ref(i - 1)} for i in range(1, MAX_DEPTH)} | {"0": {}}
    with pytest.raises(ProtocolError, match="deep"):
        check({"$defs": backwards, **ref(MAX_DEPTH - 1)})


def test_references_in_percent_and_tilde_escapes_count_too() -> None:
    chain = {f"{i}/%": {"items": {"$ref": f"#/$defs/{i + 1}~1%25"}} for i in range(MAX_DEPTH)}
    with pytest.raises(ProtocolError, match="deep"):
        check({"$defs": {**chain, f"{MAX_DEPTH}/%": {}}, "$ref": "#/$defs/0~1%25"})


def test_a_wide_schema_is_not_deep() -> None:
    wide = {str(i): {"items": ref("end")} for i in range(1000)}
    assert depth({"$defs": {**wide, "end": {}}, "anyOf": [ref(i) for i in range(1000)]}) < 8


@pytest.mark.parametrize(
    "schema",
    [
        {"items": {"$ref": "#"}},
        {"$defs": defined([1], [0]), **ref(0)},
        {"$defs": defined([0, 1, 2], [0, 1, 2], [0, 1, 2]), "anyOf": [ref(0), ref(2)]},
        {"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}, "value": {"const": [{}]}}},
    ],
)
def test_a_cycle_is_of_finite_depth(schema: dict[str, Any]) -> None:
    assert depth(schema) < 20
    check(schema)


def test_cycles_are_as_deep_as_the_longest_way_through_them() -> None:
    def ring(n: int) -> dict[str, Any]:
        return {"$defs": defined(*([(i + 1) % n] for i in range(n))), **ref(0)}

    # Of each definition: itself, its items, their list, and what refers to the next.
    assert depth(ring(100)) >= 400
    check(ring(100))
    with pytest.raises(ProtocolError, match="deep"):
        check(ring(200))


def test_a_long_way_is_found_though_short_ones_lead_to_all() -> None:
    """Every definition refers to its neighbours, and to the middles of the halves on its sides.

    Who follows the middles first is at most ten deep, and then knows all of them; llguidance,
    which follows the neighbours first, runs out of stack.
    """
    n = 600
    options: list[list[object]] = [[] for _ in range(n)]

    def halve(low: int, high: int) -> int | None:
        if low >= high:
            return None
        middle = (low + high) // 2
        halves = [halve(low, middle), halve(middle + 1, high)]
        neighbours = [i for i in (middle + 1, middle - 1) if 0 <= i < n]
        options[middle] = [*neighbours, *(i for i in halves if i is not None)]
        return middle

    root = halve(0, n)
    for order in ([0, root], [root, 0]):
        schema = {"$defs": defined(*options), "anyOf": [ref(i) for i in order]}
        assert depth(schema) >= 4 * n
        with pytest.raises(ProtocolError, match="deep"):
            check(schema)


# -- Lark -------------------------------------------------------------------------------------


def lark(source: str) -> None:
    check_constraint(Constraint("lark", source))


def test_schemas_in_a_grammar_are_vetted_each() -> None:
    lark('start: a b\na: %json {"type": "integer"}\nb: %json{"x-guidance": {}, "const": 1}')
    for source in (
        'start: %json {"not": {}}',
        'start: a b\na: %json {"type": "integer"}\nb: %json\n{"uniqueItems": true}',
        'start: "a" %json {"x-guidance": {"lenient": true}}',
        'start: %json {"multipleOf": 1000000}',
        f"start: %json {nested(MAX_DEPTH)}",
    ):
        with pytest.raises(ProtocolError, match="json_schema"):
            lark(source)


@pytest.mark.parametrize(
    "source",
    [
        "start: %json {",
        'start: %json {"a": nul}',
        'start: %json {"minimum": ' + "9" * 5000 + "}",
        "start: %json " + '{"items":' * 25_000,
    ],
    ids=["open", "word", "digits", "deep"],
)
def test_what_is_no_json_in_a_grammar_is_refused(source: str) -> None:
    with pytest.raises(ProtocolError, match="no JSON"):
        lark(source)


def test_numbers_beyond_all_bounds_in_a_grammar_are_refused() -> None:
    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        for keyword in ("minimum", "multipleOf", "const", "maxItems"):
            with pytest.raises(ProtocolError, match=keyword):
                lark(f'start: %json {{"{keyword}": {number}}}')


def test_rules_and_brackets_of_a_grammar_are_limited() -> None:
    lark("start: " + "(" * (MAX_DEPTH - 1) + '"a"' + ")" * (MAX_DEPTH - 1))
    with pytest.raises(ProtocolError, match="rules and brackets"):
        lark("start: " + "(" * (2 * MAX_DEPTH) + '"a"' + ")" * (2 * MAX_DEPTH))
    with pytest.raises(ProtocolError, match="rules and brackets"):
        lark("\n".join(f"r{i}: r{i + 1}" for i in range(2 * MAX_DEPTH + 1)))


# -- Effort -----------------------------------------------------------------------------------

# Of any size, and how large each is tried.
HOSTILE: dict[str, tuple[Callable[[int], str], int]] = {
    "lists in lists": (lambda n: JSON({"const": [[] for _ in range(n)]}), 20_000),
    "references to one": (lambda n: JSON({"$defs": {"a": {}}, "anyOf": [ref("a")] * n}), 9_000),
    "references from each to each": (
        lambda n: JSON({"$defs": defined(*([range(isqrt(n))] * isqrt(n))), **ref(0)}),
        95**2,
    ),
    "references in a ring": (
        lambda n: JSON({"$defs": defined(*([(i * 7 + 1) % n] for i in range(n)))}),
        4_500,
    ),
    "a long reference": (lambda n: JSON({"$ref": "#" + "/items" * n}), 40_000),
    "a reference of escapes": (lambda n: JSON({"$ref": "#/" + "%7E1" * n}), 60_000),
    "deep": (nested, 25_000),
    "long names over many schemas": (
        lambda n: JSON(
            {"properties": {"k" * 2 * n: {"properties": {"k" * 2 * n: {"anyOf": [{}] * n}}}}}
        ),
        10_000,
    ),
    "many names": (lambda n: JSON({f"x-{i}": {} for i in range(n)}), 5_000),
    "a long pattern": (lambda n: JSON({"pattern": "(a|b)*" * n}), 5_000),
    "a longer pattern": (lambda n: JSON({"pattern": "(a|b)*" * n}), 40_000),
    "many long patterns": (lambda n: JSON({"anyOf": [{"pattern": "(a|b)*" * 10}] * n}), 3_000),
    "an open pattern": (lambda n: JSON({"pattern": "(" * n}), 250_000),
    "a pattern of classes": (lambda n: JSON({"pattern": "[" * n}), 250_000),
    "a pattern of quantifiers": (lambda n: JSON({"pattern": "a{1,9}" * n}), 40_000),
    "many multiples": (lambda n: JSON({"anyOf": [{"multipleOf": i + 2} for i in range(n)]}), 8_000),
    "many patterns": (
        lambda n: JSON({"patternProperties": {f"a{i:05}": True for i in range(n)}}),
        15_000,
    ),
}


def check_hostile(source: str) -> None:
    try:
        check_constraint(Constraint("json_schema", json.loads(source)))
    except (ProtocolError, RecursionError) as error:
        # Python's own reader of JSON, which a request's schema has been through before.
        assert isinstance(error, ProtocolError) or source.startswith('{"items":{"items":')  # noqa: PT017


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_taken_or_refused(name: str) -> None:
    source_of, n = HOSTILE[name]
    source = source_of(n)
    assert MAX_SOURCE_BYTES // 10 < len(source) <= MAX_SOURCE_BYTES
    check_hostile(source)


@pytest.mark.parametrize("name", HOSTILE)
def test_the_check_is_linear(name: str) -> None:
    def check_anew(source: str) -> None:
        re.purge()  # what Python has compiled for another source
        check_hostile(source)

    assert_linear(check_anew, HOSTILE[name][0], 200)
