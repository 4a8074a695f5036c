"""What the tests of calls share: lines in and out, values of every kind, places for them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llamad_trio.core.errors import ProtocolError
from llamad_trio.wire.calls import Call, Generate, decode_call, encode_call
from llamad_trio.wire.lines import encode_line

Json = dict[str, Any]


def decoded(data: object) -> Call:
    """What is given as JSON data or as a raw line."""
    return decode_call(data if isinstance(data, bytes) else json.dumps(data).encode())


def completion_of(data: object) -> Generate:
    call = decoded(data)
    assert isinstance(call, Generate)
    return call


def refusal(data: object) -> str:
    """Why a call is refused."""
    with pytest.raises(ProtocolError) as caught:
        decoded(data)
    return caught.value.reason


def crossed(call: Call) -> Call:
    """A call that has gone over the wire."""
    line = encode_line(encode_call(call))
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    return decode_call(line[:-1])


def in_history(**fields: object) -> Json:
    return {"prompt": "a", "history": [fields]}


def in_tool_call(**fields: object) -> Json:
    calls = [{"id": "1", "name": "get", "arguments": {}, **fields}]
    return in_history(role="assistant", tool_calls=calls)


def in_tool(**fields: object) -> Json:
    tool = {"name": "get", "description": "", "schema": {}, **fields}
    return {"prompt": "a", "tools": [tool]}
