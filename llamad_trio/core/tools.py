"""Tools a model may call, and its calls.  Pure data: nothing here calls anything."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import attrs

from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.fields import apply_converters, checked, text, typed_init

JsonObject = Mapping[str, Any]
"""An object of JSON data, as `json.loads` gives it."""

ToolChoice = Literal["auto", "none", "required"] | str  # noqa: PYI051  (the words are documented)
"""`"auto"`, `"none"`, `"required"`, or the name of the one tool to call."""

TOOL_CHOICES = frozenset({"auto", "none", "required"})

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
"""What every tool format can write without quoting, and no control token looks like."""


def _name(value: object, _field: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ProtocolError(
            f"tool name {value!r} must be up to 64 letters, digits, '_', '.' or '-', "
            "and begin with a letter or '_'"
        )
    if value in TOOL_CHOICES:
        raise ProtocolError(f"a tool cannot be named {value!r}: tool_choice gives that a meaning")
    return value


class _CheckedObject(dict[str, Any]):
    """What `json_object` has checked and copied: a request that is varied does not do so again."""


def json_object(value: object, name: str) -> JsonObject:
    """A converter to a copy of an object of JSON data, without text that llama.cpp cannot take."""
    if isinstance(value, _CheckedObject):
        return value
    if not isinstance(value, Mapping):
        raise ProtocolError(f"{name} must be an object, not {type(value).__name__}")
    try:
        copy = _CheckedObject(json.loads(json.dumps(value, allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"{name} is not JSON data: {error}") from None
    for leaf in _texts(copy):
        text(leaf, name)
    return copy


def _texts(value: object) -> Iterator[str]:
    """Every text in JSON data, keys included.  Not recursive: depth is to cost nothing."""
    rest = [value]
    while rest:
        match rest.pop():
            case str() as leaf:
                yield leaf
            case list() as items:
                rest += items
            case dict() as fields:
                yield from fields
                rest += fields.values()


@typed_init
@attrs.frozen(field_transformer=apply_converters)
class Tool:
    """Something a model may call.

    Args:
        name: letters, digits, `_`, `.` and `-`.
        description: what it does, for the model to read.
        schema: JSON Schema of its arguments, of type `object`.
        function: what `run_tools` calls with the arguments; the engine never does.

    Raises:
        ProtocolError: a name that some format could not write, a schema that is no JSON.
    """

    name: str = attrs.field(metadata=checked(_name))
    description: str = attrs.field(metadata=checked(text))
    schema: JsonObject = attrs.field(hash=False, metadata=checked(json_object))
    function: Callable[..., object] | None = attrs.field(default=None, eq=False)

    @property
    def n_chars(self) -> int:
        """How much text there is to work on."""
        return len(self.description) + len(str(self.schema))


@typed_init
@attrs.frozen(field_transformer=apply_converters)
class ToolCall:
    """One call of a tool by the model.

    Args:
        id: names the call; the message with its result carries it, too.
        name: the tool's name.
        arguments: JSON data.

    Raises:
        ProtocolError: a name no tool can have, arguments that are no JSON.
    """

    id: str = attrs.field(metadata=checked(text))
    name: str = attrs.field(metadata=checked(_name))
    arguments: JsonObject = attrs.field(hash=False, metadata=checked(json_object))
