"""What several commands have in common: options, the engine they ask, and how they print.

Knows nothing of what they do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llamad_trio.cli.pull import ensure_model
from llamad_trio.hub.manifest import DEFAULT_MODEL

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from llamad_trio import EngineLike

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

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def engine_options(command: CommandT) -> CommandT:
    """Give a command `--model` and `--socket`: see `ensure_engine_model` and `engine_for`."""
    return _add_options(command, _ENGINE)


def sampling_options(command: CommandT) -> CommandT:
    """Give a command the `Request` fields of a completion; `None` where not given."""
    return _add_options(command, _SAMPLING)


def _add_options(command: CommandT, options: tuple[Callable[[Any], Any], ...]) -> CommandT:
    # Decorators apply from the last to the first: so the help keeps their order.
    for option in reversed(options):
        command = option(command)
    return command


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def ensure_engine_model(model: str | None, socket: str | None) -> str | None:
    """The name for `engine_for`: of a model that is here by now, unless a daemon is asked."""
    if socket is None:
        model = model or DEFAULT_MODEL
        ensure_model(model)
    return model


def engine_for(model: str | None, socket: str | None) -> AbstractAsyncContextManager[EngineLike]:
    """An engine in this process, for one request at a time, or that of the daemon at `socket`."""
    from llamad_trio import connect, open_engine

    if socket is not None:
        return connect(socket, model=model)
    return open_engine(os.path.expanduser(model or DEFAULT_MODEL), n_slots=1)


def print_json(value: object) -> None:
    """Print an attrs object, or what JSON knows."""
    import attrs

    plain = attrs.asdict(value) if attrs.has(type(value)) else value  # type: ignore[arg-type]
    click.echo(json.dumps(plain, indent=2, ensure_ascii=False))


def flat(text: str) -> str:
    return " ".join(text.split())
