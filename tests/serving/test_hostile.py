"""Clients that mean ill, are broken, or just go away: they cost themselves only."""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from llamad_trio import Engine, Limits, SessionFatal, serve_unix
from llamad_trio.serving import listener
from llamad_trio.system.nursery import open_plain_nursery
from llamad_trio.testing import open_scripted_engine
from llamad_trio.wire.calls import MAX_ID_CHARS
from tests.models import TinyModels
from tests.serving.support import (
    HANG_S,
    LONG_TEXT,
    READ_TIMEOUT,
    STUCK,
    Client,
    Daemon,
    Json,
    as_line,
    ask,
    connected,
    is_there,
    running_daemon,
    says,
    served,
)
from tests.support import until, until_idle, until_queued


async def n_connections(sock: Path) -> int:
    """How many clients the daemon has, beside the one that asks."""
    reply = json.loads(await ask(sock, {"op": "stats"}))
    if reply.get("error", "").startswith("busy: "):  # so many that there is none to ask with
        return Limits().max_connections
    n: int = reply["connections"]
    return n - 1


async def until_all_is_free(sock: Path, engine: Engine) -> None:
    """Wait until nothing is left of any client."""
    await until_idle(engine)
    while await n_connections(sock):  # noqa: ASYNC110  (there is no event to wait for)
        await trio.sleep(0.001)
    stats = engine.stats()
    assert stats.slots["free"] == engine.config.n_slots
    assert (stats.queued, stats.kv_used_tokens) == (0, 0)


# -- slow ones --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reader_that_stops_for_too_long_is_dropped(sock: Path, stream: bool) -> None:
    limits = Limits(stream_timeout_s=0.1)
    async with served(sock, says(LONG_TEXT), limits=limits) as engine:
        async with connected(sock) as client:
            if stream:
                await client.send({"prompt": "x", "stream": True, "max_tokens": 900_000})
                await until(lambda: engine.stats().slots["paused"] == 1)
            else:  # here it is one long line that does not get through
                await client.send({"op": "tokenize", "text": "x" * 900_000})
            while await n_connections(sock):  # noqa: ASYNC110  (there is no event to wait for)
                await trio.sleep(0.005)
            reply = await client.rest()
            assert b'"done"' not in reply
            assert b'"error"' not in reply
            assert stream or not reply.endswith(b"}\n")
        await until_all_is_free(sock, engine)


async def test_a_reader_that_is_slow_but_reads_is_kept(sock: Path) -> None:
    limits = Limits(stream_timeout_s=2)
    async with served(sock, says("x" * 3000), limits=limits), connected(sock) as client:
        await client.send({"prompt": "x", "stream": True, "max_tokens": 5000})
        received = b""
        started = trio.current_time()
        while part := await client.stream.receive_some(1500):
            received += part
            await trio.sleep(0.1)
        assert trio.current_time() - started > limits.stream_timeout_s
        assert json.loads(received.splitlines()[-1])["text"] == "x" * 3000


@pytest.mark.parametrize("line", [as_line({"op": "ping", "keep": True}), b"nonsense\n"])
async def test_who_asks_and_never_reads_is_not_listened_to_for_ever(
    sock: Path, line: bytes
) -> None:
    async with served(sock, says("4")) as engine, connected(sock) as client:
        await client.send({"op": "ping", "keep": True})
        before = trio.lowlevel.current_statistics().tasks_living
        for _ in range(20_000):  # the system buffers much less
            with trio.move_on_after(1) as scope:
                await client.send(line * 100)
            assert trio.lowlevel.current_statistics().tasks_living - before < 200
            if scope.cancelled_caught:
                break
        assert scope.cancelled_caught
        await until_idle(engine)
        assert b'"text":"4"' in await ask(sock, {"prompt": "x"})


# -- those that go away -----------------------------------------------------------------------------


def close(client: Client) -> None:
    client.stream.socket.close()


def half_close_and_close(client: Client) -> None:
    client.stream.socket.shutdown(socket.SHUT_WR)
    client.stream.socket.close()


def shut_down_both_sides(client: Client) -> None:
    client.stream.socket.shutdown(socket.SHUT_RDWR)


def reset(client: Client) -> None:
    linger = struct.pack("ii", 1, 0)
    client.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    client.stream.socket.close()


LEAVING = [close, half_close_and_close, shut_down_both_sides, reset]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("holds", ["decode", "prefill"])
async def test_who_leaves_frees_its_slot(
    sock: Path, holds: str, leave: Callable[[Client], None], stream: bool
) -> None:
    times = {"decode_s": 0.001} if holds == "decode" else {"prefill_s": STUCK}
    async with served(sock, says(LONG_TEXT, **times)) as engine:
        async with connected(sock) as client:
            await client.send({"prompt": "x" * 1000, "stream": stream, "max_tokens": 900_000})
            await until(lambda: engine.stats().slots[holds] == 1)
            await wait_all_tasks_blocked()
            leave(client)
            await until_all_is_free(sock, engine)
        assert engine.stats().requests == {"completed": 0, "failed": 0, "cancelled": 1}
        assert engine.stats().aborted_steps == 1 or holds == "decode"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", LEAVING)
async def test_who_leaves_while_it_waits_leaves_the_queue(
    sock: Path, leave: Callable[[Client], None], stream: bool
) -> None:
    async with served(sock, says("4", decode_s=STUCK), n_slots=1) as engine:
        async with connected(sock) as running, connected(sock) as waiting:
            await running.send({"prompt": "x"})
            await until(lambda: engine.stats().slots["free"] == 0)
            await waiting.send({"prompt": "x", "stream": stream})
            await until_queued(engine, 1)
            leave(waiting)
            await until_queued(engine, 0)
            assert engine.stats().slots["free"] == 0
        await until_all_is_free(sock, engine)


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("sent", [b"", b'{"prompt"', b'{"prompt":"x"}\n', b"x" * 2_000_000])
async def test_who_leaves_at_once_leaves_nothing(
    sock: Path, leave: Callable[[Client], None], sent: bytes
) -> None:
    async with served(sock, says("4")) as engine:
        for _ in range(5):
            async with connected(sock) as client:
                with trio.move_on_after(0.05):
                    with suppress(trio.BrokenResourceError):  # refused before all was sent
                        await client.send(sent)
                leave(client)
        await until_all_is_free(sock, engine)
        assert b'"text":"4"' in await ask(sock, {"prompt": "x"})


async def test_who_leaves_takes_all_its_requests_along(sock: Path) -> None:
    async with served(sock, says("4", decode_s=STUCK), n_slots=1) as engine:
        async with connected(sock) as client:
            for n in range(10):
                await client.send({"prompt": "x", "id": n, "keep": True, "stream": n % 2 == 0})
            await until_queued(engine, 9)
        await until_all_is_free(sock, engine)
        assert engine.stats().requests == {"completed": 0, "failed": 0, "cancelled": 10}


async def test_half_open_peers_cost_their_connections_only(sock: Path) -> None:
    async with served(sock, says("4"), limits=Limits(request_timeout_s=0.2)) as engine:
        clients = [Client(await trio.open_unix_socket(str(sock))) for _ in range(50)]
        assert b'"text":"4"' in await ask(sock, {"prompt": "x"})
        for client in clients:
            assert await client.rest() == READ_TIMEOUT
        # They have not closed, and are forgotten all the same.
        await until_all_is_free(sock, engine)
        for client in clients:
            client.stream.socket.close()


async def random_client(sock: Path, chance: random.Random) -> None:
    """Ask for something, stay for a while, and leave in some way."""
    leave = chance.choice(LEAVING)
    asked: Json = {"prompt": chance.choice(["long", "short", "x" * 3000]), "max_tokens": 200}
    asked["stream"] = chance.random() < 0.5
    if chance.random() < 0.3:
        asked |= {"id": 1, "keep": True}
    line = as_line(asked)
    sent = line if chance.random() < 0.8 else line[: chance.randrange(len(line))]
    async with connected(sock) as client:
        await client.send(sent)
        if chance.random() < 0.3:
            await client.stream.send_eof()
        with trio.move_on_after(chance.choice([0, 0.001, 0.005, 0.02, 0.1])):
            if chance.random() < 0.7:
                await client.rest()
            await trio.sleep(HANG_S)
        leave(client)


async def test_clients_that_leave_at_random_moments_leave_nothing_behind(sock: Path) -> None:
    chance = random.Random(11)
    model = says({"long": LONG_TEXT, "short": "4", "xxx": "42"}, decode_s=0.0005, prefill_s=1e-6)
    async with served(sock, model, n_slots=3, n_ctx=8192) as engine:
        for _ in range(6):
            async with trio.open_nursery() as nursery:
                for _ in range(25):
                    nursery.start_soon(random_client, sock, chance)
            await until_all_is_free(sock, engine)
        assert b'"text":"4"' in await ask(sock, {"prompt": "short"})


# -- many of them -----------------------------------------------------------------------------------


@pytest.fixture
def _many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("_many_descriptors")
async def test_300_connections_at_once_are_256_answers_and_44_refusals(sock: Path) -> None:
    async with served(sock, says("42")) as engine:
        streams = [await trio.open_unix_socket(str(sock)) for _ in range(300)]
        clients = [Client(stream) for stream in streams]
        await wait_all_tasks_blocked(0.01)
        replies = []

        async def finish(client: Client) -> None:
            with suppress(trio.BrokenResourceError):  # it has been refused already
                await client.send(b'{"prompt":"x","raw":true}\n')
            replies.append(await client.rest())
            client.stream.socket.close()

        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(finish, client)
        busy = b'{"error":"busy: 256 requests are waiting, the limit is 256"}\n'
        assert replies.count(busy) == 44
        assert replies.count(b'{"text":"42","prompt_tokens":1,"generated_tokens":3}\n') == 256
        await until_all_is_free(sock, engine)


# -- the end of the daemon --------------------------------------------------------------------------

STOPPING = b'{"error":"inference: the daemon is stopping"}\n'


async def test_the_end_is_told_to_every_client_whose_request_is_under_way(sock: Path) -> None:
    model = says(LONG_TEXT, decode_s=0.001)
    async with (
        open_scripted_engine(model, n_slots=2, n_ctx=1_048_576) as engine,
        AsyncExitStack() as clients,
    ):
        async with open_plain_nursery() as nursery:
            await nursery.start(serve_unix, engine, sock)
            streaming, whole, waiting, silent, kept = [
                await clients.enter_async_context(connected(sock)) for _ in range(5)
            ]
            await streaming.send({"prompt": "x", "stream": True})
            await streaming.reply()
            await whole.send({"prompt": "x"})
            await until(lambda: engine.stats().slots["free"] == 0)
            await waiting.send({"prompt": "x", "id": "w"})
            await kept.send({"prompt": "x", "id": 1, "keep": True})
            await kept.send({"prompt": "x", "id": 2, "keep": True, "stream": True})
            await until_queued(engine, 3)
        assert not is_there(sock)
        *tokens, last = (await streaming.rest()).splitlines(keepends=True)
        assert all(line.startswith(b'{"token":') for line in tokens)
        assert last == STOPPING
        assert await whole.rest() == STOPPING
        assert await waiting.rest() == b'{"id":"w",' + STOPPING[1:]
        assert await silent.rest() == STOPPING
        assert sorted((await kept.rest()).splitlines(keepends=True)) == [
            b'{"id":1,' + STOPPING[1:],
            b'{"id":2,' + STOPPING[1:],
        ]
        await until_idle(engine)
        # The engine is the program's own, and goes on.
        assert (await engine.complete("x", max_tokens=3)).text == "and"


async def test_the_end_does_not_wait_for_who_does_not_read(sock: Path) -> None:
    # Waiting for it would take longer than `no_hang` allows.
    limits = Limits(stream_timeout_s=10 * HANG_S)
    async with (
        open_scripted_engine(says(LONG_TEXT), n_ctx=1_048_576) as engine,
        AsyncExitStack() as clients,
    ):
        async with open_plain_nursery() as nursery:
            await nursery.start(partial(serve_unix, engine, sock, limits=limits))
            client = await clients.enter_async_context(connected(sock))
            await client.send({"prompt": "x", "stream": True, "max_tokens": 900_000})
            await until(lambda: engine.stats().slots["paused"] == 1)
        assert not is_there(sock)
        # What it has not read stays whole lines, but for the last.
        *lines, _ = (await client.rest()).split(b"\n")
        assert all("token" in json.loads(line) for line in lines)
        await until_idle(engine)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("breaks", [False, True])
async def test_an_engine_that_ends_under_it_is_an_error_for_its_requests(
    sock: Path, stream: bool, breaks: bool
) -> None:
    model = says(LONG_TEXT, decode_s=0.001)
    async with open_plain_nursery() as nursery, open_scripted_engine("other") as other:
        engines: dict[str, Any] = {"other": other}
        await nursery.start(serve_unix, engines, sock)
        async with connected(sock) as client:
            with pytest.raises(SessionFatal) if breaks else nullcontext():
                async with open_scripted_engine(model) as engine:
                    engines["going"] = engine
                    await client.send({"prompt": "x", "stream": stream, "model": "going", "id": 1})
                    await until(lambda: engine.stats().decode_tokens > 3)
                    if breaks:
                        model.crash_next_step("why")
                        await trio.sleep(HANG_S)
            *tokens, last = (await client.rest()).splitlines()
            assert stream or not tokens
            error: Json = json.loads(last)
            if breaks:
                assert (error["type"], error["details"]) == ("SessionFatal", {"reason": "why"})
            else:
                assert error == {
                    "id": 1,
                    "error": "inference: the engine is closed",
                    "type": "EngineClosed",
                    "details": {},
                }
        assert json.loads(await ask(sock, {"prompt": "x", "model": "other"}))["text"] == "other"


@pytest.mark.parametrize("error", [RecursionError, MemoryError])
async def test_a_line_that_is_too_much_for_python_costs_its_client_only(
    sock: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    decode: Callable[[bytes], Any] = getattr(listener, "decode_call")  # noqa: B009  (not exported)

    def fail(line: bytes) -> Any:
        if b"too much" in line:
            raise error
        return decode(line)

    monkeypatch.setattr(listener, "decode_call", fail)
    async with served(sock, says("4")):
        assert b'"error"' in await ask(sock, {"prompt": "too much"})
        assert b'"text":"4"' in await ask(sock, {"prompt": "x"})


# -- fuzz -------------------------------------------------------------------------------------------

SEEDS: list[Json] = [
    {"prompt": "2+2?", "max_tokens": 2},
    {"prompt": "the cat", "stream": True, "max_tokens": 3, "system": "s", "seed": 1},
    {"prompt": "a", "raw": True, "max_tokens": 1, "stop": ["b"], "temperature": 0},
    {"history": [{"role": "user", "content": "hi"}], "max_tokens": 2, "id": 1},
    {"prompt": "a", "events": True, "max_tokens": 2, "template_vars": {"a": [1, {"b": None}]}},
    {"prompt": "a", "json_schema": {"type": "integer"}, "max_tokens": 3},
    {"prompt": "a", "regex": "[a-c]{2}", "max_tokens": 3},
    {"prompt": "a", "grammar": 'root ::= "a"', "max_tokens": 3},
    {"prompt": "a", "logprobs": 3, "max_tokens": 2, "with_stats": True, "session": "s"},
    {"tokens": [5, 6, 7], "max_tokens": 2},
    {"op": "ping", "id": "x" * MAX_ID_CHARS, "keep": True},
    *({"op": "stats"}, {"op": "models"}, {"op": "cancel", "id": 5}),
    *({"op": "tokenize", "text": "a\u263a", "special": True}, {"op": "detokenize", "tokens": [9]}),
    *({"op": "render", "prompt": "a"}, {"op": "count_tokens", "prompt": "a"}),
    {"op": "score", "prompt": "a", "continuations": ["b", "c"]},
    {"op": "choose", "prompt": "a", "options": ["b", "c"]},
]
NAMES = sorted(
    {name for seed in SEEDS for name in seed} | {"model", "tools", "tool_choice", "lark"}
)
HOSTILE_VALUES = [
    *("null", "true", "0", "-1", "1e308", "1e999", "-0.0", "5.5", '""', '"\\ud800"', '"\\u0000"'),
    *("[]", "{}", "[[]]", '[{"a":1}]', "9" * 400, "9" * 5000, "-" + "9" * 25, "NaN", '"x"'),
    *('"' + "x" * 5000 + '"', "[" * 1200 + "]" * 1200, '{"a":' * 980 + "1" + "}" * 980),
    *('"{{ messages | length }}"', '{"type":"object"}', '"\\u263a"', '{"$ref":"#"}', '"(a*)*b"'),
]
HOSTILE_BYTES = [
    *(b"\n", b"\r\n", b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b'"', b"\\", b"{", b"}"),
    *(b"[", b",", b":", b" " * 5000, b"{" * 5000, b"[" * 200_000, b"\n" * 5000, b"x" * 1_100_000),
]


def mutated(chance: random.Random) -> bytes:
    """A call that may be a good one no more."""
    seed = dict(chance.choice(SEEDS))
    kind = chance.randrange(4)
    if kind == 0:  # the right form, with other values
        fields = {name: json.dumps(value) for name, value in seed.items()}
        for _ in range(chance.randrange(1, 4)):
            fields[chance.choice(NAMES)] = chance.choice(HOSTILE_VALUES)
        body = ",".join(f"{json.dumps(name)}:{value}" for name, value in fields.items())
        return b"{" + body.encode() + b"}\n"
    line = bytearray(as_line(seed))
    if kind == 1:  # other bytes
        for _ in range(chance.randrange(1, 6)):
            line[chance.randrange(len(line))] = chance.randrange(256)
    elif kind == 2:  # parts twice, moved or missing
        for _ in range(chance.randrange(1, 4)):
            a, b = sorted(chance.choices(range(len(line) + 1), k=2))
            line[a:b] = chance.choice([b"", line[a:b] * 2, chance.choice(HOSTILE_BYTES)])
    else:  # nothing that ever was one
        line[:] = chance.randbytes(chance.randrange(200))
    return bytes(line)


def check_replies(sent: bytes, replies: bytes) -> None:
    """Each line is whole; an error is one line, and the last of its request."""
    assert replies == b"" or replies.endswith(b"\n"), sent[:200]
    found = [json.loads(line) for line in replies.splitlines()]
    assert found or not sent.strip(), sent[:200]
    assert all(isinstance(reply, dict) and reply for reply in found), sent[:200]
    if b'"keep":true' not in sent:
        assert sum("error" in reply for reply in found) <= 1, sent[:200]
        assert not [reply for reply in found[:-1] if "error" in reply], sent[:200]
    for reply in found:
        assert "internal error" not in str(reply.get("error")), sent[:200]


@attrs.frozen
class Size:
    """What a process takes of the system."""

    rss_bytes: int
    n_descriptors: int
    n_threads: int

    @classmethod
    def of(cls, pid: int) -> Size:
        status = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return cls(
            int(fields["VmRSS"].split()[0]) * 1024,
            len(os.listdir(f"/proc/{pid}/fd")),
            int(fields["Threads"]),
        )


MOST_GROWTH_BYTES = 24 * 1024 * 1024
MOST_NEW_THREADS = 4
"""Trio keeps idle threads for ten seconds."""


@pytest.fixture(scope="module")
def daemon(tiny_model: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """The real one, for all that is thrown at it."""
    folder = tmp_path_factory.mktemp("hostile")
    model = tiny_model("attention")
    with running_daemon(folder / "d.sock", model) as daemon:
        yield daemon


@pytest.mark.parametrize("n", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_hostile_strings_are_answered_and_leave_nothing_behind(daemon: Daemon, n: int) -> None:
    chance = random.Random(n)
    for _ in range(150):
        daemon.ask(mutated(chance), half_close=True)
    before = Size.of(daemon.pid)
    for _ in range(n):
        sent = mutated(chance)
        check_replies(sent, daemon.ask(sent, half_close=True))
    reply = daemon.reply({"prompt": "the cat", "max_tokens": 2, "temperature": 0})
    assert reply["generated_tokens"] == 2
    assert daemon.is_idle()
    after = Size.of(daemon.pid)
    assert after.n_descriptors <= before.n_descriptors + 1
    assert after.n_threads <= before.n_threads + MOST_NEW_THREADS
    assert after.rss_bytes <= before.rss_bytes + MOST_GROWTH_BYTES
    assert "Traceback" not in daemon.log
