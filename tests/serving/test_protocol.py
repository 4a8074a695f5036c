"""Every form of request and reply, byte for byte, over a real socket."""

from __future__ import annotations

import json
import socket
from pathlib import Path

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
    arithmetic,
    ask,
    connected,
    is_there,
    says,
    served,
)
from tests.support import until_idle

MIB = 1024 * 1024


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


async def test_a_reply_without_text_is_one_all_the_same(sock: Path) -> None:
    async with served(sock, says("")):
        whole = b'{"text":"","prompt_tokens":1,"generated_tokens":1}\n'
        assert await ask(sock, b'{"prompt":"x","raw":true}\n') == whole
        done = b'{"done":true,"text":"","prompt_tokens":1,"generated_tokens":1}\n'
        assert await ask(sock, b'{"prompt":"x","raw":true,"stream":true}\n') == done


# -- how a request may come -------------------------------------------------------------------------


async def test_a_request_may_come_a_byte_at_a_time(sock: Path) -> None:
    async with served(sock, arithmetic()), connected(sock) as client:
        for place in range(len(ASKED)):
            await client.send(ASKED[place : place + 1])
            await wait_all_tasks_blocked(0.001)  # it reads what was sent
        await client.stream.send_eof()
        assert await client.rest() == FOUR


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


async def test_to_answer_a_request_without_a_stream_may_take_any_time(sock: Path) -> None:
    limits = Limits(request_timeout_s=0.02, stream_timeout_s=0.02)
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


# -- what is told, and by whom ------------------------------------------------------------------------


async def test_of_a_tool_call_only_events_tell(sock: Path) -> None:
    call = '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'
    tool = {"name": "get", "description": "Get.", "schema": {}}
    async with served(sock, says(call)):
        asked = {"prompt": "x", "tools": [tool], "tool_format": "hermes", "stream": True}
        (only,) = map(json.loads, (await ask(sock, asked)).splitlines())
        assert (only["done"], only["text"]) == (True, "")


async def test_models_may_come_and_go(sock: Path) -> None:
    async def text_of(**fields: object) -> object:
        return json.loads(await ask(sock, {"prompt": "x", **fields}))["text"]

    async with (
        open_scripted_engine(says("one")) as one,
        open_scripted_engine(says("two")) as two,
        open_plain_nursery() as nursery,
    ):
        engines: dict[str, EngineLike] = {"one": one, "two": two}
        await nursery.start(serve_unix, engines, sock)
        assert await text_of() == "one"
        engines["three"] = engines.pop("one")
        assert await text_of() == "two"
        assert await text_of(model="three") == "one"
        engines.clear()
        for call in ({"prompt": "x"}, {"op": "models"}, {"op": "stats"}):
            reply = json.loads(await ask(sock, call))
            assert reply["error"] == "invalid request: there is no model"
        assert await ask(sock, {"op": "ping"}) == b'{"pong":true}\n'


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


async def test_a_socket_that_listens_already_can_be_handed_over(sock: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(sock))
        listener.listen()
        async with open_scripted_engine(arithmetic()) as engine, open_plain_nursery() as nursery:
            await nursery.start(serve_unix, engine, listener)
            assert await ask(sock, ASKED + b"\n") == FOUR
    assert is_there(sock)  # whoever made it removes it
