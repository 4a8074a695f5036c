"""`serve`: the daemon."""

from __future__ import annotations

import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path

import attrs
import click

from llamad_trio.cli.pull import ensure_model
from llamad_trio.core.config import EngineConfig, Limits
from llamad_trio.core.engine_spec import EngineSpec
from llamad_trio.daemon.config import DEFAULT_SOCKET, DaemonConfig, load_daemon_config
from llamad_trio.hub.manifest import DEFAULT_MODEL, load_manifest


@click.command("serve")
@click.argument("model", required=False)
@click.option("--socket", help=f"Where to listen.  [default: the file's, or {DEFAULT_SOCKET}]")
@click.option("--config", "file", type=click.Path(), help="A configuration file (TOML).")
@click.option("--metrics", help="Offer metrics over HTTP on this Unix socket, for Prometheus.")
def serve_command(
    model: str | None, socket: str | None, file: str | None, metrics: str | None
) -> None:
    """Offer MODEL, or the models of a configuration file, on a Unix socket.

    SIGINT and SIGTERM stop it; SIGHUP reads the configuration file again.
    """
    if model is not None and file is not None:
        raise click.UsageError("give a MODEL or a --config, not both")
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    read = partial(_config, model, file, socket)
    config = read()
    for spec in config.models.values():
        ensure_model(spec.model)

    import trio

    from llamad_trio.daemon.daemon import STOP, run_daemon
    from llamad_trio.daemon.systemd import inherited_listener

    inherited = inherited_listener()
    reload = None if file is None else read

    # Before there is anything to stop, and after all has stopped, nothing is left undone.
    for number in STOP:
        signal.signal(number, lambda *_: os._exit(0))
    trio.run(
        partial(run_daemon, config, reload=reload, inherited=inherited, metrics_socket=metrics)
    )
    # Python itself sets other handlers to the default when it ends.
    for number in STOP:
        signal.signal(number, signal.SIG_IGN)


def _config(model: str | None, file: str | None, socket: str | None) -> DaemonConfig:
    if file is not None:
        config = load_daemon_config(file)
        return config if socket is None else attrs.evolve(config, socket=socket)
    model = model or DEFAULT_MODEL
    name = model if model in load_manifest() else Path(model).stem
    return DaemonConfig(
        socket=DEFAULT_SOCKET if socket is None else socket,
        default=name,
        limits=Limits(),
        models={name: EngineSpec(model, EngineConfig.from_env())},
    )
