"""`complete`: one completion, streamed to stdout."""

from __future__ import annotations

import json
import sys
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

    text = _piped_prompt() if prompt is None else prompt
    request = Request(text, **without_none(fields))
    opener = engine_for(ensure_engine_model(model, socket), socket)
    trio.run(_complete, opener, request, as_json, stats)


def _piped_prompt() -> str:
    if sys.stdin.isatty():
        raise click.UsageError("give a PROMPT, or pipe one in")
    return sys.stdin.buffer.read().decode()


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
