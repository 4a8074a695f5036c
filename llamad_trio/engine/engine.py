"""The engine: one model, many requests."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
)
from functools import partial
from itertools import count
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import attrs
import trio

from llamad_trio.chat.template import ChatTemplate, Limits
from llamad_trio.core.completion import Choice, Completion
from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import (
    Busy,
    EngineClosed,
    LlamadError,
    ProtocolError,
    UnsupportedFeature,
)
from llamad_trio.core.info import EngineStats, ModelInfo
from llamad_trio.core.request import Message, Request
from llamad_trio.engine.decode import DecodeActor
from llamad_trio.engine.lane import Lane, computing, shared_lane
from llamad_trio.engine.loading import loaded_model
from llamad_trio.engine.preprocess import Preprocessor, Query
from llamad_trio.engine.reporter import Reporter
from llamad_trio.engine.scoring import choose, score
from llamad_trio.engine.session import Session, opened
from llamad_trio.engine.store import SnapshotStore
from llamad_trio.engine.stream import EventStream, TicketSource, TokenStream
from llamad_trio.engine.ticket import Ticket
from llamad_trio.preflight.prove import proven
from llamad_trio.scheduling.plan import Prepared
from llamad_trio.scheduling.pool import Reuse
from llamad_trio.scheduling.runtime import LaneLike, ModelFacts, Runtime
from llamad_trio.scheduling.scheduler import Scheduler
from llamad_trio.scheduling.shelf import Shelf
from llamad_trio.scheduling.threads import ComputeThreads
from llamad_trio.scheduling.tokenizing import Scoring
from llamad_trio.system.cores import physical_cores
from llamad_trio.system.nursery import ends_in_order, open_plain_nursery
from llamad_trio.typed.asking import typed_request, with_value
from llamad_trio.typed.function_tool import tool_from
from llamad_trio.watch.broadcast import Broadcast, EventReader

if TYPE_CHECKING:
    from llamad_trio.remote.remote import RemoteEngine

T = TypeVar("T")

logger = logging.getLogger("llamad_trio")


class Engine:
    """One loaded model, for any number of tasks of this Trio run.  Made by `open_engine`.

    A request from another Trio run is a `ProtocolError`.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: EngineConfig,
        decode: DecodeActor,
        preprocessor: Preprocessor,
        inbox: trio.MemorySendChannel[Ticket | Query],
        broadcast: Broadcast,
    ) -> None:
        self._runtime = runtime
        self._decode = decode
        self._preprocessor = preprocessor
        self._inbox = inbox
        self._broadcast = broadcast
        self._config = config
        self._ids = count(1)
        self._trio_run = trio.lowlevel.current_trio_token()

    # -- requests ---------------------------------------------------------------------------

    @overload
    async def complete(
        self, request: Request | str, *, into: type[T], describe: bool = False, **fields: Any
    ) -> Completion[T]: ...

    @overload
    async def complete(
        self, request: Request | str, *, into: object = None, describe: bool = False, **fields: Any
    ) -> Completion: ...

    async def complete(
        self, request: Request | str, *, into: object = None, describe: bool = False, **fields: Any
    ) -> Completion:
        """Compute a whole completion.

        Args:
            request: what to compute, or just its prompt.
            into: a type: the text will be JSON of it, and `Completion.value` an instance.
                Any that `typed.schema_of` can describe: attrs classes, dataclasses,
                TypedDicts, enums, Literals, unions, lists, dicts, primitives,
                `msgspec.Struct`, pydantic models.
            describe: tell the model, at the end of the prompt, what its fields mean.
            fields: `Request` fields that override the request's.

        A checkpoint.  Cancelled, it stops the work and frees the slot.

        Raises:
            ProtocolError, PromptTooLong, UnsupportedFeature: the request cannot run.
            Busy: too many requests are waiting.
            ContextOverflow, InferenceError: it failed while running.
            IncompleteOutput: the text ended before it was an instance of `into`.
            EngineClosed, SessionFatal: the engine has stopped.
        """
        asked = typed_request(as_request(request, fields), into, describe=describe)
        async with self._submitted(asked, streams=False) as ticket:
            completion = await ticket.outcome()
        return completion if into is None else with_value(completion, into)

    async def complete_text(self, request: Request | str, **fields: Any) -> str:
        """`complete`, but only its text."""
        return (await self.complete(request, **fields)).text

    @asynccontextmanager
    async def stream(self, request: Request | str, **fields: Any) -> AsyncIterator[TokenStream]:
        """Compute a completion and receive its text as it comes.

        An async context manager; nothing is submitted before it is entered, and leaving
        it early cancels the request.  Arguments and errors as for `complete`; errors
        that need the model come out of the stream.
        """
        async with self._submitted(as_request(request, fields), streams=True) as ticket:
            yield TokenStream(self._source(ticket))

    @asynccontextmanager
    async def stream_events(
        self, request: Request | str, **fields: Any
    ) -> AsyncIterator[EventStream]:
        """As `stream`, with reasoning and tool calls: typed events, the last one `Done`."""
        async with self._submitted(as_request(request, fields), streams=True) as ticket:
            yield EventStream(self._source(ticket))

    async def score(
        self, request: Request | str, continuations: Sequence[str], **fields: Any
    ) -> list[float]:
        """How likely each of several texts is to follow the prompt.

        Args:
            request: the prompt; its other fields count for nothing.
            continuations: any number of texts, used as they are.
            fields: `Request` fields that override the request's.

        Returns:
            The natural logarithm of each one's probability, in their order.

        The prompt is computed once where prefixes are reused at all, each continuation for
        itself.  They are requests of their own beside the others': with a `max_queue`, others
        can fill the queue, and then this raises `Busy`.  A checkpoint; cancelled, it stops the
        work.  Raises as `complete`.
        """
        return await score(self, as_request(request, fields), continuations)

    async def choose(self, request: Request | str, options: Sequence[str], **fields: Any) -> Choice:
        """Which of several texts is likeliest to follow the prompt.  Nothing is sampled.

        Args:
            request, fields: as for `score`.
            options: at least one, none empty, all different.  One that another begins
                with is at least as likely as that.

        A checkpoint; cancelled, it stops the work.  Raises as `complete`.
        """
        return await choose(self, as_request(request, fields), options)

    def session(self) -> AbstractAsyncContextManager[Session]:
        """Explicit control of prefix, suffix and decode: see `Session`.

        An async context manager; leaving it lets go of what the session holds.

        Raises:
            UnsupportedFeature: the engine reuses nothing (`kv_cache=False`).
            EngineClosed: the engine has stopped.
        """
        self._check_open()
        if not self._config.kv_cache:
            raise UnsupportedFeature("session", "kv_cache is off: nothing would be held")
        return opened(self)

    # -- text and tokens --------------------------------------------------------------------

    async def render(self, request: Request | str, **fields: Any) -> str:
        """The prompt text a request comes to, its chat template applied.

        A checkpoint.  Raises as `complete` does.
        """
        return await self._ask_of(as_request(request, fields), self._preprocessor.render)

    async def count_tokens(self, request: Request | str, **fields: Any) -> int:
        """Length of the prompt a request comes to, in tokens.

        A checkpoint.  Raises as `complete` does; `PromptTooLong` only for a text so long
        that it cannot fit however it is tokenised.
        """
        _, tokens = await self._ask_of(as_request(request, fields), self._preprocessor.tokens)
        return len(tokens)

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Text to token ids, without BOS or EOS.

        Args:
            text: any text without NUL or lone surrogates.
            special: turn the text of control tokens into those tokens.

        A checkpoint.

        Raises:
            ProtocolError: the text cannot be encoded.
        """
        checked = Request(text, raw=True).prompt
        if not isinstance(checked, str):
            raise ProtocolError(f"text must be text, not {type(text).__name__}")
        return await self._ask(
            lambda _: self._runtime.tokenize(checked, add_special=False, parse_special=special),
            len(checked),
        )

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Token ids to text, control tokens written out.  A checkpoint.

        Raises:
            ProtocolError: an id is outside the vocabulary.
        """
        asked = Request(tokens)
        if isinstance(asked.prompt, str | None):
            raise ProtocolError("tokens must be token ids, not text")
        return await self._ask_of(asked, self._preprocessor.render)

    # -- looking around ---------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """What is known of the model."""
        facts = self._runtime.facts
        return ModelInfo(
            architecture=facts.architecture,
            description=facts.description,
            name=facts.name,
            n_params=facts.n_params,
            file_bytes=facts.file_bytes,
            n_vocab=facts.n_vocab,
            n_ctx_train=facts.n_ctx_train,
            has_template=facts.chat_template is not None,
            chat_template=facts.chat_template,
            can_rewind=facts.can_rewind,
            identity=facts.identity,
        )

    @property
    def is_open(self) -> bool:
        """Whether it takes requests: not after its block, nor after it broke down."""
        return self._decode.closed is None

    @property
    def config(self) -> EngineConfig:
        """The settings in force: clamped, and completed from the model and the machine."""
        return self._config

    def stats(self) -> EngineStats:
        """A snapshot of slots, queue, pool and counts.  Cheap, never blocks."""
        books = self._decode.scheduler.stats()
        outcomes = self._decode.outcomes
        return EngineStats(
            slots={
                "free": books.slots_free,
                "prefill": books.slots_prefill,
                "decode": books.slots_decode,
                "paused": books.slots_paused,
            },
            queued=self._decode.n_live - books.running,
            kv_used_tokens=books.kv_used,
            kv_retained_tokens=books.kv_retained,
            kv_free_tokens=books.kv_free,
            prefill_tokens=books.prefill_tokens,
            prefill_s=books.prefill_s,
            decode_tokens=books.decode_tokens,
            decode_s=books.decode_s,
            cached_tokens=books.cached_tokens,
            requests={name: outcomes[name] for name in ("completed", "failed", "cancelled")},
            preemptions=books.preemptions,
            steps=books.steps,
            aborted_steps=books.aborted_steps,
            n_threads=books.n_threads,
            n_threads_batch=books.n_threads_batch,
        )

    def events(self, max_events: int = 1024) -> AbstractAsyncContextManager[EventReader]:
        """What happens in this engine from now on: see `llamad_trio.core.engine_events`.

        Args:
            max_events: most events that wait to be read.  A reader that falls further
                behind loses the oldest, and gets a `Lagged` in their place.

        An async context manager giving a `trio.abc.ReceiveChannel`, which ends when the
        engine has stopped.  Any number of readers, none of which slows the engine down.

        Raises:
            ValueError: `max_events` is less than 1.
        """
        return self._broadcast.subscribe(max_events)

    # -- what sessions need -----------------------------------------------------------------

    @property
    def most_tokens(self) -> int:
        """Most tokens one request can have, prompt and reply together."""
        return self._preprocessor.n_ctx

    async def prepare(
        self, content: str | tuple[Message, ...], *, ends_open: bool
    ) -> tuple[str, tuple[int, ...]]:
        """Text, or messages through the template, as text and tokens.

        Args:
            content: what to prepare.
            ends_open: whether messages end with the assistant's turn open.

        A checkpoint.  Raises `ProtocolError` and `PromptTooLong` as `complete` does.
        """

        def work(limits: Limits) -> tuple[str, tuple[int, ...]]:
            if isinstance(content, str):
                return content, tuple(self._preprocessor.text_tokens(content))
            text, tokens = self._preprocessor.conversation(content, limits, ends_open=ends_open)
            return text, tuple(tokens)

        n_chars = len(content) if isinstance(content, str) else sum(m.n_chars for m in content)
        return await self._ask(work, n_chars)

    async def prepare_scoring(self, request: Request, continuations: Sequence[str]) -> Scoring:
        """The tokens of a prompt, and of texts that follow it.

        A checkpoint.  Raises `ProtocolError` and `PromptTooLong` as `complete` does.
        """
        return await self._ask(
            partial(self._preprocessor.scoring, request, continuations),
            request.n_chars + sum(map(len, continuations)),
            is_constrained=request.is_constrained,
        )

    async def score_tokens(self, prompt: Sequence[int], targets: Sequence[int]) -> float:
        """The natural logarithm of the probability that `targets` follow `prompt`.

        A checkpoint.  Raises as `complete` does.
        """
        request = Request([*prompt, *targets[:-1]])
        async with self._submitted(request, streams=False, targets=targets) as ticket:
            await ticket.outcome()
            return sum(ticket.scores)

    async def hold(self, holder: str, tokens: Sequence[int]) -> int:
        """Have `tokens` in the pool for `holder`, computing what is not there.

        Returns:
            How many of them were there already.

        A checkpoint.  Cancelled, `holder` holds what it held before.  Raises as `complete`.
        """
        self._check_open()
        if not tokens or self._decode.scheduler.hold(holder, tokens):
            await trio.lowlevel.checkpoint()
            return len(tokens)
        request = Request(tokens)
        async with self._submitted(request, streams=False, holder=holder) as ticket:
            return (await ticket.outcome()).cached_tokens

    def let_go(self, holder: str) -> None:
        """What `holder` holds is kept no longer than anything else."""
        self._decode.scheduler.let_go(holder)

    def resident(self, tokens: Sequence[int]) -> int:
        """How many of the first tokens are in the pool at this moment."""
        return self._decode.scheduler.resident(tokens)

    # -- inside -----------------------------------------------------------------------------

    @asynccontextmanager
    async def _submitted(
        self,
        request: Request,
        *,
        streams: bool,
        holder: str | None = None,
        targets: Sequence[int] = (),
    ) -> AsyncIterator[Ticket]:
        self._check_open()
        self._check_queue()
        ticket = Ticket(
            next(self._ids),
            request,
            streams=streams,
            on_room=self._decode.resume,
            holder=holder,
            targets=targets,
        )
        self._decode.register(ticket)
        try:
            await self._send(ticket)
            yield ticket
        finally:
            self._decode.withdraw(ticket)
            ticket.close()

    def _source(self, ticket: Ticket) -> TicketSource:
        return TicketSource(ticket, withdraw=lambda: self._decode.withdraw(ticket))

    async def _ask_of(self, request: Request, function: Callable[[Request, Limits], T]) -> T:
        return await self._ask(
            partial(function, request), request.n_chars, is_constrained=request.is_constrained
        )

    async def _ask(
        self, function: Callable[[Limits], T], n_chars: int, *, is_constrained: bool = False
    ) -> T:
        self._check_open()
        query = Query(function, n_chars, is_constrained=is_constrained)
        await self._send(query)
        result: T = await query.answer()
        return result

    async def _send(self, item: Ticket | Query) -> None:
        try:
            await self._inbox.send(item)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise self._decode.closed_error() from None

    def _check_open(self) -> None:
        if trio.lowlevel.current_trio_token() is not self._trio_run:
            # What it would wait for here wakes tasks of the engine's own run, and breaks both.
            raise ProtocolError(
                "the engine belongs to another Trio run: call it there, by `trio.from_thread.run`, "
                "or open it with llamad_trio.blocking"
            )
        if self._decode.closed is not None:
            raise self._decode.closed_error()

    def _check_queue(self) -> None:
        limit = self._config.max_queue
        if limit is None:
            return
        books = self._decode.scheduler
        # Who waits for a free slot will have it soon; unless room in the pool is what lacks.
        at_once = books.n_running if books.is_full else self._config.n_slots
        waiting = self._decode.n_live - at_once
        if waiting >= limit:
            raise Busy(max(waiting, 0), limit)


def as_request(request: Request | str, fields: dict[str, Any]) -> Request:
    """A request with some of its fields set, and its tools as `Tool`s.

    Raises:
        ProtocolError: unknown fields, wrong types, a function that makes no tool, two tools
            of one name.
    """
    try:
        if not isinstance(request, Request):
            request = Request(request, **fields)
        elif fields:
            request = attrs.evolve(request, **fields)
        if not request.tools:
            return request
        tools = [tool_from(tool) for tool in request.tools]
        if len({tool.name for tool in tools}) < len(tools):
            raise ProtocolError("two tools have the same name")
        return attrs.evolve(request, tools=tools)
    except TypeError as error:
        unknown = sorted(set(fields) - {field.name for field in attrs.fields(Request)})
        if not unknown:
            raise
        raise ProtocolError(f"unknown field {', '.join(unknown)}") from error


@overload
def open_engine(
    model: str | PathLike[str],
    config: EngineConfig | None = None,
    *,
    isolation: None = None,
    on_load: Callable[[float], object] | None = None,
    **overrides: Any,
) -> AbstractAsyncContextManager[Engine]: ...


@overload
def open_engine(
    model: str | PathLike[str],
    config: EngineConfig | None = None,
    *,
    isolation: Literal["process"],
    on_load: Callable[[float], object] | None = None,
    **overrides: Any,
) -> AbstractAsyncContextManager[RemoteEngine]: ...


@overload
def open_engine(
    model: str | PathLike[str],
    config: EngineConfig | None = None,
    *,
    isolation: Literal["process"] | None,
    on_load: Callable[[float], object] | None = None,
    **overrides: Any,
) -> AbstractAsyncContextManager[Engine | RemoteEngine]: ...


def open_engine(
    model: str | PathLike[str],
    config: EngineConfig | None = None,
    *,
    isolation: Literal["process"] | None = None,
    on_load: Callable[[float], object] | None = None,
    **overrides: Any,
) -> AbstractAsyncContextManager[Engine | RemoteEngine]:
    """Load a model and run its engine inside the block of an async context manager.

    Args:
        model: path of a GGUF file, or the name of a known model that has been pulled.
        config: settings; `None` takes them from the `LLAMAD_*` environment variables.
        isolation: `"process"` runs it in a process of its own: whatever brings that down
            is an `EngineCrashed` here.  A `lane` of the application's is not used then.
        on_load: called in the Trio thread with the load's progress, 0 to 1.
        overrides: `EngineConfig` fields that replace the config's.

    Leaving the block cancels what is running, waits for at most one graph node, and
    frees everything.  Cancelling the load stops it.  Exceptions of the body come out as
    themselves; a crash of the engine ends the block with its own error.

    Raises:
        ModelLoadError: missing, unreadable, no GGUF, unsupported, out of memory.
        UnsupportedFeature: the model cannot continue a text.
        ProtocolError: a setting of the wrong type, or an unknown one.
        EngineCrashed: the process of an isolated engine has ended.
    """
    config = EngineConfig.merged(config, overrides)
    if isolation is None:
        return open_named_engine(model, config, on_load=on_load)
    if isolation != "process":
        raise ProtocolError(f'isolation must be "process" or None, not {isolation!r}')
    from llamad_trio.isolation.isolation import open_isolated_engine

    return open_isolated_engine(model, config, on_load)


@asynccontextmanager
@ends_in_order
async def open_named_engine(
    model: str | PathLike[str],
    config: EngineConfig,
    *,
    name: str = "",
    broadcast: Broadcast | None = None,
    on_load: Callable[[float], object] | None = None,
) -> AsyncIterator[Engine]:
    """As `open_engine`, for who runs several: `name` and `broadcast` as for `run_engine`."""
    began = trio.current_time()
    lane = Lane() if config.lane == "own" else config.lane or shared_lane()
    config = await proven(with_lane_threads(config), model)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(lane.hosted())
        loaded = await stack.enter_async_context(loaded_model(model, config, lane, on_load))
        config = loaded.runtime.config
        stack.enter_context(counted(lane, config))
        yield await stack.enter_async_context(
            run_engine(
                loaded.runtime,
                loaded.template,
                config,
                lane,
                name=name,
                broadcast=broadcast,
                loading_since=began,
            )
        )


def with_lane_threads(config: EngineConfig) -> EngineConfig:
    """With the threads of the lane that the application made for it, unless it says otherwise."""
    if not isinstance(config.lane, Lane):
        return config
    threads = config.lane.threads
    return attrs.evolve(
        config,
        n_threads=config.n_threads or threads,
        n_threads_batch=config.n_threads_batch or threads,
    )


def counted(lane: LaneLike, config: EngineConfig) -> AbstractContextManager[None]:
    """Count the engine's threads among those that may compute at once, inside the block."""
    assert config.n_threads is not None
    assert config.n_threads_batch is not None
    return computing(lane, max(config.n_threads, config.n_threads_batch), physical_cores())


@asynccontextmanager
@ends_in_order
async def run_engine(
    runtime: Runtime,
    template: ChatTemplate | LlamadError,
    config: EngineConfig,
    lane: LaneLike,
    *,
    name: str = "",
    broadcast: Broadcast | None = None,
    loading_since: float | None = None,
) -> AsyncIterator[Engine]:
    """Run the actors of one engine inside the block.

    Args:
        runtime: the loaded model.
        template: its chat template, or the error for requests that need one.
        config: resolved.
        lane: where steps run; must be hosted.
        name: what its events call it.
        broadcast: also gets its events, beside the readers of `Engine.events`; it is not
            closed.
        loading_since: when its load began, on Trio's clock; by default, now.
    """
    if loading_since is None:
        loading_since = trio.current_time()
    facts = runtime.facts
    assert config.n_ctx is not None
    assert config.n_threads is not None
    assert config.n_threads_batch is not None
    threads = ComputeThreads(
        config.n_threads, config.n_threads_batch, adaptive=config.adaptive_threads
    )
    scheduler = Scheduler(
        n_slots=config.n_slots,
        n_seqs=facts.n_seqs,
        n_ctx=config.n_ctx,
        n_batch=config.n_batch,
        step_target_s=config.step_target_s,
        threads=threads,
        reuse=_reuse(config, facts),
        shelf=_shelf(config, facts),
    )
    to_preprocess, from_callers = trio.open_memory_channel[Ticket | Query](0)
    to_decode, from_preprocess = trio.open_memory_channel[Prepared](config.n_slots)
    own_broadcast = Broadcast(onward=broadcast)
    reporter = Reporter(own_broadcast, name)
    store = _store(config, facts)
    decode = DecodeActor(runtime, lane, scheduler, from_preprocess, reporter, store, config.weight)
    await decode.load_index()
    preprocessor = Preprocessor(
        runtime, template, _most_tokens(config, facts.n_ctx_train), decode, from_callers, to_decode
    )
    async with open_plain_nursery() as nursery:
        nursery.start_soon(decode.run)
        nursery.start_soon(preprocessor.run)
        reporter.loaded(trio.current_time() - loading_since)
        try:
            yield Engine(runtime, config, decode, preprocessor, to_preprocess, own_broadcast)
        finally:
            # Here and not when the actor is cancelled: nobody sees a half-closed engine.
            decode.close(EngineClosed())
            own_broadcast.close()


def _shelf(config: EngineConfig, facts: ModelFacts) -> Shelf | None:
    if not config.kv_cache or not (config.prompt_cache_ram_bytes or _has_disk(config)):
        return None
    # llama.cpp saves what a window still holds: such a state is of use at its end only.
    any_prefix = facts.can_rewind and not facts.n_window
    return Shelf(max_bytes=config.prompt_cache_ram_bytes, any_prefix=any_prefix)


def _store(config: EngineConfig, facts: ModelFacts) -> SnapshotStore | None:
    if not config.kv_cache or not _has_disk(config):
        return None
    assert config.prompt_cache_dir is not None
    directory = Path(config.prompt_cache_dir).expanduser()
    return SnapshotStore(directory, facts.identity, config.prompt_cache_disk_bytes)


def _has_disk(config: EngineConfig) -> bool:
    return config.prompt_cache_dir is not None and config.prompt_cache_disk_bytes > 0


def _reuse(config: EngineConfig, facts: ModelFacts) -> Reuse:
    if not config.kv_cache:
        return Reuse.NOTHING
    if facts.n_seqs <= config.n_slots:
        logger.warning("%d slots leave no sequence to retain: nothing is reused", config.n_slots)
        return Reuse.NOTHING
    if facts.can_rewind:
        return Reuse.PREFIX
    logger.warning(
        "the memory of %s cannot go back to an earlier token: a prompt is reused only when "
        "the whole of what was computed is continued",
        facts.name or facts.description,
    )
    return Reuse.WHOLE


def _most_tokens(config: EngineConfig, n_ctx_train: int) -> int:
    """Most tokens of one request: the pool, and no more than the model was trained for,
    unless its RoPE is stretched on purpose."""
    assert config.n_ctx is not None
    if config.rope_freq_base or config.rope_freq_scale or n_ctx_train <= 0:
        return config.n_ctx
    return min(config.n_ctx, n_ctx_train)
