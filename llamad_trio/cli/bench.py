"""`bench`: the engine's speed against a plain llama.cpp loop."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from llamad_trio.cli.options import json_option, print_json, without_none
from llamad_trio.cli.pull import ensure_model
from llamad_trio.hub.manifest import DEFAULT_MODEL

if TYPE_CHECKING:
    from llamad_trio.bench.prefix import PrefixReport
    from llamad_trio.bench.speed import BenchReport

Columns = tuple[tuple[str, str], ...]
"""The heads of a table, and how to format the fields of a row, in their order."""

_SPEED_COLUMNS: Columns = (
    ("at once", "d"),
    ("decode tok/s", ".1f"),
    ("raw", ".1f"),
    ("ratio", ".3f"),
    ("prefill tok/s", ".0f"),
    ("raw", ".0f"),
    ("ratio", ".3f"),
    ("TTFT s", ".3f"),
    ("raw", ".3f"),
)
_PREFIX_COLUMNS: Columns = (
    ("prefix", "s"),
    ("TTFT s", ".3f"),
    ("against cold", ".3f"),
    ("reused tokens", "d"),
)


@click.command("bench")
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--concurrency", "-c", multiple=True, type=click.IntRange(1, 64), default=(1, 4, 8))
@click.option(
    "--prompt-tokens",
    type=click.IntRange(8, 4096),
    help="Length of a prompt (128), or of the shared prefix (1000).",
)
@click.option("--tokens", type=click.IntRange(8, 4096), default=96, show_default=True)
@click.option("--pairs", type=click.IntRange(1, 100), default=5, show_default=True)
@click.option("--prefix", is_flag=True, help="Measure what reusing a prefix is worth instead.")
@click.option("--threads", type=click.IntRange(1, 256), help="Default: the physical cores.")
@json_option
def bench_command(
    model: str,
    concurrency: tuple[int, ...],
    prompt_tokens: int | None,
    tokens: int,
    pairs: int,
    prefix: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure MODEL through the engine and in a plain llama.cpp loop, in turns.

    The ratios are what counts: both sides of one are measured in the same run.
    """
    import trio

    from llamad_trio.bench.prefix import run_prefix_bench
    from llamad_trio.bench.speed import run_bench

    path = ensure_model(model)
    common: dict[str, Any] = {
        "on_progress": lambda what: click.echo(f"measuring {what}", err=True),
        **without_none({"n_threads": threads}),
    }
    if prefix:
        length = prompt_tokens or 1000
        measure = partial(run_prefix_bench, path, prefix_tokens=length, rounds=pairs, **common)
        reuse = trio.run(measure)
        title = (
            f"time to the first token, {reuse.prefix_tokens} + {reuse.suffix_tokens} prompt "
            f"tokens, medians of {reuse.rounds}"
        )
        _print(reuse, title, _PREFIX_COLUMNS, as_json=as_json)
    else:
        common |= {"concurrency": concurrency, "prompt_tokens": prompt_tokens or 128}
        speed = trio.run(partial(run_bench, path, n_tokens=tokens, pairs=pairs, **common))
        title = (
            f"{speed.description}, {speed.n_threads} threads, {speed.prompt_tokens} prompt "
            f"+ {speed.n_tokens} tokens, medians of {speed.pairs} pairs"
        )
        _print(speed, title, _SPEED_COLUMNS, as_json=as_json)


def _print(
    report: BenchReport | PrefixReport, title: str, columns: Columns, *, as_json: bool
) -> None:
    import attrs
    from rich.console import Console
    from rich.table import Table

    if as_json:
        print_json(report)
        return
    table = Table(title=title)
    for name, form in columns:
        table.add_column(name, justify="left" if form == "s" else "right")
    for row in report.rows:
        cells = zip(attrs.astuple(row), columns, strict=True)
        table.add_row(*(format(value, form) for value, (_, form) in cells))
    Console().print(table)
