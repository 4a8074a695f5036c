"""`chat`: a conversation in the terminal."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from llamad_trio.cli.options import engine_options, sampling_options
from llamad_trio.cli.pull import ensure_model
from llamad_trio.hub.manifest import DEFAULT_MODEL

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from llamad_trio import EngineLike

MAX_TOKENS = 1024
"""Of an answer, unless said otherwise: an essay fits, an endless one ends."""


@click.command("chat")
@engine_options
@sampling_options
def chat_command(
    model: str | None, socket: str | None, system: str | None, max_tokens: int | None, **fields: Any
) -> None:
    """Talk with a model; /help lists what else can be typed.

    An answer has at most 1024 tokens, or --max-tokens.  Where stdin or stdout is no terminal,
    each line of stdin is a turn, and stdout has the answers and nothing else.
    """
    import trio

    from llamad_trio.cli.chat_loop import Chat
    from llamad_trio.cli.chat_terminal import Lines, Prompt, Screen, open_history
    from llamad_trio.cli.history import Conversation

    def opened(name: str | None) -> AbstractAsyncContextManager[EngineLike]:
        from llamad_trio import connect, open_engine

        if socket is not None:
            return connect(socket, model=name)
        return open_engine(os.path.expanduser(name or DEFAULT_MODEL), n_slots=1)

    given = {name: value for name, value in fields.items() if value is not None}
    given["max_tokens"] = MAX_TOKENS if max_tokens is None else max_tokens
    conversation = Conversation(system)
    if socket is None:
        model = model or DEFAULT_MODEL
        ensure_model(model)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may have what its encoding has not
    screen = Screen(sys.stdout, sys.stdout if is_terminal else sys.stderr)
    reader = Prompt(open_history()) if is_terminal else Lines(sys.stdin.fileno())
    status = trio.run(Chat(opened, reader, screen, conversation, given).run, model)
    if status:
        raise SystemExit(status)
