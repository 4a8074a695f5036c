"""Every form of request and reply, byte for byte, over a real socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from llamad_trio import EngineLike, Limits, serve_unix
from llamad_trio.system.nursery import open_plain_nursery
from llamad_trio.testing import open_scripted_engine
from tests.serving.support import (
    ASKED,
    FORTY_TWO,
    FOUR,
    READ_TIMEOUT,
    STREAMED,
    STUCK,
    Json,
    arithmetic,
    ask,
    connected,
    is_there,
    says,
    served,
)
from tests.support import until, until_idle, until_queued

MIB = 1024 * 1024


async def settled() -> None:
    """Let the daemon read what was sent."""
    await wait_all_tasks_blocked(0.001)


# -- one request, one reply -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "half_close"), [(b"\n", False), (b"", True), (b"\n", True), (b"\r\n", False)]
)
async def test_a_request_ends_with_a_newline_or_a_half_close(
    sock: Path, ending: bytes, half_close: bool
) -> None:
    async with served(sock, arithmetic()):
        assert await ask(sock, ASKED + ending, half_close=half_close) == FOUR
        assert await ask(sock, STREAMED + ending, half_close=half_close) == FORTY_TWO


@pytest.mark.parametrize("half_close", [False, True])
async def test_an_error_is_one_line_in_both_modes(sock: Path, half_close: bool) -> None:
    error = b'{"error":"inference: ValueError: why"}\n'
    ending = b"" if half_close else b"\n"
    async with served(sock, arithmetic()):
        for request in (b'{"prompt":"fail"}', b'{"prompt":"fail","stream":true}'):
            assert await ask(sock, request + ending, half_close=half_close) == error


async def test_an_error_comes_in_the_place_of_the_rest_of_a_stream(sock: Path) -> None:
    model = arithmetic(decode_s=0.01)
    async with served(sock, model) as engine, connected(sock) as client:
        await client.send(b'{"prompt":"count","stream":true}\n')
        assert await client.line() == b'{"token":"a"}\n'
        model.fail_next_step("why")
        *tokens, last = (await client.rest()).splitlines(keepends=True)
        assert all(line.startswith(b'{"token":') for line in tokens)
        assert last == b'{"error":"inference: why"}\n'
        await until_idle(engine)


async def test_text_comes_as_utf8_in_whole_characters(sock: Path) -> None:
    async with served(sock, says('"\N{SNOWMAN}\n\N{GRINNING FACE}\x01')):
        assert (
            await ask(sock, b'{"prompt":"x","raw":true,"stream":true}\n')
            == (
                '{"token":"\\""}\n{"token":"\N{SNOWMAN}"}\n{"token":"\\n"}\n'
                '{"token":"\N{GRINNING FACE}"}\n{"token":"\\u0001"}\n'
                '{"done":true,"text":"\\"\N{SNOWMAN}\\n\N{GRINNING FACE}\\u0001",'
                '"prompt_tokens":1,"generated_tokens":6}\n'
            ).encode()
        )


async def test_a_reply_without_text_is_one_all_the_same(sock: Path) -> None:
    async with served(sock, says("")):
        whole = b'{"text":"","prompt_tokens":1,"generated_tokens":1}\n'
        assert await ask(sock, b'{"prompt":"x","raw":true}\n') == whole
        done = b'{"done":true,"text":"","prompt_tokens":1,"generated_tokens":1}\n'
        assert await ask(sock, b'{"prompt":"x","raw":true,"stream":true}\n') == done


async def test_the_fields_of_the_original_reach_the_engine(sock: Path) -> None:
    async with served(sock, says(lambda prompt: "ab" + prompt)):
        request = {
            "prompt": "c",
            "system": "s",
            "history": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "v"}],
            "stop": ["\nuser: c"],
            "max_tokens": 500,
        }
        reply = json.loads(await ask(sock, request))
        assert reply["text"] == "absystem: s\nuser: u\nassistant: v"
        assert reply.keys() == {"text", "prompt_tokens", "generated_tokens"}
        assert json.loads(await ask(sock, {"prompt": "c", "max_tokens": 1}))["text"] == "a"


async def test_a_refusal_of_the_engine_has_the_contracts_words(sock: Path) -> None:
    async with served(sock, arithmetic(), n_ctx=16):
        assert await ask(sock, {"prompt": "x" * 60, "raw": True}) == (
            b'{"error":"prompt too long: 60 tokens, at most 15 fit"}\n'
        )
        assert await ask(sock, {"prompt": "x" * 60, "raw": True, "id": 1}) == (
            b'{"id":1,"error":"prompt too long: 60 tokens, at most 15 fit",'
            b'"type":"PromptTooLong","details":{"tokens":60,"budget":15}}\n'
        )


async def test_a_model_without_a_template_says_so(sock: Path) -> None:
    async with served(sock, arithmetic(chat_template=None)):
        reply = json.loads(await ask(sock, {"prompt": "2+2?"}))
        assert reply["error"].startswith("invalid request: ")
        assert "template" in reply["error"]
        assert await ask(sock, ASKED + b"\n") == FOUR


# -- how a request may come -------------------------------------------------------------------------


@pytest.mark.parametrize("request_", [ASKED + b"\n", STREAMED + b"\n", b'{"prompt":"\\u263a"}\r\n'])
async def test_a_request_may_be_cut_at_every_byte(sock: Path, request_: bytes) -> None:
    async with served(sock, says("4")):
        whole = await ask(sock, request_)
        assert whole.endswith(b"}\n")
        for place in range(1, len(request_)):
            async with connected(sock) as client:
                await client.send(request_[:place])
                await settled()
                await client.send(request_[place:])
                assert await client.rest() == whole


async def test_a_request_may_come_a_byte_at_a_time(sock: Path) -> None:
    async with served(sock, arithmetic()), connected(sock) as client:
        for place in range(len(ASKED)):
            await client.send(ASKED[place : place + 1])
            await settled()
        await client.stream.send_eof()
        assert await client.rest() == FOUR


@pytest.mark.parametrize(
    "request_",
    [
        ASKED + b" \n",
        b" \t" + ASKED + b" \t \r\n",
        b'{ "raw" :\ttrue\r, "prompt" : "2+2?" }\n',
        b'{"raw":true,"prompt":"\\u0032+2\\u003f"}\n',
        ASKED + b"\n\n\n",
    ],
)
async def test_white_space_is_no_part_of_a_request(sock: Path, request_: bytes) -> None:
    async with served(sock, arithmetic()):
        assert await ask(sock, request_) == FOUR


@pytest.mark.parametrize("blank", [b"", b" ", b"\n", b"\r\n", b" \t\r\n", b"\n\n", b"\n" + ASKED])
async def test_without_a_request_the_reply_is_that_it_is_empty(sock: Path, blank: bytes) -> None:
    async with served(sock, arithmetic()):
        assert await ask(sock, blank, half_close=True) == b'{"error":"empty request"}\n'


async def test_what_comes_after_a_request_is_ignored(sock: Path) -> None:
    model = arithmetic()
    async with served(sock, model) as engine:
        for more in (STREAMED + b"\n", b"nonsense", b"\0" * 100_000):
            assert await ask(sock, ASKED + b"\n" + more) == FOUR
        assert engine.stats().requests == {"completed": 3, "failed": 0, "cancelled": 0}


def padded(n_bytes: int) -> bytes:
    """`ASKED` with white space in it, of this length."""
    return ASKED[:-1] + b" " * (n_bytes - len(ASKED)) + b"}"


TOO_LARGE = b'{"error":"request too large"}\n'


async def test_a_request_may_have_a_mebibyte_and_no_more(sock: Path) -> None:
    async with served(sock, arithmetic()) as engine:
        for ending, half_close in ((b"\n", False), (b"", True)):
            assert await ask(sock, padded(MIB) + ending, half_close=half_close) == FOUR
            assert await ask(sock, padded(MIB + 1) + ending, half_close=half_close) == TOO_LARGE
        # Nobody waits for the end of what is too large already.
        assert await ask(sock, b" " * (MIB + 1)) == TOO_LARGE
        assert engine.stats().requests["completed"] == 2


async def test_who_goes_on_sending_what_is_refused_sees_why(sock: Path) -> None:
    async with served(sock, arithmetic()):
        assert await ask(sock, b"x" * (6 * MIB)) == TOO_LARGE
        assert await ask(sock, b"x" * (6 * MIB) + b"\n" + ASKED, half_close=True) == TOO_LARGE
        async with connected(sock) as client:
            await client.send(b"x" * (6 * MIB))  # all of it, before a byte is read
            assert await client.rest() == TOO_LARGE


async def test_the_limit_of_a_request_can_be_set(sock: Path) -> None:
    async with served(sock, arithmetic(), limits=Limits(max_request_bytes=64)):
        assert await ask(sock, padded(64) + b"\n") == FOUR
        assert await ask(sock, padded(65) + b"\n") == TOO_LARGE


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (b'{"prompt":"\xff"}', "not JSON: "),
        (b'{"prompt":"\\ud800"}', "prompt contains a lone surrogate"),
        (b'{"prompt":"x","max_token":5}', "unknown field 'max_token' (did you mean"),
        (b"[" * 200_000, "the JSON is nested too deeply"),
        (b"GET / HTTP/1.1\r", "not JSON: "),
    ],
    ids=lambda part: str(part[:30]),
)
async def test_a_bad_request_is_refused_in_one_line(
    sock: Path, request_: bytes, reason: str
) -> None:
    async with served(sock, arithmetic()) as engine:
        reply = await ask(sock, request_ + b"\n")
        assert reply.count(b"\n") == 1
        found = json.loads(reply)
        assert found.keys() == {"error"}
        assert found["error"].startswith(f"invalid request: {reason}")
        assert await ask(sock, request_, half_close=True) == reply
        assert await ask(sock, ASKED + b"\n") == FOUR
        assert engine.stats().requests == {"completed": 1, "failed": 0, "cancelled": 0}


# -- time -------------------------------------------------------------------------------------------

STREAM_TIMEOUT = b'{"error":"stream timeout"}\n'


@pytest.mark.parametrize("sent", [b"", b"{", ASKED])
async def test_who_does_not_send_a_request_in_time_is_refused(sock: Path, sent: bytes) -> None:
    async with served(sock, arithmetic(), limits=Limits(request_timeout_s=0.05)):
        assert await ask(sock, sent) == READ_TIMEOUT


async def test_sending_a_little_now_and_then_gains_no_time(sock: Path) -> None:
    async with (
        served(sock, arithmetic(), limits=Limits(request_timeout_s=0.1)),
        connected(sock) as client,
        trio.open_nursery() as nursery,
    ):

        async def drip() -> None:
            while True:
                await client.send(b" ")
                await trio.sleep(0.01)

        nursery.start_soon(drip)
        assert await client.rest() == READ_TIMEOUT
        nursery.cancel_scope.cancel()


async def test_the_time_to_send_a_request_is_not_the_time_to_answer_it(sock: Path) -> None:
    limits = Limits(request_timeout_s=0.02)
    async with served(sock, arithmetic(decode_s=0.05), limits=limits):
        assert await ask(sock, ASKED + b"\n") == FOUR


async def test_a_stream_without_a_token_ends_after_the_stream_timeout(sock: Path) -> None:
    limits = Limits(stream_timeout_s=0.05)
    async with served(sock, arithmetic(decode_s=STUCK), limits=limits) as engine:
        assert await ask(sock, STREAMED + b"\n") == STREAM_TIMEOUT
        assert await ask(sock, {"prompt": "20+22", "events": True, "id": 1}) == (
            b'{"id":1,"error":"stream timeout"}\n'
        )
        await until_idle(engine)
        assert engine.stats().requests == {"completed": 0, "failed": 0, "cancelled": 2}


async def test_a_stream_that_stops_coming_ends_after_the_stream_timeout(sock: Path) -> None:
    model = arithmetic()
    limits = Limits(stream_timeout_s=0.1)
    async with served(sock, model, limits=limits) as engine, connected(sock) as client:
        await client.send(b'{"prompt":"count","stream":true}\n')
        assert await client.line() == b'{"token":"a"}\n'
        model._decode_s = STUCK
        *tokens, last = (await client.rest()).splitlines(keepends=True)
        assert all(line.startswith(b'{"token":') for line in tokens)
        assert last == STREAM_TIMEOUT
        await until_idle(engine)


async def test_a_stream_may_take_longer_than_the_stream_timeout_in_all(sock: Path) -> None:
    limits = Limits(stream_timeout_s=1)
    async with served(sock, says("012345", decode_s=0.25), limits=limits):
        reply = await ask(sock, {"prompt": "x", "stream": True})
        assert json.loads(reply.splitlines()[-1])["text"] == "012345"


async def test_a_request_without_a_stream_may_take_any_time(sock: Path) -> None:
    limits = Limits(stream_timeout_s=0.02)
    async with served(sock, arithmetic(decode_s=0.05), limits=limits):
        assert await ask(sock, ASKED + b"\n") == FOUR


# -- busy -------------------------------------------------------------------------------------------


async def test_more_connections_than_allowed_are_told_that_it_is_busy(sock: Path) -> None:
    busy = b'{"error":"busy: 2 requests are waiting, the limit is 2"}\n'
    limits = Limits(max_connections=2)
    async with served(sock, arithmetic(), limits=limits), connected(sock) as first:
        async with connected(sock):
            assert await ask(sock, b"") == busy
            assert await ask(sock, ASKED + b"\n") == busy
        # Whoever leaves makes room.
        reply = busy
        while reply == busy:
            reply = await ask(sock, ASKED + b"\n")
        assert reply == FOUR
        await first.send(ASKED + b"\n")
        assert await first.rest() == FOUR


async def test_a_full_queue_is_busy(sock: Path) -> None:
    model = arithmetic(decode_s=STUCK)
    async with served(sock, model, n_slots=1, max_queue=1) as engine:
        async with connected(sock) as running, connected(sock) as waiting:
            await running.send(ASKED + b"\n")
            await until(lambda: engine.stats().slots["free"] == 0)
            await waiting.send(ASKED + b"\n")
            await until_queued(engine, 1)
            assert await ask(sock, ASKED + b"\n") == (
                b'{"error":"busy: 1 requests are waiting, the limit is 1"}\n'
            )
            assert await ask(sock, {"prompt": "2+2?", "stream": True, "id": "a"}) == (
                b'{"id":"a","error":"busy: 1 requests are waiting, the limit is 1",'
                b'"type":"Busy","details":{"queued":1,"max_queue":1}}\n'
            )
        await until_idle(engine)


# -- the other fields -----------------------------------------------------------------------------------


async def test_any_other_field_brings_all_that_is_known_of_a_completion(sock: Path) -> None:
    async with served(sock, arithmetic()):
        reply = json.loads(
            await ask(sock, {"prompt": "2+2?", "raw": True, "id": "a", "stop": ["x"]})
        )
        assert reply.pop("ttft_s") > 0
        assert reply.pop("duration_s") > 0
        assert reply == {
            "id": "a",
            "text": "4",
            "prompt_tokens": 4,
            "generated_tokens": 2,
            "finish_reason": "stop",
        }
        cut = json.loads(await ask(sock, {"prompt": "count", "max_tokens": 3, "session": "s"}))
        assert (cut["text"], cut["finish_reason"]) == ("and", "length")
        by_tokens = json.loads(await ask(sock, {"tokens": [ord(char) for char in "2+2?"]}))
        assert (by_tokens["text"], by_tokens["prompt_tokens"]) == ("4", 4)
        stopped = json.loads(await ask(sock, {"prompt": "count", "stop": [" so"], "id": 1}))
        assert (stopped["text"], stopped["stop_sequence"]) == ("and", " so")
        assert stopped["cached_tokens"] > 0


async def test_the_form_of_the_text_can_be_asked_for(sock: Path) -> None:
    async with served(sock, arithmetic()):
        for form in ({"json_schema": {"type": "integer"}}, {"regex": "[0-9]+"}):
            assert json.loads(await ask(sock, {"prompt": "20+22", **form}))["text"] == "42"
        refused = json.loads(await ask(sock, {"prompt": "20+22", "regex": "["}))
        assert refused["type"] == "ProtocolError"


async def test_logprobs_come_with_the_reply(sock: Path) -> None:
    async with served(sock, arithmetic()):
        reply = json.loads(await ask(sock, {"prompt": "2+2?", "logprobs": 0}))
        assert reply["logprobs"][0] == {"token": 52, "text": "4", "bytes": [52], "logprob": 0.0}
        assert len(reply["logprobs"]) == reply["generated_tokens"]


async def test_events_tell_what_a_stream_of_text_does_not(sock: Path) -> None:
    call = '<tool_call>\n{"name": "get", "arguments": {"n": 1}}\n</tool_call>'
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tool = {"name": "get", "description": "Get.", "schema": schema}
    async with served(sock, says(call)):
        asked: Json = {"prompt": "x", "tools": [tool], "tool_format": "hermes"}
        lines = (await ask(sock, {**asked, "events": True, "id": 1})).splitlines()
        *parts, last = map(json.loads, lines)
        assert all(part["id"] == 1 for part in parts)
        started = parts[0]["tool_call"]
        assert (started["index"], started["name"]) == (0, "get")
        arguments = "".join(part["tool_call"]["arguments"] for part in parts[1:])
        assert json.loads(arguments) == {"n": 1}
        assert last["done"] is True
        assert last["tool_calls"] == [{"id": started["id"], "name": "get", "arguments": {"n": 1}}]
        (only,) = map(json.loads, (await ask(sock, {**asked, "stream": True})).splitlines())
        assert (only["done"], only["text"]) == (True, "")


async def test_the_statistics_come_with_the_end_if_asked_for(sock: Path) -> None:
    async with served(sock, arithmetic()) as engine:
        for way in ({}, {"stream": True}):
            lines = (await ask(sock, {"prompt": "2+2?", "with_stats": True, **way})).splitlines()
            stats = json.loads(lines[-1])["stats"]
            assert stats["requests"]["completed"] == engine.stats().requests["completed"]
            assert stats["slots"].keys() == {"free", "prefill", "decode", "paused"}


# -- ops ------------------------------------------------------------------------------------------------


async def test_an_op_is_answered_in_one_line_with_its_id(sock: Path) -> None:
    # What each op replies is told, and tried, in docs/protocol.md.
    async with served(sock, arithmetic()), connected(sock) as client:
        await client.send({"op": "tokenize", "text": "2+", "id": "a b", "keep": True})
        assert await client.reply() == {"id": "a b", "tokens": [50, 43]}
        await client.send({"op": "count_tokens", "prompt": "2+2?", "keep": True})
        assert await client.reply() == {"count": len("user: 2+2?\nassistant: ")}
        await client.send({"op": "choose", "prompt": "2+2?", "options": ["5", "4"], "keep": True})
        choice = (await client.reply())["choice"]
        assert (choice["text"], choice["index"]) == ("4", 1)
        await client.send({"op": "cancel", "id": 1})
        assert await client.rest() == b'{"id":1,"cancelled":false}\n'


@pytest.mark.parametrize(
    "call",
    [
        *({"op": "choose", "prompt": "x", "options": options} for options in ([], [5], ["a", "a"])),
        *({"op": "score", "prompt": "x", "continuations": [text]} for text in (None, "\ud800")),
        *({"op": "detokenize", "tokens": [token]} for token in (-1, 10**30, "5", True)),
        {"tokens": [10**30]},
    ],
    ids=str,
)
async def test_what_the_engine_refuses_is_an_invalid_request(sock: Path, call: Json) -> None:
    async with served(sock, arithmetic()):
        reply = json.loads(await ask(sock, call))
        assert reply["error"].startswith("invalid request: ")
        assert reply["type"] == "ProtocolError"
        assert reply["error"] == f"invalid request: {reply['details']['reason']}"


async def test_the_statistics_are_of_the_daemon_and_its_engines(sock: Path) -> None:
    async with served(sock, arithmetic(), n_slots=3) as engine, connected(sock):
        await ask(sock, ASKED + b"\n")
        await until_idle(engine)
        stats = json.loads(await ask(sock, {"op": "stats"}))
        assert stats["uptime_s"] > 0
        assert stats["connections"] == 2
        assert stats["default"] == "default"
        (model,) = stats["models"].values()
        assert model["info"]["architecture"] == "scripted"
        assert model["config"]["n_slots"] == 3
        assert model["stats"]["slots"] == {"free": 3, "prefill": 0, "decode": 0, "paused": 0}
        assert model["stats"]["requests"] == {"completed": 1, "failed": 0, "cancelled": 0}


# -- several models ---------------------------------------------------------------------------------------


async def with_models(
    sock: Path, check: Callable[[dict[str, EngineLike]], Any], **options: Any
) -> None:
    async with (
        open_scripted_engine(says("one"), n_slots=1) as one,
        open_scripted_engine(says("two"), n_slots=2) as two,
        open_plain_nursery() as nursery,
    ):
        engines: dict[str, EngineLike] = {"one": one, "two": two}
        await nursery.start(partial(serve_unix, engines, sock, **options))
        await check(engines)


async def text_of(sock: Path, **fields: object) -> object:
    reply = json.loads(await ask(sock, {"prompt": "x", **fields}))
    return reply.get("text", reply.get("error"))


async def test_a_request_names_its_model_or_gets_the_default(sock: Path) -> None:
    async def check(_: dict[str, EngineLike]) -> None:
        assert await text_of(sock) == "two"
        assert await text_of(sock, model="one") == "one"
        assert await text_of(sock, model="two") == "two"
        unknown = "invalid request: unknown model 'three'; known are one, two"
        assert await text_of(sock, model="three") == unknown
        one, two = json.loads(await ask(sock, {"op": "models"}))["models"]
        known = {"description": "scripted model", "n_ctx": 4096}
        assert {"name": "one", "default": False, "n_slots": 1, **known}.items() <= one.items()
        assert {"name": "two", "default": True, "n_slots": 2, **known}.items() <= two.items()

    await with_models(sock, check, default="two")


async def test_models_may_come_and_go(sock: Path) -> None:
    async def check(engines: dict[str, EngineLike]) -> None:
        assert await text_of(sock) == "one"
        engines["three"] = engines.pop("one")
        assert await text_of(sock) == "two"
        assert await text_of(sock, model="three") == "one"
        engines.clear()
        for call in ({"prompt": "x"}, {"op": "models"}, {"op": "stats"}):
            reply = json.loads(await ask(sock, call))
            assert reply["error"] == "invalid request: there is no model"
        assert await ask(sock, {"op": "ping"}) == b'{"pong":true}\n'

    await with_models(sock, check)


async def test_what_nobody_foresaw_is_an_internal_error_of_that_request_alone(
    sock: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(sock, arithmetic()) as engine:

        async def render(*_: object) -> str:
            raise ZeroDivisionError("nobody foresaw this")

        monkeypatch.setattr(type(engine), "render", render)
        reply = json.loads(await ask(sock, {"op": "render", "prompt": "x", "id": 1}))
        assert reply["error"] == "inference: internal error; the daemon's log tells more"
        assert reply["id"] == 1
        assert "nobody foresaw this" in caplog.text
        assert await ask(sock, ASKED + b"\n") == FOUR


async def test_a_long_request_is_answered_as_a_short_one(sock: Path) -> None:
    # Long lines are read in a thread.
    async with served(sock, arithmetic()), connected(sock) as client:
        await client.send({"op": "ping", "keep": True})
        assert await client.line() == b'{"pong":true}\n'
        await client.send(padded(200_000) + b"\n")
        assert await client.rest() == FOUR


async def test_a_socket_that_listens_already_can_be_handed_over(sock: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(sock))
        listener.listen()
        async with open_scripted_engine(arithmetic()) as engine, open_plain_nursery() as nursery:
            await nursery.start(serve_unix, engine, listener)
            assert await ask(sock, ASKED + b"\n") == FOUR
    assert is_there(sock)  # whoever made it removes it
