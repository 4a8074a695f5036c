"""`inspect`: what a GGUF is, and what an engine with it takes in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from llamad_trio.cli.options import json_option, print_json, print_rows, without_none
from llamad_trio.cli.pull import ensure_model

if TYPE_CHECKING:
    from pathlib import Path

    from llamad_trio import EngineConfig, ModelInfo
    from llamad_trio.memory import MemoryEstimate


@click.command("inspect")
@click.argument("model")
@json_option
@click.option("--template", is_flag=True, help="Print only the chat template.")
@click.option("--n-ctx", type=click.IntRange(min=1), help="Tokens in the pool, for the memory.")
@click.option("--n-slots", type=click.IntRange(min=1), help="Slots, for the memory.")
def inspect_command(
    model: str, as_json: bool, template: bool, n_ctx: int | None, n_slots: int | None
) -> None:
    """Load MODEL (a known name or a GGUF file) and tell what it is.

    The memory is what an engine takes with the LLAMAD_* variables, or the options here.
    """
    import attrs
    import trio

    from llamad_trio import EngineConfig
    from llamad_trio.memory import estimate_memory

    config = EngineConfig.merge(None, without_none({"n_ctx": n_ctx, "n_slots": n_slots}))
    path = ensure_model(model)
    info = trio.run(_read_info, path)
    if template:
        if info.chat_template is None:
            raise click.ClickException("the model has no chat template")
        click.echo(info.chat_template)
        return
    memory = trio.run(estimate_memory, path, config)
    if as_json:
        sizes = {**attrs.asdict(memory), "total_bytes": memory.total_bytes}
        print_json({**attrs.asdict(info), "memory": sizes})
    else:
        _print_table(info, memory, config)


async def _read_info(model: Path) -> ModelInfo:
    from llamad_trio import open_engine

    async with open_engine(model, n_slots=1, n_ctx=256) as eng:
        return eng.info


def _print_table(info: ModelInfo, memory: MemoryEstimate, config: EngineConfig) -> None:
    from rich.filesize import decimal

    in_force = config.resolve(n_ctx_train=info.n_ctx_train, n_cores=1, max_slots=config.n_slots)
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
        "memory": f"{decimal(memory.total_bytes)} with {in_force.n_ctx:,} tokens in the pool "
        f"and {in_force.n_slots} slots",
        "  weights": decimal(memory.weights_bytes),
        "  KV pool": decimal(memory.kv_bytes),
        "  compute": decimal(memory.compute_bytes),
        "  the rest": decimal(memory.overhead_bytes),
    }
    print_rows(rows, 16)
