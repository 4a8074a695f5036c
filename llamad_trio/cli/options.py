"""The options that several commands have.  Decides their names; knows nothing of engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from llamad_trio.hub.manifest import DEFAULT_MODEL

CommandT = TypeVar("CommandT", bound=Callable[..., object])

_ENGINE = (
    click.option(
        "--model",
        "-m",
        help=f"A known model, or a GGUF file; with --socket, one of the daemon's.  [{DEFAULT_MODEL}]",
    ),
    click.option("--socket", help="Ask the daemon that listens there."),
)

_SAMPLING = (
    click.option("--system", "-s", help="A system message."),
    click.option("--max-tokens", "-n", type=int, help="Most tokens to generate."),
    click.option("--temperature", "-t", type=float, help="0 is greedy."),
    click.option("--top-k", type=int, help="Keep the k likeliest tokens."),
    click.option("--top-p", type=float, help="Keep the likeliest tokens up to this probability."),
    click.option("--min-p", type=float, help="Drop tokens below this share of the likeliest."),
    click.option("--repeat-penalty", type=float, help="1 is off."),
    click.option("--repeat-last-n", type=int, help="Tokens the penalties look back on; -1 is all."),
    click.option("--presence-penalty", type=float),
    click.option("--frequency-penalty", type=float),
    click.option("--seed", type=int, help="Same seed, same text."),
    click.option("--stop", multiple=True, help="Text that ends the generation; may be repeated."),
)


def engine_options(command: CommandT) -> CommandT:
    """Give a command `--model` and `--socket`."""
    return _with(command, _ENGINE)


def sampling_options(command: CommandT) -> CommandT:
    """Give a command the `Request` fields of a completion; `None` where not given."""
    return _with(command, _SAMPLING)


def _with(command: CommandT, options: tuple[Callable[[Any], Any], ...]) -> CommandT:
    # Decorators apply from the last to the first: so the help keeps their order.
    for option in reversed(options):
        command = option(command)
    return command
