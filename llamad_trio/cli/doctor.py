"""`doctor`: what this machine is, and what is wrong with it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llamad_trio.doctor import MachineReport


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def doctor_command(as_json: bool) -> None:
    """Tell what this machine is to llama.cpp, and what is wrong with it, if anything.

    Computes for a second, in a process of its own.  The exit status is 1 if something is wrong.
    What it prints is all that a bug report needs.
    """
    import attrs
    import trio

    from llamad_trio.doctor import examine_machine

    report = trio.run(examine_machine)
    if as_json:
        click.echo(json.dumps(attrs.asdict(report), indent=2, ensure_ascii=False))
    else:
        _print_table(report)
    if report.problems:
        sys.exit(1)


def _print_table(report: MachineReport) -> None:
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
        "packages": _listed(
            f"{name} {version or '(none)'}" for name, version in report.packages.items()
        ),
        "llama.cpp": report.llama_cpp or "could not be loaded",
        "  built for": _listed(report.built_for),
        "  not in this CPU": _listed(lacking),
        "  not built in": _listed(unused),
        "  extra buffers": f"{extra}: {report.extra_bufts_reason}",
        "C++ compiler": report.compiler or "none that is known",
        "cores": f"{cores['physical']:g} to compute on: {cores['logical']:g} logical, "
        f"{cores['allowed']:g} allowed, {quota}",
        "memory": f"{decimal(memory['available'] or 0)} of {decimal(memory['total'] or 0)} "
        f"available{limit}",
        "open files": f"{report.open_files} at most",
        "devices": _listed(f"{d['kind']} {d['description']}" for d in report.devices),
        "speed": _listed(speeds),
        "models": f"{report.models['folder']}: {_listed(installed)}",  # type: ignore[arg-type]
        "socket": f"{report.socket['path']}: "
        + ("a daemon listens" if report.socket["listens"] else "nobody listens"),
    }
    for name, value in rows.items():
        click.echo(f"{name:18} {value}")
    for problem in report.problems:
        click.echo(f"\nwrong: {problem}")
    if not report.problems:
        click.echo("\nnothing is wrong")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
