"""The preprocess actor: template, tokenise, check the budget, hand on.

Short texts are worked on at once, in the order of arrival.  Long ones go to a worker
thread each, and the short ones behind them do not wait: first come, first served is
counted from here on.  No cancel abandons such a thread: the model outlives it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import attrs
import outcome
import trio

from llamad_trio.chat.conversation import ChatFormat, Turn
from llamad_trio.chat.guard import SENTINELS
from llamad_trio.chat.meter import FULL, QUICK, RenderLimits, TemplateTimeout
from llamad_trio.chat.template import ChatTemplate
from llamad_trio.core.errors import (
    EngineClosed,
    InferenceError,
    LlamadError,
    PromptTooLong,
    ProtocolError,
)
from llamad_trio.core.request import Message, Request
from llamad_trio.engine.decode import DecodeActor
from llamad_trio.engine.ticket import Ticket
from llamad_trio.scheduling.plan import Prepared, resolve_sampling
from llamad_trio.scheduling.prefix import common_length
from llamad_trio.scheduling.runtime import Runtime, Scoring, tokens_of_prompt, without_sentinel
from llamad_trio.system.nursery import ends_in_order, open_plain_nursery

T = TypeVar("T")

logger = logging.getLogger("llamad_trio")

MAX_THREADS = 4
"""Long texts worked on at once, and constraints compiled at once; more would only take each
other's cores.  Two limits, because a hostile constraint may take seconds."""

OFF_LOOP_CHARS = 2_000
"""Texts longer than this are worked on in a thread.  Templating and tokenising this many
characters takes about a millisecond; the loop may be blocked for five at most."""


@attrs.define(eq=False)
class Query:
    """A question about text for the preprocess actor: `function`, of `n_chars` of it.

    The function is told what a template may use.  `is_constrained` is whether it is of a
    request with a constraint, which may take time to read.
    """

    function: Callable[[RenderLimits], Any]
    n_chars: int
    is_constrained: bool
    result: outcome.Outcome[Any] = attrs.field(factory=lambda: outcome.Error(EngineClosed()))
    answered: trio.Event = attrs.field(factory=trio.Event)

    async def answer(self) -> Any:
        """Wait for the result of the function, or its error.  A checkpoint."""
        await self.answered.wait()
        return self.result.unwrap()


class Preprocessor:
    """Turns requests into token lists that are known to fit.

    `template` is the chat template, or the error for requests that need one; `n_ctx` the most
    tokens, prompt and reply together, that one request can have.
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
        self._compilers = trio.CapacityLimiter(MAX_THREADS)
        self._chat = ChatFormat(runtime.facts, template)

    @ends_in_order
    async def run(self) -> None:
        """Run until cancelled.  What is in the inbox then is answered by nobody."""
        with self._inbox, self._outbox:
            async with open_plain_nursery() as nursery:
                async for item in self._inbox:
                    if _is_long(item):
                        nursery.start_soon(self._handle, item)
                    else:
                        await self._handle(item)

    # -- what queries ask -------------------------------------------------------------------

    def render(self, request: Request, limits: RenderLimits) -> str:
        """The prompt as text, as it will be tokenised.

        Raises:
            ProtocolError: an id outside the vocabulary, no template.
        """
        if not isinstance(request.prompt, str | None):
            self._check_vocabulary(request.prompt)
            return self._runtime.detokenize(request.prompt)
        sentinel = next((s for s in SENTINELS if not _has(request, s)), SENTINELS[0])
        return self._chat.turn(request, sentinel, limits).prompt.replace(sentinel, "")

    def tokens(self, request: Request, limits: RenderLimits) -> tuple[Turn, list[int]]:
        """What a request comes to, and its prompt as tokens.

        Raises:
            ProtocolError: no token at all, an id outside the vocabulary, no template.
            PromptTooLong: a text of this length cannot fit, however it is tokenised.
        """
        if not isinstance(request.prompt, str | None):
            self._check_vocabulary(request.prompt)
            turn = self._chat.turn(request, "", limits)
            tokens = list(request.prompt)
        else:
            turn, tokens = self._tokenize_unforged(
                request,
                lambda sentinel: self._chat.turn(request, sentinel, limits),
                lambda turn: turn.prompt,
            )
        if not tokens:
            raise ProtocolError("the prompt is empty")
        return turn, tokens

    def text_tokens(self, text: str) -> list[int]:
        """A prompt's text as tokens, with BOS where the model wants it.

        Raises:
            PromptTooLong: a text of this length cannot fit, however it is tokenised.
        """
        facts = self._runtime.facts
        if facts.max_bytes_per_token:
            self._check_length(-(-len(text.encode()) // facts.max_bytes_per_token))
        return tokens_of_prompt(self._runtime, text)

    def conversation(
        self, messages: tuple[Message, ...], limits: RenderLimits, *, ends_open: bool
    ) -> tuple[str, list[int]]:
        """Messages as text and tokens, ready for the assistant's turn or not."""

        def render(sentinel: str) -> tuple[str, str]:
            text = self._chat.render_messages(
                messages, sentinel, limits, add_generation_prompt=ends_open
            )
            return text, text.replace(sentinel, "")

        (_, text), tokens = self._tokenize_unforged(messages, render, lambda rendered: rendered[0])
        return text, tokens

    def scoring_tokens(
        self, request: Request, continuations: Sequence[str], limits: RenderLimits
    ) -> Scoring:
        """The tokens of a prompt, and of texts that follow it.  Raises as `tokens`."""
        turn, prompt = self.tokens(request, limits)
        wholes: list[list[int]] = []
        if request.raw and isinstance(request.prompt, str):
            wholes = [self.text_tokens(turn.prompt + text) for text in continuations]
        n = min((common_length(prompt, whole, len(prompt)) for whole in wholes), default=0)
        if n:
            scoring = Scoring(prompt[:n], [whole[n:] for whole in wholes], prompt[n:])
        else:
            # Ids, and what a template ends with, are joined to nothing that follows.
            tokenize = partial(self._runtime.tokenize, add_special=False, parse_special=False)
            scoring = Scoring(prompt, [tokenize(text) for text in continuations], ())
        longest = max(map(len, (*scoring.targets, scoring.own)))
        self._check_length(len(scoring.prompt) + longest)
        return scoring

    def _tokenize_unforged(
        self, source: object, make: Callable[[str], T], text_of: Callable[[T], str]
    ) -> tuple[T, list[int]]:
        """Make something with a prompt's text in it, and tokenise that.

        What looks like a control token and is not the template's own has a sentinel in it,
        by which `make` has been given; its tokens are left out.
        """
        for sentinel in SENTINELS:
            made = make(sentinel)
            text = text_of(made)
            tokens = self.text_tokens(text)
            if sentinel not in text:
                return made, tokens
            if _has(source, sentinel):
                continue
            kept = without_sentinel(self._runtime, tokens, sentinel, text.count(sentinel))
            if kept is not None:
                return made, kept
        raise ProtocolError("there is text that this vocabulary cannot tell from a control token")

    # -- requests ---------------------------------------------------------------------------

    @ends_in_order
    async def _handle(self, item: Ticket | Query) -> None:
        if isinstance(item, Ticket):
            if self._decode.is_live(item):
                await self._prepare(item)
            return
        try:
            item.result = await self._work(item, item.function)
        finally:
            item.answered.set()

    async def _prepare(self, ticket: Ticket) -> None:
        result = await self._work(ticket, partial(self._ready, ticket))
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
        self._decode.wake()

    def _ready(self, ticket: Ticket, limits: RenderLimits) -> Prepared:
        request = ticket.request
        turn, tokens = self.tokens(request, limits)
        self._check_length(len(tokens))
        ticket.turn = turn
        computes_only = ticket.holder is not None or bool(ticket.targets)
        return Prepared(
            id=ticket.id,
            tokens=tokens,
            max_tokens=0 if computes_only else min(request.max_tokens, self.n_ctx - len(tokens)),
            sampling=resolve_sampling(request, n_ctx=self.n_ctx, fresh_seed=secrets.randbits(32)),
            stop=request.stop,
            streams=ticket.streams,
            session=request.session,
            holder=ticket.holder,
            targets=ticket.targets,
            constraint=None if turn.constraint is None else self._runtime.compile(turn.constraint),
            visible=turn.visible,
            n_logprobs=request.logprobs,
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

    async def _work(
        self, item: Ticket | Query, function: Callable[[RenderLimits], T]
    ) -> outcome.Outcome[T]:
        """Call `function` with what its template may use: here, or in a thread."""
        if not _is_long(item):
            result = outcome.capture(function, QUICK)
            if not isinstance(result, outcome.Error) or not isinstance(
                result.error, TemplateTimeout
            ):
                return result
        async with self._compilers if item.is_constrained else self._limiter:
            if isinstance(item, Ticket) and not self._decode.is_live(item):
                return outcome.Error(EngineClosed())  # nobody will see it
            return await trio.to_thread.run_sync(
                outcome.capture, function, FULL, limiter=trio.CapacityLimiter(1)
            )


def _is_long(item: Ticket | Query) -> bool:
    return item.n_chars > OFF_LOOP_CHARS or item.is_constrained


def _has(source: object, sentinel: str) -> bool:
    """Whether any text of a request, or of messages, has the sentinel in it."""
    return ascii(sentinel)[1:-1] in ascii(source)
