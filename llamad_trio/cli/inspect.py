"""`inspect`: what a GGUF is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from llamad_trio.cli.pull import ensure_model

if TYPE_CHECKING:
    from llamad_trio import ModelInfo

__all__ = ["inspect_command"]


@click.command("inspect")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--template", is_flag=True, help="Print only the chat template.")
def inspect_command(model: str, as_json: bool, template: bool) -> None:
    """Load MODEL (a known name or a GGUF file) and tell what it is."""
    import attrs
    import trio

    info: ModelInfo = trio.run(_inspect, ensure_model(model))
    if template:
        if info.chat_template is None:
            raise click.ClickException("the model has no chat template")
        click.echo(info.chat_template)
    elif as_json:
        click.echo(json.dumps(attrs.asdict(info), indent=2, ensure_ascii=False))
    else:
        _print_table(info)


async def _inspect(model: Any) -> ModelInfo:
    from llamad_trio import open_engine

    async with open_engine(model, n_slots=1, n_ctx=256) as eng:
        return eng.info


def _print_table(info: ModelInfo) -> None:
    from rich.filesize import decimal

    rows = {
        "name": info.name or "(none)",
        "architecture": info.architecture,
        "description": info.description,
        "parameters": f"{info.n_params:,}",
        "file": decimal(info.file_bytes),
        "vocabulary": f"{info.n_vocab:,} tokens",
        "trained context": f"{info.n_ctx_train:,} tokens",
        "chat template": "yes (see --template)" if info.has_template else "none: prompts are raw",
        "can rewind": "yes" if info.can_rewind else "no: only whole prompts and replies are reused",
        "identity": info.identity,
    }
    for name, value in rows.items():
        click.echo(f"{name:16} {value}")
