"""A chat with a daemon, in a pipe and at a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from click.testing import CliRunner

from llamad_trio import EngineLike, EngineSpec, connect, serve_unix
from llamad_trio.cli.generate import chat_command
from llamad_trio.system.nursery import open_plain_nursery
from llamad_trio.testing import ScriptedModel, open_scripted_models
from tests.cli.conftest import CommandLine, run_process
from tests.cli.table import Table
from tests.models import TinyModels
from tests.serving.support import running_daemon

# -- a daemon's model that is loaded when it is asked ---


class LazyTable(Table):
    """A chat with a daemon in this program, whose models are not loaded."""

    def __init__(self, path: Path, replies: Any, *typed: str, **options: Any) -> None:
        super().__init__(replies, *typed, **options)
        self._path = path

    async def talk(self) -> int:
        specs = {name: EngineSpec(name, load="lazy", n_ctx=self._n_ctx) for name in self._models}
        with trio.fail_after(20):
            async with (
                open_scripted_models(self._models, specs) as models,
                open_plain_nursery() as nursery,
            ):
                await nursery.start(serve_unix, models, self._path)
                status = await self._chat.run(None)
                nursery.cancel_scope.cancel()
        return status

    def _opened(self, name: str | None) -> AbstractAsyncContextManager[EngineLike]:
        return connect(self._path, model=name)


async def test_a_lazy_model_has_a_title_without_a_description_until_it_is_loaded(
    tmp_path: Path,
) -> None:
    typed = ("/model first", "a", "/model", "/model second")
    table = LazyTable(tmp_path / "d.sock", "A", *typed, models={"second": "B"})
    assert await table.talk() == 0
    assert table.notes == [
        "the default model; /help lists the commands, Ctrl-D or /quit leaves",
        "first",
        "first (scripted model)",
        "second",
    ]
    assert table.answers.getvalue() == "A\n"


async def test_stats_of_a_lazy_model_are_there_after_an_answer(tmp_path: Path) -> None:
    table = LazyTable(tmp_path / "d.sock", "A", "/stats", "a", "/stats")
    await table.talk()
    assert table.notes[1:3] == ["no answer yet", "engine: not loaded"]
    assert table.notes[3].startswith("last answer: ")
    assert table.notes[4] == "context: 21 of 4096 tokens"
    assert "1 completed, 0 failed, 0 cancelled" in table.notes[-1]


async def test_stats_after_an_answer_that_was_stopped_are_those_of_now(tmp_path: Path) -> None:
    model = ScriptedModel("abcdef" * 500, decode_s=0.001)
    table = LazyTable(tmp_path / "d.sock", model, "a", "/stats", interrupt_at="abcd")
    await table.talk()
    assert table.notes[1:3] == ["stopped", "no answer yet"]
    assert "decode - tokens/s" not in table.notes[-1]


# -- as a process ---


def environment(tmp_path: Path) -> dict[str, str]:
    return {
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path),
        "TERM": "xterm",
        "PROMPT_TOOLKIT_NO_CPR": "1",
    }


def test_a_pipe_gets_answers_and_nothing_else(tiny_model: TinyModels, tmp_path: Path) -> None:
    path = tiny_model("attention", can_end=True)
    saved = tmp_path / "saved.json"
    (tmp_path / "other.gguf").symlink_to(path)
    args = ["chat", "-m", str(path), "-n", "20", "--seed", "1", "-s", "be brief"]
    typed = f"hello\n/stats\n/model ~/other.gguf\nagain\n/save {saved}"
    result = run_process(*args, stdin=typed.encode(), **environment(tmp_path))
    assert result.returncode == 0
    messages = json.loads(saved.read_text())["messages"]
    assert [m["role"] for m in messages] == ["system", *["user", "assistant"] * 2]
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    whole_lines = (answer if answer.endswith("\n") else f"{answer}\n" for answer in answers)
    assert result.stdout.decode() == "".join(whole_lines)
    notes = result.stderr.decode().splitlines()
    assert sum(note.startswith("last answer: ") for note in notes) == 1
    assert any(note.startswith("~/other.gguf (llama") for note in notes)
    assert f"saved to {saved}" in notes
    assert not any("error" in note for note in notes)


def test_what_the_encoding_has_not_does_not_end_it(tiny_model: TinyModels, tmp_path: Path) -> None:
    wild = ["-t", "2", "--top-k", "0", "--top-p", "1", "--seed", "1", "-n", "300"]
    args = ("chat", "-m", str(tiny_model("attention")), *wild)
    env = {**environment(tmp_path), "PYTHONIOENCODING": "ascii"}
    result = run_process(*args, stdin=b"hello\n", **env)
    assert result.returncode == 0
    assert b"?" in result.stdout  # in place of a stray byte's U+FFFD
    assert result.stderr == b"cut off after 300 tokens\n"


def test_help_lists_the_options_in_their_order() -> None:
    text = CliRunner().invoke(chat_command, ["--help"]).output
    places = [
        text.index(f"--{name} ") for name in ("model", "socket", "system", "max-tokens", "stop")
    ]
    assert places == sorted(places)


@pytest.fixture(scope="module")
def daemon(tiny_model: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a daemon with the models one, two and, not loaded yet, lazy."""
    folder = tmp_path_factory.mktemp("daemon")
    config = folder / "daemon.toml"
    path = f"path = '{tiny_model('attention')}'\n"
    config.write_text(f"[models.one]\n{path}[models.two]\n{path}[models.lazy]\n{path}load = 'lazy'")
    with running_daemon(folder / "daemon.sock", "--config", config) as process:
        yield process.path


def test_a_daemon_answers_and_has_other_models(daemon: Path, tmp_path: Path) -> None:
    typed = b"hello\n/model two\n/model three\nagain\n/stats\n"
    args = ("chat", "--socket", str(daemon), "-m", "one", "-n", "5")
    result = run_process(*args, stdin=typed, **environment(tmp_path))
    assert result.returncode == 0
    assert result.stdout
    notes = result.stderr.decode().splitlines()
    cut_off = "cut off after 5 tokens"
    assert [note for note in notes if note == cut_off] == [cut_off] * 2
    assert notes[1].startswith("two (")
    assert notes[2].startswith("error: ")
    assert "three" in notes[2]
    assert "1 completed" in notes[-1]


def test_the_speeds_of_a_completion_are_told_of_a_lazy_model_too(
    command_line: CommandLine, daemon: Path
) -> None:
    args = ("complete", "hi", "--stats", "-m", "lazy", "--socket", str(daemon), "-n", "5")
    ended = command_line(*args)
    assert ended.status == 0
    assert ended.out
    (speeds,) = ended.err.splitlines()
    assert "5 generated" in speeds


# A terminal of its own, so that Ctrl-C typed there becomes a signal.
ON_A_TERMINAL = (
    "import fcntl, runpy, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "runpy.run_module('llamad_trio', run_name='__main__')"
)

ESCAPE = re.compile(rb"\x1b(\[[0-9;?]*[A-Za-z]|[=>78])")


class Terminal:
    """A chat on a pseudo terminal."""

    def __init__(self, *args: str, env: Mapping[str, str]) -> None:
        self._ours, self._its = pty.openpty()
        termios.tcsetwinsize(self._its, (24, 80))
        self.modes = termios.tcgetattr(self._its)
        self._seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_A_TERMINAL, "chat", *args],
            stdin=self._its,
            stdout=self._its,
            stderr=self._its,
            env=env,
            start_new_session=True,
        )

    def send(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait_for(self, text: str) -> str:
        """Wait for `text`, and return what came up to its end since the last wait."""
        return self.wait_for_match(re.escape(text))

    def wait_for_match(self, pattern: str) -> str:
        """The same for a regular expression."""
        deadline = time.monotonic() + 90
        while True:
            plain = ESCAPE.sub(b"", self._seen)
            if match := re.search(pattern.encode(), plain, re.DOTALL):
                self._seen = plain[match.end() :]
                return plain[: match.end()].decode(errors="replace")
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._ours], [], [], left)[0]:
                pytest.fail(f"{pattern!r} does not come: {plain[-2000:]!r}")
            self._seen += os.read(self._ours, 65536)

    def modes_now(self) -> list[Any]:
        return termios.tcgetattr(self._its)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._its)


@pytest.fixture
def terminal(tiny_model: TinyModels, tmp_path: Path) -> Iterator[Terminal]:
    """A chat with a model that does not end by itself."""
    path = tiny_model("attention", n_ctx_train=32_768)
    env = {**os.environ, **environment(tmp_path), "LLAMAD_N_CTX": "32768", "LLAMAD_N_THREADS": "1"}
    terminal = Terminal("-m", str(path), "-n", "30000", "--seed", "1", env=env)
    try:
        yield terminal
    finally:
        terminal.close()


def test_a_conversation_at_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    assert "/help lists the commands" in terminal.wait_for(">")
    for turn in ("first\r", "second\\\rline\r"):
        terminal.send(turn)
        terminal.wait_for_match(".{400}")
        assert terminal.modes_now() == terminal.modes
        terminal.send("\x03")
        terminal.wait_for("stopped")
        terminal.wait_for(">")
    terminal.send("\x03")
    terminal.wait_for("Ctrl-D or /quit leaves")
    terminal.wait_for(">")
    terminal.send(f"/save {saved}\r")
    terminal.wait_for("saved to")
    terminal.wait_for(">")
    assert terminal.modes_now() != terminal.modes
    terminal.send("\x04")
    assert terminal.process.wait(timeout=60) == 0
    assert terminal.modes_now() == terminal.modes
    first, answer, second, _ = (m["content"] for m in json.loads(saved.read_text())["messages"])
    assert (first, second) == ("first", "second\nline")
    assert len(answer) > 100
    (history,) = tmp_path.rglob("chat_history")
    assert "+first\n" in history.read_text()


def test_a_terminal_is_given_back_when_the_process_is_told_to_end(terminal: Terminal) -> None:
    terminal.wait_for(">")
    terminal.send("half a li")
    terminal.wait_for("half a li")
    assert terminal.modes_now() != terminal.modes
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.process.wait(timeout=60) == 143
    assert terminal.modes_now() == terminal.modes
