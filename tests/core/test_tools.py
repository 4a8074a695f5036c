"""What a tool is, and what a call of one."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
from hypothesis import given, settings

from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.tools import TOOL_CHOICES, Tool, ToolCall
from tests.strategies import json_objects

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize("name", ["f", "_", "get_weather", "a.b-c_1", "Z" * 64])
def test_a_name_that_every_format_can_write_is_taken(name: str) -> None:
    assert Tool(name, "", SCHEMA).name == ToolCall("1", name, {}).name == name


@pytest.mark.parametrize(
    "name", ["", "1f", "a b", "a\n", "<s>", 'a"', "Z" * 65, "ä", "a\0", None, 5, b"f", "-f", "f()"]
)
def test_any_other_name_is_refused(name: Any) -> None:
    with pytest.raises(ProtocolError, match="name"):
        Tool(name, "", SCHEMA)
    with pytest.raises(ProtocolError, match="name"):
        ToolCall("1", name, {})


@pytest.mark.parametrize("name", sorted(TOOL_CHOICES))
def test_no_tool_has_a_name_that_tool_choice_gives_a_meaning(name: str) -> None:
    with pytest.raises(ProtocolError, match="tool_choice"):
        Tool(name, "", SCHEMA)


NO_OBJECTS: list[Any] = [None, "{}", 5, [], [("a", 1)], {1, 2}]
NO_JSON: list[Any] = [{"a": {1}}, {"a": b"x"}, {"a": math.nan}, {"a": object()}, {(1, 2): "a"}]
NO_TEXT: list[Any] = [{"a": "\0"}, {"\0": 1}, {"a": ["\ud800"]}, {"a": [{"b": {"c\udfff": 1}}]}]


@pytest.mark.parametrize("data", [*NO_OBJECTS, *NO_JSON, *NO_TEXT])
def test_a_schema_and_arguments_are_json_data_that_llama_cpp_can_take(data: Any) -> None:
    with pytest.raises(ProtocolError, match="schema"):
        Tool("f", "", data)
    with pytest.raises(ProtocolError, match="arguments"):
        ToolCall("1", "f", data)


def test_data_that_holds_itself_or_is_nested_without_end_is_refused() -> None:
    endless: dict[str, Any] = {}
    endless["a"] = endless
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    for data in (endless, deep):
        with pytest.raises(ProtocolError, match="schema"):
            Tool("f", "", data)


@pytest.mark.parametrize("text", [None, 5, b"x", "a\0", "\ud800"])
def test_description_and_id_are_text_that_llama_cpp_can_take(text: Any) -> None:
    with pytest.raises(ProtocolError, match="description"):
        Tool("f", text, SCHEMA)
    with pytest.raises(ProtocolError, match="id"):
        ToolCall(text, "f", {})


@settings(max_examples=40, deadline=None)
@given(json_objects)
def test_data_comes_back_as_a_copy_of_the_callers(data: dict[str, Any]) -> None:
    call = ToolCall("1", "f", data)
    assert call.arguments == data
    before = ToolCall("1", "f", data)
    data["new"] = 1
    assert call == before
    assert "new" not in call.arguments


def test_equal_calls_and_tools_are_one_key() -> None:
    assert len({ToolCall("1", "f", {"a": [1]}), ToolCall("1", "f", {"a": [1]})}) == 1
    assert ToolCall("1", "f", {"a": [1]}) != ToolCall("1", "f", {"a": [2]})
    assert len({Tool("f", "", SCHEMA), Tool("f", "", SCHEMA), Tool("g", "", SCHEMA)}) == 2


def test_what_a_tool_does_is_not_part_of_what_it_is() -> None:
    assert Tool("f", "", SCHEMA, print) == Tool("f", "", SCHEMA)
    assert Tool("f", "", SCHEMA).function is None


def test_both_are_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Tool("f", "", SCHEMA).name = "g"  # type: ignore[misc]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        ToolCall("1", "f", {}).id = "2"  # type: ignore[misc]
