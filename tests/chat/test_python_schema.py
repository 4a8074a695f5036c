"""What LFM2's grammar of Python literals makes of a schema, beside the formats that write JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llamad_trio.chat.tools.formats import TOOL_FORMATS, Lfm2
from llamad_trio.core.errors import UnsupportedFeature
from llamad_trio.core.tools import Tool, ToolCall
from tests.matching import compiled, takes

WORD, TEXT = {"type": "boolean"}, {"type": "string"}
NODE = {
    "type": "object",
    "properties": {"is_leaf": WORD, "next": {"$ref": "#/properties/x"}},
    "required": ["is_leaf"],
    "additionalProperties": False,
}

# A schema of `x`, what stands beside it in the tool's schema, and a value that fits and one that does not.
SCHEMAS: dict[str, tuple[Any, dict[str, Any], object, object]] = {
    "a name": ({"$ref": "#/$defs/a"}, {"$defs": {"a": WORD}}, True, "a"),
    "a slash": ({"$ref": "#/$defs/a~1b"}, {"$defs": {"a/b": WORD}}, True, "a"),
    "a slash, of text": ({"$ref": "#/$defs/a~1b"}, {"$defs": {"a/b": TEXT}}, "a", True),
    "a tilde": ({"$ref": "#/$defs/~01"}, {"$defs": {"~1": WORD}}, True, "a"),
    "a percent sign": ({"$ref": "#/$defs/a%25"}, {"$defs": {"a%": WORD}}, True, "a"),
    "an older word": ({"$ref": "#/definitions/a"}, {"definitions": {"a": WORD}}, True, "a"),
    "a list": ({"$ref": "#/$defs/a/anyOf/1"}, {"$defs": {"a": {"anyOf": [TEXT, WORD]}}}, True, "a"),
    "a chain": ({"$ref": "#/$defs/a"}, {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": WORD}}, True, 1),
    "anything": ({"$ref": "#/$defs/a"}, {"$defs": {"a": True}}, [None, {"a": 1}], ...),
    "a neighbour": (
        {"type": "array", "items": {"$ref": "#/properties/x/prefixItems/0"}, "prefixItems": [TEXT]},
        {},
        ["a", "b"],
        ["a", 1],
    ),
    "a neighbour in a draft": (
        {"type": "array", "items": {"$ref": "#/$defs/a"}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "$defs": {"a": {"enum": ["a"]}}},
        ["a", "a"],
        ["b"],
    ),
    "itself": (NODE, {}, {"is_leaf": False, "next": {"is_leaf": True}}, {"is_leaf": 1}),
    "the whole": (
        {"anyOf": [{"$ref": "#"}, TEXT]},
        {"additionalProperties": False},
        {"x": {"x": "a"}},
        {"y": 1},
    ),
    "a constant": ({"const": [True, None]}, {}, [True, None], [True]),
    "a map": ({"type": "object", "additionalProperties": WORD}, {}, {"a": True}, {"a": 1}),
    "an empty list": ({"type": "array", "items": WORD, "maxItems": 0}, {}, [], [True]),
    "annotations": ({**WORD, "$comment": "?", "x-a": [], "readOnly": True}, {}, True, "a"),
    "alien keywords": (
        {"type": ["array", "boolean"], "items": WORD, "pattern": "a", "minProperties": 1},
        {},
        [True],
        ["a"],
    ),
}


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize(("schema", "beside", "good", "bad"), SCHEMAS.values(), ids=SCHEMAS)
def test_all_formats_take_the_same_schemas_and_enforce_them(
    name: str, schema: Any, beside: dict[str, Any], good: object, bad: object
) -> None:
    tool_format = TOOL_FORMATS[name]
    tool = Tool(
        "f", "", {"type": "object", "properties": {"x": schema}, "required": ["x"], **beside}
    )
    grammar = tool_format.grammar([tool], choice="required", parallel=False, marker=json.dumps)
    for value, fits in ((good, True), (bad, False)):
        if value is ...:
            continue  # all values fit
        text = tool_format.write_calls([ToolCall("a1b2c3d4e", "f", {"x": value})])
        assert takes(compiled(grammar, "lark"), text) is fits, text


def test_the_arguments_may_be_what_is_referred_to() -> None:
    arguments = {"type": "object", "properties": {"is_new": WORD}, "additionalProperties": False}
    schema = {"$ref": "#/$defs/a~1", "$defs": {"a/": {"$ref": "#/$defs/b"}, "b": arguments}}
    grammar = Lfm2().grammar(
        [Tool("f", "", schema)], choice="required", parallel=False, marker=json.dumps
    )
    for text, fits in (("[f(is_new=True)]", True), ("[f()]", True), ("[f(is_new=1)]", False)):
        assert takes(compiled(grammar, "lark"), f"{Lfm2.opener}{text}<|tool_call_end|>") is fits


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1), "type": "array"} if depth else WORD


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#/properties/y"}, "leads to no schema"),
        ({"$ref": "#/properties/x"}, "one and the same value"),
        ({"properties": []}, "an object of schemas"),
        ({"type": "object", "properties": {"a": WORD}, "required": ["b"]}, "'b' is required"),
        ({"type": "object", "required": ["b"]}, "keys that have no schema"),
        ({"type": "object", "properties": {"a": WORD}, "additionalProperties": WORD}, "together"),
        ({"type": "object", "properties": {"a": WORD, "b": False}}, "allows nothing"),
        ({"enum": [True], "minimum": 1}, "enum, minimum without a type"),
        ({"type": "object", "patternProperties": {"a": WORD}}, "patternProperties"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"allOf": [WORD]}, "allOf"),
        ({"not": {}}, "'not' at #/properties/x"),
        ({"$ref": "https://example.com/s"}, "example.com"),
        ({"type": "array", "items": {"type": "widget"}}, "widget"),
        (nested(490), "nested too deeply"),
        ({"anyOf": [{"enum": ["a" * 6_000]}, *({"enum": [str(i) * 6_000]} for i in range(50)), WORD]}, "bytes"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_cannot_be_written_out_is_refused_with_the_reason(schema: Any, reason: str) -> None:
    tool = Tool("f", "", {"type": "object", "properties": {"x": schema}})
    with pytest.raises(UnsupportedFeature, match=reason):
        Lfm2().grammar([tool], choice="auto", parallel=True, marker=json.dumps)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": WORD}}}, "'array' here"),
        ({"type": "object", "properties": {"no-name": {}}}, "no-name"),
        ({"type": "object", "additionalProperties": TEXT}, "only be those"),
        ({"type": "object", "required": ["x"]}, "'x'"),
        ({"type": "object", "anyOf": [{"required": ["x"]}]}, "anyOf"),
    ],
)
def test_arguments_that_cannot_be_written_out_are_refused(schema: Any, reason: str) -> None:
    with pytest.raises(UnsupportedFeature, match=reason) as refused:
        Lfm2().grammar([Tool("f", "", schema)], choice="auto", parallel=True, marker=json.dumps)
    assert "'f'" in str(refused.value)
