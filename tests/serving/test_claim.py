"""A daemon has its path before its models load, and listens there after."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import trio

from llamad_trio import EngineSpec, ModelLoadError, SocketUnavailable
from llamad_trio.core.limits import Limits
from llamad_trio.daemon.config import DaemonConfig
from llamad_trio.daemon.daemon import run_daemon
from llamad_trio.serving.unix_socket import claim_path


def config(folder: Path, path: Path) -> DaemonConfig:
    models = {"none": EngineSpec(folder / "none.gguf")}
    return DaemonConfig(socket=str(path), default="none", limits=Limits(), models=models)


async def test_a_path_that_cannot_be_had_is_told_before_a_model_loads(tmp_path: Path) -> None:
    with pytest.raises(SocketUnavailable, match="it is not a socket"):
        await run_daemon(config(tmp_path, tmp_path))


def test_a_model_that_cannot_be_loaded_leaves_nothing_of_the_path(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        trio.run(run_daemon, config(tmp_path, tmp_path / "d.sock"))
    assert not list(tmp_path.iterdir())


def test_a_path_is_ours_before_anybody_listens(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    with claim_path(path) as listen:
        assert not path.exists()
        with pytest.raises(SocketUnavailable, match="another daemon is using it"), claim_path(path):
            pass
        listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not list(tmp_path.iterdir())


def test_what_has_come_to_the_path_meanwhile_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    with claim_path(path) as listen:
        path.write_text("somebody's")
        with pytest.raises(SocketUnavailable, match="it is not a socket"):
            listen()
    assert path.read_text() == "somebody's"
