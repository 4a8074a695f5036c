"""`bench`: the engine's speed against a plain llama.cpp loop."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from llamad_trio.cli.pull import ensure_model
from llamad_trio.hub.manifest import DEFAULT_MODEL

if TYPE_CHECKING:
    from llamad_trio.bench.prefix import PrefixReport
    from llamad_trio.bench.speed import BenchReport


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
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
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
    import attrs
    import trio

    from llamad_trio.bench.prefix import run_prefix_bench
    from llamad_trio.bench.speed import run_bench

    overrides: dict[str, Any] = {} if threads is None else {"n_threads": threads}

    def tell(what: str) -> None:
        click.echo(f"measuring {what}", err=True)

    if prefix:
        length = 1000 if prompt_tokens is None else prompt_tokens
        prefix_report = trio.run(
            partial(
                run_prefix_bench,
                ensure_model(model),
                prefix_tokens=length,
                rounds=pairs,
                on_progress=tell,
                **overrides,
            )
        )
        if as_json:
            click.echo(json.dumps(attrs.asdict(prefix_report), indent=2))
        else:
            _print_prefix_table(prefix_report)
        return
    report = trio.run(
        partial(
            run_bench,
            ensure_model(model),
            concurrency=concurrency,
            prompt_tokens=128 if prompt_tokens is None else prompt_tokens,
            n_tokens=tokens,
            pairs=pairs,
            on_progress=tell,
            **overrides,
        )
    )
    if as_json:
        click.echo(json.dumps(attrs.asdict(report), indent=2))
    else:
        _print_table(report)


def _print_table(report: BenchReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{report.description}, {report.n_threads} threads, {report.prompt_tokens} prompt "
        f"+ {report.n_tokens} tokens, medians of {report.pairs} pairs"
    )
    table.add_column("at once", justify="right")
    for what in ("decode tok/s", "prefill tok/s", "TTFT s"):
        table.add_column(what, justify="right")
        table.add_column("raw", justify="right")
        if what != "TTFT s":
            table.add_column("ratio", justify="right")
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
    Console().print(table)


def _print_prefix_table(report: PrefixReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"time to the first token, {report.prefix_tokens} + {report.suffix_tokens} prompt "
        f"tokens, medians of {report.rounds}"
    )
    table.add_column("prefix")
    for what in ("TTFT s", "against cold", "reused tokens"):
        table.add_column(what, justify="right")
    for row in report.rows:
        table.add_row(row.case, f"{row.ttft_s:.3f}", f"{row.ratio:.3f}", str(row.cached_tokens))
    Console().print(table)
