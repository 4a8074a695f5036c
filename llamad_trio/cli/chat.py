"""`chat`: a conversation in the terminal."""

from __future__ import annotations

import io
import sys
from functools import partial
from typing import Any

import click

from llamad_trio.cli.options import (
    engine_for,
    engine_options,
    ensure_engine_model,
    sampling_options,
    without_none,
)

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

    from llamad_trio.cli.chat_loop import ChatLoop
    from llamad_trio.cli.chat_terminal import Lines, Prompt, Screen, open_history
    from llamad_trio.cli.history import Conversation

    fields["max_tokens"] = MAX_TOKENS if max_tokens is None else max_tokens
    conversation = Conversation(system)
    model = ensure_engine_model(model, socket)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may have what its encoding has not
    screen = Screen(sys.stdout, sys.stdout if is_terminal else sys.stderr)
    reader = Prompt(open_history()) if is_terminal else Lines(sys.stdin.fileno())
    opener = partial(engine_for, socket=socket)
    chat = ChatLoop(opener, reader, screen, conversation, without_none(fields))
    status = trio.run(chat.run, model)
    if status:
        raise SystemExit(status)
