"""A conversation in the terminal: what lines mean, what is shown, and what Ctrl-C stops."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from click.testing import CliRunner
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from llamad_trio import (
    Completion,
    Engine,
    EngineLike,
    EngineSpec,
    Message,
    ModelLoadError,
    ProtocolError,
    connect,
    serve_unix,
)
from llamad_trio.cli.chat import chat_command
from llamad_trio.cli.chat_loop import Chat
from llamad_trio.cli.chat_terminal import Key, Lines, Prompt, Screen, open_history
from llamad_trio.cli.history import COMMANDS, Command, Conversation, Reply, Say, parse, visible
from llamad_trio.system.nursery import open_plain_nursery
from llamad_trio.testing import ScriptedModel, open_scripted_engine, open_scripted_models
from tests.engine.test_events import THINKS_ITSELF
from tests.models import TinyModels
from tests.serving.support import running_daemon
from tests.support import until

# -- what is typed, and what has been said ------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("", None),
        (" \t\n", None),
        ("hello", Say("hello")),
        ("  /help", Say("  /help")),
        ("two\nlines", Say("two\nlines")),
        ("//etc/passwd", Say("/etc/passwd")),
        ("///", Say("//")),
        ("/help", Command("help", "")),
        ("/save!  a b.md ", Command("save!", "a b.md")),
        ("/system be\nbrief", Command("system", "be\nbrief")),
        ("/system\nbe brief", Command("system", "be brief")),
        ("/", Command("", "")),
        ("/ help", Command("", "help")),
        ("/etc/passwd is?", Command("etc/passwd", "is?")),
    ],
)
def test_a_line_is_text_or_a_command(line: str, meaning: Say | Command | None) -> None:
    assert parse(line) == meaning


def test_what_a_terminal_would_obey_is_replaced() -> None:
    controls = {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))} - {"\n", "\t"}
    assert visible("".join(sorted(controls))) == "\ufffd" * len(controls)
    assert visible("a\n\tä 中 \u00a0🙂") == "a\n\tä 中 \u00a0🙂"


def completion(text: str) -> Completion:
    return Completion(text=text, prompt_tokens=1, generated_tokens=1, finish_reason="stop")


def conversation_of(*exchanges: tuple[str, str], system: str | None = None) -> Conversation:
    conversation = Conversation(system)
    for said, answered in exchanges:
        conversation.keep(said, Reply(answered, completion=completion(answered)))
    return conversation


def test_a_request_has_all_that_was_said_and_a_session() -> None:
    conversation = conversation_of(("a", "A"), ("b", "B"), system="be brief")
    request = conversation.request("c", {"seed": 7, "max_tokens": 9})
    assert [(m.role, m.content) for m in request.messages] == [
        ("system", "be brief"),
        ("user", "a"),
        ("assistant", "A"),
        ("user", "b"),
        ("assistant", "B"),
        ("user", "c"),
    ]
    assert (request.seed, request.max_tokens) == (7, 9)
    assert request.session
    assert conversation.request("d", {}).session == request.session
    assert Conversation().request("d", {}).session != request.session
    shorter = conversation.request("c", {}, without=1)
    assert [m.content for m in shorter.history] == ["b", "B"]
    assert len(conversation) == 2


def test_an_answer_that_was_stopped_is_kept_if_it_had_begun() -> None:
    conversation = Conversation()
    conversation.keep("a", Reply(reasoning="hm"))
    assert len(conversation) == 0
    conversation.keep("b", Reply("B", "so"))
    conversation.keep("c", Reply("", completion=completion("")))
    assert conversation.history == (
        Message("user", "b"),
        Message("assistant", "B", reasoning="so"),
        Message("user", "c"),
        Message("assistant", ""),
    )


def test_an_answer_that_no_message_can_hold_is_kept_without_what_is_wrong() -> None:
    conversation = conversation_of(("a", "A\0B"))
    assert conversation.history[1].content == "A\ufffdB"


def test_a_bad_system_message_leaves_the_old_one() -> None:
    conversation = Conversation("good")
    with pytest.raises(ProtocolError, match="NUL"):
        conversation.set_system("bad\0")
    assert conversation.system == "good"


def test_a_conversation_is_written_as_markdown_or_json() -> None:
    conversation = conversation_of(("hi", "hello 🙂"), system="be brief")
    assert conversation.text_as(".md") == (
        "## System\n\nbe brief\n\n## User\n\nhi\n\n## Assistant\n\nhello 🙂\n"
    )
    assert json.loads(conversation.text_as(".json")) == {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello 🙂"},
        ]
    }
    with pytest.raises(ValueError, match=r"\.md or \.json"):
        conversation.text_as(".txt")


# -- the loop, with a scripted model --------------------------------------------------------------


class Typed:
    """A reader of lines that are all known before; what may be done between them is done."""

    def __init__(self, *lines: str | Key | Callable[[], object], is_terminal: bool = True) -> None:
        self.is_terminal = is_terminal
        self._lines = iter(lines)

    async def read(self) -> str | Key:
        for line in self._lines:
            await trio.lowlevel.checkpoint()
            if isinstance(line, str | Key):
                return line
            line()
            await trio.testing.wait_all_tasks_blocked()  # a signal has arrived by then
        await trio.lowlevel.checkpoint()
        return Key.END


class Paper(io.StringIO):
    """A file in memory, that interrupts when something is written to it."""

    def __init__(self, *, is_terminal: bool = False, interrupt_at: str | None = None) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self._interrupt_at = interrupt_at

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        n = super().write(text)
        if self._interrupt_at is not None and self._interrupt_at in self.getvalue():
            self._interrupt_at = None
            signal.raise_signal(signal.SIGINT)
        return n


class Table:
    """A chat and all that it needs, on scripted models."""

    def __init__(
        self,
        replies: Any,
        *typed: str | Key | Callable[[], object],
        is_terminal: bool = True,
        interrupt_at: str | None = None,
        system: str | None = None,
        n_ctx: int = 4096,
        models: Mapping[str, Any] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self.engines: list[Engine] = []
        self.closed: list[str] = []
        self.answers = Paper(interrupt_at=interrupt_at)
        self.asides = Paper()
        self.conversation = Conversation(system)
        self._models = {"first": replies, **(models or {})}
        self._n_ctx = n_ctx
        self._chat = Chat(
            self._opened,
            Typed(*typed, is_terminal=is_terminal),
            Screen(self.answers, self.asides),
            self.conversation,
            {"max_tokens": 1000, **(fields or {})},
        )

    def _opened(self, name: str | None) -> AbstractAsyncContextManager[EngineLike]:
        return self._open(name)

    @asynccontextmanager
    async def _open(self, name: str | None) -> AsyncIterator[EngineLike]:
        assert name is not None
        if name == "endless":
            signal.raise_signal(signal.SIGINT)
            await trio.sleep_forever()
        if name not in self._models:
            raise ModelLoadError(name, "no such\nmodel")
        async with open_scripted_engine(self._models[name], n_slots=1, n_ctx=self._n_ctx) as engine:
            self.engines.append(engine)
            yield engine
        self.closed.append(name)

    async def talk(self) -> int:
        return await self._chat.run("first")

    @property
    def notes(self) -> list[str]:
        return self.asides.getvalue().splitlines()

    @property
    def said(self) -> list[str]:
        return [message.content for message in self.conversation.history]


def by_turn(replies: Mapping[str, str | Exception]) -> Callable[[str], str | Exception]:
    """Replies by what the user said last."""
    return lambda prompt: replies[prompt.split("user: ")[-1].removesuffix("\nassistant: ")]


def echo(prompt: str) -> str:
    """What the scripted model was told, on one line."""
    return prompt.removesuffix("assistant: ").rstrip("\n").replace("\n", " | ")


async def test_each_turn_follows_from_the_ones_before(
    autojump_clock: trio.testing.MockClock,
) -> None:
    table = Table(by_turn({"a": "A", "b": "B"}), "a", "b", is_terminal=False)
    assert await table.talk() == 0
    assert table.answers.getvalue() == "A\nB\n"
    assert table.notes == []
    assert table.said == ["a", "A", "b", "B"]


async def test_the_model_sees_the_system_message_and_what_was_said(
    autojump_clock: trio.testing.MockClock,
) -> None:
    table = Table(echo, "a", "/system", "/system -", "/system", "//b", system="be brief")
    await table.talk()
    first, second = table.answers.getvalue().splitlines()
    assert first == "system: be brief | user: a"
    assert second == f"user: a | assistant: {first} | user: /b"
    assert table.notes[1:] == ["be brief", "no system message", "no system message"]


async def test_the_prefix_stays_in_the_cache(autojump_clock: trio.testing.MockClock) -> None:
    table = Table("an answer of some length", "a question of some length", "another")
    await table.talk()
    last = table.conversation.last
    assert last is not None
    assert last.cached_tokens > len("an answer of some length a question of some length")


async def test_an_answer_is_shown_as_it_comes(autojump_clock: trio.testing.MockClock) -> None:
    table = Table(ScriptedModel("x" * 60, decode_s=1.0), "a")
    seen: list[int] = []

    async def watch() -> None:
        for _ in range(3):
            await trio.sleep(15)
            seen.append(len(table.answers.getvalue()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await table.talk()
    assert seen == pytest.approx([15, 30, 45], abs=2)


async def test_reasoning_is_apart_from_the_answer(autojump_clock: trio.testing.MockClock) -> None:
    model = ScriptedModel("<think>\nhm\n</think>\n\nok", chat_template=THINKS_ITSELF)
    table = Table(model, "a", is_terminal=False)
    await table.talk()
    assert table.answers.getvalue() == "ok\n"
    assert table.asides.getvalue().strip() == "hm"
    assert table.conversation.history[1].reasoning is not None
    assert table.conversation.history[1].content == "ok"


async def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(
    autojump_clock: trio.testing.MockClock,
) -> None:
    table = Table(
        by_turn({"a": "abcdef" * 1000, "next": "fine"}),
        "a",
        "next",
        interrupt_at="abcd",
        fields={"max_tokens": 2000},
    )
    assert await table.talk() == 0
    stopped, last = table.answers.getvalue().splitlines()
    assert stopped.startswith("abcd")
    assert len(stopped) < 100
    assert table.said == ["a", stopped, "next", "fine"]
    assert last == "fine"
    assert "stopped" in table.notes
    # There is one slot: it was free for the second answer.
    assert table.engines[0].stats().requests == {"completed": 1, "failed": 0, "cancelled": 1}


async def test_ctrl_c_at_the_prompt_says_how_to_leave(
    autojump_clock: trio.testing.MockClock,
) -> None:
    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    table = Table("A", Key.INTERRUPT, interrupt, "a")
    assert await table.talk() == 0
    assert table.notes[1:3] == ["Ctrl-D or /quit leaves"] * 2
    assert table.answers.getvalue() == "A\n"


async def test_without_a_terminal_ctrl_c_ends_it_with_130(
    autojump_clock: trio.testing.MockClock,
) -> None:
    table = Table("abcdef" * 500, "a", "b", is_terminal=False, interrupt_at="abcd")
    assert await table.talk() == 130
    assert table.said == []


async def test_ctrl_c_ends_it_before_the_first_model_is_there() -> None:
    table = Table("A", "a")
    assert await table._chat.run("endless") == 130


async def test_sigterm_closes_the_engine(autojump_clock: trio.testing.MockClock) -> None:
    table = Table("A", lambda: signal.raise_signal(signal.SIGTERM), "lost")
    assert await table.talk() == 143
    with pytest.raises(Exception, match="closed"):
        await table.engines[0].complete("a")


async def test_a_cut_off_answer_says_so(autojump_clock: trio.testing.MockClock) -> None:
    table = Table("abcdef", "a", fields={"max_tokens": 3})
    await table.talk()
    assert table.answers.getvalue() == "abc\n"
    assert table.notes[-1] == "cut off after 3 tokens"


async def test_what_no_longer_fits_is_forgotten_aloud(
    autojump_clock: trio.testing.MockClock,
) -> None:
    table = Table("fine", "a" * 60, "b" * 60, "c" * 100, n_ctx=256)
    await table.talk()
    assert table.said == ["b" * 60, "fine", "c" * 100, "fine"]
    told = [note for note in table.notes if "no longer fits" in note]
    assert told == ["the conversation no longer fits: its oldest part (1 of yours) is gone"]
    assert table.answers.getvalue() == "fine\n" * 3


async def test_what_can_never_fit_costs_nothing_but_itself(
    autojump_clock: trio.testing.MockClock,
) -> None:
    table = Table("fine", "a", "b" * 300, "c", n_ctx=256)
    await table.talk()
    assert table.said == ["a", "fine", "c", "fine"]
    assert [note for note in table.notes if "error" in note] == [
        "error: prompt too long: 318 tokens, at most 255 fit"
    ]


async def test_a_failed_turn_is_one_line_and_is_not_kept(
    autojump_clock: trio.testing.MockClock,
) -> None:
    table = Table(
        by_turn({"bad": ValueError("two\nlines"), "good": "fine"}), "bad", "good", "\ud800"
    )
    await table.talk()
    assert table.said == ["good", "fine"]
    first, second = [note for note in table.notes if note.startswith("error")]
    assert "two lines" in first
    assert "surrogate" in second


async def test_a_crashed_engine_can_be_replaced(autojump_clock: trio.testing.MockClock) -> None:
    model = ScriptedModel("A")
    table = Table(
        model,
        "a",
        lambda: model.crash_next_step("broken"),
        "lost",
        "lost too",
        "/model second",
        "b",
        models={"second": "B"},
    )
    assert await table.talk() == 0
    assert table.said == ["a", "A", "b", "B"]
    assert sum("broken" in note for note in table.notes) == 2


async def test_another_model_goes_on_with_the_conversation(
    autojump_clock: trio.testing.MockClock,
) -> None:
    closed: list[str] = []

    def look() -> None:
        closed.extend(table.closed)

    typed = ("a", "/model second", "/model", "b", look)
    table: Table = Table("A", *typed, models={"second": echo})
    await table.talk()
    assert table.answers.getvalue() == "A\nuser: a | assistant: A | user: b\n"
    assert table.notes[1:] == ["second (scripted model)"] * 2
    assert closed == ["first"]  # while the second went on


@pytest.mark.parametrize("other", ["none", "endless"])
async def test_the_old_model_stays_where_another_cannot_be_had(
    other: str, autojump_clock: trio.testing.MockClock
) -> None:
    table = Table(by_turn({"a": "A", "b": "B"}), "a", f"/model {other}", "b")
    assert await table.talk() == 0
    assert table.said == ["a", "A", "b", "B"]
    assert table.notes[1] in (
        "error: cannot load model 'none': no such model",
        "first (scripted model)",  # the load that Ctrl-C stopped
    )
    assert len(table.engines) == 1


async def test_reset_forgets_all_but_the_system_message(
    autojump_clock: trio.testing.MockClock,
) -> None:
    table = Table(echo, "a", "/reset", "b", system="be brief")
    await table.talk()
    assert table.answers.getvalue().splitlines()[1] == "system: be brief | user: b"


async def test_save_overwrites_only_when_told(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    file, other = tmp_path / "a b.json", tmp_path / "c.txt"
    file.write_text("precious")
    typed = ("a", f"/save {file}", f"/save {other}", f"/save {tmp_path / 'no' / 'd.md'}", "/save")
    table = Table("A", *typed, "/save ~nobody-of-this-name/e.md")
    await table.talk()
    assert file.read_text() == "precious"
    assert os.listdir(tmp_path) == [file.name]
    exists, suffix, folder, nothing, home = table.notes[1:]
    assert "/save! overwrites" in exists
    assert "must end in .md or .json" in suffix
    assert "No such file" in folder
    assert "must end in .md or .json" in nothing
    assert "home directory" in home
    await Table("A", "a", f"/save! {file}").talk()
    assert [m["content"] for m in json.loads(file.read_text())["messages"]] == ["a", "A"]


async def test_stats_tell_of_the_last_answer_and_the_engine(
    autojump_clock: trio.testing.MockClock,
) -> None:
    table = Table(ScriptedModel("abcdefghijk", decode_s=0.1), "/stats", "a", "/stats")
    await table.talk()
    assert table.notes[1] == "no answer yet"
    assert table.notes[-3:-1] == [
        "last answer: 19 prompt tokens (0 cached), first token after 0.100 s, "
        "12 generated (10 tokens/s)",
        "context: 31 of 4096 tokens",
    ]
    assert "1 completed, 0 failed, 0 cancelled" in table.notes[-1]


# -- a daemon's model that is loaded when it is asked ---------------------------------------------


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


async def test_every_command_is_known_and_listed(autojump_clock: trio.testing.MockClock) -> None:
    table = Table("A", *(f"/{name}" for name in COMMANDS if name != "quit"), "/quit", "lost")
    await table.talk()
    assert not any("unknown" in note for note in table.notes)
    assert table.answers.getvalue() == ""
    for usage, what in COMMANDS.values():
        assert any(usage in note and what in note for note in table.notes)


async def test_an_unknown_command_is_one_line(autojump_clock: trio.testing.MockClock) -> None:
    table = Table("A", "/etc/passwd")
    await table.talk()
    assert table.notes[1:] == ["unknown command /etc/passwd: /help lists them, // says a slash"]
    assert table.said == []


# -- the screen -----------------------------------------------------------------------------------

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


# -- lines of a pipe or a file --------------------------------------------------------------------


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


# -- the prompt -----------------------------------------------------------------------------------


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


# -- the history of lines -------------------------------------------------------------------------


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


# -- as a process ---------------------------------------------------------------------------------


def environment(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "LLAMAD_N_THREADS": "1",
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
    result = subprocess.run(
        [sys.executable, "-m", "llamad_trio", *args],
        input=f"hello\n/stats\n/model ~/other.gguf\nagain\n/save {saved}".encode(),
        capture_output=True,
        env=environment(tmp_path),
        timeout=120,
        check=False,
    )
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
    result = subprocess.run(
        [sys.executable, "-m", "llamad_trio", "chat", "-m", str(tiny_model("attention")), *wild],
        input=b"hello\n",
        capture_output=True,
        env={**environment(tmp_path), "PYTHONIOENCODING": "ascii"},
        timeout=120,
        check=False,
    )
    assert result.returncode == 0
    assert b"?" in result.stdout  # in place of a stray byte's U+FFFD
    assert result.stderr == b"cut off after 300 tokens\n"


def test_help_lists_the_options_in_their_order() -> None:
    text = CliRunner().invoke(chat_command, ["--help"]).output
    places = [
        text.index(f"--{name} ") for name in ("model", "socket", "system", "max-tokens", "stop")
    ]
    assert places == sorted(places)


COMMAND = (sys.executable, "-m", "llamad_trio")


@pytest.fixture(scope="module")
def daemon(tiny_model: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a daemon with the models one, two and, not loaded yet, lazy."""
    folder = tmp_path_factory.mktemp("daemon")
    config = folder / "daemon.toml"
    path = f"path = '{tiny_model('attention')}'\n"
    config.write_text(f"[models.one]\n{path}[models.two]\n{path}[models.lazy]\n{path}load = 'lazy'")
    with running_daemon(folder / "daemon.sock", "--config", config) as process:
        yield process.path


def ask(tmp_path: Path, *args: str, typed: str = "") -> subprocess.CompletedProcess[bytes]:
    """The command line with these arguments and this input."""
    return subprocess.run(
        [*COMMAND, *args],
        input=typed.encode(),
        capture_output=True,
        env=environment(tmp_path),
        timeout=60,
        check=False,
    )


def test_a_daemon_answers_and_has_other_models(daemon: Path, tmp_path: Path) -> None:
    typed = "hello\n/model two\n/model three\nagain\n/stats\n"
    args = ("chat", "--socket", str(daemon), "-m", "one", "-n", "5")
    result = ask(tmp_path, *args, typed=typed)
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
    daemon: Path, tmp_path: Path
) -> None:
    args = ("complete", "hi", "--stats", "-m", "lazy", "--socket", str(daemon), "-n", "5")
    result = ask(tmp_path, *args)
    assert result.returncode == 0
    assert result.stdout
    (speeds,) = result.stderr.decode().splitlines()
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
        return self._wait(re.escape(text))

    def wait_for_more(self, n_characters: int) -> None:
        """Wait for so much output."""
        self._wait(f".{{{n_characters}}}")

    def _wait(self, pattern: str) -> str:
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

    def status(self) -> int:
        """Wait for the end, and return how it ended."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self._ours], [], [], 0.05)[0]:
                self._seen += os.read(self._ours, 65536)
        return self.process.wait(timeout=1)

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
    env = {**environment(tmp_path), "LLAMAD_N_CTX": "32768"}
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
        terminal.wait_for_more(400)
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
    assert terminal.status() == 0
    assert terminal.modes_now() == terminal.modes
    first, answer, second, _ = (m["content"] for m in json.loads(saved.read_text())["messages"])
    assert (first, second) == ("first", "second\nline")
    assert len(answer) > 100
    (history,) = tmp_path.rglob("chat_history")
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "+first\n" in history.read_text()


def test_a_terminal_is_given_back_when_the_process_is_told_to_end(terminal: Terminal) -> None:
    terminal.wait_for(">")
    terminal.send("half a li")
    terminal.wait_for("half a li")
    assert terminal.modes_now() != terminal.modes
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.status() == 143
    assert terminal.modes_now() == terminal.modes
