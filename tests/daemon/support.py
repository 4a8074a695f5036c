"""What the tests of the real process share."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.serving.support import Daemon, Json, as_line, running_daemon

LONG: Json = {"prompt": "the cat", "max_tokens": 90_000}
"""A request that no test waits for the end of."""

STOPPING = {"error": "inference: the daemon is stopping"}

ASKED: Json = {"prompt": "the cat", "max_tokens": 20, "temperature": 0}


@contextmanager
def own_daemon(sock: Path, model: Path, **env: str) -> Iterator[Daemon]:
    with running_daemon(sock, model, env={"LLAMAD_N_CTX": "100000", **env}) as daemon:
        yield daemon


@contextmanager
def configured(sock: Path, text: str, **options: Any) -> Iterator[Daemon]:
    config = sock.with_name("daemon.toml")
    config.write_text(text)
    with running_daemon(sock, "--config", config, **options) as daemon:
        yield daemon


def apart(name: str, path: Path, **fields: int | str) -> str:
    return table(name, path, isolation="'process'", **fields)


def table(name: str, path: Path, **fields: int | str) -> str:
    lines = [f"[models.{name}]", f"path = {str(path)!r}"]
    return "\n".join([*lines, *(f"{key} = {value}" for key, value in fields.items())]) + "\n"


@contextmanager
def streaming(daemon: Daemon, **fields: object) -> Iterator[Stream]:
    """A stream that has begun."""
    with daemon.connect() as client:
        client.sendall(as_line({**LONG, "stream": True, **fields}))
        stream = Stream(client)
        assert "token" in stream.reply()
        try:
            yield stream
        finally:
            stream.close()


class Stream:
    """The lines of a reply that is coming."""

    def __init__(self, client: socket.socket) -> None:
        self._lines = client.makefile("rb")

    def reply(self) -> Json:
        """The next line."""
        reply: Json = json.loads(self._lines.readline())
        return reply

    def close(self) -> None:
        """Let go of the socket, which stays open until the last of its files is closed."""
        self._lines.close()

    def last(self) -> Json | None:
        """The last line, once the daemon has closed; `None` if all of them were tokens."""
        lines = self._lines.readlines()
        assert all(line.endswith(b"\n") for line in lines)
        last: Json = json.loads(lines[-1]) if lines else {"token": ""}
        return None if "token" in last else last


def check_last_words(log: str, *words: str) -> None:
    """Check that a daemon that could not go on said so in one line, beside what it logged."""
    assert "Traceback" not in log
    lines = log.splitlines()
    (error,) = (line for line in lines if " INFO " not in line and " WARNING " not in line)
    assert error.startswith("error: ")
    assert all(word in error for word in words)
