"""What the tests of calls share: lines in and out, values of every kind, places for them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import strategies as st

from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.request import Request
from llamad_trio.wire.calls import Call, Generate, decode_call, encode_call
from llamad_trio.wire.lines import encode_line

Json = dict[str, Any]


def decoded(data: object) -> Call:
    return decode_call(json.dumps(data).encode())


def request_of(data: object) -> Request:
    call = decoded(data)
    assert isinstance(call, Generate)
    return call.request


def refusal(data: object) -> str:
    """Why a call is refused, given as JSON data or as a raw line."""
    line = data if isinstance(data, bytes) else json.dumps(data).encode()
    with pytest.raises(ProtocolError) as caught:
        decode_call(line)
    return caught.value.reason


def crossed(call: Call) -> Call:
    """A call that has gone over the wire."""
    line = encode_line(encode_call(call))
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    return decode_call(line[:-1])


texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
numbers = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def in_history(**fields: object) -> Json:
    return {"prompt": "a", "history": [fields]}


def in_tool_call(**fields: object) -> Json:
    calls = [{"id": "1", "name": "get", "arguments": {}, **fields}]
    return in_history(role="assistant", tool_calls=calls)


def in_tool(**fields: object) -> Json:
    tool = {"name": "get", "description": "", "schema": {}, **fields}
    return {"prompt": "a", "tools": [tool]}
