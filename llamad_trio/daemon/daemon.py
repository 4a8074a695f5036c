"""The daemon: models as its configuration says, a socket, and the signals that govern it."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext, suppress
from functools import partial

import attrs
import trio

from llamad_trio.core.errors import LlamadError
from llamad_trio.daemon.config import DaemonConfig
from llamad_trio.daemon.metrics_socket import serve_metrics
from llamad_trio.daemon.systemd import notify
from llamad_trio.serving.listener import serve_unix
from llamad_trio.serving.unix_socket import claim_path
from llamad_trio.supervision.models import Models, open_models
from llamad_trio.system.nursery import new_scope, open_plain_nursery, run_all
from llamad_trio.watch.prometheus import EngineMetrics

logger = logging.getLogger("llamad_trio")

STOP = (signal.SIGINT, signal.SIGTERM)


async def run_daemon(
    config: DaemonConfig,
    *,
    reload: Callable[[], DaemonConfig] | None = None,
    inherited: socket.socket | None = None,
    metrics_socket: str | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        reload: reads the configuration again, for SIGHUP.  Models that are new in it are
            opened, those it does not name are closed, those it says something else of are
            replaced; the rest go on undisturbed.  If it cannot be read, or a model cannot
            be opened, the models stay as they are, and the log says why.  Those whose load
            failed are tried again.
        inherited: a socket that listens already, instead of the one the config names.
        metrics_socket: where to offer metrics over HTTP, if anywhere.

    A checkpoint.  Cancelled, it stops as for a signal.

    Raises:
        SocketUnavailable: the socket cannot be listened on.  Told before a model loads.
        RestartsExhausted: a model's engine broke down again and again.
        LlamadError: a model cannot be opened.
    """
    # Signals count from here on, those that come during the load included; and until all is
    # over, so that a second one does no more than the first.
    with trio.open_signal_receiver(*STOP, signal.SIGHUP) as signals:
        daemon = _Daemon(config, reload, inherited, metrics_socket)
        async with open_plain_nursery() as nursery:
            nursery.start_soon(daemon.obey, signals)
            with daemon.scope:
                await daemon.serve()


@attrs.define(eq=False)
class _Daemon:
    """See `run_daemon`."""

    _config: DaemonConfig
    _read_config: Callable[[], DaemonConfig] | None
    _inherited: socket.socket | None
    _metrics_socket: str | None
    scope: trio.CancelScope = attrs.field(factory=new_scope)
    _reload_wanted: trio.Event = attrs.field(factory=trio.Event)

    async def obey(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            if number == signal.SIGHUP:
                self._reload_wanted.set()
            elif not self.scope.cancel_called:
                logger.info("stopping")
                notify("STOPPING=1")
                self.scope.cancel()

    async def serve(self) -> None:
        config, path, inherited = self._config, self._config.socket, self._inherited
        # Whether the path can be had is known before the models load.
        with claim_path(path) if inherited is None else nullcontext(lambda: inherited) as listen:
            async with (
                open_models(config.models, default=config.default) as models,
                open_plain_nursery() as nursery,
            ):
                metrics = EngineMetrics(models)
                await nursery.start(metrics.run, models)
                if self._metrics_socket is not None:
                    await nursery.start(serve_metrics, metrics, self._metrics_socket)
                eager = [name for name, spec in config.models.items() if spec.load == "eager"]
                await run_all([partial(models.load, name) for name in eager])
                sock = listen()
                answer = partial(
                    serve_unix, default=config.default, limits=config.limits, metrics=metrics
                )
                await nursery.start(answer, models, sock)
                logger.info("listening on %s", sock.getsockname())
                notify("READY=1")
                # Reloads come one at a time; not before the first load, of the file as it was.
                while True:
                    await self._reload_wanted.wait()
                    self._reload_wanted = trio.Event()
                    if self._read_config is not None:
                        await self._reload(models, self._read_config)

    async def _reload(self, models: Models, read: Callable[[], DaemonConfig]) -> None:
        try:
            # A file can be a pipe that nobody writes to.  (The ignore is for trio-typing's stubs.)
            new = await trio.to_thread.run_sync(read, abandon_on_cancel=True)  # type: ignore[call-arg, unused-ignore]
            await models.change(new.models)
        except LlamadError as error:
            logger.error("the models stay as they were: %s", error)  # noqa: TRY400  (it says all)
            return
        old = self._config
        default_stays = new.default == old.default or old.default not in new.models
        if (new.socket, new.limits) != (old.socket, old.limits) or not default_stays:
            logger.warning("[daemon] has changed: that counts from the next start")
        for name, model in models.items():
            if model.state == "failed" and model.spec.load == "eager":
                with suppress(LlamadError):  # the supervisor has logged it
                    await models.load(name)
        logger.info("reloaded; models: %s", ", ".join(models))
