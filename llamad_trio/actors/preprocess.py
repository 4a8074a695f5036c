"""The preprocess actor: template, tokenise, check the budget, hand on.

Short texts are worked on at once, in the order of arrival.  Long ones go to a worker
thread each, and the short ones behind them do not wait: first come, first served is
counted from here on.  No cancel abandons such a thread: the model outlives it.
"""

from __future__ import annotations

import copy
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import outcome
import trio

from llamad_trio.actors.decode import DecodeActor
from llamad_trio.actors.nursery import open_plain_nursery
from llamad_trio.actors.ticket import Ticket
from llamad_trio.chat.template import ChatTemplate
from llamad_trio.core.errors import (
    EngineClosed,
    InferenceError,
    LlamadError,
    PromptTooLong,
    ProtocolError,
)
from llamad_trio.core.plan import Prepared
from llamad_trio.core.request import Message, Request
from llamad_trio.core.runtime import Runtime
from llamad_trio.core.sampling import resolve_sampling

__all__ = ["Preprocessor", "Query"]

T = TypeVar("T")

logger = logging.getLogger("llamad_trio")

MAX_THREADS = 4
"""Long texts worked on at once; more would only take each other's cores."""

OFF_LOOP_CHARS = 2_000
"""Texts longer than this are worked on in a thread.  Templating and tokenising this many
characters takes about a millisecond; the loop may be blocked for five at most."""


class Query:
    """A question about text for the preprocess actor: `function`, of `n_chars` of it."""

    def __init__(self, function: Callable[[], Any], n_chars: int) -> None:
        self.function = function
        self.n_chars = n_chars
        self.result: outcome.Outcome[Any] = outcome.Error(EngineClosed())
        self.answered: trio.Event = trio.Event()

    async def answer(self) -> Any:
        """Wait for the result of the function, or its error.  A checkpoint."""
        await self.answered.wait()
        return self.result.unwrap()


class Preprocessor:
    """Turns requests into token lists that are known to fit.

    Args:
        runtime: the loaded model.
        template: its chat template, or the error for requests that need one.
        n_ctx: most tokens, prompt and reply together, that one request can have.
        decode: where failures go, and who is told of arrivals.
        inbox: tickets and queries.
        outbox: what is ready to run.
    """

    def __init__(
        self,
        runtime: Runtime,
        template: ChatTemplate | LlamadError,
        n_ctx: int,
        decode: DecodeActor,
        inbox: trio.MemoryReceiveChannel[Ticket | Query],
        outbox: trio.MemorySendChannel[Prepared],
    ) -> None:
        self._runtime = runtime
        self.n_ctx = n_ctx
        self._decode = decode
        self._inbox = inbox
        self._outbox = outbox
        self._limiter = trio.CapacityLimiter(MAX_THREADS)
        self._template = template

    async def run(self) -> None:
        """Run until cancelled.  What is in the inbox then is answered by nobody."""
        with self._inbox, self._outbox:
            async with open_plain_nursery() as nursery:
                async for item in self._inbox:
                    if item.n_chars <= OFF_LOOP_CHARS:
                        await self._handle(item)
                    else:
                        nursery.start_soon(self._handle, item)

    # -- what queries ask -------------------------------------------------------------------

    def render(self, request: Request) -> str:
        """The prompt as text, as it will be tokenised.

        Raises:
            ProtocolError: an id outside the vocabulary, no template.
        """
        if not isinstance(request.prompt, str):
            self._check_vocabulary(request.prompt)
            return self._runtime.detokenize(request.prompt)
        if request.raw:
            return request.prompt
        return self.render_messages(request.messages, add_generation_prompt=True)

    def render_messages(self, messages: Iterable[Message], *, add_generation_prompt: bool) -> str:
        """A conversation as text, ready for the assistant's turn or not."""
        if isinstance(self._template, LlamadError):
            raise copy.copy(self._template)
        return self._template.render(
            [{"role": m.role, "content": m.content} for m in messages],
            add_generation_prompt=add_generation_prompt,
        )

    def tokens(self, request: Request) -> list[int]:
        """The prompt as tokens.

        Raises:
            ProtocolError: no token at all, an id outside the vocabulary, no template.
            PromptTooLong: a text of this length cannot fit, however it is tokenised.
        """
        if not isinstance(request.prompt, str):
            self._check_vocabulary(request.prompt)
            tokens = list(request.prompt)
        else:
            tokens = self.text_tokens(self.render(request))
        if not tokens:
            raise ProtocolError("the prompt is empty")
        return tokens

    def text_tokens(self, text: str) -> list[int]:
        """A prompt's text as tokens, with BOS where the model wants it.

        Raises:
            PromptTooLong: a text of this length cannot fit, however it is tokenised.
        """
        facts = self._runtime.facts
        if facts.max_bytes_per_token:
            self._check_length(-(-len(text.encode()) // facts.max_bytes_per_token))
        # A template that writes BOS itself must not get a second one.
        has_bos = bool(facts.bos_text) and text.startswith(facts.bos_text)
        return self._runtime.tokenize(text, add_special=not has_bos, parse_special=True)

    # -- requests ---------------------------------------------------------------------------

    async def _handle(self, item: Ticket | Query) -> None:
        if isinstance(item, Query):
            await self._answer(item)
        elif self._decode.is_live(item):
            await self._prepare(item)

    async def _answer(self, query: Query) -> None:
        try:
            query.result = await self._off_loop(query.n_chars, query.function)
        finally:
            query.answered.set()

    async def _prepare(self, ticket: Ticket) -> None:
        result = await self._off_loop(ticket.n_chars, lambda: self._ready(ticket))
        try:
            prepared = result.unwrap()
        except LlamadError as error:
            self._decode.reject(ticket, error)
            return
        except Exception as error:  # ours or the template's: it costs this request only
            logger.exception("request %d could not be prepared", ticket.id)
            self._decode.reject(ticket, InferenceError(f"{type(error).__name__}: {error}"))
            return
        await self._outbox.send(prepared)
        self._decode.ring()

    def _ready(self, ticket: Ticket) -> Prepared:
        request = ticket.request
        tokens = self.tokens(request)
        self._check_length(len(tokens))
        return Prepared(
            id=ticket.id,
            tokens=tokens,
            max_tokens=0 if ticket.holder else min(request.max_tokens, self.n_ctx - len(tokens)),
            sampling=resolve_sampling(request, n_ctx=self.n_ctx, fresh_seed=secrets.randbits(32)),
            stop=request.stop,
            streams=ticket.streams,
            session=request.session,
            holder=ticket.holder,
        )

    def _check_vocabulary(self, tokens: Sequence[int]) -> None:
        # llama.cpp ends the process over an id it does not know.
        for token in tokens:
            if not 0 <= token < self._runtime.facts.n_vocab:
                raise ProtocolError(f"token {token} is not in the vocabulary")

    def _check_length(self, n_tokens: int) -> None:
        budget = self.n_ctx - 1  # at least one token must be left for the reply
        if n_tokens > budget:
            raise PromptTooLong(n_tokens, budget)

    async def _off_loop(self, n_chars: int, function: Callable[[], T]) -> outcome.Outcome[T]:
        if n_chars <= OFF_LOOP_CHARS:
            return outcome.capture(function)
        return await trio.to_thread.run_sync(outcome.capture, function, limiter=self._limiter)
