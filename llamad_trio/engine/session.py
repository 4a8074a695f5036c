"""Explicit control of what is computed when: prefix, suffix, decode.

For agents and editors that know what will stay and what will change.  A session keeps
the text of its prefix and suffix; their KV lies in the pool like everybody's, is kept
there in preference to everything that is not running, and is computed again should it
have had to go.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from typing import Literal, Unpack, get_args

import attrs
import trio

from llamad_trio.core.errors import ContextOverflow, PromptTooLong, ProtocolError
from llamad_trio.core.request import Message, Request, RequestFields
from llamad_trio.engine.desk import Desk
from llamad_trio.engine.stream import TokenStream
from llamad_trio.scheduling.prefix import common_length
from llamad_trio.scheduling.snapshot_file import pack_tokens
from llamad_trio.typed.asking import as_request

Content = str | Sequence[Message]
Stage = Literal["prefix", "suffix"]

STAGES: tuple[Stage, ...] = get_args(Stage)


@attrs.frozen(kw_only=True)
class PrefixStatus:
    """What it took to have a prefix in the pool.  Counts in tokens.

    Attributes:
        reused: were there already, whoever had computed them.
        dropped: of what the session held before, no longer part of it.
        prefilled: computed now.
        resident: in the pool, for this session: all but the last one where the memory
            cannot go back (`ModelInfo.can_rewind`), for which decoding computes that.
        available: what suffix and reply may still take.
        byte_hash: SHA-256 (hex) of the prefix as text.
        token_hash: SHA-256 (hex) of its token ids, as little-endian 32-bit integers.
        manifest_digest: the identity it was computed under (`ModelInfo.identity`).
    """

    reused: int
    dropped: int
    prefilled: int
    resident: int
    available: int
    byte_hash: str
    token_hash: str
    manifest_digest: str


@attrs.frozen(kw_only=True)
class SuffixStatus:
    """What is in the pool once a suffix is.  Counts in tokens.

    Attributes:
        suffix: tokens of the suffix.
        prefix: tokens before it.  Where text and suffix meet, they may be tokenised
            differently than the prefix alone was: then this is less than its length.
        resident, available, manifest_digest: as in `PrefixStatus`.
    """

    suffix: int
    prefix: int
    resident: int
    available: int
    manifest_digest: str


@attrs.frozen(kw_only=True)
class Segment:
    """A part of what a session holds: its ranges in bytes and tokens, and their hashes."""

    kind: Stage
    bytes: tuple[int, int]
    tokens: tuple[int, int]
    byte_hash: str
    token_hash: str


@attrs.frozen(kw_only=True)
class ContextReport:
    """What a session holds now.

    Attributes:
        segments: its parts, in order.
        resident: tokens of it that are in the pool at this moment.
        reused: tokens that the last call found computed already.
        capacity: most tokens it can have, reply included.
        state: `"empty"`, `"prefix"` or `"suffix"`: what was done last.
        manifest_digest: the identity it was computed under.
    """

    segments: tuple[Segment, ...]
    resident: int
    reused: int
    capacity: int
    state: Literal["empty", "prefix", "suffix"]
    manifest_digest: str


@attrs.frozen
class _Context:
    """Text and tokens, the first `n_prefix` and `n_prefix_bytes` of them the prefix's."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    n_prefix: int = 0
    n_prefix_bytes: int = 0


class Session:
    """One context under explicit control.  Made by `Engine.session` and `fork`.

    A prefix and a suffix are either text, used as it is, or messages, put through the
    chat template: the suffix's then end with the assistant's turn open.  Where they
    meet, the tokens are those of the whole: the split never changes what the model
    reads.

    One task at a time; a second one waits.
    """

    _names = count(1)

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._name = f"session {next(self._names)}"
        self._turn = trio.Lock()
        self._closed = False
        self._prefix: str | tuple[Message, ...] = ""
        self._context = _Context()
        self._before_suffix: _Context | None = None
        self._reused = 0

    async def ensure_prefix(self, prefix: Content) -> PrefixStatus:
        """Have exactly this prefix in the pool, computing what is not there.

        A checkpoint.  Cancelled or failed, the session holds what it held before.

        Args:
            prefix: text, or messages.

        Raises:
            ContextOverflow: it does not fit, at stage `"prefix"`.
            ProtocolError, InferenceError, EngineClosed, SessionFatal: as `Engine.complete`.
        """
        content = _check_content(prefix)
        async with self._alone():
            text, tokens = await self._tokens(content, ends_open=False)
            before = self._context.tokens
            kept = common_length(before, tokens, len(tokens))
            self._check_room("prefix", kept, len(tokens))
            reused, resident = await self._hold("prefix", tokens)
            if not self._desk.facts.can_rewind:
                self._desk.let_go(self._holder("suffix"))
            self._prefix, self._before_suffix, self._reused = content, None, reused
            self._context = _Context(text, tokens, len(tokens), len(text.encode()))
            return PrefixStatus(
                reused=reused,
                dropped=len(before) - kept,
                prefilled=resident - reused,
                resident=resident,
                available=self._desk.most_tokens - len(tokens),
                byte_hash=_sha256(text.encode()),
                token_hash=_token_hash(tokens),
                manifest_digest=self._desk.facts.identity,
            )

    async def prefill_suffix(self, suffix: Content) -> SuffixStatus:
        """Have this suffix in the pool after the prefix, instead of the suffix before it.

        A checkpoint.  Cancelled or failed, the session holds its prefix alone.

        Args:
            suffix: text after a prefix of text, messages after a prefix of messages.

        Raises:
            ContextOverflow: it does not fit, at stage `"suffix"`.
            ProtocolError: text after messages, or messages after text; and all that
                `ensure_prefix` raises.
        """
        content = _check_content(suffix)
        async with self._alone():
            prefix = self._before_suffix or self._context
            self._context, self._before_suffix = prefix, None
            text, tokens = await self._tokens(_join(self._prefix, content), ends_open=True)
            n_prefix = common_length(prefix.tokens, tokens, len(tokens))
            self._check_room("suffix", n_prefix, len(tokens))
            self._reused, resident = await self._hold("suffix", tokens)
            self._before_suffix = prefix
            # A template may write a message that is not the last one differently.
            n_bytes = common_length(prefix.text.encode(), text.encode(), prefix.n_prefix_bytes)
            self._context = _Context(text, tokens, n_prefix, n_bytes)
            return SuffixStatus(
                suffix=len(tokens) - n_prefix,
                prefix=n_prefix,
                resident=resident,
                available=self._desk.most_tokens - len(tokens),
                manifest_digest=self._desk.facts.identity,
            )

    def decode(self, **fields: Unpack[RequestFields]) -> AbstractAsyncContextManager[TokenStream]:
        """Generate from here: as `Engine.stream`, with everything before computed already.

        The session stays where it is: decoding again starts from the same place.

        Args:
            fields: sampling fields of `Request`, `max_tokens` and `stop`.
        """
        self._check_open()
        return self._decode(Request(self._context.tokens, session=self._name), fields)

    @asynccontextmanager
    async def _decode(self, request: Request, fields: RequestFields) -> AsyncIterator[TokenStream]:
        async with self._desk.reply_to(as_request(request, fields)) as reply:
            yield TokenStream(reply)

    def explain(self) -> ContextReport:
        """What the session holds.  Never blocks."""
        context = self._context
        data = context.text.encode()
        return ContextReport(
            segments=tuple(_segments(context, data)),
            resident=self._desk.resident(context.tokens),
            reused=self._reused,
            capacity=self._desk.most_tokens,
            state="suffix" if self._before_suffix else "prefix" if context.tokens else "empty",
            manifest_digest=self._desk.facts.identity,
        )

    @asynccontextmanager
    async def fork(self) -> AsyncIterator[Session]:
        """Another session that begins with all this one holds, and shares its cells.

        An async context manager, as `Engine.session`.
        """
        self._check_open()
        async with open_session(self._desk) as other:
            other._prefix, other._context = self._prefix, self._context
            other._before_suffix = self._before_suffix
            if self._before_suffix is not None:
                await other._hold("prefix", self._before_suffix.tokens)
                await other._hold("suffix", other._context.tokens)
            else:
                await other._hold("prefix", other._context.tokens)
            yield other

    # -- inside -----------------------------------------------------------------------------

    async def _hold(self, stage: Stage, tokens: tuple[int, ...]) -> tuple[int, int]:
        """Have tokens in the pool; return how many were there already, and how many are now.

        Where memory cannot go back, decoding could not compute the last token again: it is
        left to that, and the prefix is held beside the suffix.
        """
        resident = tokens if self._desk.facts.can_rewind else tokens[:-1]
        return await self._desk.hold(self._holder(stage), resident), len(resident)

    def _holder(self, stage: Stage) -> str:
        return self._name if self._desk.facts.can_rewind else f"{self._name} {stage}"

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        self._check_open()
        async with self._turn:
            self._check_open()
            try:
                yield
            finally:
                if self._closed:  # meanwhile, by another task
                    self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("the session is closed")

    def _check_room(self, stage: Stage, kept: int, n_tokens: int) -> None:
        if n_tokens > self._desk.most_tokens - 1:  # one token of a reply must fit, too
            raise ContextOverflow(stage, kept, n_tokens - kept, self._desk.most_tokens)

    async def _tokens(
        self, content: str | tuple[Message, ...], *, ends_open: bool
    ) -> tuple[str, tuple[int, ...]]:
        try:
            return await self._desk.prepare(content, ends_open=ends_open)
        except PromptTooLong as error:
            stage: Stage = "suffix" if ends_open else "prefix"
            kept = len(self._context.tokens)
            raise ContextOverflow(
                stage, kept, error.tokens - kept, self._desk.most_tokens
            ) from None

    def close(self) -> None:
        """Let go of what is held.  `Engine.session` does it."""
        self._closed = True
        for stage in STAGES:
            self._desk.let_go(self._holder(stage))


@asynccontextmanager
async def open_session(desk: Desk) -> AsyncIterator[Session]:
    """A session of an engine, closed with the block."""
    session = Session(desk)
    try:
        yield session
    finally:
        session.close()


def _check_content(content: Content) -> str | tuple[Message, ...]:
    if isinstance(content, str):
        prompt = Request(content, raw=True).prompt
        assert isinstance(prompt, str)
        return prompt
    return tuple(Request("", history=content).history)


def _join(
    prefix: str | tuple[Message, ...], suffix: str | tuple[Message, ...]
) -> str | tuple[Message, ...]:
    if isinstance(prefix, str) and isinstance(suffix, str):
        return prefix + suffix
    if isinstance(prefix, tuple) and isinstance(suffix, tuple):
        return prefix + suffix
    if not prefix:
        return suffix
    raise ProtocolError("prefix and suffix must both be text, or both be messages")


def _segments(context: _Context, data: bytes) -> Iterable[Segment]:
    byte_cuts = (0, context.n_prefix_bytes, len(data))
    token_cuts = (0, context.n_prefix, len(context.tokens))
    for i, kind in enumerate(STAGES):
        bytes_, tokens = (byte_cuts[i], byte_cuts[i + 1]), (token_cuts[i], token_cuts[i + 1])
        if bytes_[0] < bytes_[1] or tokens[0] < tokens[1]:
            yield Segment(
                kind=kind,
                bytes=bytes_,
                tokens=tokens,
                byte_hash=_sha256(data[slice(*bytes_)]),
                token_hash=_token_hash(context.tokens[slice(*tokens)]),
            )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _token_hash(tokens: Sequence[int]) -> str:
    return _sha256(pack_tokens(tokens))
