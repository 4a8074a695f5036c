"""Lines that are no JSON, text that nobody may say, depths: each is a refusal and no more."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from llamad_trio.core.errors import ProtocolError
from llamad_trio.wire.calls import decode_call
from tests.effort import assert_linear
from tests.wire.support import (
    Json,
    completion_of,
    decoded,
    in_history,
    in_tool,
    in_tool_call,
    refusal,
)

# -- what is no JSON -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000])
@pytest.mark.parametrize(
    "place",
    [
        '{"prompt":"a","temperature":%s}',
        '{"prompt":"a","max_tokens":%s}',
        '{"prompt":"a","id":%s}',
        '{"prompt":"a","nonsense":%s}',
        '{"prompt":"a","template_vars":{"b":[%s]}}',
        '{"prompt":"a","json_schema":{"minimum":%s}}',
        '{"tokens":[%s]}',
        "%s",
    ],
)
def test_a_number_that_is_none_is_refused_wherever_it_is(place: str, number: str) -> None:
    reason = refusal((place % number).encode())
    assert reason.startswith("not JSON: ")
    assert len(reason) < 300


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b" ", b"{", b"}", b"nonsense", b'{"prompt":"a"', b'{"prompt":"a",}'),
        *(b"{'prompt':'a'}", b'{prompt:"a"}', b'{"prompt":"a"} {"prompt":"a"}', b'{"prompt":"a"}x'),
        b'{"prompt":"a"}\0',
        b'\0{"prompt":"a"}',
        b'{"prompt":"a\0"}',
        b'{"prompt":"a\x1f"}',
        b'{"prompt":"a" /* why */}',
        b'{"prompt":"\\x41"}',
        b'{"prompt":"a","top_k":05}',
        b'{"prompt":"a","top_k":0x5}',
        b'{"prompt":"a","top_k":+5}',
        b'{"prompt":"a","temperature":.5}',
        b'{"prompt":"a","stream":True}',
        b'\xef\xbb\xbf{"prompt":"a"}',
        '{"prompt":"a"}'.encode("utf-16"),
        '{"prompt":"a"}'.encode("utf-32-le"),
        b'{"prompt":"\xff"}',
        b'{"prompt":"\xc3"}',
        b'{"prompt":"\xed\xa0\x80"}',  # a surrogate, written as UTF-8 does not allow
        b'{"prompt":"\xc0\x80"}',  # NUL, in a longer form than there is
        b'{"prompt":"\xf4\x90\x80\x80"}',  # beyond the last character
    ],
)
def test_what_is_no_json_is_refused(line: bytes) -> None:
    assert refusal(line).startswith("not JSON: ")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        *((b"[]", "an array"), (b'"a"', "a string"), (b"5", "a number"), (b"5.5", "a number")),
        *((b"true", "a boolean"), (b"null", "null")),
    ],
)
def test_json_that_is_no_object_is_refused_with_what_it_is(line: bytes, name: str) -> None:
    assert refusal(line) == f"must be a JSON object, not {name}"


def test_blanks_around_a_request_are_no_part_of_it() -> None:
    assert decode_call(b' \t\r{"prompt" : "a"} \t\r') == decoded({"prompt": "a"})


# -- hostile text --------------------------------------------------------------------------------


def hostile(text: str) -> list[Json]:
    """Calls that have a text wherever one can be."""
    return [
        *({"prompt": text}, {"prompt": "a", "system": text}, {"prompt": "a", "stop": [text]}),
        *({"prompt": "a", field: text} for field in ("regex", "lark", "grammar", "grammar_root")),
        *({"prompt": "a", field: text} for field in ("tool_choice", "tool_format", "session")),
        *({"prompt": "a", field: text} for field in ("model", "id")),
        *(
            {"prompt": "a", field: {"a": [{"b": text}]}}
            for field in ("json_schema", "template_vars")
        ),
        *({"prompt": "a", field: {text: 1}} for field in ("json_schema", "template_vars")),
        *(in_history(role="assistant", **{f: text}) for f in ("content", "reasoning")),
        *(in_history(role="tool", **{f: text}) for f in ("tool_call_id", "name")),
        in_history(role=text),
        *(in_tool_call(id=text), in_tool_call(name=text), in_tool_call(arguments={"a": text})),
        *(in_tool(name=text), in_tool(description=text), in_tool(schema={"a": text})),
        *({"op": "tokenize", "text": text}, {"op": text}, {"prompt": "a", text: 1}),
    ]


@pytest.mark.parametrize("text", ["a\0", "\0", "\ud800", "a\udfff", "\udc00\ud800"])
def test_nul_bytes_and_lone_surrogates_are_refused_wherever_they_are(text: str) -> None:
    for data in hostile(text):
        # The reason can be told: it has no such text itself.
        assert "\0" not in refusal(data), data
        refusal(data).encode()


def test_a_pair_of_surrogates_is_a_character() -> None:
    call = completion_of(b'{"prompt":"\\ud83d\\ude00"}')
    assert call.request.prompt == "\N{GRINNING FACE}"


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":', b'{"prompt":[', b'{"history":['])
def test_200_000_levels_are_refused(opening: bytes) -> None:
    deep = opening * 200_000
    assert refusal(deep) == "the JSON is nested too deeply"
    assert refusal(b'{"prompt":"a","template_vars":' + deep) == "the JSON is nested too deeply"


@pytest.mark.parametrize(
    "place",
    [
        b'{"prompt":"a","template_vars":{"a":%s}}',
        b'{"prompt":"a","json_schema":{"a":%s}}',
        b'{"prompt":"a","tools":[{"name":"b","description":"","schema":{"a":%s}}]}',
        b'{"prompt":"a","history":[{"role":"assistant","tool_calls":'
        b'[{"id":"1","name":"b","arguments":{"a":%s}}]}]}',
        b'{"prompt":%s}',
        b'{"tokens":%s}',
    ],
)
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_no_depth_is_more_than_a_refusal(place: bytes, opening: bytes, closing: bytes) -> None:
    # Each version of Python has limits of its own, and other ones for reading than for writing.
    n_refused = 0
    for depth in (*range(1, 900, 100), *range(960, 1000), *range(1000, 30_000, 900)):
        line = place % (opening * depth + b"1" + closing * depth)
        try:
            decode_call(line)
        except ProtocolError:
            n_refused += 1
    assert n_refused > 30


def test_depth_does_not_multiply_what_is_in_it() -> None:
    def line(n: int) -> bytes:
        texts = b",".join([b'"a"'] * (10 * n))
        nested = b'{"a":' * n + b"[" + texts + b"]" + b"}" * n
        return b'{"prompt":"a","template_vars":{"a":' + nested + b"}}"

    assert_linear(decode_call, line, 100, copies=True)


@given(
    st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode(errors="replace"))
)
def test_bytes_are_a_call_or_are_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_call(line)
