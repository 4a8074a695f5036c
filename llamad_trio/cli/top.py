"""`top`: a live view of a daemon.

`view` decides what is shown, from two snapshots and the time between them; it knows neither
terminal nor daemon.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from llamad_trio.daemon.config import DEFAULT_SOCKET

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from llamad_trio.core.info import DaemonStats, EngineStats, ModelStats

MAX_SLOT_CELLS = 64
POOL_CELLS = 32

_SLOT_CELLS = {"decode": ("D", "green"), "prefill": ("P", "cyan"), "paused": ("=", "yellow")}
_POOL_CELLS = {"used": ("|", "green"), "retained": (":", "blue")}
_FREE = (".", "dim")


class _Seconds(click.FloatRange):
    """A range that `nan`, which is beyond no limit, is not in either."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value} is not a number.", param, ctx)
        return seconds


@click.command("top")
@click.option("--socket", default=DEFAULT_SOCKET, show_default=True, help="The daemon's socket.")
@click.option(
    "--interval",
    type=_Seconds(0.05, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Measure one interval, print one view, and leave.")
@click.option("--json", "as_json", is_flag=True, help="Print each snapshot as a line of JSON.")
def top_command(socket: str, interval: float, once: bool, as_json: bool) -> None:
    """Show what a daemon is doing: slots, speeds, queue, KV pool, and how requests ended.

    Of a model that is not loaded, it shows the state.
    Speeds are tokens per second of the last interval, idle time included.  On a terminal
    the view is refreshed in place until Ctrl-C; elsewhere one is printed per interval.
    """
    import trio

    trio.run(_top, socket, interval, once, as_json)


async def _top(socket: str, interval: float, once: bool, as_json: bool) -> None:
    import trio
    from rich.console import Console
    from rich.live import Live

    from llamad_trio.remote.remote import daemon_stats

    console = Console(force_terminal=sys.stdout.isatty())
    in_place = console.is_terminal and not console.is_dumb_terminal and not once and not as_json
    # Refreshed by hand: rich would start a thread to do it.
    live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
    previous, then = None, 0.0
    with live if in_place else nullcontext():
        while True:
            current, now = await daemon_stats(socket), trio.current_time()
            # One snapshot has no speeds: only a view that will be refreshed is shown without.
            if previous is not None or in_place or as_json:
                if as_json:
                    click.echo(json.dumps(current, default=_plain))
                elif in_place:
                    live.update(view(previous, current, now - then), refresh=True)
                else:
                    console.print(view(previous, current, now - then))
                if once:
                    return
            previous, then = current, now
            await trio.sleep(interval)


def _plain(value: object) -> object:
    import attrs

    if isinstance(value, Mapping):
        return dict(value)
    if attrs.has(type(value)):
        return attrs.asdict(value, recurse=False)  # type: ignore[arg-type]
    return str(value)


def view(previous: DaemonStats | None, current: DaemonStats, seconds: float) -> RenderableType:
    """What `top` shows of a daemon, from two snapshots; without the earlier one, no speeds."""
    from rich.console import Group
    from rich.text import Text

    if previous is None or previous.uptime_s > current.uptime_s:  # a new daemon on the old socket
        before: Mapping[str, ModelStats] = {}
    else:
        before = previous.models
    uptime = timedelta(seconds=int(current.uptime_s))
    header = f"up {uptime}, {_count(current.connections, 'connection')}, "
    absent = {name: state for name, state in current.states.items() if name not in current.models}
    n_models = len(current.models) + len(absent)
    parts: list[RenderableType] = [Text(header + _count(n_models, "model"))]
    for name, model in current.models.items():
        earlier = before[name].stats if name in before else None
        described = ", ".join(part for part in (model.info.description, model.info.name) if part)
        parts += [Text(), _named(name, described), _rows(earlier, model, seconds)]
    if absent:
        parts += [Text(), *(_named(name, state) for name, state in absent.items())]
    return Group(*parts)


def _named(name: str, what: str) -> Text:
    from rich.text import Text

    return Text.assemble((_printable(name), "bold"), "  ", _printable(what))


def _rows(earlier: EngineStats | None, model: ModelStats, seconds: float) -> RenderableType:
    from rich.table import Table

    stats = model.stats
    n_slots = sum(stats.slots.values())
    states = {state: stats.slots.get(state, 0) for state in _SLOT_CELLS}
    pool = {"used": stats.kv_used_tokens, "retained": stats.kv_retained_tokens}
    n_ctx = model.config.n_ctx or sum(pool.values()) + stats.kv_free_tokens
    prompt_tokens = stats.cached_tokens + stats.prefill_tokens
    limit = "" if model.config.max_queue is None else f" of {model.config.max_queue:,}"

    table = Table.grid(padding=(0, 2))
    table.add_row("", "slots", _bar(states, _SLOT_CELLS, n_slots, min(n_slots, MAX_SLOT_CELLS)))
    table.add_row("", "", _join({**states, "free": stats.slots.get("free", 0)}))
    table.add_row("", "queue", f"{stats.queued:,}{limit} waiting")
    table.add_row("", "speed", _speeds(earlier, stats, seconds))
    threads = {"for decode": stats.n_threads, "for prompts": stats.n_threads_batch}
    table.add_row("", "threads", _join(threads))
    table.add_row("", "KV pool", _bar(pool, _POOL_CELLS, n_ctx, POOL_CELLS))
    table.add_row("", "", f"{_join({**pool, 'free': stats.kv_free_tokens})} of {n_ctx:,} tokens")
    table.add_row("", "cached", f"{_share(stats.cached_tokens, prompt_tokens)} of prompt tokens")
    table.add_row("", "requests", _join(stats.requests))
    return table


def _bar(
    parts: Mapping[str, int], cells: Mapping[str, tuple[str, str]], total: int, width: int
) -> Text:
    """`[DDP.]`: each part's share of `width` cells, and what is left of `total` as free."""
    from rich.text import Text

    bar = Text("[")
    filled = reached = 0
    for part, (cell, style) in cells.items():
        reached += parts[part]
        end = min(round(width * reached / max(total, 1)), width)
        bar.append(cell * (end - filled), style)
        filled = end
    cell, style = _FREE
    return bar.append(cell * (width - filled), style).append("]")


def _speeds(earlier: EngineStats | None, now: EngineStats, seconds: float) -> str:
    if earlier is None or earlier.steps > now.steps or seconds <= 0:  # new, or loaded again
        return "decode - tok/s, prefill - tok/s, busy -"
    decode = (now.decode_tokens - earlier.decode_tokens) / seconds
    prefill = (now.prefill_tokens - earlier.prefill_tokens) / seconds
    busy_s = now.decode_s + now.prefill_s - earlier.decode_s - earlier.prefill_s
    # A step counts when it ends, so that one may bring more time than the interval has.
    busy = _share(min(busy_s, seconds), seconds)
    return f"decode {decode:,.1f} tok/s, prefill {prefill:,.1f} tok/s, busy {busy}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _join(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {_printable(name)}" for name, number in numbers.items())


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _printable(text: str) -> str:
    """`text` without what could drive the terminal: names come from model files."""
    return "".join(char if char.isprintable() else "?" for char in text)
