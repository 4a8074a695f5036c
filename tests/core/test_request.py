"""What a valid request is."""

from __future__ import annotations

import inspect
import math
from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from llamad_trio.core.config import ConfigFields, EngineConfig
from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.request import (
    CONSTRAINTS,
    MAX_INT,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    Message,
    Request,
    RequestFields,
)
from llamad_trio.core.tools import Tool, ToolCall

RANGES = [
    ("max_tokens", 1, MAX_INT),
    ("temperature", 0.0, 2.0),
    ("top_k", 0, MAX_INT),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repeat_penalty", 0.0, 2.0),
    ("repeat_last_n", -1, MAX_INT),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("seed", 0, 2**32 - 1),
    ("logprobs", 0, MAX_LOGPROBS),
]


@pytest.mark.parametrize(("field", "low", "high"), RANGES)
def test_numbers_are_clamped_to_their_range(field: str, low: float, high: float) -> None:
    def given_as(value: float) -> Any:
        return getattr(Request("x", **{field: value}), field)  # type: ignore[arg-type]

    assert (given_as(-(10**400)), given_as(10**400)) == (low, high)
    assert (given_as(low), given_as(high)) == (low, high)
    if isinstance(low, float):
        assert (given_as(-math.inf), given_as(math.inf)) == (low, high)
        assert given_as(math.nan) == getattr(Request("x"), field)


def get(a: int) -> int:
    """Get something."""
    return a


TOOL = Tool("get", "Get something.", {"type": "object", "properties": {"a": {}}}, get)

NO_TEXT = ["a\0", "\ud800", b"bytes", 1]
NO_SWITCH = [1, 0, None, "true"]
NO_DATA = ["{}", [], 5, {"a": b"x"}, {"a": {1}}, {"a": math.nan}, {"a": "\0"}, {"\ud800": 1}]

BAD_VALUES: dict[str, list[Any]] = {
    **{field: ["1", True, [1]] for field, _, _ in RANGES},
    **dict.fromkeys(["system", "regex", "lark", "grammar", "grammar_root"], NO_TEXT),
    **dict.fromkeys(["tool_choice", "tool_format", "session"], NO_TEXT),
    **dict.fromkeys(["json_schema", "template_vars"], NO_DATA),
    **dict.fromkeys(["parallel_tool_calls", "raw"], NO_SWITCH),
    "prompt": [*NO_TEXT, [1, "2"], [1.0], [True], {1}, bytearray(1)],
    "history": ["user", "", b"", 5, None, [("user", "a")], [None]],
    "stop": ["END", "", b"", None, 5, [1], ["a\0"], ["\ud800"]],
    "tools": [get, "get", b"get", {"get": get}, None, [None], ["get"], [5]],
}


@pytest.mark.parametrize("field", BAD_VALUES)
def test_what_a_field_cannot_be_is_refused_by_name(field: str) -> None:
    for value in BAD_VALUES[field]:
        fields: dict[str, Any] = {"prompt": "x", field: value}
        with pytest.raises(ProtocolError, match=field.removesuffix("s")):
            Request(**fields)


# -- prompts ------------------------------------------------------------------------------


@given(st.lists(st.integers()))
def test_a_prompt_may_be_token_ids(tokens: list[int]) -> None:
    assert Request(tokens).prompt == tuple(tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {"system": "be brief"},
        {"history": [Message("user", "a")]},
        {"tools": [get]},
        {"template_vars": {"enable_thinking": False}},
    ],
)
@pytest.mark.parametrize("prompt", [{"prompt": "x", "raw": True}, {"prompt": [1, 2]}])
def test_what_needs_the_template_is_refused_where_it_is_skipped(
    fields: dict[str, Any], prompt: dict[str, Any]
) -> None:
    with pytest.raises(ProtocolError, match="chat template"):
        Request(**fields, **prompt)


def test_the_conversation_is_system_history_prompt() -> None:
    history = [Message("user", "a"), Message("assistant", "b")]
    request = Request("c", system="s", history=history)
    assert request.messages == (Message("system", "s"), *history, Message("user", "c"))
    assert Request("c").messages == (Message("user", "c"),)


def test_without_a_prompt_the_history_is_answered() -> None:
    history = [Message("user", "a")]
    assert Request(None, history=history, system="s").messages == (Message("system", "s"), *history)
    assert Request(None, history=history).uses_template
    bad: list[dict[str, Any]] = [{}, {"system": "s"}, {"raw": True}]
    for fields in (*bad, {"history": history, "raw": True}):
        with pytest.raises(ProtocolError):
            Request(None, **fields)


def test_token_ids_are_no_conversation() -> None:
    with pytest.raises(ProtocolError, match="no messages"):
        _ = Request([1]).messages


def test_its_size_is_that_of_all_its_text() -> None:
    history = [Message("user", "ab"), Message("assistant", "cde")]
    assert Request("xyz", system="s", history=history).n_chars == 9
    assert Request([7, 8]).n_chars == 2
    for field in ("regex", "lark", "grammar"):
        assert Request("x", **{field: "a" * 50}).n_chars == 51  # type: ignore[arg-type]


LONG = "x" * 1000


@pytest.mark.parametrize(
    "fields",
    [
        {"system": LONG},
        {"history": [Message("tool", LONG)]},
        {"history": [Message("tool", "", tool_call_id=LONG)]},
        {"history": [Message("tool", "", name=LONG)]},
        {"history": [Message("assistant", reasoning=LONG)]},
        {"history": [Message("assistant", tool_calls=[ToolCall("1", "f", {"a": [LONG]})])]},
        {"history": [Message("assistant", tool_calls=[ToolCall(LONG, "f", {})])]},
        {"template_vars": {"a": [LONG]}},
        {"tools": [Tool("f", LONG, {})]},
        {"tools": [Tool("f", "", {"description": LONG})]},
    ],
)
def test_no_text_of_a_prompt_is_left_out_of_its_size(fields: dict[str, Any]) -> None:
    # What is long is worked on in a thread: what was not counted would block the loop.
    assert Request("", **fields).n_chars >= 1000


# -- constraints and tools ------------------------------------------------------------------

GIVEN: dict[str, Any] = {
    "json_schema": {"type": "integer"},
    "regex": "a",
    "lark": "start: /a/",
    "grammar": 'root ::= "a"',
    "tools": [get],
}


@pytest.mark.parametrize("first", GIVEN)
@pytest.mark.parametrize("second", GIVEN)
def test_a_text_has_one_form_at_most(first: str, second: str) -> None:
    fields = {first: GIVEN[first], second: GIVEN[second]}
    if first == second:
        assert Request("x", **fields).is_constrained
        return
    with pytest.raises(ProtocolError, match="only one of") as caught:
        Request("x", **fields)
    assert first in caught.value.reason
    assert second in caught.value.reason


def test_an_empty_constraint_is_one_all_the_same() -> None:
    empty: dict[str, Any] = {"json_schema": {}, "regex": "", "lark": "", "grammar": ""}
    assert empty.keys() == set(CONSTRAINTS)
    for field, value in empty.items():
        assert Request("x", **{field: value}).is_constrained
        with pytest.raises(ProtocolError, match="only one of"):
            Request("x", **{field: value}, tools=[get])


def test_tools_that_may_not_be_called_leave_room_for_a_constraint() -> None:
    request = Request("x", tools=[get], tool_choice="none", regex="a")
    assert request.is_constrained
    assert not attrs.evolve(request, regex=None).is_constrained
    assert not Request("x").is_constrained


def test_functions_and_tools_are_kept_as_they_are() -> None:
    assert Request("x", tools=(tool for tool in (get, TOOL))).tools == (get, TOOL)  # type: ignore[arg-type]


def test_data_is_copied() -> None:
    data: dict[str, Any] = {"a": [1]}
    request = Request("x", json_schema=data, template_vars=data)
    data["a"].append(2)
    assert request.json_schema == request.template_vars == {"a": [1]}


# -- messages -----------------------------------------------------------------------------


def test_a_message_holds_what_its_role_can_have() -> None:
    call = ToolCall("1", "get", {"a": 1})
    assert Message("assistant", "", tool_calls=[call], reasoning="hm").tool_calls == (call,)
    assert Message("tool", "5", tool_call_id="1", name="get").tool_call_id == "1"
    assert Message("user").content == ""


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    ("field", "roles", "value"),
    [
        ("tool_calls", {"assistant"}, [ToolCall("1", "get", {})]),
        ("reasoning", {"assistant"}, "hm"),
        ("tool_call_id", {"tool"}, "1"),
        ("name", {"tool"}, "get"),
    ],
)
def test_a_field_that_a_role_cannot_have_is_refused(
    role: str, field: str, roles: set[str], value: Any
) -> None:
    if role in roles:
        assert getattr(Message(role, "x", **{field: value}), field)
        return
    with pytest.raises(ProtocolError, match=field):
        Message(role, "x", **{field: value})


BAD_MESSAGES: list[tuple[str, str, list[Any]]] = [
    ("role", "user", ["function", "User", "", 3, None, ["user"]]),
    ("content", "user", ["a\0", "\udfff", 1, None]),
    ("reasoning", "assistant", NO_TEXT),
    ("tool_call_id", "tool", NO_TEXT),
    ("name", "tool", NO_TEXT),
    ("tool_calls", "assistant", ["x", 5, None, [None], [{"name": "get"}], ToolCall("1", "f", {})]),
]


@pytest.mark.parametrize(("field", "role", "values"), BAD_MESSAGES)
def test_what_a_field_of_a_message_cannot_be_is_refused_by_name(
    field: str, role: str, values: list[Any]
) -> None:
    for value in values:
        fields: dict[str, Any] = {"role": role, "content": "x", field: value}
        with pytest.raises(ProtocolError, match=field):
            Message(**fields)


def test_a_history_may_be_any_iterable_and_is_read_once() -> None:
    turns = (Message("user", str(i)) for i in range(3))
    assert [turn.content for turn in Request("x", history=turns).history] == ["0", "1", "2"]  # type: ignore[arg-type]


# -- stops --------------------------------------------------------------------------------


def test_empty_stops_are_dropped() -> None:
    assert Request("x", stop=["", "a", ""]).stop == ("a",)


def test_stops_are_bounded_in_number_and_size() -> None:
    assert len(Request("x", stop=["a"] * MAX_STOPS).stop) == MAX_STOPS
    with pytest.raises(ProtocolError, match="at most"):
        Request("x", stop=["a"] * (MAX_STOPS + 1))
    assert Request("x", stop=["a" * MAX_STOP_CHARS]).stop
    with pytest.raises(ProtocolError, match="exceed"):
        Request("x", stop=["a" * MAX_STOP_CHARS, "a"])


# -- frozen -------------------------------------------------------------------------------


def test_a_request_is_frozen_and_varied_by_evolve() -> None:
    request = Request("x", seed=1)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        request.seed = 2  # type: ignore[misc]
    varied = attrs.evolve(request, seed=2, temperature=99)
    assert (varied.prompt, varied.seed, varied.temperature) == ("x", 2, 2.0)
    assert request.seed == 1
    with pytest.raises(ProtocolError):
        attrs.evolve(request, seed="2")  # type: ignore[arg-type]


def test_a_request_can_be_a_key() -> None:
    assert len({Request("x", stop=["a"]), Request("x", stop=("a",)), Request([1])}) == 2


def test_a_request_with_data_in_it_can_be_a_key() -> None:
    def request() -> Request:
        call = ToolCall("1", "get", {"a": [1]})
        return Request(
            None,
            history=[Message("assistant", "", tool_calls=[call])],
            tools=[TOOL],
            template_vars={"a": {"b": 1}},
        )

    assert len({request(), request()}) == 1
    schemas = [Request("x", json_schema={"const": n}) for n in (1, 1, 2)]
    assert len(set(schemas)) == 2


@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
            for name in attrs.fields_dict(Request)
            if name != "prompt"
        },
    )
)
def test_any_values_make_a_valid_request_or_a_protocol_error(fields: dict[str, Any]) -> None:
    try:
        request = Request("x", **fields)
    except ProtocolError:
        return
    assert attrs.evolve(request) == request
    assert request.max_tokens >= 1
    assert 0.0 <= request.temperature <= 2.0
    assert request.seed is None or 0 <= request.seed < 2**32
    assert all(request.stop)


@pytest.mark.parametrize("choice", ["required", "get"])
def test_a_choice_of_tools_there_are_not_is_refused(choice: str) -> None:
    with pytest.raises(ProtocolError, match="no tools"):
        Request("x", tool_choice=choice)
    for harmless in ("auto", "none"):
        assert Request("x", tool_choice=harmless).tool_choice == harmless


WIDER = {"prompt_cache_dir": "str | PathLike[str] | None", "tensor_split": "Sequence[float]"}
"""What is taken, where that is more than what a field then is."""


@pytest.mark.parametrize(
    ("kind", "fields"), [(Request, RequestFields), (EngineConfig, ConfigFields)]
)
def test_type_checkers_know_every_field_and_its_type(
    kind: type[attrs.AttrsInstance], fields: type[object]
) -> None:
    told = {name: hint.__forward_arg__ for name, hint in fields.__annotations__.items()}
    of_kind = {name: WIDER.get(name, hint) for name, hint in kind.__annotations__.items()}
    of_kind.pop("prompt", None)
    assert list(told.items()) == list(of_kind.items())


def test_help_tells_the_types_of_fields() -> None:
    shown = str(inspect.signature(Request))
    assert "max_tokens: 'int' = 256" in shown
    assert "seed: 'int | None' = None" in shown
