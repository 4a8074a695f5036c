"""Several models in one program, each under a supervisor."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from functools import partial
from typing import Any, Literal, TypeVar, Unpack, overload

import attrs
import trio

from llamad_trio.core.completion import Choice, Completion
from llamad_trio.core.config import EngineConfig
from llamad_trio.core.engine_spec import EngineSpec, pick_model
from llamad_trio.core.errors import EngineClosed, ProtocolError, RestartsExhausted
from llamad_trio.core.fields import optional, text
from llamad_trio.core.info import EngineStats, ModelInfo
from llamad_trio.core.request import Request, RequestFields
from llamad_trio.core.restarts import RestartPolicy
from llamad_trio.engine.assembly import open_named_engine
from llamad_trio.engine.engine_like import EngineLike
from llamad_trio.engine.stream import EventStream, ReplySource, TokenStream
from llamad_trio.isolation.isolation import open_isolated_engine
from llamad_trio.memory import check_budget, estimate_memory, total_memory
from llamad_trio.supervision.supervisor import ModelState, Supervisor
from llamad_trio.system.nursery import ends_in_order, new_scope, open_plain_nursery
from llamad_trio.watch import refresh_if_possible
from llamad_trio.watch.broadcast import Broadcast, EventReader

T = TypeVar("T")

AUTO_SHARE = 0.8
"""How much of the memory models may take by themselves: the rest is for the program, and for what
the estimate does not see."""

OpenModel = Callable[[str, EngineSpec, Broadcast], AbstractAsyncContextManager[EngineLike]]
"""Opens the engine of a model, which tells what happens to it under the model's name."""


def _open(
    name: str, spec: EngineSpec, broadcast: Broadcast
) -> AbstractAsyncContextManager[EngineLike]:
    if spec.isolation is not None:
        return open_isolated_engine(spec.model, spec.config, name=name, broadcast=broadcast)
    return open_named_engine(spec.model, spec.config, name=name, broadcast=broadcast)


@asynccontextmanager
@ends_in_order
async def open_models(
    specs: Mapping[str, EngineSpec],
    *,
    default: str | None = None,
    restart: RestartPolicy | None = None,
    memory_budget_bytes: int | Literal["auto"] | None = None,
    opener: OpenModel = _open,
) -> AsyncIterator[Models]:
    """Run several models inside the block.

    Each is an engine under a supervisor.  When one fails, its requests get a typed error,
    the others go on, and it is opened again after a while.  Requests that arrive while a
    model loads or waits for that are held until it is ready, or until their caller leaves.

    Args:
        specs: the models by name.
        default: the model of requests that name none; `None` is the first.
        restart: how often a model that fails is opened again; `None` is `RestartPolicy()`.
        memory_budget_bytes: what all models together may take; `"auto"` is 80 % of what the
            machine, or this process's cgroup, has; `None` is no limit.
        opener: opens a model's engine; for tests (see `testing.open_scripted_models`).

    Entering waits for no load: `Models.wait_ready` does.  Leaving the block closes all
    engines.  Exceptions of the body come out as themselves.

    Raises:
        ProtocolError: an argument of the wrong type, a negative budget, or `default` is none
            of the models.
        RestartsExhausted: a model failed more often than its policy allows; ends the block,
            and cancels who waits for a model in there.
    """
    specs = _check_specs(specs)
    default = optional(text)(default, "default")
    if default is not None and default not in specs:
        raise ProtocolError(f"the default model {default!r} is none of {', '.join(specs)}")
    if not isinstance(restart, RestartPolicy | None):
        raise ProtocolError(f"restart must be a RestartPolicy, not {type(restart).__name__}")
    budget = Budget(memory_budget_bytes)
    with closing(Broadcast()) as broadcast:
        async with open_plain_nursery() as nursery:
            policy = restart or RestartPolicy()
            models = Models(nursery, default, policy, budget, opener, broadcast)
            models._models = {name: models._supervise(name, spec) for name, spec in specs.items()}
            await trio.lowlevel.checkpoint()
            try:
                yield models
            finally:
                models._is_closed = True


def _check_specs(specs: object) -> dict[str, EngineSpec]:
    if not isinstance(specs, Mapping):
        raise ProtocolError(f"models must be EngineSpecs by name, not {type(specs).__name__}")
    for name, spec in specs.items():
        _check(name, spec)
    return dict(specs)


def _check(name: object, spec: object) -> None:
    text(name, "the name of a model")
    if not isinstance(spec, EngineSpec):
        raise ProtocolError(f"model {name!r} must be an EngineSpec, not {type(spec).__name__}")


class Budget:
    """Who holds how much of `limit` bytes; `None` is no limit.

    Raises:
        ProtocolError: the limit is something else, or negative.
    """

    def __init__(self, limit: int | Literal["auto"] | None) -> None:
        if limit == "auto":
            limit = int(AUTO_SHARE * total_memory())
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
            raise ProtocolError(f'memory_budget_bytes must be bytes or "auto", not {limit!r}')
        if limit is not None and limit < 0:
            raise ProtocolError("memory_budget_bytes must not be negative")
        self._limit = limit
        self._held: Counter[str] = Counter()

    @asynccontextmanager
    async def hold(self, name: str, spec: EngineSpec) -> AsyncIterator[None]:
        """Hold what a model needs inside the block.  A checkpoint if there is a limit.

        Raises:
            InsufficientMemory: there is not so much left.
            ModelLoadError: the file cannot be read.
        """
        if self._limit is None:
            yield
            return
        need = (await estimate_memory(spec.model, spec.config)).total_bytes
        check_budget(need, self._limit, +self._held)
        self._held[name] += need
        try:
            yield
        finally:
            self._held[name] -= need


@attrs.define(eq=False)
class Models(Mapping[str, "Model"]):
    """Models by name.  Made by `open_models`; safe to use from any number of tasks."""

    _nursery: trio.Nursery
    _default: str | None
    _policy: RestartPolicy
    _budget: Budget
    _opener: OpenModel
    _broadcast: Broadcast
    _models: dict[str, Model] = attrs.field(factory=dict, init=False)
    _changing: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    _is_closed: bool = attrs.field(default=False, init=False)
    _exhausted: RestartsExhausted | None = attrs.field(default=None, init=False)

    def __getitem__(self, name: str) -> Model:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    # -- requests: as `Engine`'s, of the model that is named -----------------------------------

    @overload
    async def complete(
        self,
        request: Request | str,
        *,
        into: type[T],
        model: str | None = None,
        describe: bool = False,
        **fields: Unpack[RequestFields],
    ) -> Completion[T]: ...

    @overload
    async def complete(
        self,
        request: Request | str,
        *,
        into: object = None,
        model: str | None = None,
        describe: bool = False,
        **fields: Unpack[RequestFields],
    ) -> Completion: ...

    async def complete(
        self,
        request: Request | str,
        *,
        into: Any = None,
        model: str | None = None,
        describe: bool = False,
        **fields: Unpack[RequestFields],
    ) -> Completion[Any]:
        """As `Engine.complete`, of `model`, or the default one."""
        asked = self._model_for_request(model)
        return await asked.complete(request, into=into, describe=describe, **fields)

    async def complete_text(
        self, request: Request | str, *, model: str | None = None, **fields: Unpack[RequestFields]
    ) -> str:
        """As `Engine.complete_text`, of `model`, or the default one."""
        return await self._model_for_request(model).complete_text(request, **fields)

    def stream(
        self, request: Request | str, *, model: str | None = None, **fields: Unpack[RequestFields]
    ) -> AbstractAsyncContextManager[TokenStream]:
        """As `Engine.stream`, of `model`, or the default one."""
        return self._model_for_request(model).stream(request, **fields)

    def stream_events(
        self, request: Request | str, *, model: str | None = None, **fields: Unpack[RequestFields]
    ) -> AbstractAsyncContextManager[EventStream]:
        """As `Engine.stream_events`, of `model`, or the default one."""
        return self._model_for_request(model).stream_events(request, **fields)

    # -- the models -------------------------------------------------------------------------

    @property
    def default(self) -> str | None:
        """The model of requests that name none; `None` if there is none at all."""
        return pick_model(None, self._models, self._default) if self._models else None

    def state(self, name: str) -> ModelState:
        """What is going on with a model.  Raises `ProtocolError` for an unknown one."""
        return self._model_by_name(name).state

    async def wait_ready(self, name: str) -> None:
        """Wait until a model is ready, without having it loaded.

        A checkpoint.

        Raises:
            ProtocolError: there is no such model.
            LlamadError: it could not be loaded.
            EngineClosed: it was removed meanwhile.
            RestartsExhausted: it was given up; outside the block, which that cancels.
        """
        await trio.lowlevel.checkpoint()
        await self._model_by_name(name).supervisor.wait_ready(want=False)

    async def load(self, name: str) -> None:
        """Have a model loaded, also if that failed before, and wait until it is ready.

        A checkpoint; cancelled, the load goes on.  Raises as `wait_ready`.
        """
        await trio.lowlevel.checkpoint()
        await self._model_by_name(name).supervisor.load()

    async def unload(self, name: str) -> None:
        """Close a model's engine, and wait until that is done.

        Its requests that are under way get `EngineClosed`; the next one has it loaded
        again.  A checkpoint; cancelled, it is closed all the same.

        Raises:
            ProtocolError: there is no such model.
        """
        await self._model_by_name(name).supervisor.unload()

    async def add(self, name: str, spec: EngineSpec) -> None:
        """Add a model, and wait until it is ready, unless it is to be loaded lazily.

        Waits first for any other `add`, `remove` or `change` that is under way, its loads
        included.  A checkpoint.  Cancelled, or if it cannot be loaded, it is not there.

        Raises:
            ProtocolError: there is one of that name, or an argument has the wrong type.
            LlamadError: it could not be loaded.
            EngineClosed: the block has ended.
        """
        _check(name, spec)
        async with self._changing:
            if name in self._models:
                raise ProtocolError(f"there is a model {name!r} already")
            await self._change({**self._specs(), name: spec})

    async def remove(self, name: str) -> None:
        """Close a model's engine and forget the model; wait until that is done.

        Its requests that are under way, or wait for it, get `EngineClosed`.  Waits first for
        any other `add`, `remove` or `change` that is under way, its loads included.  A
        checkpoint.  Cancelled before it is its turn, the model stays; cancelled while the
        engine closes, it is removed all the same.

        Raises:
            ProtocolError: there is no such model.
            EngineClosed: the block has ended.
        """
        async with self._changing:
            self._model_by_name(name)
            await self._change({n: spec for n, spec in self._specs().items() if n != name})

    async def change(self, specs: Mapping[str, EngineSpec]) -> None:
        """Have these models and no others.

        Those that are new, or have another spec, are loaded first, beside those there are;
        then the ones they replace, and those that are not named, are closed as by `remove`.
        The rest go on undisturbed.  Waits first for any other `add`, `remove` or `change` that
        is under way, its loads included.  A checkpoint.  Cancelled before the new ones are
        loaded, or if one cannot be loaded, everything stays as it was; cancelled while the
        old ones close, it has changed all the same.

        Raises:
            ProtocolError: one is no `EngineSpec`, or its name no text.
            LlamadError: one could not be loaded.
            EngineClosed: the block has ended.
        """
        specs = _check_specs(specs)
        async with self._changing:
            await self._change(specs)

    async def _change(self, specs: Mapping[str, EngineSpec]) -> None:
        if self._is_closed:
            raise EngineClosed
        old = self._models
        new = {
            name: self._supervise(name, spec)
            for name, spec in specs.items()
            if name not in old or old[name].spec != spec
        }
        try:
            for model in new.values():
                if model.spec.load == "eager":
                    await model.supervisor.wait_ready(want=True)
        except BaseException:
            for model in new.values():
                model.scope.cancel()
            raise
        self._models = {name: new.get(name) or old[name] for name in specs}
        gone = [model for name, model in old.items() if self._models.get(name) is not model]
        for model in gone:
            model.scope.cancel()
        for model in gone:
            await model.gone.wait()

    def _specs(self) -> dict[str, EngineSpec]:
        return {name: model.spec for name, model in self._models.items()}

    def events(self, max_events: int = 1024) -> AbstractAsyncContextManager[EventReader]:
        """What happens in all models from now on, restarts included; see `Engine.events`."""
        return self._broadcast.subscribe(max_events)

    def _supervise(self, name: str, spec: EngineSpec) -> Model:
        broadcast = Broadcast(onward=self._broadcast)
        reserve = partial(self._budget.hold, name, spec)
        open_engine = partial(self._opener, name, spec, broadcast)
        model = Model(Supervisor(name, spec, reserve, open_engine, self._policy, broadcast))
        self._nursery.start_soon(self._run, model)
        return model

    @ends_in_order
    async def _run(self, model: Model) -> None:
        try:
            with model.scope:
                await model.supervisor.run()
        except RestartsExhausted as error:
            if self._exhausted is not None:  # the block ends with that one, and with no group
                self._exhausted.add_note(f"meanwhile: {error}")
                return
            self._exhausted = error
            raise
        finally:
            model.supervisor.broadcast.close()
            model.gone.set()

    def _model_for_request(self, name: str | None) -> Model:
        return self._models[pick_model(name, self._models, self._default)]

    def _model_by_name(self, name: str) -> Model:
        """The model of that name: here `None` is not the default one."""
        return self._model_for_request(text(name, "model"))


class Model(EngineLike):
    """One model of several, with the interface of `Engine`.

    What needs the engine waits until it is ready, and has it loaded if need be.  `info`,
    `config` and `stats` do not wait: they raise `EngineClosed` while it is not.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.spec = supervisor.spec
        self.scope = new_scope()
        self.gone = trio.Event()

    @property
    def name(self) -> str:
        """What it is called."""
        return self.supervisor.name

    @property
    def state(self) -> ModelState:
        """What is going on with it."""
        return self.supervisor.state

    @property
    def is_open(self) -> bool:
        """Whether it is ready."""
        return self.supervisor.is_ready

    @property
    def info(self) -> ModelInfo:
        return self.supervisor.engine.info

    @property
    def config(self) -> EngineConfig:
        return self.supervisor.engine.config

    def stats(self) -> EngineStats:
        """As `Engine.stats`.  With `isolation="process"` as `RemoteEngine.stats`: what the
        other process told last."""
        return self.supervisor.engine.stats()

    async def refresh(self) -> EngineStats:
        """`stats` of this moment, also of a model in another process.

        Does not have it loaded.  A checkpoint.  Raises as `stats`.
        """
        engine = self.supervisor.engine
        await refresh_if_possible(engine)
        return engine.stats()

    def events(self, max_events: int = 1024) -> AbstractAsyncContextManager[EventReader]:
        """What happens in this model from now on, restarts included; see `Engine.events`.

        Does not have it loaded.  The iteration ends when the model is removed.
        """
        return self.supervisor.broadcast.subscribe(max_events)

    # -- requests: see `EngineLike` ----------------------------------------------------------

    async def _complete(self, request: Request) -> Completion:
        async with self.supervisor.in_use() as engine:
            return await engine.complete(request)

    @asynccontextmanager
    async def _reply_to(self, request: Request, *, events: bool) -> AsyncIterator[ReplySource]:
        async with (
            self.supervisor.in_use() as engine,
            engine._reply_to(request, events=events) as reply,
        ):
            yield reply

    async def _score(self, request: Request, continuations: Sequence[str]) -> list[float]:
        async with self.supervisor.in_use() as engine:
            return await engine.score(request, continuations)

    async def _choose(self, request: Request, options: Sequence[str]) -> Choice:
        async with self.supervisor.in_use() as engine:
            return await engine.choose(request, options)

    async def _render(self, request: Request) -> str:
        async with self.supervisor.in_use() as engine:
            return await engine.render(request)

    async def _count_tokens(self, request: Request) -> int:
        async with self.supervisor.in_use() as engine:
            return await engine.count_tokens(request)

    async def _tokenize(self, text: str, *, special: bool) -> list[int]:
        async with self.supervisor.in_use() as engine:
            return await engine.tokenize(text, special=special)

    async def _detokenize(self, tokens: Sequence[int]) -> str:
        async with self.supervisor.in_use() as engine:
            return await engine.detokenize(tokens)
