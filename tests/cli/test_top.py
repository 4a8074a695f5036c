"""What `top` shows, and how it behaves at a terminal, in a pipe and for scripts."""

from __future__ import annotations

import io
import itertools
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import llamad_trio.remote.remote
from llamad_trio.cli import main
from llamad_trio.cli.top import top_command, view
from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import Disconnected
from llamad_trio.core.info import DaemonStats, EngineStats, ModelInfo, ModelStats
from tests.cli.conftest import CommandLine

ROOT = Path(__file__).parents[2]

INFO = ModelInfo(
    architecture="llama",
    description="llama 256M Q4_1",
    name="Small One",
    n_params=1,
    file_bytes=2,
    n_vocab=3,
    n_ctx_train=4,
    has_template=False,
    chat_template=None,
    can_rewind=True,
    identity="id",
)
STATS = EngineStats(
    slots={"free": 2, "prefill": 1, "decode": 3, "paused": 2},
    queued=5,
    kv_used_tokens=1024,
    kv_retained_tokens=2048,
    kv_free_tokens=1024,
    prefill_tokens=300,
    prefill_s=1.0,
    decode_tokens=1000,
    decode_s=2.0,
    cached_tokens=100,
    requests={"completed": 1234, "failed": 2, "cancelled": 3},
    preemptions=0,
    steps=50,
    aborted_steps=0,
    n_threads=2,
    n_threads_batch=2,
)


def daemon(
    uptime_s: float = 100.0,
    *,
    config: EngineConfig = EngineConfig(n_ctx=4096, n_slots=8),  # noqa: B008  (frozen)
    info: ModelInfo = INFO,
    **stats: Any,
) -> DaemonStats:
    model = ModelStats(info=info, config=config, stats=attrs.evolve(STATS, **stats))
    return DaemonStats(
        uptime_s=uptime_s, connections=2, default="small", models=MappingProxyType({"small": model})
    )


def drawn(previous: DaemonStats | None, current: DaemonStats, seconds: float = 1.0) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=100).print(view(previous, current, seconds))
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def line(name: str, lines: list[str]) -> str:
    (found,) = [text.removeprefix(f"{name} ") for text in lines if text.startswith(f"{name} ")]
    return found


# The view


def test_the_header_tells_uptime_connections_and_models() -> None:
    assert (
        drawn(None, daemon(3 * 86_400 + 3723.9))[0] == "up 3 days, 1:02:03, 2 connections, 1 model"
    )


def test_a_model_is_shown_with_its_name_and_description() -> None:
    assert "small llama 256M Q4_1, Small One" in drawn(None, daemon())
    unnamed = attrs.evolve(INFO, name=None)
    assert "small llama 256M Q4_1" in drawn(None, daemon(info=unnamed))


def test_every_model_is_shown() -> None:
    one = daemon()
    two = attrs.evolve(one, models={"small": one.models["small"], "big": one.models["small"]})
    lines = drawn(None, two)
    assert lines[0].endswith("2 models")
    assert [text.split()[0] for text in lines if INFO.description in text] == ["small", "big"]


def test_a_model_that_is_not_ready_is_a_line_with_its_state() -> None:
    states = {"lazy": "unloaded", "small": "ready", "\x1b[1mbad": "backing off"}
    lines = drawn(None, attrs.evolve(daemon(), states=states))
    assert lines[0].endswith("3 models")
    assert lines[-3:] == ["", "lazy unloaded", "?[1mbad backing off"]
    assert [text for text in lines if text.startswith("small")] == [
        "small llama 256M Q4_1, Small One"
    ]


def test_a_daemon_with_nothing_loaded_is_shown() -> None:
    current = attrs.evolve(daemon(), models={}, states={"lazy": "loading"})
    assert drawn(None, current) == ["up 0:01:40, 2 connections, 1 model", "", "lazy loading"]


HALF = {"free": 256, "prefill": 0, "decode": 256, "paused": 0}
LIMITED = EngineConfig(n_ctx=4096, max_queue=64)


@pytest.mark.parametrize(
    ("changes", "name", "told"),
    [
        ({"n_threads": 1}, "threads", "1 for decode, 2 for prompts"),
        ({}, "slots", "[DDDP==..]"),
        ({"slots": HALF}, "slots", f"[{'D' * 32}{'.' * 32}]"),  # many share the cells
        ({"slots": {}}, "slots", "[]"),
        ({}, "3 decode, 1 prefill, 2 paused,", "2 free"),
        ({}, "KV pool", f"[{'|' * 8}{':' * 16}{'.' * 8}]"),
        ({}, "1,024 used, 2,048 retained, 1,024 free of", "4,096 tokens"),
        # A pool whose size is not told is the sum of its parts.
        ({"config": EngineConfig()}, "1,024 used, 2,048 retained, 1,024 free of", "4,096 tokens"),
        ({}, "queue", "5 waiting"),
        ({"config": LIMITED}, "queue", "5 of 64 waiting"),
        ({}, "cached", "25% of prompt tokens"),
        ({"cached_tokens": 0, "prefill_tokens": 0}, "cached", "- of prompt tokens"),
        ({}, "requests", "1,234 completed, 2 failed, 3 cancelled"),
    ],
)
def test_a_line_tells_its_share(changes: dict[str, Any], name: str, told: str) -> None:
    assert line(name, drawn(None, daemon(**changes))) == told


@pytest.mark.parametrize(
    ("used", "retained"), [(0, 0), (4096, 0), (0, 4096), (2048, 2048), (61, 67), (9000, 9000)]
)
def test_a_bar_keeps_its_length(used: int, retained: int) -> None:
    bar = line("KV pool", drawn(None, daemon(kv_used_tokens=used, kv_retained_tokens=retained)))
    assert len(bar) == 34
    assert (used + retained < 4096) == ("." in bar)


LATER: dict[str, Any] = {
    "decode_tokens": 1100,
    "prefill_tokens": 3300,
    "decode_s": 2.5,
    "prefill_s": 1.25,
}


@pytest.mark.parametrize(
    ("current", "seconds", "told"),
    [
        (
            daemon(102.0, **LATER, steps=60),
            2.0,
            "decode 50.0 tok/s, prefill 1,500.0 tok/s, busy 38%",
        ),
        (daemon(101.0), 1.0, "decode 0.0 tok/s, prefill 0.0 tok/s, busy 0%"),
        # A step that began before the interval makes nobody busier than busy.
        (daemon(decode_s=7.0), 1.0, "decode 0.0 tok/s, prefill 0.0 tok/s, busy 100%"),
    ],
)
def test_speeds_are_the_difference_of_two_snapshots_over_the_time_between(
    current: DaemonStats, seconds: float, told: str
) -> None:
    assert line("speed", drawn(daemon(), current, seconds)) == told


@pytest.mark.parametrize(
    ("previous", "current", "seconds"),
    [
        (None, daemon(), 1.0),
        (daemon(), daemon(1.0, steps=900), 1.0),  # another daemon
        (daemon(), daemon(101.0, steps=3, decode_tokens=5), 1.0),  # the model was loaded again
        (attrs.evolve(daemon(), models={}), daemon(101.0), 1.0),  # the model is new
        (daemon(), daemon(), 0.0),
    ],
)
def test_without_a_snapshot_to_compare_with_speeds_are_left_open(
    previous: DaemonStats | None, current: DaemonStats, seconds: float
) -> None:
    assert line("speed", drawn(previous, current, seconds)) == (
        "decode - tok/s, prefill - tok/s, busy -"
    )


def test_a_name_can_neither_drive_the_terminal_nor_style_the_view() -> None:
    hostile = attrs.evolve(INFO, description="\x1b]0;title\x07\n", name="[red]x[/nonsense]")
    lines = drawn(None, daemon(info=hostile))
    assert "small ?]0;title??, [red]x[/nonsense]" in lines


# The command

STATES = {"small": "ready", "lazy": "unloaded"}


def snapshots() -> Iterator[DaemonStats]:
    """A daemon that decodes ten tokens between two snapshots."""
    for i in itertools.count():
        now = daemon(100.0 + i, decode_tokens=1000 + 10 * i, steps=50 + i)
        yield attrs.evolve(now, states=STATES)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sockets the command has asked, of a daemon that hangs up at the fourth time."""
    sockets: list[str] = []
    answers = snapshots()

    async def stats(path: str) -> DaemonStats:
        sockets.append(path)
        if len(sockets) == 4:
            raise Disconnected
        return next(answers)

    monkeypatch.setattr(llamad_trio.remote.remote, "daemon_stats", stats)
    return sockets


def run(*arguments: str) -> Result:
    return CliRunner().invoke(top_command, ["--interval", "0.05", *arguments])


@pytest.mark.parametrize(
    ("where", "path"), [(("--socket", "/run/my.sock"), "/run/my.sock"), ((), "/tmp/llamad.sock")]
)
def test_once_prints_one_view_with_speeds(
    asked: list[str], where: tuple[str, ...], path: str
) -> None:
    result = run("--once", *where)
    assert result.exit_code == 0
    assert result.stdout.count("up 0:01:41") == result.stdout.count("up ") == 1
    assert "decode - tok/s" not in result.stdout
    assert asked == [path] * 2


def test_once_as_json_is_the_whole_snapshot(asked: list[str]) -> None:
    result = run("--once", "--json")
    (text,) = result.stdout.splitlines()
    told = json.loads(text)
    assert told.keys() == {"uptime_s", "connections", "default", "models", "states"}
    assert told["states"] == STATES
    assert told["models"].keys() == {"small"}
    small = told["models"]["small"]
    assert small["info"] == attrs.asdict(INFO)
    assert small["stats"] == attrs.asdict(STATS)
    assert (small["config"]["n_ctx"], small["config"]["tensor_split"]) == (4096, [])
    assert len(asked) == 1


def test_json_is_one_line_per_interval(asked: list[str]) -> None:
    result = run("--json")
    told = [json.loads(text) for text in result.stdout.splitlines()]
    assert [snapshot["uptime_s"] for snapshot in told] == [100.0, 101.0, 102.0]
    assert isinstance(result.exception, Disconnected)


@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}])
def test_off_the_terminal_one_plain_view_is_printed_per_interval(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = run()
    assert [text for text in result.stdout.splitlines() if text.startswith("up ")] == [
        "up 0:01:41, 2 connections, 2 models",
        "up 0:01:42, 2 connections, 2 models",
    ]
    assert "\x1b" not in result.stdout
    assert isinstance(result.exception, Disconnected)


@pytest.mark.parametrize("interval", ["0", "-1", "inf", "-inf", "nan", "often"])
def test_an_interval_that_makes_no_sense_is_a_usage_error(
    command_line: CommandLine, asked: list[str], interval: str
) -> None:
    ended = command_line("top", "--interval", interval)
    assert ended.status == 2
    (error,) = ended.err.splitlines()
    assert error.startswith("error: Invalid value for '--interval': ")
    assert asked == []


def run_main() -> None:
    """The command line with `top`, on a daemon that always answers.  Runs in a process of its own."""
    answers = snapshots()

    async def stats(path: str) -> DaemonStats:
        return next(answers)

    llamad_trio.remote.remote.daemon_stats = stats  # type: ignore[assignment]
    sys.argv = ["llamad-trio", "top", "--interval", "0.05"]
    main()


def shown_until_ctrl_c(kind: str) -> bytes:
    """What a terminal of this kind gets: three views, and all that comes after Ctrl-C."""
    terminal, end = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", "from tests.cli.test_top import run_main; run_main()"],
        stdin=subprocess.DEVNULL,
        stdout=end,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "TERM": kind},
    ) as process:
        os.close(end)
        seen = b""
        deadline = time.monotonic() + 60
        while seen.count(b"up 0:01:") < 3:
            assert select.select([terminal], [], [], deadline - time.monotonic())[0], seen
            seen += os.read(terminal, 65_536)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.strip()) == (130, b"")
    with suppress(OSError), open(terminal, "rb", buffering=0) as rest:  # it ends with an error
        while data := rest.read(65_536):
            seen += data
    return seen


def test_on_a_terminal_the_view_is_refreshed_in_place() -> None:
    seen = shown_until_ctrl_c("xterm")
    assert seen.index(b"decode - tok/s") < seen.index(b"\x1b[1A") < seen.rindex(b"up 0:01:")
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l"), "the cursor is back"


def test_a_terminal_that_cannot_move_its_cursor_gets_one_view_after_the_other() -> None:
    assert b"\x1b" not in shown_until_ctrl_c("dumb")
