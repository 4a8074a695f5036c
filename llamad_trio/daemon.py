"""The daemon: models as its configuration says, a socket, and the signals that govern it."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable
from functools import partial

import attrs
import trio

from llamad_trio.actors.listener import serve_unix
from llamad_trio.actors.metrics_socket import serve_metrics
from llamad_trio.actors.nursery import open_plain_nursery
from llamad_trio.actors.systemd import notify
from llamad_trio.core.errors import LlamadError
from llamad_trio.daemon_config import DaemonConfig
from llamad_trio.info import EngineStats
from llamad_trio.models import Models, open_models
from llamad_trio.watch.prometheus import EngineMetrics

__all__ = ["run_daemon"]

logger = logging.getLogger("llamad_trio")


async def run_daemon(
    config: DaemonConfig,
    *,
    reload: Callable[[], DaemonConfig] | None = None,
    inherited: socket.socket | None = None,
    metrics_socket: str | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        config: the models, the socket, the limits.
        reload: reads the configuration again, for SIGHUP.  Models that are new in it are
            opened, those it does not name are closed, those it says something else of are
            replaced; the rest go on undisturbed.  If it cannot be read, or a model cannot
            be opened, the models stay as they are, and the log says why.
        inherited: a socket that listens already, instead of the one the config names.
        metrics_socket: where to offer metrics over HTTP, if anywhere.

    A checkpoint.  Cancelled, it stops as for a signal.

    Raises:
        SocketUnavailable: the socket cannot be listened on.
        RestartsExhausted: a model's engine broke down again and again.
        LlamadError: a model cannot be opened.
    """
    # From here on: a signal that comes during the load is obeyed, too.
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async with (
            open_models(config.models, default=config.default) as models,
            open_plain_nursery() as nursery,
        ):
            # A partial: trio-typing's stubs count no more than four arguments.
            serve = partial(_serve, nursery, config, models, inherited, metrics_socket)
            nursery.start_soon(serve)
            async for number in signals:
                if number != signal.SIGHUP:
                    logger.info("stopping")
                    notify("STOPPING=1")
                    return
                if reload is not None:
                    nursery.start_soon(_reload, config, models, reload)


async def _serve(
    nursery: trio.Nursery,
    config: DaemonConfig,
    models: Models,
    inherited: socket.socket | None,
    metrics_socket: str | None,
) -> None:
    metrics = EngineMetrics(partial(_stats, models))
    await nursery.start(metrics.run, models)
    for name, spec in config.models.items():
        if spec.load == "eager":
            await models.wait_ready(name)
    where = config.socket if inherited is None else inherited
    listen = partial(serve_unix, default=config.default, limits=config.limits, metrics=metrics)
    await nursery.start(listen, models, where)
    if metrics_socket is not None:
        await nursery.start(serve_metrics, metrics, metrics_socket)
    logger.info("listening on %s", where if inherited is None else inherited.getsockname())
    notify("READY=1")


def _stats(models: Models) -> dict[str, EngineStats]:
    return {name: model.stats() for name, model in models.items() if model.is_open}


async def _reload(config: DaemonConfig, models: Models, read: Callable[[], DaemonConfig]) -> None:
    try:
        new = await trio.to_thread.run_sync(read)
        await models.change(new.models)
    except LlamadError as error:
        logger.error("the models stay as they were: %s", error)  # noqa: TRY400  (it says all)
        return
    if attrs.evolve(new, models=config.models) != config:
        logger.warning("[daemon] has changed: that counts from the next start")
    logger.info("reloaded; models: %s", ", ".join(models))
