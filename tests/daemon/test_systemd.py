"""What systemd hands over and what it is told, with real descriptors and datagrams."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamad_trio.daemon.systemd import notify
from tests.daemon.systemd_process import VARIABLES, report_inherited

ROOT = Path(__file__).parents[2]


def start(variables: tuple[str, ...], *handed_over: int) -> subprocess.Popen[str]:
    """Run `report_inherited` with these descriptors as its number 3 and up."""
    # Only an exec can put them there: the new process moves them away from itself first.
    code = f"""if True:
        import os, sys
        aside = [os.dup(fd) for fd in map(int, sys.argv[1].split())]
        high = [os.dup2(fd, 100 + i) for i, fd in enumerate(aside)]
        os.closerange(3, 100)
        for i, fd in enumerate(high):
            os.dup2(fd, 3 + i)
            os.close(fd)
        code = "import sys; from {report_inherited.__module__} import report_inherited as f; f(*sys.argv[1:])"
        os.execv(sys.executable, [sys.executable, "-c", code, *sys.argv[2:]])
    """
    return subprocess.Popen(
        [sys.executable, "-c", code, " ".join(map(str, handed_over)), *variables],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=handed_over,
        env={name: value for name, value in os.environ.items() if name not in VARIABLES},
    )


def output_of(variables: tuple[str, ...], *handed_over: int) -> list[str]:
    process = start(variables, *handed_over)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output.splitlines()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.fspath(tmp_path / "d.sock"))
        sock.listen()
        yield sock


OURS = ("LISTEN_PID=PID", "LISTEN_FDS=1", "LISTEN_FDNAMES=d.sock", "LISTEN_PIDFDID=7")
NOTHING_LEFT = ["left:", "inheritable:"]


@pytest.mark.parametrize("n_fds", [1, 2])
def test_the_first_socket_handed_over_is_used_and_none_is_passed_on(
    listener: socket.socket, n_fds: int
) -> None:
    variables = ("LISTEN_PID=PID", f"LISTEN_FDS={n_fds}", *OURS[2:])
    process = start(variables, listener.fileno(), listener.fileno())
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect(listener.getsockname())
        assert client.recv(100) == b"hello"
    output, _ = process.communicate(timeout=60)
    passed_on = [] if n_fds == 2 else [4]  # it was not handed over
    assert output.splitlines() == [
        listener.getsockname(),
        "3 False",
        "left:",
        " ".join(["inheritable:", *map(str, passed_on)]),
    ]


@pytest.mark.parametrize(
    "variables",
    [
        (),
        ("LISTEN_FDS=1", "LISTEN_FDNAMES=d.sock"),
        ("LISTEN_PID=1", "LISTEN_FDS=1"),
        ("LISTEN_PID=", "LISTEN_FDS=1"),
        ("LISTEN_PID=x", "LISTEN_FDS=1"),
        ("LISTEN_PID=PID", "LISTEN_FDS=0"),
        ("LISTEN_PID=PID", "LISTEN_FDS=-1"),
    ],
)
def test_what_is_not_meant_for_this_process_is_not_used(
    listener: socket.socket, variables: tuple[str, ...]
) -> None:
    assert output_of(variables, listener.fileno()) == ["None", "left:", "inheritable: 3"]


@pytest.mark.parametrize("n_fds", ["", "many"])
def test_a_number_of_descriptors_that_is_none_is_refused(
    listener: socket.socket, n_fds: str
) -> None:
    refused, *_ = output_of(("LISTEN_PID=PID", f"LISTEN_FDS={n_fds}"), listener.fileno())
    assert refused == f"LISTEN_FDS: {n_fds!r} is not a number"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has sockets of packets")
@pytest.mark.parametrize("kind", ["TCP", "datagram", "packets", "connected", "bound"])
def test_a_socket_that_is_not_a_unix_listener_is_refused(tmp_path: Path, kind: str) -> None:
    one, other = socket.socketpair()
    with one, other:
        match kind:
            case "TCP":
                sock = socket.create_server(("127.0.0.1", 0))
            case "datagram":
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            case "packets":
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sock.bind(os.fspath(tmp_path / "packets"))
                sock.listen()
            case "bound":
                sock = socket.socket(socket.AF_UNIX)
                sock.bind(os.fspath(tmp_path / "bound"))
            case _:
                sock = one
        with sock:
            output = output_of(OURS, sock.fileno())
    reason = "descriptor 3 is not a listening Unix stream socket"
    assert output == [f"LISTEN_FDS: {reason}", *NOTHING_LEFT]


def test_a_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        refused, *rest = output_of(OURS, file.fileno())
    assert refused == "LISTEN_FDS: descriptor 3: Socket operation on non-socket"
    assert rest == NOTHING_LEFT


def test_a_descriptor_that_is_not_there_is_refused(listener: socket.socket) -> None:
    assert output_of(OURS)[0] == "LISTEN_FDS: descriptor 3: Bad file descriptor"
    two = ("LISTEN_PID=PID", "LISTEN_FDS=2")
    refused = output_of(two, listener.fileno())[0]
    assert refused == "LISTEN_FDS: descriptor 4: Bad file descriptor"


# -- notify -----------------------------------------------------------------------------------


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(10)
        sock.bind(os.fspath(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", os.fspath(tmp_path / "notify"))
        yield sock


def test_a_state_is_told_also_one_that_is_no_text(manager: socket.socket) -> None:
    for state, told in (
        ("READY=1\nSTATUS=serving", b"READY=1\nSTATUS=serving"),
        ("STATUS=\udcff\ud800", b"STATUS=??"),
    ):
        notify(state)
        assert manager.recv(1000) == told


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")
def test_a_state_is_told_on_an_abstract_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"llamad-test-{os.getpid()}"
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(10)
        manager.bind(f"\0{name}")
        notify("READY=1")
        assert manager.recv(1000) == b"READY=1"


@pytest.mark.parametrize("address", [None, ""])
def test_nobody_is_told_where_nobody_wants_to_be(
    address: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if address is None:
        monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    else:
        monkeypatch.setenv("NOTIFY_SOCKET", address)

    def refuse(*_: object) -> None:
        pytest.fail("a socket is made")

    monkeypatch.setattr(socket, "socket", refuse)
    notify("READY=1")
    assert caplog.records == []


@pytest.mark.parametrize("address", ["/nonexistent/notify", "/tmp/" + "x" * 200, "@nobody-there"])
def test_what_cannot_be_told_is_a_warning(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    notify("READY=1")
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("llamad_trio", "WARNING")
    assert "READY=1" in record.getMessage()


def test_a_manager_that_does_not_listen_is_not_waited_for(
    manager: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(100_000):
        notify("STATUS=still")
        if caplog.records:
            break
    assert "unavailable" in caplog.text
    assert manager.recv(1000) == b"STATUS=still"
