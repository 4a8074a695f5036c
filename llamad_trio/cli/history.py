"""What is typed into a chat, and what has been said.  Knows no terminal and no engine."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

import attrs

from llamad_trio import Completion, EngineStats, Message, Request
from llamad_trio.cli.options import flat

COMMANDS = {
    "system": ("/system [TEXT]", "show the system message, or set it; /system - clears it"),
    "reset": ("/reset", "forget what was said, but not the system message"),
    "save": ("/save FILE", "write the conversation to FILE.md or FILE.json"),
    "save!": ("/save! FILE", "the same, and overwrite FILE"),
    "stats": ("/stats", "tell how the last answer and the engine went"),
    "model": ("/model [NAME]", "tell the model, or go on with another one"),
    "help": ("/help", "show this"),
    "quit": ("/quit", "leave; so does Ctrl-D"),
}
"""By name: how it is used, and what it does."""

_COMMAND = re.compile(r"/(\S*)\s*(.*)", re.DOTALL)

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@attrs.frozen
class Say:
    """Text for the model."""

    text: str


@attrs.frozen
class Command:
    """A slash command: its name without the slash, and the rest of the line."""

    name: str
    argument: str


@attrs.define
class PartialReply:
    """What has been received of an answer, and how it ended, if it was not stopped."""

    text: str = ""
    reasoning: str = ""
    completion: Completion | None = None


def parse(line: str) -> Say | Command | None:
    """What a line means: nothing if it is blank.  A `//` at its start is a literal slash."""
    if not line.strip():
        return None
    if line.startswith("//"):
        return Say(line[1:])
    match = _COMMAND.fullmatch(line)
    return Say(line) if match is None else Command(match[1], match[2].strip())


class Conversation:
    """The turns so far, in exchanges of a question and its answer.

    `last` is the end of the last answer that was not stopped.  Raises `ProtocolError` if `system`
    is no text a request can have.
    """

    def __init__(self, system: str | None = None) -> None:
        self._session = f"chat-{secrets.token_hex(4)}"
        self._exchanges: list[tuple[Message, Message]] = []
        self.last: Completion | None = None
        self.set_system(system)

    def __len__(self) -> int:
        return len(self._exchanges)

    @property
    def history(self) -> tuple[Message, ...]:
        return tuple(message for exchange in self._exchanges for message in exchange)

    def set_system(self, text: str | None) -> None:
        """Replace the system message.  Raises `ProtocolError` and keeps the old one if bad."""
        self.system = None if text is None else Message("system", text).content

    def request(self, text: str, fields: Mapping[str, Any], *, without: int = 0) -> Request:
        """The request for an answer to `text`, without so many of the oldest exchanges.

        Raises `ProtocolError` if `text` or one of `fields` is nothing a request can have.
        """
        history = self.history[2 * without :]
        return Request(text, system=self.system, history=history, session=self._session, **fields)

    def keep(self, text: str, reply: PartialReply) -> None:
        """Add an exchange, unless it was stopped before the answer began."""
        self.last = reply.completion or self.last
        if reply.text or reply.completion is not None:
            reasoning = _storable(reply.reasoning) or None
            answer = Message("assistant", _storable(reply.text), reasoning=reasoning)
            self._exchanges.append((Message("user", text), answer))

    def drop(self, n: int) -> None:
        del self._exchanges[:n]

    def text_as(self, suffix: str) -> str:
        """All of it but the reasoning: Markdown for `.md`, JSON for `.json`, else `ValueError`."""
        first = () if self.system is None else (Message("system", self.system),)
        turns = (*first, *self.history)
        match suffix:
            case ".md":
                return "\n".join(f"## {m.role.capitalize()}\n\n{m.content}\n" for m in turns)
            case ".json":
                messages = [{"role": m.role, "content": m.content} for m in turns]
                return json.dumps({"messages": messages}, ensure_ascii=False, indent=2) + "\n"
            case _:
                raise ValueError("the name must end in .md or .json")


def stats_lines(last: Completion | None, stats: EngineStats | None, n_ctx: int | None) -> list[str]:
    """The last answer's speeds, the context it used of the pool's `n_ctx`, and the engine's counts.

    There are no `stats` while its model is not loaded.
    """
    lines = ["no answer yet"]
    if last is not None:
        speed = _rate(last.generated_tokens - 1, last.duration_s - last.ttft_s)
        limit = "" if n_ctx is None else f" of {n_ctx}"
        lines = [
            f"last answer: {last.prompt_tokens} prompt tokens ({last.cached_tokens} cached), "
            f"first token after {last.ttft_s:.3f} s, {last.generated_tokens} generated ({speed})",
            f"context: {last.prompt_tokens + last.generated_tokens}{limit} tokens",
        ]
    if stats is None:
        return [*lines, "engine: not loaded"]
    requests = ", ".join(f"{n} {outcome}" for outcome, n in stats.requests.items())
    return [
        *lines,
        f"engine: prefill {_rate(stats.prefill_tokens, stats.prefill_s)}, "
        f"decode {_rate(stats.decode_tokens, stats.decode_s)}; requests: {requests}; "
        f"KV pool: {stats.kv_used_tokens} used, {stats.kv_retained_tokens} retained, "
        f"{stats.kv_free_tokens} free",
    ]


def visible(text: str) -> str:
    """The text without what a terminal would obey."""
    return _CONTROL.sub("\ufffd", text)


def one_line(error: Exception) -> str:
    return f"error: {flat(str(error)) or type(error).__name__}"


def _rate(n_tokens: int, seconds: float) -> str:
    return f"{n_tokens / seconds:.0f} tokens/s" if n_tokens > 0 and seconds > 0 else "- tokens/s"


def _storable(text: str) -> str:
    """The text without what no message can hold."""
    return text.replace("\0", "\ufffd")
