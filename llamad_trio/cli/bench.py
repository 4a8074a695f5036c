"""`bench`: the engine's speed against a plain llama.cpp loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llamad_trio.cli.options import json_option, print_json, without_none
from llamad_trio.cli.pull import ensure_model
from llamad_trio.hub.manifest import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.table import Table

    from llamad_trio.bench.prefix import PrefixReport
    from llamad_trio.bench.speed import BenchReport

ReportT = TypeVar("ReportT")


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
        _print(trio.run(measure), _prefix_table, as_json=as_json)
    else:
        common |= {"concurrency": concurrency, "prompt_tokens": prompt_tokens or 128}
        against_plain = partial(run_bench, path, n_tokens=tokens, pairs=pairs, **common)
        _print(trio.run(against_plain), _speed_table, as_json=as_json)


def _print(report: ReportT, draw: Callable[[ReportT], Table], *, as_json: bool) -> None:
    from rich.console import Console

    if as_json:
        print_json(report)
    else:
        Console().print(draw(report))


def _speed_table(report: BenchReport) -> Table:
    table = _numbers_table(
        f"{report.description}, {report.n_threads} threads, {report.prompt_tokens} prompt "
        f"+ {report.n_tokens} tokens, medians of {report.pairs} pairs",
        *("at once", "decode tok/s", "raw", "ratio", "prefill tok/s", "raw", "ratio"),
        *("TTFT s", "raw"),
    )
    for row in report.rows:
        table.add_row(
            str(row.concurrency),
            f"{row.decode_tps:.1f}",
            f"{row.raw_decode_tps:.1f}",
            f"{row.decode_ratio:.3f}",
            f"{row.prefill_tps:.0f}",
            f"{row.raw_prefill_tps:.0f}",
            f"{row.prefill_ratio:.3f}",
            f"{row.ttft_s:.3f}",
            f"{row.raw_ttft_s:.3f}",
        )
    return table


def _prefix_table(report: PrefixReport) -> Table:
    table = _numbers_table(
        f"time to the first token, {report.prefix_tokens} + {report.suffix_tokens} prompt "
        f"tokens, medians of {report.rounds}",
        *("prefix", "TTFT s", "against cold", "reused tokens"),
    )
    table.columns[0].justify = "left"
    for row in report.rows:
        table.add_row(row.case, f"{row.ttft_s:.3f}", f"{row.ratio:.3f}", str(row.cached_tokens))
    return table


def _numbers_table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table
