"""A chat goes on from turn to turn, whatever is typed, and Ctrl-C stops what is under way."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from llamad_trio.cli.chat_terminal import Key
from llamad_trio.cli.history import COMMANDS
from llamad_trio.testing import ScriptedModel
from tests.cli.table import Table
from tests.engine.test_events import THINKS_ITSELF


async def hold(replies: Any, *typed: str | Key | Callable[[], object], **options: Any) -> Table:
    """A chat, held to its end."""
    table = Table(replies, *typed, **options)
    assert await table.talk() == 0
    return table


def by_turn(replies: Mapping[str, str | Exception]) -> Callable[[str], str | Exception]:
    """Replies by what the user said last."""
    return lambda prompt: replies[prompt.split("user: ")[-1].removesuffix("\nassistant: ")]


def echo(prompt: str) -> str:
    """What the scripted model was told, on one line."""
    return prompt.removesuffix("assistant: ").rstrip("\n").replace("\n", " | ")


async def test_each_turn_follows_from_the_ones_before(autojump_clock: MockClock) -> None:
    table = await hold(by_turn({"a": "A", "b": "B"}), "a", "b", is_terminal=False)
    assert table.answers.getvalue() == "A\nB\n"
    assert table.notes == []
    assert table.said == ["a", "A", "b", "B"]


async def test_the_model_sees_the_system_message_and_what_was_said(
    autojump_clock: MockClock,
) -> None:
    table = await hold(echo, "a", "/system", "/system -", "/system", "//b", system="be brief")
    first, second = table.answers.getvalue().splitlines()
    assert first == "system: be brief | user: a"
    assert second == f"user: a | assistant: {first} | user: /b"
    assert table.notes[1:] == ["be brief", "no system message", "no system message"]


async def test_the_prefix_stays_in_the_cache(autojump_clock: MockClock) -> None:
    table = await hold("an answer of some length", "a question of some length", "another")
    last = table.conversation.last
    assert last is not None
    assert last.cached_tokens > len("an answer of some length a question of some length")


async def test_an_answer_is_shown_as_it_comes(autojump_clock: MockClock) -> None:
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


async def test_reasoning_is_apart_from_the_answer(autojump_clock: MockClock) -> None:
    model = ScriptedModel("<think>\nhm\n</think>\n\nok", chat_template=THINKS_ITSELF)
    table = await hold(model, "a", is_terminal=False)
    assert table.answers.getvalue() == "ok\n"
    assert table.asides.getvalue().strip() == "hm"
    assert table.conversation.history[1].reasoning is not None
    assert table.conversation.history[1].content == "ok"


async def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(
    autojump_clock: MockClock,
) -> None:
    table = await hold(
        by_turn({"a": "abcdef" * 1000, "next": "fine"}),
        "a",
        "next",
        interrupt_at="abcd",
        fields={"max_tokens": 2000},
    )
    stopped, last = table.answers.getvalue().splitlines()
    assert stopped.startswith("abcd")
    assert len(stopped) < 100
    assert table.said == ["a", stopped, "next", "fine"]
    assert last == "fine"
    assert "stopped" in table.notes
    # There is one slot: it was free for the second answer.
    assert table.engines[0].stats().requests == {"completed": 1, "failed": 0, "cancelled": 1}


async def test_ctrl_c_at_the_prompt_says_how_to_leave(autojump_clock: MockClock) -> None:
    table = await hold("A", Key.INTERRUPT, lambda: signal.raise_signal(signal.SIGINT), "a")
    assert table.notes[1:3] == ["Ctrl-D or /quit leaves"] * 2
    assert table.answers.getvalue() == "A\n"


async def test_without_a_terminal_ctrl_c_ends_it_with_130(autojump_clock: MockClock) -> None:
    table = Table("abcdef" * 500, "a", "b", is_terminal=False, interrupt_at="abcd")
    assert await table.talk() == 130
    assert table.said == []


async def test_ctrl_c_ends_it_before_the_first_model_is_there() -> None:
    table = Table("A", "a")
    assert await table._chat.run("endless") == 130


async def test_sigterm_closes_the_engine(autojump_clock: MockClock) -> None:
    table = Table("A", lambda: signal.raise_signal(signal.SIGTERM), "lost")
    assert await table.talk() == 143
    with pytest.raises(Exception, match="closed"):
        await table.engines[0].complete("a")


async def test_a_cut_off_answer_says_so(autojump_clock: MockClock) -> None:
    table = await hold("abcdef", "a", fields={"max_tokens": 3})
    assert table.answers.getvalue() == "abc\n"
    assert table.notes[-1] == "cut off after 3 tokens"


async def test_what_no_longer_fits_is_forgotten_aloud(autojump_clock: MockClock) -> None:
    table = await hold("fine", "a" * 60, "b" * 60, "c" * 100, n_ctx=256)
    assert table.said == ["b" * 60, "fine", "c" * 100, "fine"]
    told = [note for note in table.notes if "no longer fits" in note]
    assert told == ["the conversation no longer fits: its oldest part (1 of yours) is gone"]
    assert table.answers.getvalue() == "fine\n" * 3


async def test_what_can_never_fit_costs_nothing_but_itself(autojump_clock: MockClock) -> None:
    table = await hold("fine", "a", "b" * 300, "c", n_ctx=256)
    assert table.said == ["a", "fine", "c", "fine"]
    assert [note for note in table.notes if "error" in note] == [
        "error: prompt too long: 318 tokens, at most 255 fit"
    ]


async def test_a_failed_turn_is_one_line_and_is_not_kept(autojump_clock: MockClock) -> None:
    table = await hold(
        by_turn({"bad": ValueError("two\nlines"), "good": "fine"}), "bad", "good", "\ud800"
    )
    assert table.said == ["good", "fine"]
    first, second = [note for note in table.notes if note.startswith("error")]
    assert "two lines" in first
    assert "surrogate" in second


async def test_a_crashed_engine_can_be_replaced(autojump_clock: MockClock) -> None:
    model = ScriptedModel("A")
    table = await hold(
        model,
        "a",
        lambda: model.crash_next_step("broken"),
        "lost",
        "lost too",
        "/model second",
        "b",
        models={"second": "B"},
    )
    assert table.said == ["a", "A", "b", "B"]
    assert sum("broken" in note for note in table.notes) == 2


async def test_another_model_goes_on_with_the_conversation(autojump_clock: MockClock) -> None:
    closed: list[str] = []

    def look() -> None:
        closed.extend(table.closed)

    typed = ("a", "/model second", "/model", "b", look)
    table = Table("A", *typed, models={"second": echo})
    await table.talk()
    assert table.answers.getvalue() == "A\nuser: a | assistant: A | user: b\n"
    assert table.notes[1:] == ["second (scripted model)"] * 2
    assert closed == ["first"]  # while the second went on


@pytest.mark.parametrize("other", ["none", "endless"])
async def test_the_old_model_stays_where_another_cannot_be_had(
    other: str, autojump_clock: MockClock
) -> None:
    table = await hold(by_turn({"a": "A", "b": "B"}), "a", f"/model {other}", "b")
    assert table.said == ["a", "A", "b", "B"]
    assert table.notes[1] in (
        "error: cannot load model 'none': no such model",
        "first (scripted model)",  # the load that Ctrl-C stopped
    )
    assert len(table.engines) == 1


async def test_reset_forgets_all_but_the_system_message(autojump_clock: MockClock) -> None:
    table = await hold(echo, "a", "/reset", "b", system="be brief")
    assert table.answers.getvalue().splitlines()[1] == "system: be brief | user: b"


async def test_save_overwrites_only_when_told(tmp_path: Path, autojump_clock: MockClock) -> None:
    file, other = tmp_path / "a b.json", tmp_path / "c.txt"
    file.write_text("precious")
    typed = ("a", f"/save {file}", f"/save {other}", f"/save {tmp_path / 'no' / 'd.md'}", "/save")
    table = await hold("A", *typed, "/save ~nobody-of-this-name/e.md")
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


async def test_stats_tell_of_the_last_answer_and_the_engine(autojump_clock: MockClock) -> None:
    table = await hold(ScriptedModel("abcdefghijk", decode_s=0.1), "/stats", "a", "/stats")
    assert table.notes[1] == "no answer yet"
    assert table.notes[-3:-1] == [
        "last answer: 19 prompt tokens (0 cached), first token after 0.100 s, "
        "12 generated (10 tokens/s)",
        "context: 31 of 4096 tokens",
    ]
    assert "1 completed, 0 failed, 0 cancelled" in table.notes[-1]


async def test_every_command_is_known_and_listed(autojump_clock: MockClock) -> None:
    table = await hold("A", *(f"/{name}" for name in COMMANDS if name != "quit"), "/quit", "lost")
    assert not any("unknown" in note for note in table.notes)
    assert table.answers.getvalue() == ""
    for usage, what in COMMANDS.values():
        assert any(usage in note and what in note for note in table.notes)


async def test_an_unknown_command_is_one_line(autojump_clock: MockClock) -> None:
    table = await hold("A", "/etc/passwd")
    assert table.notes[1:] == ["unknown command /etc/passwd: /help lists them, // says a slash"]
    assert table.said == []
