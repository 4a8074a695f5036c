"""Several requests on one connection: one after the other, at once, and cancelled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from llamad_trio import Limits
from tests.serving.support import (
    READ_TIMEOUT,
    STUCK,
    Json,
    arithmetic,
    as_line,
    ask,
    connected,
    says,
    served,
)
from tests.support import until, until_idle, until_queued


async def test_several_run_at_once_and_their_lines_are_told_apart(sock: Path) -> None:
    model = says(lambda prompt: prompt * 20, decode_s=0.001)
    async with served(sock, model, n_slots=4) as engine, connected(sock) as client:
        texts = {"a": "one ", "b": "two ", "c": "three ", 7: "four "}
        for call_id, text in texts.items():
            stream = call_id != 7
            asked: Json = {"prompt": text, "raw": True, "stream": stream, "id": call_id}
            await client.send({**asked, "keep": True})
        await until(lambda: engine.stats().slots["free"] == 0)
        pieces: dict[object, str] = dict.fromkeys(texts, "")
        order = []
        done: dict[object, str] = {}
        while len(done) < len(texts):
            reply = await client.reply()
            order.append(reply["id"])
            if "text" in reply:
                done[reply["id"]] = reply["text"]
            else:
                pieces[reply["id"]] += reply["token"]
        expected = {call_id: text * 20 for call_id, text in texts.items()}
        assert done == expected
        assert pieces == {**expected, 7: ""}
        # They do come mixed: else this says nothing.
        assert order != sorted(order, key=str)


async def test_no_two_under_way_have_the_same_id(sock: Path) -> None:
    async with served(sock, arithmetic(decode_s=0.02)) as engine, connected(sock) as client:
        asked: Json = {"prompt": "2+2?", "id": "a", "keep": True}
        await client.send(asked, asked)
        reason = "a call with the id 'a' is under way"
        assert await client.reply() == {
            "id": "a",
            "error": f"invalid request: {reason}",
            "type": "ProtocolError",
            "details": {"reason": reason},
        }
        assert (await client.reply())["text"] == "4"
        # Text and numbers are different ids, and one that has ended is free.
        await client.send({**asked, "id": "1"}, {**asked, "id": 1}, asked)
        replies = await client.replies(3)
        assert {reply["id"] for reply in replies} == {"1", 1, "a"}
        assert {reply["text"] for reply in replies} == {"4"}
        assert engine.stats().requests["completed"] == 4


async def test_requests_without_an_id_may_run_at_once(sock: Path) -> None:
    async with served(sock, arithmetic(decode_s=0.01)), connected(sock) as client:
        await client.send(*({"prompt": "2+2?", "keep": True},) * 3)
        replies = await client.replies(3)
        assert [reply["text"] for reply in replies] == ["4"] * 3
        assert all("id" not in reply for reply in replies)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("holds", ["decode", "prefill", "nothing"])
async def test_a_request_is_cancelled_by_its_id(sock: Path, stream: bool, holds: str) -> None:
    model = arithmetic(decode_s=0.002, prefill_s=STUCK if holds == "prefill" else 0.0)
    async with (
        served(sock, model, n_slots=1) as engine,
        connected(sock) as other,
        connected(sock) as client,
    ):
        if holds == "nothing":  # it waits
            await other.send({"prompt": "count"})
            await until(lambda: engine.stats().slots["free"] == 0)
        asked: Json = {"prompt": "count", "stream": stream, "id": "a", "keep": True}
        await client.send(asked)
        await until(lambda: engine.stats().slots.get(holds, engine.stats().queued) == 1)
        await client.send({"op": "cancel", "id": "a", "keep": True})
        replies: list[Json] = []
        while len(replies) < 2:
            reply = await client.reply()
            if "token" not in reply:
                replies.append(reply)
        assert {"id": "a", "cancelled": True} in replies
        assert {"id": "a", "error": "cancelled"} in replies
        other.stream.socket.close()
        await until_idle(engine)
        assert engine.stats().aborted_steps == 1 or holds != "prefill"
        # Nothing more comes of it, and its id is free.
        model._prefill_s = 0.0
        await client.send({"prompt": "2+2?", "id": "a"})
        assert json.loads(await client.rest())["text"] == "4"


@pytest.mark.parametrize("which", [{"id": "b"}, {"id": 1}, {}])
async def test_there_may_be_nothing_to_cancel(sock: Path, which: Json) -> None:
    async with served(sock, arithmetic(decode_s=0.05)) as engine, connected(sock) as client:
        await client.send({"prompt": "2+2?", "id": "1", "keep": True})
        await until(lambda: engine.stats().slots["free"] < engine.config.n_slots)
        await client.send({"op": "cancel", "keep": True, **which})
        assert await client.reply() == {**which, "cancelled": False}
        # Nor is there one of another connection.
        assert await ask(sock, {"op": "cancel", "id": "1"}) == b'{"id":"1","cancelled":false}\n'
        assert (await client.reply())["text"] == "4"


async def test_at_most_64_are_under_way_on_one_connection(sock: Path) -> None:
    model = arithmetic(decode_s=STUCK)
    async with served(sock, model, n_slots=1) as engine, connected(sock) as client:
        asked: Json = {"prompt": "count", "keep": True}
        await client.send(*({**asked, "id": n} for n in range(64)))
        await until_queued(engine, 63)
        for call in ({**asked, "id": 64}, {"op": "ping", "id": 64, "keep": True}):
            await client.send(call)
            assert await client.reply() == {
                "id": 64,
                "error": "busy: 64 requests are waiting, the limit is 64",
                "type": "Busy",
                "details": {"queued": 64, "max_queue": 64},
            }
        # To cancel one there is always room, and then there is for another.
        await client.send({"op": "cancel", "id": 63, "keep": True})
        assert {"id": 63, "error": "cancelled"} in await client.replies(2)
        await client.send({"op": "ping", "id": 64, "keep": True})
        assert await client.reply() == {"id": 64, "pong": True}
    await until_idle(engine)


async def test_all_are_answered_before_the_connection_ends(sock: Path) -> None:
    async with served(sock, arithmetic(decode_s=0.01)):
        slow: Json = {"prompt": "20+22", "id": "slow", "keep": True, "stream": True}
        packet = as_line(slow) + as_line({"op": "ping", "id": "last"})
        for data, half_close in ((packet, False), (as_line(slow), True), (packet, True)):
            replies = (await ask(sock, data, half_close=half_close)).splitlines()
            assert json.loads(replies[-1])["text"] == "42"
            assert len(replies) == 3 + data.count(b"last")


async def test_a_bad_line_or_a_request_that_fails_in_between_costs_only_itself(sock: Path) -> None:
    async with served(sock, arithmetic()), connected(sock) as client:
        await client.send({"op": "ping", "id": 1, "keep": True})
        assert await client.reply() == {"id": 1, "pong": True}
        bad = {b"nonsense\n": "invalid request: not JSON", b"\n": "empty request"}
        for line, reason in bad.items():
            await client.send(line)
            assert (await client.reply())["error"].startswith(reason)
        await client.send({"prompt": "2+2?", "max_tokens": "5", "keep": True})
        assert (await client.reply())["error"].startswith("invalid request: max_tokens")
        await client.send({"prompt": "fail", "keep": True})
        assert (await client.reply())["error"] == "inference: ValueError: why"
        await client.send({"op": "ping", "id": 2})
        assert await client.rest() == b'{"id":2,"pong":true}\n'


async def test_a_bad_first_line_ends_the_connection(sock: Path) -> None:
    async with served(sock, arithmetic()):
        reply = await ask(sock, b'{"keep":true}\n' + as_line({"op": "ping"}))
        assert reply == b'{"error":"invalid request: missing field \'prompt\'"}\n'


@pytest.mark.parametrize("refused", [b"x" * 100 + b"\n", b"x"])
async def test_a_line_that_cannot_be_read_costs_only_itself(sock: Path, refused: bytes) -> None:
    limits = Limits(max_request_bytes=64, request_timeout_s=0.05)
    async with (
        served(sock, arithmetic(decode_s=0.05), limits=limits) as engine,
        connected(sock) as client,
    ):
        await client.send({"prompt": "20+22", "id": "a", "keep": True})
        await until(lambda: engine.stats().slots["free"] < engine.config.n_slots)
        await client.send(refused)
        replies = [json.loads(line) for line in (await client.rest()).splitlines()]
        assert [reply for reply in replies if "id" not in reply]
        # Either of them will do, but there must be one.
        assert [r for r in replies if r.get("id") == "a" and ("text" in r or "error" in r)]


async def test_between_requests_there_is_no_time_limit(sock: Path) -> None:
    limits = Limits(request_timeout_s=0.05)
    async with served(sock, arithmetic(), limits=limits), connected(sock) as client:
        await client.send({"op": "ping", "keep": True})
        assert await client.line() == b'{"pong":true}\n'
        await trio.sleep(0.15)
        await client.send({"op": "ping", "keep": True})
        assert await client.line() == b'{"pong":true}\n'
        await client.send(b'{"op":')
        assert await client.rest() == READ_TIMEOUT
