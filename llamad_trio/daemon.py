"""The daemon: models as its configuration says, a socket, and the signals that govern it."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable, Mapping
from functools import partial

import attrs
import trio

from llamad_trio.actors.listener import serve_unix
from llamad_trio.actors.nursery import TaskStatus, open_plain_nursery, unlimited
from llamad_trio.actors.systemd import notify
from llamad_trio.core.errors import LlamadError
from llamad_trio.daemon_config import DaemonConfig, ModelSpec
from llamad_trio.engine import Engine, open_engine

__all__ = ["run_daemon"]

logger = logging.getLogger("llamad_trio")


async def run_daemon(
    config: DaemonConfig,
    *,
    reload: Callable[[], DaemonConfig] | None = None,
    inherited: socket.socket | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        config: the models, the socket, the limits.
        reload: reads the configuration again, for SIGHUP; see `_Daemon.reload`.
        inherited: a socket that listens already, instead of the one the config names.

    A checkpoint.  Cancelled, it stops as for a signal.

    Raises:
        SocketUnavailable: the socket cannot be listened on.
        LlamadError: a model cannot be opened, or its engine broke down.
    """
    # From here on: a signal that comes during the load is obeyed, too.
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async with open_plain_nursery() as nursery:
            daemon = _Daemon(config, nursery)
            nursery.start_soon(daemon.serve, inherited)
            async for number in signals:
                if number != signal.SIGHUP:
                    logger.info("stopping")
                    notify("STOPPING=1")
                    return
                if reload is not None:
                    nursery.start_soon(daemon.reload, reload)


@attrs.define(eq=False)
class _Open:
    """A model that is open."""

    spec: ModelSpec
    engine: Engine
    scope: trio.CancelScope


class _Daemon:
    """The models of one daemon."""

    def __init__(self, config: DaemonConfig, nursery: trio.Nursery) -> None:
        self._config = config
        self._nursery = nursery
        self._models: dict[str, _Open] = {}
        self._engines: dict[str, Engine] = {}
        self._changing = trio.Lock()

    async def serve(self, inherited: socket.socket | None) -> None:
        """Open the models and answer until cancelled."""
        config = self._config
        await self._change(config.models)
        where = config.socket if inherited is None else inherited
        listen = partial(serve_unix, default=config.default, limits=config.limits)
        await self._nursery.start(listen, self._engines, where)
        logger.info("listening on %s", where if inherited is None else inherited.getsockname())
        notify("READY=1")

    async def reload(self, read: Callable[[], DaemonConfig]) -> None:
        """Change the models to what the configuration says now.

        Those that are new are opened, those it does not name are closed, those it says
        something else of are replaced; the rest go on undisturbed.  If it cannot be read,
        or a model cannot be opened, everything stays as it is, and the log says why.
        """
        try:
            config = await trio.to_thread.run_sync(read)
            await self._change(config.models)
        except LlamadError as error:
            logger.error("the configuration stays as it was: %s", error)  # noqa: TRY400  (it says all)
            return
        if attrs.evolve(config, models=self._config.models) != self._config:
            logger.warning("[daemon] has changed: that counts from the next start")
        logger.info("reloaded; models: %s", ", ".join(self._engines))

    async def _change(self, specs: Mapping[str, ModelSpec]) -> None:
        async with self._changing:
            new: dict[str, _Open] = {}
            try:
                for name, spec in specs.items():
                    if name not in self._models or self._models[name].spec != spec:
                        new[name] = await self._nursery.start(self._run, name, spec)
            except BaseException:
                for model in new.values():
                    model.scope.cancel()
                raise
            old = self._models
            self._models = {name: new.get(name) or old[name] for name in specs}
            self._engines.clear()
            self._engines |= {name: model.engine for name, model in self._models.items()}
            for name, model in old.items():
                if self._models.get(name) is not model:
                    logger.info("closing %s", name)
                    model.scope.cancel()

    async def _run(
        self,
        name: str,
        spec: ModelSpec,
        *,
        task_status: TaskStatus[_Open] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        logger.info("opening %s: %s", name, spec.model)
        with unlimited() as scope:
            async with open_engine(spec.model, spec.config) as engine:
                task_status.started(_Open(spec, engine, scope))
                await trio.sleep_forever()
