"""Which of several models a request means."""

from __future__ import annotations

from collections.abc import Collection

from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.fields import optional, text


def pick_model(name: str | None, known: Collection[str], default: str | None) -> str:
    """The name of the model that is meant.

    Args:
        name: the one that is asked for; `None` is the default one.
        known: those there are.
        default: which of them is the default; the first one is, if that is not there.

    Raises:
        ProtocolError: there is no such model, or none at all, or the name is no text.
    """
    name = optional(text)(name, "model")
    if name is None:
        name = default if default in known else next(iter(known), None)
    if name is None:
        raise ProtocolError("there is no model")
    if name not in known:
        raise ProtocolError(f"unknown model {name[:64]!r}; known are {', '.join(known)}")
    return name
