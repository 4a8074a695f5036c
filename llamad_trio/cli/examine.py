"""`inspect` and `doctor`: what a GGUF is, what this machine is, and what is wrong with it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from llamad_trio.cli.options import json_option, print_json, without_none
from llamad_trio.cli.pull import ensure_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from llamad_trio import EngineConfig, ModelInfo
    from llamad_trio.doctor import MachineReport
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
        _print_model(info, memory, config)


async def _read_info(model: Path) -> ModelInfo:
    from llamad_trio import open_engine

    async with open_engine(model, n_slots=1, n_ctx=256) as eng:
        return eng.info


def _print_model(info: ModelInfo, memory: MemoryEstimate, config: EngineConfig) -> None:
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
    _print_rows(rows, 16)


@click.command("doctor")
@json_option
def doctor_command(as_json: bool) -> None:
    """Tell what this machine is to llama.cpp, and what is wrong with it, if anything.

    Computes for a second, in a process of its own.  The exit status is 1 if something is wrong.
    What it prints is all that a bug report needs.
    """
    import trio

    from llamad_trio.doctor import examine_machine

    report = trio.run(examine_machine)
    if as_json:
        print_json(report)
    else:
        _print_machine(report)
    if report.problems:
        sys.exit(1)


def _print_machine(report: MachineReport) -> None:
    from rich.filesize import decimal

    lacking = sorted(set(report.built_for) - set(report.cpu_has)) if report.cpu_has else []
    unused = sorted(set(report.cpu_has) - set(report.built_for)) if report.built_for else []
    cores, memory = report.cores, report.memory
    quota = "no quota" if cores["quota"] is None else f"a quota of {cores['quota']:g}"
    limit = "" if memory["limit"] is None else f", {decimal(memory['limit'])} of addresses at most"
    extra = {True: "on", False: "off", None: "nothing works"}[report.use_extra_bufts]
    speeds = [
        f"{speed:.0f} tokens/s with {n} thread{'s' if n != '1' else ''}"
        for n, speed in report.speeds.items()
    ]
    if report.speeds and min(report.speeds.values()) < report.speeds["1"]:
        speeds.append("another program wants the cores")
    installed = report.models["installed"]
    rows = {
        "python": report.python,
        "system": report.system,
        "CPU": report.cpu or "not known",
        "packages": _join(
            f"{name} {version or '(none)'}" for name, version in report.packages.items()
        ),
        "llama.cpp": report.llama_cpp or "could not be loaded",
        "  built for": _join(report.built_for),
        "  not in this CPU": _join(lacking),
        "  not built in": _join(unused),
        "  extra buffers": f"{extra}: {report.extra_bufts_reason}",
        "C++ compiler": report.compiler or "none that is known",
        "cores": f"{cores['physical']:g} to compute on: {cores['logical']:g} logical, "
        f"{cores['allowed']:g} allowed, {quota}",
        "memory": f"{decimal(memory['available'] or 0)} of {decimal(memory['total'] or 0)} "
        f"available{limit}",
        "open files": f"{report.open_files} at most",
        "devices": _join(f"{d['kind']} {d['description']}" for d in report.devices),
        "speed": _join(speeds),
        "models": f"{report.models['folder']}: {_join(installed)}",  # type: ignore[arg-type]
        "socket": f"{report.socket['path']}: "
        + ("a daemon listens" if report.socket["listens"] else "nobody listens"),
    }
    _print_rows(rows, 18)
    for problem in report.problems:
        click.echo(f"\nwrong: {problem}")
    if not report.problems:
        click.echo("\nnothing is wrong")


def _join(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _print_rows(rows: Mapping[str, str], width: int) -> None:
    """Print names, as many columns wide, and what is to be told of each."""
    for name, value in rows.items():
        click.echo(f"{name:{width}} {value}")
