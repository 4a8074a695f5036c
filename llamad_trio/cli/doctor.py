"""`doctor`: what this machine is, and what is wrong with it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from llamad_trio.cli.options import json_option, print_json, print_rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llamad_trio.doctor import MachineReport


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
    print_rows(rows, 18)
    for problem in report.problems:
        click.echo(f"\nwrong: {problem}")
    if not report.problems:
        click.echo("\nnothing is wrong")


def _join(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
