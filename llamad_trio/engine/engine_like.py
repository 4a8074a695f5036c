"""What every engine offers, whether its model runs in this program or behind a socket.

Decides what a caller may write, and what it comes to as one whole `Request`.  How that is
computed, each kind of engine knows for itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar, Unpack, overload

from trio.abc import ReceiveChannel

from llamad_trio.core.completion import Choice, Completion
from llamad_trio.core.config import EngineConfig
from llamad_trio.core.engine_events import EngineEvent
from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.fields import text as checked_text
from llamad_trio.core.info import EngineStats, ModelInfo
from llamad_trio.core.request import Request, RequestFields
from llamad_trio.engine.stream import EventStream, ReplySource, TokenStream
from llamad_trio.typed.asking import as_request, checked_texts, typed_request, with_value

T = TypeVar("T")


class EngineLike(ABC):
    """An `Engine`, a `RemoteEngine`, a `Model` of several, or whatever else does the same."""

    # -- requests ---------------------------------------------------------------------------

    @overload
    async def complete(
        self,
        request: Request | str,
        *,
        into: type[T],
        describe: bool = False,
        **fields: Unpack[RequestFields],
    ) -> Completion[T]: ...

    @overload
    async def complete(
        self,
        request: Request | str,
        *,
        into: object = None,
        describe: bool = False,
        **fields: Unpack[RequestFields],
    ) -> Completion: ...

    async def complete(
        self,
        request: Request | str,
        *,
        into: object = None,
        describe: bool = False,
        **fields: Unpack[RequestFields],
    ) -> Completion[Any]:
        """Compute a whole completion.

        Args:
            request: what to compute, or just its prompt.
            into: a type: the text will be JSON of it, and `Completion.value` an instance.
                Any that `typed.schema` can describe: attrs classes, dataclasses,
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
            Disconnected, EngineCrashed: the process it is in has gone away.
        """
        asked = typed_request(as_request(request, fields), into, describe=describe)
        completion = await self._complete(asked)
        return completion if into is None else with_value(completion, into)

    async def complete_text(self, request: Request | str, **fields: Unpack[RequestFields]) -> str:
        """`complete`, but only its text."""
        return (await self.complete(request, **fields)).text

    @asynccontextmanager
    async def stream(
        self, request: Request | str, **fields: Unpack[RequestFields]
    ) -> AsyncIterator[TokenStream]:
        """Compute a completion and receive its text as it comes.

        An async context manager; nothing is submitted before it is entered, and leaving
        it early cancels the request.  Arguments and errors as for `complete`; errors
        that need the model come out of the stream.
        """
        async with self._reply_to(as_request(request, fields), events=False) as reply:
            yield TokenStream(reply)

    @asynccontextmanager
    async def stream_events(
        self, request: Request | str, **fields: Unpack[RequestFields]
    ) -> AsyncIterator[EventStream]:
        """As `stream`, with reasoning and tool calls: typed events, the last one `Done`."""
        async with self._reply_to(as_request(request, fields), events=True) as reply:
            yield EventStream(reply)

    async def score(
        self, request: Request | str, continuations: Sequence[str], **fields: Unpack[RequestFields]
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
        asked = as_request(request, fields)
        return await self._score(asked, checked_texts("continuations", continuations))

    async def choose(
        self, request: Request | str, options: Sequence[str], **fields: Unpack[RequestFields]
    ) -> Choice:
        """Which of several texts is likeliest to follow the prompt.  Nothing is sampled.

        Args:
            request, fields: as for `score`.
            options: at least one, none empty, all different.  One that another begins
                with is at least as likely as that.

        A checkpoint; cancelled, it stops the work.  Raises as `complete`.
        """
        asked = as_request(request, fields)
        texts = checked_texts("options", options)
        if not texts or "" in texts or len(set(texts)) < len(texts):
            raise ProtocolError("options must be texts, at least one, none empty, all different")
        return await self._choose(asked, texts)

    # -- text and tokens --------------------------------------------------------------------

    async def render(self, request: Request | str, **fields: Unpack[RequestFields]) -> str:
        """The prompt text a request comes to, its chat template applied.

        A checkpoint.  Raises as `complete` does.
        """
        return await self._render(as_request(request, fields))

    async def count_tokens(self, request: Request | str, **fields: Unpack[RequestFields]) -> int:
        """Length of the prompt a request comes to, in tokens.

        A checkpoint.  Raises as `complete` does; `PromptTooLong` only for a text so long
        that it cannot fit however it is tokenised.
        """
        return await self._count_tokens(as_request(request, fields))

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Text to token ids, without BOS or EOS.

        Args:
            text: any text without NUL or lone surrogates.
            special: turn the text of control tokens into those tokens.

        A checkpoint.

        Raises:
            ProtocolError: the text cannot be encoded.
        """
        return await self._tokenize(checked_text(text, "text"), special=special)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Token ids to text, control tokens written out.  A checkpoint.

        Raises:
            ProtocolError: an id is outside the vocabulary.
        """
        asked = Request(tokens)
        if isinstance(asked.prompt, str | None):
            raise ProtocolError("tokens must be token ids, not text")
        return await self._detokenize(asked.prompt)

    # -- looking around ---------------------------------------------------------------------

    @property
    @abstractmethod
    def info(self) -> ModelInfo:
        """What is known of the model."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether it takes requests."""

    @property
    @abstractmethod
    def config(self) -> EngineConfig:
        """The settings in force: clamped, and completed from the model and the machine."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """A snapshot of slots, queue, pool and counts.  Cheap, never blocks."""

    @abstractmethod
    def events(
        self, max_events: int = 1024
    ) -> AbstractAsyncContextManager[ReceiveChannel[EngineEvent]]:
        """What happens in this engine from now on: see `llamad_trio.core.engine_events`.

        Args:
            max_events: most events that wait to be read.  A reader that falls further
                behind loses the oldest, and gets a `Lagged` in their place.

        An async context manager giving a `trio.abc.ReceiveChannel`, which ends when the
        engine has stopped.  Any number of readers, none of which slows the engine down.

        Raises:
            ValueError: `max_events` is less than 1.
        """

    # -- what the kinds of engines differ in: each takes what was checked ----------------------

    @abstractmethod
    async def _complete(self, request: Request) -> Completion: ...

    @abstractmethod
    def _reply_to(
        self, request: Request, *, events: bool
    ) -> AbstractAsyncContextManager[ReplySource]: ...

    @abstractmethod
    async def _score(self, request: Request, continuations: Sequence[str]) -> list[float]: ...

    @abstractmethod
    async def _choose(self, request: Request, options: Sequence[str]) -> Choice: ...

    @abstractmethod
    async def _render(self, request: Request) -> str: ...

    @abstractmethod
    async def _count_tokens(self, request: Request) -> int: ...

    @abstractmethod
    async def _tokenize(self, text: str, *, special: bool) -> list[int]: ...

    @abstractmethod
    async def _detokenize(self, tokens: Sequence[int]) -> str: ...
