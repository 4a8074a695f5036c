from __future__ import annotations

import re
from typing import Any

import pytest

from llamad_trio.constraints.schema_keywords import ANNOTATIONS, REFUSED, SUPPORTED, resolve
from llamad_trio.constraints.schema_pattern import fault_of_pattern
from llamad_trio.constraints.schema_vetting import vet_schema
from llamad_trio.core.errors import ProtocolError

EXAMPLES: dict[str, Any] = {
    "type": ["string", "null"],
    "const": {"a": [1, "b"]},
    "enum": [1, None, 0.5],
    "allOf": [True],
    "anyOf": [{}],
    "oneOf": [{}, False],
    "$ref": "#/$defs/a",
    "$defs": {"a": {}},
    "definitions": {},
    "properties": {"not": {}, "$id": True},
    "patternProperties": {"^a": {}},
    "additionalProperties": False,
    "required": ["a"],
    "minProperties": 1,
    "maxProperties": 9,
    "items": {},
    "prefixItems": [{}],
    "minItems": 0,
    "maxItems": 1,
    "minLength": 3,
    "maxLength": 5,
    "pattern": r"^\d{3}-[A-Z]+(?:a|b)*?$",
    "format": "date-time",
    "minimum": -1.5,
    "maximum": 2**53,
    "exclusiveMinimum": 0,
    "exclusiveMaximum": 0.0,
    "multipleOf": 0.25,
}


def test_every_supported_keyword_is_taken() -> None:
    assert EXAMPLES.keys() == SUPPORTED.keys()
    for name, value in EXAMPLES.items():
        vet_schema({"$defs": {"a": True}, name: value})
        vet_schema({"$defs": {"a": {}}, "items": {"allOf": [{"properties": {"b": {name: value}}}]}})


def test_every_annotation_is_taken_whatever_it_says() -> None:
    for name in ANNOTATIONS - {"$schema", "$id", "id"}:
        vet_schema({"properties": {"a": {name: {"not": [1, float("inf")], "minimun": 1}}}})
    vet_schema({"$id": "urn:a", "$schema": "http://json-schema.org/draft-07/schema#", "x-a": 1})


def test_every_refused_keyword_is_refused_with_its_reason_wherever_it_is() -> None:
    for name, reason in REFUSED.items():
        for schema in ({name: True}, {"$defs": {"unused": {"items": {name: True}}}}):
            with pytest.raises(ProtocolError, match=re.escape(name)) as caught:
                vet_schema(schema)
            assert reason in str(caught.value)


def test_the_tables_do_not_overlap() -> None:
    names = [*SUPPORTED, *ANNOTATIONS, *REFUSED]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"minimun": 1}, "'minimun' at #"),
        ({"properties": {"a": {"anyOf": [{}, {"Type": "a"}]}}}, "#/properties/a/anyOf/1"),
        ({"$defs": {"a": {"uniqueItem": True}}}, "#/$defs/a"),
        ({"a" * 100_000: 1}, "no keyword"),
        ({"properties": {"a" * 100_000: {"b": 1}}}, "no keyword"),
    ],
)
def test_unknown_keywords_are_refused(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(place)) as caught:
        vet_schema(schema)
    assert len(str(caught.value)) < 400


DRAFT_4, DRAFT_7 = (f"http://json-schema.org/draft-0{n}/schema#" for n in (4, 7))
IN_A_RING = {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"oneOf": [{"$ref": "#/$defs/a"}]}}

REFUSED_VALUES: dict[str, list[Any]] = {
    "type": ["int", [], None],
    "const": [2**53 + 1, "a\x01"],
    "enum": [[], ["a", ["\x7f"]], [[{"a": float("inf")}]]],
    "allOf": [[], [{"pattern": "a" * 10_000}] * 4, [{"multipleOf": 2**-7}, {"multipleOf": 3}]],
    "anyOf": [{}, [{"$ref": "#"}, {}]],
    "oneOf": [[1], [{}] * 2001],
    "$ref": ["#", 1, "", "#/", "#a", "http://a/b", "#/properties"],
    "$defs": [[], IN_A_RING, {"a": {"$schema": "https://json-schema.org/draft/2020-12/schema"}}],
    "properties": [{"a": 1}, {str(i): True for i in range(2001)}],
    "patternProperties": [
        *({"(": True}, {f"^{i}$": True for i in range(31)}, {"a" * 33_000: True})
    ],
    "additionalProperties": [None],
    "required": ["a", [1]],
    "minProperties": [2],
    "items": [[{}], {"$id": "a"}],
    "prefixItems": [{}],
    "minItems": [-1],
    "maxItems": [1.0],
    "minLength": [True],
    "maxLength": ["é" * 200],
    "pattern": [1, "a" * 10_000 + "("],
    "format": ["int32", ["date"]],
    "minimum": ["1", True, float("nan"), 1e-16],
    "maximum": [2**53 + 2],
    "exclusiveMinimum": [1],
    "multipleOf": [0, -1, 0.1, 2.5, float("nan")],
    "$schema": ["http://json-schema.org/draft-03/schema#", 1],
    "$id": [1],
}


@pytest.mark.parametrize(
    "schema",
    [
        *({keyword: value} for keyword, values in REFUSED_VALUES.items() for value in values),
        {"$ref": "#/default", "default": {}},
        *({"$ref": f"#/allOf/{index}", "allOf": [{}]} for index in (1, "00", "9" * 5000)),
        {"minProperties": 4, "required": ["a", "b", "a"]},
        {"exclusiveMinimum": True, "minimum": 1},
        {"exclusiveMaximum": 1, "type": ["number", "null"]},
        {"items": {"exclusiveMinimum": 0}, "allOf": [{"maximum": 0.5}]},
        {"exclusiveMaximum": 0, "minimum": -0.5},
        {"$schema": DRAFT_4, "items": {"const": 1}},
        {"$schema": DRAFT_7, "prefixItems": [{}]},
    ],
    ids=lambda schema: str(schema)[:60],
)
def test_values_that_would_not_be_enforced_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        vet_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 9},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 100},
        {"required": ["a", "b"], "minProperties": 3},
        {"allOf": [{"multipleOf": 3}, {"multipleOf": 5}, {"multipleOf": 0.5}]},
        {"$ref": "#/$defs/a~1b%25~0/properties//items", "$defs": {"a/b%~": {"properties": {"": {"items": {}}}}}},
        {"$ref": "#/prefixItems/1", "prefixItems": [{}, False]},
        {"items": {"$ref": "#"}},
    ],
)  # fmt: skip
def test_what_is_sound_is_taken(schema: dict[str, Any]) -> None:
    vet_schema(schema)


def test_references_lead_to_schemas_only() -> None:
    a = {"const": {"items": {}}, "items": True}
    schema = {"$defs": {"a": a}, "properties": {"items": {}}}
    assert resolve("#", schema) is schema
    assert resolve("#/$defs/a", schema) is a
    assert resolve("#/$defs/a/items", schema) is True
    assert resolve("#/properties/items", schema) == {}
    for ref in ("#/$defs", "#/$defs/a/const", "#/$defs/a/const/items", "#/items", "#/$defs/b", ""):
        assert resolve(ref, schema) is None


def test_in_a_grammar_the_style_may_be_chosen_but_not_the_strictness() -> None:
    vet_schema({"x-guidance": {"whitespace_flexible": True}}, in_lark=True)
    for style in ({"lenient": True}, {"coerce_one_of": 1}, "lenient"):
        with pytest.raises(ProtocolError, match="x-guidance"):
            vet_schema({"x-guidance": style}, in_lark=True)
    with pytest.raises(ProtocolError, match="x-guidance"):
        vet_schema({"items": {"x-guidance": {}}}, in_lark=True)


@pytest.mark.parametrize(
    "pattern",
    [
        *("", "abc", "^a|b$", "a.b", r"\d+\.\d{2}", r"^[^\s@]+@[^\s@]+$", r"[\w.-]+", "a{2}b{3,}"),
        *(r"(?:a|(b))+?", "(?P<x>a)", "[a-z]{1,9}?", "}", "]", r"\u00e9\x41", r"\/\-\@", r"[^\x00-\x1f\v]", "[.^$*+?{}()|]"),
    ],
)  # fmt: skip
def test_patterns_that_all_read_alike_are_taken(pattern: str) -> None:
    assert fault_of_pattern(pattern) is None


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"\D", r"\W", r"[^\d]", r"[^\w-]", r"[^\S]", r"\b", r"\B", r"\A", r"\Z", r"\p{L}", r"\1"),
        *(r"\cA", r"\0", r"\N{DIGIT ONE}", r"\u{41}", r"\x4", r"\Q", "\\", "\\\n", r"\é", r"[\b]"),
        *("(?i)a", "(?i:a)", "(?=a)", "(?!a)", "(?<=a)b", "(?<!a)b", "(?>a)", "(?<x>a)", "(?#a)"),
        *("(?P=x)", "(?P<é>a)", "(?x) a", "(?"),
        *("a*+", "a++", "a**", "a{2}{3}", "a{2}+", "*a", "^*", "(*a)", "a|*", "a{,2}", "a{", "{a}"),
        *("[[:alpha:]]", "[a[b]]", "[a&&b]", "[a--b]", "[a~~b]", "[]a]", "[^]a]", "[a", "[a\\", "["),
        *("a\x01", r"\x01", r"\u001f*", r"\v", r"[\x00-\x20]", "[\x7f]"),
        *("(", ")", "[z-a]", r"[\d-z]", "(?P<x>a)(?P<x>b)", "a{5,2}", "(" * 5000 + ")" * 5000),
    ],
    ids=lambda pattern: pattern[:20],
)  # fmt: skip
def test_patterns_that_are_read_differently_are_refused(pattern: str) -> None:
    assert fault_of_pattern(pattern)


@pytest.mark.parametrize("pattern", [r"^\d+$", r"\w", r"[\w-]", r"\s", r"^\S", r"\\\d"])
def test_keys_are_told_apart_only_by_what_all_read_alike(pattern: str) -> None:
    assert fault_of_pattern(pattern) is None
    assert fault_of_pattern(pattern, of_keys=True)
    vet_schema({"patternProperties": {r"^[0-9A-Za-z_]+\\d$": True}})
    with pytest.raises(ProtocolError, match="told apart"):
        vet_schema({"patternProperties": {pattern: True}})
