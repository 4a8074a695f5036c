"""Errors as the texts of the protocol, and back."""

from __future__ import annotations

import logging
import re

from llamad_trio.core import errors
from llamad_trio.core.errors import (
    Busy,
    EngineClosed,
    InferenceError,
    LlamadError,
    PromptTooLong,
    ProtocolError,
    UnsupportedFeature,
)
from llamad_trio.wire.converter import structure_known, unstructure

logger = logging.getLogger("llamad_trio")

CLOSING = "inference: the daemon is stopping"
"""What those are told whose request was under way."""

_AS_THEY_ARE = (Busy, InferenceError, PromptTooLong, ProtocolError)
"""These begin with the protocol's own words."""

_KINDS = {name: getattr(errors, name) for name in errors.__all__ if name != "LlamadError"}


def error_text(error: LlamadError) -> str:
    """What a client of the original protocol is told."""
    if isinstance(error, _AS_THEY_ARE):
        return str(error)
    kind = "invalid request" if isinstance(error, UnsupportedFeature) else "inference"
    return f"{kind}: {error}"


def error_reply(error: LlamadError, *, is_original: bool) -> dict[str, object]:
    """The whole reply: with the error's type and fields, unless it is the original's."""
    reply: dict[str, object] = {"error": error_text(error)}
    if not is_original:
        reply |= {"type": type(error).__name__, "details": unstructure(error)}
    return reply


def error_from(reply: dict[str, object]) -> LlamadError:
    """The error that a reply tells of, as it was raised on the other side."""
    text = str(reply.get("error"))
    kind, details = _KINDS.get(str(reply.get("type"))), reply.get("details")
    if kind is not None and isinstance(details, dict):
        try:
            error: LlamadError = structure_known(details, kind)
            str(error)  # nobody else is to find out that its fields make no text
        except (ProtocolError, ArithmeticError, TypeError, ValueError) as failure:
            logger.debug("an error of another version: %r", failure)
        else:
            return error
    numbers = [int(number) for number in re.findall(r"\d{1,18}", text)]
    if len(numbers) == 2 and text.startswith("busy: "):
        return Busy(*numbers)
    if len(numbers) == 2 and text.startswith("prompt too long: "):
        return PromptTooLong(*numbers)
    if text.startswith("invalid request: "):
        return ProtocolError(text.removeprefix("invalid request: "))
    if text in {"empty request", "request too large", "read timeout"}:
        return ProtocolError(text)
    if text == CLOSING:
        return EngineClosed()
    return InferenceError(text.removeprefix("inference: "))
