"""What a line typed into a chat means, and what has been said."""

from __future__ import annotations

import json

import pytest

from llamad_trio import Completion, Message, ProtocolError
from llamad_trio.cli.history import Command, Conversation, PartialReply, Say, parse, visible


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
        conversation.keep(said, PartialReply(answered, completion=completion(answered)))
    return conversation


def test_a_request_has_all_that_was_said_and_a_session() -> None:
    conversation = conversation_of(("a", "A"), ("b", "B"), system="be brief")
    request = conversation.request("c", {"seed": 7, "max_tokens": 9})
    assert [m.content for m in request.messages] == ["be brief", "a", "A", "b", "B", "c"]
    assert (request.seed, request.max_tokens) == (7, 9)
    assert request.session
    assert conversation.request("d", {}).session == request.session
    assert Conversation().request("d", {}).session != request.session
    shorter = conversation.request("c", {}, without=1)
    assert [m.content for m in shorter.history] == ["b", "B"]
    assert len(conversation) == 2


def test_an_answer_that_was_stopped_is_kept_if_it_had_begun() -> None:
    conversation = Conversation()
    conversation.keep("a", PartialReply(reasoning="hm"))
    assert len(conversation) == 0
    conversation.keep("b", PartialReply("B", "so"))
    conversation.keep("c", PartialReply("", completion=completion("")))
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
