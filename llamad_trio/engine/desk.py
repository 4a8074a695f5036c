"""Where the requests of one engine are handed in: what the engine itself, its sessions and
its scoring are built on.

Decides who is let in, and that whoever leaves early takes the work along.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import TypeVar

import trio

from llamad_trio.chat.meter import RenderLimits
from llamad_trio.core.completion import Completion
from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import Busy, ProtocolError
from llamad_trio.core.request import Message, Request
from llamad_trio.engine.decode import DecodeActor
from llamad_trio.engine.preprocess import Preprocessor, Query
from llamad_trio.engine.ticket import Ticket, TicketSource
from llamad_trio.scheduling.runtime import ModelFacts, Runtime, Scoring

T = TypeVar("T")


class Desk:
    """One engine's desk.  Each async method is a checkpoint and raises what `complete` does."""

    def __init__(
        self,
        runtime: Runtime,
        config: EngineConfig,
        decode: DecodeActor,
        preprocessor: Preprocessor,
        inbox: trio.MemorySendChannel[Ticket | Query],
    ) -> None:
        self.config = config
        self.decode = decode
        self._runtime = runtime
        self._preprocessor = preprocessor
        self._inbox = inbox
        self._ids = count(1)
        self._trio_run = trio.lowlevel.current_trio_token()

    @property
    def facts(self) -> ModelFacts:
        """What the model says of itself."""
        return self._runtime.facts

    @property
    def most_tokens(self) -> int:
        """Most tokens one request can have, prompt and reply together."""
        return self._preprocessor.n_ctx

    def check_open(self) -> None:
        """Raise if the engine takes no requests, or not of this Trio run."""
        if trio.lowlevel.current_trio_token() is not self._trio_run:
            # What it would wait for here wakes tasks of the engine's own run, and breaks both.
            raise ProtocolError(
                "the engine belongs to another Trio run: call it there, by `trio.from_thread.run`, "
                "or open it with llamad_trio.blocking"
            )
        if self.decode.closed is not None:
            raise self.decode.closed_error()

    # -- requests ---------------------------------------------------------------------------

    async def complete(self, request: Request, *, holder: str | None = None) -> Completion:
        """Compute a request, nobody reading its pieces; with a `holder` only its prompt, whose
        KV is then held by this name.
        """
        async with self._live_ticket(request, holder=holder) as ticket:
            return await ticket.outcome()

    @asynccontextmanager
    async def reply_to(self, request: Request) -> AsyncIterator[TicketSource]:
        """Compute a request inside the block, and read the parts of its reply."""
        async with self._live_ticket(request, streams=True) as ticket:
            yield TicketSource(ticket, withdraw=lambda: self.decode.withdraw(ticket))

    async def score_tokens(self, prompt: Sequence[int], targets: Sequence[int]) -> float:
        """The natural logarithm of the probability that `targets` follow `prompt`."""
        request = Request([*prompt, *targets[:-1]])
        async with self._live_ticket(request, targets=targets) as ticket:
            await ticket.outcome()
            return sum(ticket.scores)

    async def hold(self, holder: str, tokens: Sequence[int]) -> int:
        """Have `tokens` in the pool for `holder`, computing what is not there; return how many
        of them were there already.  Cancelled, `holder` holds what it held before.
        """
        self.check_open()
        if not tokens or self.decode.scheduler.hold(holder, tokens):
            await trio.lowlevel.checkpoint()
            return len(tokens)
        return (await self.complete(Request(tokens), holder=holder)).cached_tokens

    def let_go(self, holder: str) -> None:
        """What `holder` holds is kept no longer than anything else."""
        self.decode.scheduler.let_go(holder)

    def resident(self, tokens: Sequence[int]) -> int:
        """How many of the first tokens are in the pool at this moment."""
        return self.decode.scheduler.n_resident(tokens)

    @asynccontextmanager
    async def _live_ticket(
        self,
        request: Request,
        *,
        streams: bool = False,
        holder: str | None = None,
        targets: Sequence[int] = (),
    ) -> AsyncIterator[Ticket]:
        self.check_open()
        self._check_queue()
        ticket = Ticket(
            next(self._ids),
            request,
            streams=streams,
            on_room=self.decode.resume,
            holder=holder,
            targets=targets,
        )
        self.decode.register(ticket)
        try:
            await self._send(ticket)
            yield ticket
        finally:
            self.decode.withdraw(ticket)
            ticket.close()

    def _check_queue(self) -> None:
        limit = self.config.max_queue
        if limit is None:
            return
        books = self.decode.scheduler
        # Who waits for a free slot will have it soon; unless room in the pool is what lacks.
        at_once = books.n_running if books.has_waiting else self.config.n_slots
        waiting = self.decode.n_live - at_once
        if waiting >= limit:
            raise Busy(max(waiting, 0), limit)

    # -- text and tokens --------------------------------------------------------------------

    async def render(self, request: Request) -> str:
        """The prompt of a request as text."""
        return await self._ask_of(request, self._preprocessor.render)

    async def prompt_tokens(self, request: Request) -> Sequence[int]:
        """The prompt of a request as tokens."""
        return (await self._ask_of(request, self._preprocessor.tokens))[1]

    async def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """Text as tokens, without BOS or EOS."""
        return await self._ask(
            lambda _: self._runtime.tokenize(text, add_special=False, parse_special=parse_special),
            len(text),
        )

    async def prepare(
        self, content: str | tuple[Message, ...], *, ends_open: bool
    ) -> tuple[str, tuple[int, ...]]:
        """Text, or messages through the template, as text and tokens; messages may end with the
        assistant's turn open.
        """

        def work(limits: RenderLimits) -> tuple[str, tuple[int, ...]]:
            if isinstance(content, str):
                return content, tuple(self._preprocessor.text_tokens(content))
            text, tokens = self._preprocessor.conversation(content, limits, ends_open=ends_open)
            return text, tuple(tokens)

        n_chars = len(content) if isinstance(content, str) else sum(m.n_chars for m in content)
        return await self._ask(work, n_chars)

    async def prepare_scoring(self, request: Request, continuations: Sequence[str]) -> Scoring:
        """The tokens of a prompt, and of texts that follow it."""
        return await self._ask(
            partial(self._preprocessor.scoring_tokens, request, continuations),
            request.n_chars + sum(map(len, continuations)),
            is_constrained=request.is_constrained,
        )

    async def _ask_of(self, request: Request, function: Callable[[Request, RenderLimits], T]) -> T:
        return await self._ask(
            partial(function, request), request.n_chars, is_constrained=request.is_constrained
        )

    async def _ask(
        self, function: Callable[[RenderLimits], T], n_chars: int, *, is_constrained: bool = False
    ) -> T:
        self.check_open()
        query = Query(function, n_chars, is_constrained=is_constrained)
        await self._send(query)
        result: T = await query.answer()
        return result

    async def _send(self, item: Ticket | Query) -> None:
        try:
            await self._inbox.send(item)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise self.decode.closed_error() from None
