"""Data to JSON and back, for everything that crosses the socket.  Decides what a type looks
like there; a wrong type or an unknown key is refused, and nothing is coerced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import attrs
import cattrs
from cattrs.errors import CattrsError, ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from llamad_trio.core.completion import Choice, Completion, TokenLogprob
from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.fields import unknown_names
from llamad_trio.core.request import Message, Request
from llamad_trio.core.tools import Tool, ToolCall

T = TypeVar("T", bound=attrs.AttrsInstance)


def structure(value: object, kind: type[T]) -> T:
    """JSON data as an instance of an attrs class.

    Fields that need not be given count as not given when they are null.

    Raises:
        ProtocolError: an unknown field, one that is missing, or one of a wrong type.
    """
    return _structure_with(_converter, value, kind)


def structure_known(value: object, kind: type[T]) -> T:
    """`structure`, but keys that no type has are ignored: the other side may be newer."""
    return _structure_with(_tolerant_converter, value, kind)


def _structure_with(converter: cattrs.Converter, value: object, kind: type[T]) -> T:
    if not isinstance(value, dict):
        raise ProtocolError(f"{kind.__name__} must be an object, not {type(value).__name__}")
    optional = {f.name for f in attrs.fields(kind) if f.default is not attrs.NOTHING}
    given = {name: item for name, item in value.items() if item is not None or name not in optional}
    for field in attrs.fields(kind):
        if field.name not in given and field.name not in optional:
            raise ProtocolError(f"missing field {field.name!r}")
    try:
        return converter.structure(given, kind)
    except ForbiddenExtraKeysError as error:
        raise unknown_field(error.extra_fields, given_fields(kind)) from None
    except _WRONG_SHAPE as error:
        raise ProtocolError(f"{kind.__name__}: {error}") from None


_WRONG_SHAPE = (
    *(CattrsError, AttributeError, KeyError, OverflowError, TypeError, ValueError),
    RecursionError,
)
"""What cattrs, and the code it makes, raises for a value of another shape."""


def given_fields(kind: type[attrs.AttrsInstance]) -> set[str]:
    """The names of the fields that the JSON of a class may have."""
    hidden = {name for name, how in _overrides.get(kind, {}).items() if how.omit}
    return attrs.fields_dict(kind).keys() - hidden


def unknown_field(names: Iterable[str], known: Iterable[str]) -> ProtocolError:
    """The error for unknown fields.  Tells one, and not all of it: there may be any number."""
    return ProtocolError(f"unknown field {unknown_names([min(names)[:64]], known, repr)}")


def unstructure(value: object) -> dict[str, Any]:
    """An instance as JSON data; what has its default is left out."""
    data: dict[str, Any] = _converter.unstructure(value)
    return data


# -- primitives: as they are, or not at all -----------------------------------------------


def _strictly(kind: type, name: str, *others: type) -> Callable[[object, object], object]:
    def convert(value: object, _: object) -> object:
        if isinstance(value, bool) is not (kind is bool) or not isinstance(value, (kind, *others)):
            raise ProtocolError(f"expected {name}, not {type(value).__name__}")
        return kind(value)

    return convert


# -- classes ------------------------------------------------------------------------------


def _many(name: str, kind: type[T]) -> Callable[[object, object], list[T]]:
    def convert(value: object, _: object) -> list[T]:
        if not isinstance(value, list):
            raise ProtocolError(f"{name} must be a list, not {type(value).__name__}")
        return [structure(item, kind) for item in value]

    return convert


_overrides: dict[type, dict[str, Any]] = {}


def register(kind: type[attrs.AttrsInstance], **overrides: Any) -> None:
    """Say what is special about the fields of a class: cattrs' `override` by name."""
    _overrides[kind] = overrides


register(ToolCall)
register(Message, tool_calls=override(struct_hook=_many("tool_calls", ToolCall)))
register(Tool, function=override(omit=True))
register(
    Request,
    history=override(struct_hook=_many("history", Message)),
    tools=override(struct_hook=_many("tools", Tool)),
)
register(Completion, value=override(omit=True))
register(Choice)
register(EngineConfig, lane=override(omit=True))


def _reader(
    kind: type[attrs.AttrsInstance], converter: cattrs.Converter
) -> Callable[[Any, Any], object]:
    read: Callable[[Any, Any], object] = make_dict_structure_fn(kind, converter, **_overrides[kind])

    def read_once(value: Any, type_: type) -> object:
        # A call's request is put together before the call is.
        return value if isinstance(value, kind) else read(value, type_)

    return read_once


def _writer(
    kind: type[attrs.AttrsInstance], converter: cattrs.Converter
) -> Callable[[Any], dict[str, Any]]:
    return make_dict_unstructure_fn(
        kind, converter, _cattrs_omit_if_default=True, **_overrides[kind]
    )


def _bytes_as_numbers(logprob: TokenLogprob) -> dict[str, Any]:
    return {
        "token": logprob.token,
        "text": logprob.text,
        "bytes": list(logprob.piece),
        "logprob": logprob.logprob,
        **({"top": [_bytes_as_numbers(other) for other in logprob.top]} if logprob.top else {}),
    }


def _numbers_as_bytes(value: Any, _: object) -> TokenLogprob:
    match value:
        case {
            "token": int(token),
            "bytes": list(piece),
            "logprob": int() | float() | None as logprob,
        }:
            return TokenLogprob(
                token=token,
                piece=bytes(piece),
                # JSON has no infinity; it comes as null.
                logprob=float("-inf") if logprob is None else float(logprob),
                top=tuple(_numbers_as_bytes(other, _) for other in value.get("top", ())),
            )
    raise ProtocolError("bad logprobs")


# -- the converters -----------------------------------------------------------------------


def _new_converter(*, forbid_extra_keys: bool) -> cattrs.Converter:
    made = cattrs.Converter(
        forbid_extra_keys=forbid_extra_keys,
        prefer_attrib_converters=True,
        detailed_validation=False,
        omit_if_default=True,
    )
    made.register_structure_hook(bool, _strictly(bool, "true or false"))
    made.register_structure_hook(int, _strictly(int, "an integer"))
    made.register_structure_hook(str, _strictly(str, "text"))
    made.register_structure_hook(float, _strictly(float, "a number", int))
    # Made when first needed: all of them take a tenth of a second, at each start of a process.
    made.register_structure_hook_factory(_overrides.__contains__, _reader)
    made.register_unstructure_hook_factory(_overrides.__contains__, _writer)
    made.register_structure_hook(TokenLogprob, _numbers_as_bytes)
    made.register_unstructure_hook(TokenLogprob, _bytes_as_numbers)
    return made


_converter = _new_converter(forbid_extra_keys=True)
_tolerant_converter = _new_converter(forbid_extra_keys=False)
"""For replies: whoever wrote them may be newer."""
