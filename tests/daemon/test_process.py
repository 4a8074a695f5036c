"""The daemon as it is deployed: a process, its clients in other languages, and its signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import attrs
import pytest
import trio

from llamad_trio import EngineSpec, Limits, ModelLoadError, SocketUnavailable
from llamad_trio.daemon.config import DaemonConfig
from llamad_trio.daemon.daemon import run_daemon
from llamad_trio.isolation import isolation
from tests.daemon.support import (
    ASKED,
    LONG,
    STOPPING,
    Stream,
    apart,
    check_last_words,
    configured,
    own_daemon,
    streaming,
    table,
)
from tests.models import TinyModels
from tests.serving.support import (
    HANG_S,
    ROOT,
    Daemon,
    Json,
    as_line,
    is_there,
    running_daemon,
    wait_for,
)


def needs(program: str) -> pytest.MarkDecorator:
    found = shutil.which(program) is not None
    return pytest.mark.skipif(not found, reason=f"{program} is not installed")


@pytest.fixture(scope="module")
def model(tiny_model: TinyModels) -> Path:
    """A model that never ends a text of itself, and has room for a long one."""
    return tiny_model("attention", n_ctx_train=100_000)


@pytest.fixture(scope="module")
def daemon(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One for all the tests that leave it running."""
    sock = tmp_path_factory.mktemp("process") / "d.sock"
    with own_daemon(sock, model, LLAMAD_N_SLOTS="4") as daemon:
        yield daemon


@pytest.fixture
def sock(tmp_path: Path) -> Path:
    """The path of a daemon of one's own."""
    return tmp_path / "own.sock"


# -- clients ------------------------------------------------------------------------------------------


def run_program(
    *command: str | Path, stdin: bytes = b"", status: int = 0
) -> subprocess.CompletedProcess[bytes]:
    result = subprocess.run(
        [*map(str, command)],
        input=stdin,
        capture_output=True,
        timeout=HANG_S,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == status, result.stderr.decode()
    return result


NODE = pytest.param("node", "client.mjs", marks=needs("node"))


@pytest.mark.parametrize(("program", "client"), [(sys.executable, "client.py"), NODE])
def test_client_of_a_few_lines_prints_the_reply_or_ends_with_the_error(
    daemon: Daemon, program: str, client: str
) -> None:
    file = ROOT / "examples" / client
    assert run_program(program, file, daemon.path, "the cat").stdout.strip()
    run_program(program, file, daemon.path, "x" * 110_000, status=1)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("nc -N -U {}", marks=needs("nc")),
        pytest.param(f"socat -t {HANG_S} - UNIX-CONNECT:{{}}", marks=needs("socat")),
    ],
)
@pytest.mark.parametrize("ending", [b"\n", b"", b"\r\n"])
def test_tool_of_the_system_is_a_client(daemon: Daemon, command: str, ending: bytes) -> None:
    def answer(line: bytes) -> bytes:
        command_line = command.format(daemon.path).split()
        return run_program(*command_line, stdin=line.strip() + ending).stdout

    assert answer(as_line(ASKED)) == daemon.ask(ASKED)
    streamed = answer(as_line({**ASKED, "stream": True}))
    assert json.loads(streamed.splitlines()[-1]) == {"done": True, **daemon.reply(ASKED)}
    refused = answer(b'{"prompt":5}')
    assert refused == b'{"error":"invalid request: prompt must be text, not int"}\n'


def llamad(
    *arguments: str | Path, stdin: bytes = b"", status: int = 0
) -> subprocess.CompletedProcess[bytes]:
    command = (sys.executable, "-m", "llamad_trio", *arguments)
    return run_program(*command, stdin=stdin, status=status)


def test_complete_asks_a_daemon(daemon: Daemon) -> None:
    flags = ("--max-tokens", "20", "--temperature", "0", "--socket", daemon.path)
    expected = daemon.reply(ASKED)
    as_json = json.loads(llamad("complete", "the cat", "--json", *flags).stdout)
    assert expected.items() <= as_json.items()
    assert as_json["finish_reason"] == "length"
    assert llamad("complete", *flags, stdin=b"the cat").stdout.decode() == expected["text"] + "\n"


def test_top_tells_what_a_daemon_is_doing(daemon: Daemon) -> None:
    flags = ("--once", "--json", "--interval", "0.05", "--socket", daemon.path)
    with streaming(daemon):
        told = json.loads(llamad("top", *flags).stdout)
    assert told["connections"] == 2
    (model,) = told["models"].values()
    assert model["stats"]["slots"]["free"] == 3
    assert model["stats"]["kv_used_tokens"] > 0
    assert model["config"]["n_slots"] == 4
    wait_for(daemon.is_idle)


# -- clients that are killed --------------------------------------------------------------------------

KILLED_CLIENT = """
import signal, socket, sys
with socket.socket(socket.AF_UNIX) as daemon:
    daemon.connect(sys.argv[1])
    daemon.sendall(sys.stdin.buffer.readline())
    print("sent", flush=True)
    if sys.argv[2] == "reads":
        daemon.recv(1)
        print("received", flush=True)
    signal.pause()
"""


@contextmanager
def other_process(daemon: Daemon, request: Json, does: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-I", "-c", KILLED_CLIENT, str(daemon.path), does]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(as_line(request))
            process.stdin.flush()
            assert process.stdout.readline() == b"sent\n"
            assert does != "reads" or process.stdout.readline() == b"received\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("asked", "does", "holds"),
    [
        ({**LONG, "stream": True}, "reads", "decode"),
        ({**LONG, "stream": False}, "waits", "decode"),
        ({"tokens": [50] * 60_000, "max_tokens": 1}, "waits", "prefill"),
    ],
    ids=["it reads", "it waits", "its prompt is read"],
)
def test_kill_9_of_a_client_frees_its_slot(
    daemon: Daemon, asked: Json, does: str, holds: str
) -> None:
    cancelled = daemon.stats()["requests"]["cancelled"]
    with other_process(daemon, asked, does) as process:
        wait_for(lambda: daemon.stats()["slots"][holds] == 1)
        process.kill()
        wait_for(daemon.is_idle)
    assert daemon.stats()["requests"]["cancelled"] == cancelled + 1
    assert daemon.reply(ASKED)["generated_tokens"] == 20


# -- the path -----------------------------------------------------------------------------------------


def test_kill_9_of_the_daemon_and_it_starts_again_over_the_stale_socket(
    sock: Path, model: Path
) -> None:
    with own_daemon(sock, model) as daemon, streaming(daemon) as stream:
        daemon.signal(signal.SIGKILL)
        assert daemon.wait() == -signal.SIGKILL
        assert stream.last() is None
    assert is_there(sock)
    with own_daemon(sock, model) as daemon:
        assert daemon.reply(ASKED)["generated_tokens"] == 20
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
    assert not is_there(sock)


def test_the_second_daemon_on_one_path_fails_in_one_line(daemon: Daemon, model: Path) -> None:
    stderr = llamad("serve", model, "--socket", daemon.path, status=1).stderr.decode()
    check_last_words(stderr, str(daemon.path), "another daemon")
    assert daemon.reply({"op": "ping"}) == {"pong": True}


def test_the_socket_is_for_its_user_alone(daemon: Daemon) -> None:
    assert daemon.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("arguments", "told"),
    [((), "no.gguf"), (("--metrics", "nowhere/metrics.sock"), "metrics.sock")],
    ids=["the model", "the place for metrics, before any load"],
)
def test_what_is_not_there_is_one_line(
    sock: Path, tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    with running_daemon(sock, tmp_path / "no.gguf", *arguments, is_ready=False) as daemon:
        assert daemon.wait() == 1
        check_last_words(daemon.log, told)
    assert not is_there(sock)


async def test_a_path_that_cannot_be_had_is_told_before_a_model_loads(tmp_path: Path) -> None:
    with pytest.raises(SocketUnavailable, match="it is not a socket"):
        await run_daemon(without_model(tmp_path, tmp_path))


def test_a_model_that_cannot_be_loaded_leaves_nothing_of_the_path(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        trio.run(run_daemon, without_model(tmp_path, tmp_path / "d.sock"))
    assert not list(tmp_path.iterdir())


def without_model(folder: Path, path: Path) -> DaemonConfig:
    models = {"none": EngineSpec(folder / "none.gguf")}
    return DaemonConfig(socket=str(path), default="none", limits=Limits(), models=models)


# -- SIGINT and SIGTERM -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order_in_the_midst_of_everything(
    sock: Path, model: Path, number: signal.Signals
) -> None:
    with (
        own_daemon(sock, model, LLAMAD_N_SLOTS="2") as daemon,
        streaming(daemon) as stream,
        daemon.connect() as whole,
        daemon.connect() as waiting,
        daemon.connect() as silent,
    ):
        whole.sendall(as_line(LONG))
        wait_for(lambda: daemon.stats()["slots"]["free"] == 0)
        waiting.sendall(as_line({**LONG, "id": 1}))
        wait_for(lambda: daemon.stats()["queued"] == 1)
        daemon.signal(number)
        assert daemon.notice() == b"STOPPING=1"
        assert daemon.wait() == 0
        assert not is_there(sock)
        assert not is_there(sock.with_name(f"{sock.name}.lock"))
        assert stream.last() == STOPPING
        for client, id_ in ((whole, {}), (waiting, {"id": 1}), (silent, {})):
            assert Stream(client).last() == {**id_, **STOPPING}
        assert "Traceback" not in daemon.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_midst_of_the_load_ends_it_in_order(
    sock: Path, model: Path, number: signal.Signals
) -> None:
    many = "".join(table(f"m{n}", model) for n in range(100))
    with configured(sock, many, is_ready=False) as daemon:
        wait_for(lambda: "is ready" in daemon.log)  # the first of them
        daemon.signal(number)
        assert daemon.wait() == 0
        assert "listening" not in daemon.log
        assert "Traceback" not in daemon.log
    assert not is_there(sock)


def ended_within(daemon: Daemon, seconds: float) -> bool:
    try:
        daemon.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


@pytest.mark.parametrize(
    "numbers",
    [
        (2, 15),
        (15, 2),
        pytest.param((2, 2), marks=pytest.mark.slow),
        pytest.param((15, 15), marks=pytest.mark.slow),
    ],
)
def test_a_second_signal_does_no_more_than_the_first(
    sock: Path, model: Path, numbers: tuple[int, int]
) -> None:
    with own_daemon(sock, model) as daemon, streaming(daemon):
        for number in numbers:
            daemon.signal(signal.Signals(number))
        while not ended_within(daemon, 0.005):  # whatever it is doing by then
            daemon.signal(signal.Signals(numbers[1]))
        assert daemon.wait() == 0
    assert not is_there(sock)


def engine_processes(daemon: Daemon) -> list[int]:
    pids = [
        int(pid)
        for task in Path(f"/proc/{daemon.pid}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    return [
        p
        for p in pids
        if b"llamad_trio.isolation.isolated" in Path(f"/proc/{p}/cmdline").read_bytes()
    ]


def test_a_signal_while_an_engine_s_process_loads_ends_it_soon(sock: Path, model: Path) -> None:
    four = "".join(apart(f"m{n}", model) for n in range(4))
    with configured(sock, four, is_ready=False) as daemon:
        wait_for(lambda: bool(engine_processes(daemon)))
        daemon.signal(signal.SIGTERM)
        assert daemon.wait(isolation.GRACE_S) == 0


def test_without_descriptors_it_lives_and_so_do_its_models(sock: Path, model: Path) -> None:
    two = table("here", model) + apart("apart", model, load="'lazy'")
    limited = ("sh", "-c", 'ulimit -n 64; exec "$@"', "sh", sys.executable, "-m", "llamad_trio")
    with configured(sock, two, command=(*limited, "serve")) as daemon:
        with daemon.connect() as first:
            first.sendall(as_line({"op": "ping", "keep": True}))
            replies = first.makefile("r")
            assert json.loads(replies.readline()) == {"pong": True}
            others = [daemon.connect() for _ in range(70)]
            first.sendall(as_line({**ASKED, "model": "here", "keep": True}))
            assert json.loads(replies.readline())["generated_tokens"] == 20
            first.sendall(as_line({**ASKED, "model": "apart"}))
            assert "Too many open files" in json.loads(replies.readline())["error"]
            for other in others:
                other.close()
            replies.close()
        assert daemon.reply({**ASKED, "model": "apart"})["generated_tokens"] == 20


def test_it_listens_when_all_have_been_ready_though_one_was_closed_since(
    sock: Path, model: Path, smollm2_path: Path
) -> None:
    idle = table("small", model) + "unload_after_s = 0.01\n"
    with configured(sock, table("large", smollm2_path) + idle) as daemon:
        assert daemon.reply({**ASKED, "model": "small"})["generated_tokens"] == 20


# -- SIGHUP -------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "daemon.toml"
    path.write_text(table("stays", model, n_ctx=100_000) + table("goes", model, n_ctx=100_000))
    return path


def names(daemon: Daemon) -> list[str]:
    return [model["name"] for model in daemon.reply({"op": "models"})["models"]]


def test_sighup_adds_removes_and_replaces_models_and_leaves_the_rest_alone(
    sock: Path, config: Path, model: Path
) -> None:
    with running_daemon(sock, "--config", config) as daemon, daemon.connect() as leaving:
        assert names(daemon) == ["stays", "goes"]
        leaving.sendall(as_line({**LONG, "model": "goes"}))
        with streaming(daemon, model="stays") as stream:
            wait_for(lambda: daemon.stats("goes")["slots"]["free"] < 4)
            config.write_text(table("comes", model) + table("stays", model, n_ctx=100_000))
            daemon.signal(signal.SIGHUP)
            wait_for(lambda: names(daemon) == ["comes", "stays"])
            assert Stream(leaving).last() == {
                "error": "inference: the engine is closed",
                "type": "EngineClosed",
                "details": {},
            }
            for _ in range(20):
                assert "token" in stream.reply()
            assert daemon.stats("stays")["requests"]["cancelled"] == 0
            assert daemon.reply({**ASKED, "model": "comes"})["generated_tokens"] == 20
            gone = daemon.reply({**ASKED, "model": "goes"})
            assert gone["error"].startswith("invalid request: unknown model 'goes'")
            # What is set up in another way is replaced.
            stays = table("stays", model, n_ctx=100_000)
            config.write_text(table("comes", model, n_slots=7) + stays)
            daemon.signal(signal.SIGHUP)
            wait_for(lambda: daemon.stats("comes")["slots"]["free"] == 7)
            assert daemon.reply({**ASKED, "model": "comes"})["generated_tokens"] == 20
            for _ in range(20):
                assert "token" in stream.reply()


def errors(daemon: Daemon) -> list[str]:
    lines = daemon.log.splitlines()
    return [line for line in lines if " ERROR " in line and " stay" in line]  # not llama.cpp's


def has_errors(daemon: Daemon, n: int) -> bool:
    return len(errors(daemon)) == n


def test_sighup_with_a_bad_file_changes_nothing_says_why_and_does_not_hold_up_the_end(
    sock: Path, config: Path, model: Path
) -> None:
    broken = config.parent / "broken.gguf"
    broken.write_bytes(b"GGUF")
    bad = {
        "no TOML at all": "not valid TOML",
        "[models.a]\npath = 'a'\nn_ctxx = 5\n": "n_ctx",
        "": "no model",
        table("comes", model) + table("a", Path("/no/such/file.gguf")): "no such file",
        table("comes", model) + table("a", broken): "broken.gguf",
    }

    with running_daemon(sock, "--config", config) as daemon, streaming(daemon) as stream:
        for n, (text, reason) in enumerate(bad.items(), start=1):
            config.write_text(text)
            daemon.signal(signal.SIGHUP)
            wait_for(partial(has_errors, daemon, n))
            assert reason in errors(daemon)[-1]
            assert names(daemon) == ["stays", "goes"]
            assert "token" in stream.reply()
        config.unlink()
        daemon.signal(signal.SIGHUP)
        wait_for(partial(has_errors, daemon, len(bad) + 1))
        assert "cannot be read" in errors(daemon)[-1]
        assert daemon.reply({**ASKED, "model": "goes"})["generated_tokens"] == 20
        assert "Traceback" not in daemon.log
        # What is right by then is taken.
        config.write_text(table("comes", model))
        daemon.signal(signal.SIGHUP)
        wait_for(lambda: names(daemon) == ["comes"])
        assert daemon.reply(ASKED)["generated_tokens"] == 20
        # A file that nobody writes does not hold up the end.
        config.unlink()
        os.mkfifo(config)
        daemon.signal(signal.SIGHUP)
        assert daemon.reply({"op": "ping"}) == {"pong": True}
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0


def test_sighup_while_it_starts_counts_when_it_has_started(
    sock: Path, model: Path, smollm2_path: Path
) -> None:
    both = table("a", smollm2_path) + table("b", model)
    with configured(sock, both, is_ready=False) as daemon:
        wait_for(lambda: "is ready" in daemon.log)
        sock.with_name("daemon.toml").write_text(table("b", model) + table("c", model))
        daemon.signal(signal.SIGHUP)
        wait_for(lambda: "reloaded" in daemon.log)
        assert names(daemon) == ["b", "c"]
        assert "[daemon] has changed" not in daemon.log


def test_sighup_tries_failed_models_again(sock: Path, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    shutil.copy(model, file)
    idle = table("a", file) + "unload_after_s = 0.01\n"
    with configured(sock, idle + table("b", model)) as daemon:

        def state() -> object:
            return daemon.reply({"op": "stats"})["states"]["a"]

        wait_for(lambda: state() == "unloaded")
        file.unlink()
        assert "no such file" in daemon.reply({**ASKED, "model": "a"})["error"]
        assert state() == "failed"
        shutil.copy(model, file)
        daemon.signal(signal.SIGHUP)
        wait_for(lambda: state() != "failed")


def test_sighup_without_a_file_changes_nothing(daemon: Daemon) -> None:
    with streaming(daemon) as stream:
        daemon.signal(signal.SIGHUP)
        for _ in range(20):
            assert "token" in stream.reply()
        assert daemon.reply({"op": "ping"}) == {"pong": True}
        assert daemon.process.poll() is None
    wait_for(daemon.is_idle)


# -- systemd ------------------------------------------------------------------------------------------

ACTIVATE = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.environ['LISTEN_PID'] = str(os.getpid()); "
    "os.environ['LISTEN_FDS'] = '1'; os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)


def test_a_socket_of_systemd_is_listened_on_for_all_who_came_early_and_left_there(
    sock: Path, model: Path
) -> None:
    named = sock.with_name("named.sock")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as early:
        listener.bind(str(sock))
        listener.listen()
        early.settimeout(HANG_S)
        early.connect(str(sock))
        early.sendall(as_line(ASKED))
        fd = listener.fileno()
        serve = ("-m", "llamad_trio", "serve", str(model))
        command = (sys.executable, "-c", ACTIVATE, str(fd), *serve)
        with running_daemon(named, command=command, pass_fds=[fd]) as started:
            daemon = attrs.evolve(started, path=sock)
            assert not is_there(named)
            assert Stream(early).reply()["generated_tokens"] == 20
            assert daemon.reply(ASKED)["generated_tokens"] == 20
            daemon.signal(signal.SIGTERM)
            assert daemon.wait() == 0
    assert is_there(sock)
