"""Where a chat's lines come from, and what its screen shows."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from llamad_trio.cli.chat_terminal import Key, Lines, Prompt, Screen, open_history
from llamad_trio.cli.history import visible
from tests.cli.table import Paper
from tests.support import until

# -- the screen ---

HOSTILE = "a\x1b]0;title\x07b\x9bc\rd\n\te"


def test_no_control_character_reaches_a_terminal() -> None:
    paper = Paper(is_terminal=True)
    screen = Screen(paper, paper)
    screen.answer(HOSTILE)
    screen.reasoning(HOSTILE)
    screen.note(HOSTILE)
    shown = paper.getvalue().replace("\x1b[2m", "").replace("\x1b[0m", "")
    assert shown == "\n".join([visible(HOSTILE)] * 3) + "\n"


def test_a_pipe_gets_the_answer_as_it_is() -> None:
    paper = Paper()
    Screen(paper, Paper()).answer(HOSTILE)
    assert paper.getvalue() == HOSTILE


def test_what_is_beside_the_answer_begins_a_line_and_is_dim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    paper = Paper(is_terminal=True)
    screen = Screen(paper, paper)
    screen.reasoning("h")
    screen.reasoning("m")
    screen.answer("yes")
    screen.note("done")
    assert paper.getvalue() == "\x1b[2mh\x1b[0m\x1b[2mm\x1b[0m\nyes\n\x1b[2mdone\n\x1b[0m"
    monkeypatch.setenv("TERM", "dumb")
    paper = Paper(is_terminal=True)
    Screen(paper, paper).note("done")
    assert paper.getvalue() == "done\n"


# -- lines of a pipe or a file ---


async def all_lines(lines: Lines) -> list[str]:
    read: list[str] = []
    while isinstance(line := await lines.read(), str):
        read.append(line)
    assert await lines.read() is Key.END
    return read


@pytest.mark.parametrize("kind", ["pipe", "file"])
async def test_lines_come_whole(kind: str, tmp_path: Path) -> None:
    data = "one\r\n\ntwo ä\n".encode() + b"\xff" + b"x" * 200_000 + b"\nlast"
    if kind == "file":
        (tmp_path / "lines").write_bytes(data)
        with (tmp_path / "lines").open("rb", buffering=0) as file:
            read = await all_lines(Lines(file.fileno()))
    else:
        reading, writing = os.pipe()

        def write() -> None:
            with open(writing, "wb", buffering=0) as pipe:
                pipe.writelines(data[n : n + 7_001] for n in range(0, len(data), 7_001))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, write)
            read = await all_lines(Lines(reading))
        os.close(reading)
    assert read == ["one", "", "two ä", "\udcff" + "x" * 200_000, "last"]


async def test_a_wait_for_a_line_that_is_cancelled_loses_nothing() -> None:
    reading, writing = os.pipe()
    lines = Lines(reading)
    os.write(writing, b"be")
    with trio.move_on_after(0.05) as scope:
        await lines.read()
    assert scope.cancelled_caught
    os.write(writing, b"gun\n")
    assert await lines.read() == "begun"
    os.close(writing)
    os.close(reading)


# -- the prompt ---


@contextmanager
def keyboard() -> Iterator[PipeInput]:
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        yield keys


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ("hello\r", "hello"),
        ("helo\x1b[Dl\r", "hello"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ("one\\\rtwo\\\\\r\r", "one\ntwo\\\n"),
        ("a\\b\r", "a\\b"),
        ("\x1b[200~pasted\r\nlines\n\x1b[201~\r", "pasted\nlines\n"),
        ("\x03", Key.INTERRUPT),
        ("draft\x03", ""),
        ("\x04", Key.END),
        ("ab\x1b[D\x04\r", "a"),
    ],
)
async def test_keys_make_a_line(keys: str, line: str | Key) -> None:
    with keyboard() as board:
        prompt = Prompt(InMemoryHistory())
        board.send_text(keys)
        assert await prompt.read() == line


async def test_commands_are_completed() -> None:
    with keyboard() as board, trio.fail_after(20):
        prompt = Prompt(InMemoryHistory())
        buffer = prompt._session.default_buffer

        async def choose() -> None:
            board.send_text("/hel")
            await until(lambda: buffer.complete_state is not None)
            board.send_text("\t\r")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(choose)
            assert await prompt.read() == "/help"


async def test_earlier_lines_come_back() -> None:
    with keyboard() as board:
        prompt = Prompt(InMemoryHistory())
        for keys, line in [
            ("first\r", "first"),
            ("second\r", "second"),
            ("\x1b[A\x1b[A\r", "first"),
        ]:
            board.send_text(keys)
            assert await prompt.read() == line


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.3])
async def test_a_prompt_that_is_cancelled_ends_and_can_be_shown_again(after_s: float) -> None:
    with keyboard() as board:
        prompt = Prompt(InMemoryHistory())
        with trio.fail_after(20):
            with trio.move_on_after(after_s) as scope:
                await prompt.read()
            assert scope.cancelled_caught
            board.send_text("again\r")
            assert await prompt.read() == "again"


# -- the history of lines ---


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def lines_of(history: History) -> list[str]:
    return list(history.load_history_strings())


def test_the_history_is_for_its_user_alone(state: Path) -> None:
    before = os.umask(0)
    try:
        open_history().append_string("secret")
    finally:
        os.umask(before)
    (file,) = state.rglob("chat_history")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert lines_of(open_history()) == ["secret"]


def test_without_a_place_for_it_the_history_is_in_memory(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (state / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(state / "file"))
    monkeypatch.setenv("HOME", str(state / "file"))
    history = open_history()
    history.append_string("a")
    assert history.get_strings() == ["a"]
    assert not list(state.rglob("chat_history"))


def test_a_line_that_cannot_be_written_costs_only_its_history(state: Path) -> None:
    history = open_history()
    history.append_string("stray \udcff byte")
    (file,) = state.rglob("chat_history")
    assert lines_of(open_history()) == ["stray ? byte"]
    file.unlink()
    file.mkdir()
    history.append_string("b")
    assert history.get_strings()[-1] == "b"
