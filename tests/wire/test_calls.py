"""What a client may ask, and how: every field crosses, and nothing else gets in."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.request import CONSTRAINTS, MAX_INT, MAX_LOGPROBS, Message, Request
from llamad_trio.core.tools import Tool
from llamad_trio.wire.calls import (
    MAX_ID_CHARS,
    Call,
    Cancel,
    Choose,
    CountTokens,
    Detokenize,
    Generate,
    GetMetrics,
    GetStats,
    ListModels,
    Ping,
    Render,
    Score,
    Tokenize,
    WatchEvents,
    encode_call,
)
from tests.strategies import json_objects, json_values, names, texts, tool_calls
from tests.wire.support import (
    Json,
    completion_of,
    crossed,
    decoded,
    in_history,
    in_tool,
    in_tool_call,
    refusal,
)

# -- every field crosses ----------------------------------------------------------------------

messages = st.one_of(
    st.builds(Message, st.sampled_from(["system", "user"]), texts),
    st.builds(
        Message,
        st.just("assistant"),
        texts,
        tool_calls=st.lists(tool_calls, max_size=2),
        reasoning=st.none() | texts,
    ),
    st.builds(
        Message, st.just("tool"), texts, tool_call_id=st.none() | texts, name=st.none() | texts
    ),
)
tools = st.builds(Tool, names, texts, json_objects)

sampling: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, MAX_INT),
    "temperature": st.floats(0, 2),
    "top_k": st.integers(0, MAX_INT),
    "top_p": st.floats(0, 1),
    "min_p": st.floats(0, 1),
    "repeat_penalty": st.floats(0, 2),
    "repeat_last_n": st.integers(-1, MAX_INT),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "seed": st.none() | st.integers(0, 2**32 - 1),
    "stop": st.lists(texts, max_size=3),
    "grammar_root": texts,
    "tool_choice": st.sampled_from(["auto", "required", "get"]),
    "parallel_tool_calls": st.booleans(),
    "tool_format": st.none() | texts,
    "logprobs": st.none() | st.integers(0, MAX_LOGPROBS),
    "session": st.none() | texts,
}
forms: dict[str, st.SearchStrategy[Any]] = {
    "json_schema": json_objects,
    "regex": texts,
    "lark": texts,
    "grammar": texts,
    "tools": st.lists(tools, min_size=1, max_size=2),
}
of_the_template: dict[str, st.SearchStrategy[Any]] = {
    "system": st.none() | texts,
    "history": st.lists(messages, max_size=3),
    "template_vars": json_objects,
}
FIELDS = {*sampling, *forms, *of_the_template, "prompt", "raw"}


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Any request: with some of the fields given, and at most one form its text must have."""
    fields = draw(st.fixed_dictionaries({}, optional=sampling))
    form = draw(st.sampled_from([None, *forms]))
    uses_template = draw(st.booleans())
    if form == "tools" and not uses_template:
        form = None
    if form != "tools":
        fields.pop("tool_choice", None)
    if form is not None:
        fields[form] = draw(forms[form])
    if not uses_template:
        prompt = draw(texts | st.lists(st.integers(), max_size=5))
        return Request(prompt, raw=isinstance(prompt, str), **fields)
    fields |= draw(st.fixed_dictionaries({}, optional=of_the_template))
    no_prompt = bool(fields.get("history")) and draw(st.booleans())
    return Request(None if no_prompt else draw(texts), **fields)


def test_the_requests_of_these_tests_have_every_field() -> None:
    assert attrs.fields_dict(Request).keys() == FIELDS
    assert set(forms) == {*CONSTRAINTS, "tools"}


ids = st.none() | st.integers() | st.text(st.characters(categories=["L", "N"]), max_size=20)


@given(request=requests(), call_id=ids, flags=st.lists(st.booleans(), min_size=4, max_size=4))
def test_every_field_of_a_request_crosses(
    request: Request, call_id: Any, flags: list[bool]
) -> None:
    stream, events, with_stats, keep = flags
    call = Generate(
        request=request, id=call_id, stream=stream, events=events, with_stats=with_stats, keep=keep
    )
    found = crossed(call)
    assert isinstance(found, Generate)
    assert attrs.evolve(found, is_original=False) == call


OTHER_CALLS = [
    Ping(),
    ListModels(),
    GetStats(),
    GetMetrics(),
    WatchEvents(),
    WatchEvents(max_events=7),
    Cancel(id="a"),
    Tokenize(text="a", special=True),
    Tokenize(text=""),
    Detokenize(tokens=(1, 2)),
    Render(request=Request("a", system="b")),
    CountTokens(request=Request((1, 2))),
    Score(request=Request("a"), continuations=("b", "c")),
    Choose(request=Request("a"), options=("b", "c")),
]


@pytest.mark.parametrize("call", OTHER_CALLS, ids=lambda call: type(call).__name__)
def test_every_call_crosses(call: Call) -> None:
    assert crossed(call) == call
    same = attrs.evolve(call, id="7", keep=True, model="small")
    assert crossed(same) == same


def test_every_kind_of_call_is_tested_here() -> None:
    # By name: attrs makes each class anew, and the first one may not be collected yet.
    tested = {type(call).__name__ for call in OTHER_CALLS} | {"Generate"}
    assert tested == {kind.__name__ for kind in Call.__subclasses__()}


def test_what_has_its_default_is_not_sent() -> None:
    assert encode_call(Generate(request=Request("a"))) == {"prompt": "a"}
    assert encode_call(Ping()) == {"op": "ping"}


def test_a_tools_function_stays_at_home() -> None:
    def get() -> None: ...

    call = Generate(request=Request("a", tools=[Tool("get", "Get.", {}, get)]))
    found = crossed(call)
    assert isinstance(found, Generate)
    assert [attrs.asdict(tool) for tool in found.request.tools if isinstance(tool, Tool)] == [
        {"name": "get", "description": "Get.", "schema": {}, "function": None}
    ]


# -- the original protocol ---------------------------------------------------------------------

ORIGINAL: Json = {
    "system": "s",
    "history": [{"role": "user", "content": "u"}],
    "max_tokens": 5,
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.5,
    "repeat_penalty": 1.5,
    "repeat_last_n": 5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "seed": 5,
    "stop": ["x"],
    "grammar": 'root ::= "a"',
    "grammar_root": "root",
    "raw": False,
    "stream": True,
}

BEYOND: Json = {
    "json_schema": {},
    "regex": "a",
    "lark": 'start: "a"',
    "tools": [{"name": "get", "description": "", "schema": {}}],
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "tool_format": "hermes",
    "template_vars": {"a": 1},
    "logprobs": 2,
    "session": "s",
    "events": True,
    "with_stats": True,
    "id": 1,
    "keep": True,
    "model": "small",
}


def test_a_request_of_the_original_fields_gets_the_original_reply() -> None:
    assert completion_of({"prompt": "a"}).is_original
    assert completion_of({"prompt": "a", **ORIGINAL}).is_original
    for field, value in ORIGINAL.items():
        assert completion_of({"prompt": "a", field: value}).is_original


@pytest.mark.parametrize("field", BEYOND)
def test_a_request_of_any_other_field_gets_all_there_is(field: str) -> None:
    assert not completion_of({"prompt": "a", field: BEYOND[field]}).is_original
    assert not completion_of({"prompt": "a", "stream": True, field: BEYOND[field]}).is_original


def test_a_request_of_token_ids_gets_all_there_is() -> None:
    assert not completion_of({"tokens": [1, 2]}).is_original


def test_every_field_of_a_request_is_of_one_protocol_or_the_other() -> None:
    own = attrs.fields_dict(Generate).keys() - {"request", "is_original"}
    assert ORIGINAL.keys() | BEYOND.keys() | {"prompt"} == FIELDS | own
    assert not ORIGINAL.keys() & BEYOND.keys()


# -- wrong types ---------------------------------------------------------------------------------

NO_NUMBER: list[object] = ["5", True, False, [5], {"a": 5}]
NO_INTEGER: list[object] = [*NO_NUMBER, 5.5, 5.0]
NO_TEXT: list[object] = [5, 5.5, True, ["a"], {"a": "b"}]
NO_FLAG: list[object] = ["true", "5", 0, 1, 5.5, [True], {}]
NO_LIST: list[object] = ["5", 5, 5.5, True, {"a": 5}]
NO_OBJECT: list[object] = ["5", 5, 5.5, True, ["a"]]

WRONG: dict[str, list[object]] = {
    "prompt": NO_TEXT,
    "tokens": [*NO_LIST, ["5"], [True], [5.5], [[5]], [None]],
    **dict.fromkeys(("max_tokens", "top_k", "repeat_last_n", "seed", "logprobs"), NO_INTEGER),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repeat_penalty"), NO_NUMBER),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), NO_NUMBER),
    **dict.fromkeys(("system", "regex", "lark", "grammar", "grammar_root"), NO_TEXT),
    **dict.fromkeys(("tool_choice", "tool_format", "session", "model"), NO_TEXT),
    **dict.fromkeys(("raw", "parallel_tool_calls", "stream", "events", "with_stats"), NO_FLAG),
    "keep": NO_FLAG,
    "stop": ["5", 5, 5.5, True, {"a": 5}, [5], [True], [None], [["a"]]],
    "json_schema": NO_OBJECT,
    "template_vars": NO_OBJECT,
    "history": NO_LIST,
    "tools": NO_LIST,
    "id": [True, 5.5, ["a"], {}, "a" * (MAX_ID_CHARS + 1), "a\n", "a\0", "\ud800"],
}


def test_the_wrong_types_are_of_every_field() -> None:
    own = attrs.fields_dict(Generate).keys() - {"request", "is_original"}
    assert WRONG.keys() == FIELDS | own | {"tokens"}


@pytest.mark.parametrize("field", WRONG)
def test_a_field_of_a_wrong_type_is_refused_by_name(field: str) -> None:
    rest = {} if field in {"prompt", "tokens"} else {"prompt": "a"}
    for value in WRONG[field]:
        told = field.removesuffix("s") if field == "tokens" else field
        assert told in refusal({**rest, field: value}), value


@pytest.mark.parametrize(
    ("place", "field", "wrong"),
    [
        (in_history, "role", [*NO_TEXT, None, "boss", ""]),
        (in_history, "content", NO_TEXT),
        (in_history, "tool_calls", NO_LIST),
        (in_history, "tool_call_id", NO_TEXT),
        (in_history, "name", NO_TEXT),
        (in_history, "reasoning", NO_TEXT),
        (in_tool_call, "id", [*NO_TEXT, None]),
        (in_tool_call, "name", [*NO_TEXT, None, "", "a b", "auto"]),
        (in_tool_call, "arguments", [*NO_OBJECT, None]),
        (in_tool, "name", [*NO_TEXT, None, "", "a b", "auto"]),
        (in_tool, "description", [*NO_TEXT, None]),
        (in_tool, "schema", [*NO_OBJECT, None]),
    ],
)
def test_a_wrong_type_further_down_is_refused_by_name(
    place: Any, field: str, wrong: list[object]
) -> None:
    role = {"tool_calls": "assistant", "reasoning": "assistant"}.get(field, "tool")
    rest = {"role": role} if place is in_history else {}
    for value in wrong:
        assert field in refusal(place(**{**rest, field: value})), value


@pytest.mark.parametrize("item", ["5", 5, True, 5.5, None, []])
def test_what_stands_for_an_object_in_a_list_is_refused(item: object) -> None:
    assert "must be an object" in refusal({"prompt": "a", "history": [item]})
    assert "must be an object" in refusal({"prompt": "a", "tools": [item]})
    call = in_history(role="assistant", tool_calls=[item])
    assert "must be an object" in refusal(call)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"op": "tokenize", "text": 5}, "text"),
        ({"op": "tokenize", "text": "a", "special": 1}, "special"),
        ({"op": "detokenize", "tokens": "5"}, "tokens"),
        ({"op": "score", "prompt": "a", "continuations": "b"}, "continuations"),
        ({"op": "choose", "prompt": "a", "options": {"b": 1}}, "options"),
        ({"op": "render", "prompt": 5}, "prompt"),
        ({"op": "ping", "keep": "yes"}, "keep"),
    ],
)
def test_a_wrong_type_in_another_call_is_refused_by_name(data: Json, field: str) -> None:
    assert field in refusal(data)


def test_numbers_out_of_range_are_clamped_and_integers_are_numbers_too() -> None:
    line = b'{"prompt":"a","max_tokens":%s,"temperature":-%s,"top_p":1}'
    request = completion_of(line % (b"9" * 4000, b"9" * 4000)).request
    assert (request.max_tokens, request.temperature, request.top_p) == (MAX_INT, 0.0, 1.0)


# -- null ----------------------------------------------------------------------------------------

OPTIONAL = sorted(ORIGINAL.keys() | BEYOND.keys() | {"op", "tokens"})


@pytest.mark.parametrize("field", OPTIONAL)
def test_null_counts_as_not_given(field: str) -> None:
    assert decoded({"prompt": "a", field: None}) == decoded({"prompt": "a"})


def test_null_counts_as_not_given_further_down() -> None:
    history: list[Json] = [
        {"role": "assistant", "content": None, "tool_calls": None, "reasoning": None},
        {"role": "tool", "content": "a", "tool_call_id": None, "name": None},
    ]
    expected = (Message("assistant"), Message("tool", "a"))
    assert completion_of({"prompt": "a", "history": history}).request.history == expected


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": None, "history": []}, "prompt"),
        ({"stream": True}, "prompt"),
        (in_history(content="a"), "role"),
        (in_history(role="assistant", tool_calls=[{"id": "1", "name": "get"}]), "arguments"),
        ({"prompt": "a", "tools": [{"name": "get", "description": ""}]}, "schema"),
        ({"op": "tokenize"}, "text"),
        ({"op": "detokenize", "tokens": None}, "tokens"),
        ({"op": "score", "prompt": "a"}, "continuations"),
        ({"op": "choose", "prompt": "a"}, "options"),
        ({"op": "render"}, "prompt"),
    ],
)
def test_what_must_be_given_is_missed_by_name(data: Json, field: str) -> None:
    assert refusal(data) == f"missing field {field!r}"


def test_without_a_prompt_the_history_is_answered() -> None:
    history = [{"role": "user", "content": "a"}]
    assert completion_of({"history": history}).request.prompt is None
    assert completion_of({"history": history, "prompt": None}).request.prompt is None
    assert completion_of({"history": history, "prompt": ""}).request.prompt == ""


def test_a_prompt_is_text_or_tokens_and_not_both() -> None:
    assert completion_of({"tokens": [1, 2]}).request.prompt == (1, 2)
    assert "only one of prompt and tokens" in refusal({"prompt": "a", "tokens": [1]})


# -- unknown and duplicate keys ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"prompt": "a", "nonsense": 1}, "'nonsense'"),
        ({"prompt": "a", "nonsense": None}, "'nonsense'"),
        ({"prompt": "a", "nonsense": 1, "stream": True, "id": 1}, "'nonsense'"),
        (in_history(role="user", content="a", nonsense=1), "'nonsense'"),
        (in_tool_call(nonsense=1), "'nonsense'"),
        (in_tool(nonsense=1), "'nonsense'"),
        ({"op": "ping", "nonsense": 1}, "'nonsense'"),
        ({"op": "cancel", "id": 1, "nonsense": 1}, "'nonsense'"),
        ({"op": "tokenize", "text": "a", "nonsense": 1}, "'nonsense'"),
        ({"op": "score", "prompt": "a", "continuations": [], "nonsense": 1}, "'nonsense'"),
        # Other calls have no fields of a completion, and a tool can bring no function.
        ({"op": "ping", "prompt": "a"}, "'prompt'"),
        ({"op": "render", "prompt": "a", "stream": True}, "'stream'"),
        (in_tool(function="os.system"), "'function'"),
        # A misspelt one is told with the right one.
        ({"prompt": "a", "max_token": 1}, "'max_token' (did you mean 'max_tokens'?)"),
        ({"prompt": "a", "Strem": True}, "'Strem' (did you mean 'stream'?)"),
        ({"promt": "a"}, "'promt' (did you mean 'prompt'?)"),
        ({"op": "choose", "prompt": "a", "option": []}, "'option' (did you mean 'options'?)"),
        (in_history(role="user", contents="a"), "'contents' (did you mean 'content'?)"),
        (in_tool_call(argument={}), "'argument' (did you mean 'arguments'?)"),
        (in_tool(schemas={}), "'schemas' (did you mean 'schema'?)"),
    ],
)
def test_an_unknown_key_is_refused_at_every_level(data: Json, told: str) -> None:
    assert refusal(data) == f"unknown field {told}"


@pytest.mark.parametrize("field", ["request", "is_original"])
@pytest.mark.parametrize("value", [None, True, {}, {"prompt": "b"}, "a"])
def test_what_the_package_alone_may_say_is_an_unknown_field(field: str, value: object) -> None:
    for op in ({}, {"op": "render"}):
        assert refusal({**op, "prompt": "a", field: value}) == f"unknown field {field!r}"


def test_an_unknown_key_is_told_in_part_only() -> None:
    assert len(refusal({"prompt": "a", "n" * 100_000: 1})) < 200
    assert len(refusal({"op": "o" * 100_000})) < 200
    assert len(refusal(b'{"%s":1,"%s":2}' % ((b"n" * 100_000,) * 2))) < 200


@pytest.mark.parametrize("op", ["", "pong", "PING", " ping", 5, True, ["ping"], {}])
def test_an_unknown_op_is_refused_with_those_there_are(op: object) -> None:
    reason = refusal({"op": op})
    assert reason.startswith("unknown op")
    for known in ("ping", "models", "stats", "cancel"):
        assert known in reason


@pytest.mark.parametrize(
    "line",
    [
        b'{"prompt":"a","prompt":"a"}',
        b'{"prompt":"a","stream":true,"stream":false}',
        b'{"prompt":"a","nonsense":1,"nonsense":1}',
        b'{"prompt":"a","pr\\u006fmpt":"b"}',
        b'{"op":"ping","op":"ping"}',
        b'{"prompt":"a","history":[{"role":"user","role":"user"}]}',
        b'{"prompt":"a","template_vars":{"b":[{"a":1,"a":1}]}}',
        b'{"prompt":"a","json_schema":{"type":"object","type":"object"}}',
        b'{"prompt":"a","tools":[{"name":"b","description":"","schema":{"x":1,"x":1}}]}',
    ],
)
def test_a_key_that_comes_twice_is_refused_at_every_level(line: bytes) -> None:
    assert "duplicate field" in refusal(line)


some_fields = st.dictionaries(
    st.sampled_from(sorted(WRONG.keys() | {"op", "text", "options", "continuations", "special"}))
    | texts,
    json_values()
    | st.sampled_from([*in_tool()["tools"], *OTHER_CALLS]).map(
        lambda value: value if isinstance(value, dict) else type(value).op
    ),
    max_size=5,
)


@given(some_fields)
def test_an_object_is_a_call_or_is_refused(data: Json) -> None:
    try:
        call = decoded(data)
    except ProtocolError:
        return
    assert crossed(call) == call
