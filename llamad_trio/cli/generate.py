"""`complete` and `chat`: one completion, streamed to stdout, and a conversation in the terminal."""

from __future__ import annotations

import io
import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from llamad_trio.cli.options import (
    engine_for,
    engine_options,
    ensure_engine_model,
    sampling_options,
    without_none,
)

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from llamad_trio import Completion, EngineLike, EngineStats, Request

MAX_CHAT_TOKENS = 1024
"""Of an answer in a chat, unless said otherwise: an essay fits, an endless one ends."""


@click.command("complete")
@click.argument("prompt", required=False)
@engine_options
@sampling_options
@click.option("--raw", is_flag=True, help="Use the prompt as it is, without a chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole completion as JSON.")
@click.option("--stats", is_flag=True, help="Print speeds to stderr.")
def complete_command(
    prompt: str | None,
    model: str | None,
    socket: str | None,
    as_json: bool,
    stats: bool,
    **fields: Any,
) -> None:
    """Complete PROMPT, or what comes through stdin, and print the text as it is generated."""
    import trio

    from llamad_trio import Request

    if prompt is None:
        if sys.stdin.isatty():
            raise click.UsageError("give a PROMPT, or pipe one in")
        prompt = sys.stdin.buffer.read().decode()
    request = Request(prompt, **without_none(fields))
    opener = engine_for(ensure_engine_model(model, socket), socket)
    trio.run(_complete, opener, request, as_json, stats)


async def _complete(
    opener: AbstractAsyncContextManager[EngineLike], request: Request, as_json: bool, stats: bool
) -> None:
    import attrs

    async with opener as eng:
        if as_json:
            completion = await eng.complete(request)
            click.echo(json.dumps(attrs.asdict(completion), ensure_ascii=False))
        else:
            async with eng.stream(request) as tokens:
                async for piece in tokens:
                    click.echo(piece, nl=False)
                completion = await tokens.result()
            click.echo()
        if stats:
            click.echo(_speeds(completion, eng.stats()), err=True)


def _speeds(completion: Completion, stats: EngineStats) -> str:
    return (
        f"{completion.prompt_tokens} prompt tokens "
        f"({stats.prefill_tokens / max(stats.prefill_s, 1e-9):.0f}/s), "
        f"{completion.generated_tokens} generated "
        f"({stats.decode_tokens / max(stats.decode_s, 1e-9):.0f}/s), "
        f"first after {completion.ttft_s:.3f} s, {completion.finish_reason}"
    )


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

    fields["max_tokens"] = MAX_CHAT_TOKENS if max_tokens is None else max_tokens
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
