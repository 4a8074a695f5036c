"""Data to JSON and back, for everything that crosses the socket.  Decides what a type looks
like there; a wrong type or an unknown key is refused, and nothing is coerced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs
import cattrs
from cattrs.errors import ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from llamad_trio.core.completion import Choice, Completion, TokenLogprob
from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.request import Message, Request
from llamad_trio.core.tools import Tool, ToolCall

__all__ = ["structure", "structure_known", "unstructure"]

T = TypeVar("T", bound=attrs.AttrsInstance)

_converter = cattrs.Converter(
    forbid_extra_keys=True,
    prefer_attrib_converters=True,
    detailed_validation=False,
    omit_if_default=True,
)


def structure(value: object, kind: type[T]) -> T:
    """JSON data as an instance of a type.

    Args:
        value: an object; fields that need not be given count as not given when they are null.
        kind: an attrs class.

    Raises:
        ProtocolError: an unknown field, one that is missing, or one of a wrong type.
    """
    if not isinstance(value, dict):
        raise ProtocolError(f"{kind.__name__} must be an object, not {type(value).__name__}")
    optional = {f.name for f in attrs.fields(kind) if f.default is not attrs.NOTHING}
    given = {name: item for name, item in value.items() if item is not None or name not in optional}
    for field in attrs.fields(kind):
        if field.name not in given and field.name not in optional:
            raise ProtocolError(f"missing field {field.name!r}")
    try:
        return _converter.structure(given, kind)
    except ForbiddenExtraKeysError as error:
        raise ProtocolError(f"unknown field {min(error.extra_fields)[:64]!r}") from None


def structure_known(value: Mapping[str, object], kind: type[T]) -> T:
    """`structure`, but keys the type does not have are ignored: the other side may be newer."""
    names = {field.name for field in attrs.fields(kind)}
    return structure({name: item for name, item in value.items() if name in names}, kind)


def unstructure(value: object) -> dict[str, Any]:
    """An instance as JSON data; what has its default is left out."""
    data: dict[str, Any] = _converter.unstructure(value)
    return data


# -- primitives: as they are, or not at all -----------------------------------------------


def _strictly(kind: type, name: str) -> Callable[[object, object], object]:
    def check(value: object, _: object) -> object:
        if isinstance(value, bool) is not (kind is bool) or not isinstance(value, kind):
            raise ProtocolError(f"expected {name}, not {type(value).__name__}")
        return value

    return check


def _float(value: object, _: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ProtocolError(f"expected a number, not {type(value).__name__}")
    return float(value)


_converter.register_structure_hook(bool, _strictly(bool, "true or false"))
_converter.register_structure_hook(int, _strictly(int, "an integer"))
_converter.register_structure_hook(str, _strictly(str, "text"))
_converter.register_structure_hook(float, _float)


# -- classes ------------------------------------------------------------------------------


def _many(name: str, kind: type[T]) -> Callable[[object, object], list[T]]:
    def convert(value: object, _: object) -> list[T]:
        if not isinstance(value, list):
            raise ProtocolError(f"{name} must be a list, not {type(value).__name__}")
        return [structure(item, kind) for item in value]

    return convert


def _register(kind: type[attrs.AttrsInstance], **overrides: Any) -> None:
    read: Callable[[Any, Any], object] = make_dict_structure_fn(
        kind,
        _converter,
        _cattrs_forbid_extra_keys=True,
        _cattrs_prefer_attrib_converters=True,
        _cattrs_detailed_validation=False,
        **overrides,
    )
    write: Callable[[Any], dict[str, Any]] = make_dict_unstructure_fn(
        kind, _converter, _cattrs_omit_if_default=True, **overrides
    )

    def read_once(value: Any, type_: type) -> object:
        # A call's request is put together before the call is.
        return value if isinstance(value, kind) else read(value, type_)

    _converter.register_structure_hook(kind, read_once)
    _converter.register_unstructure_hook(kind, write)


def _bytes_as_numbers(logprob: TokenLogprob) -> dict[str, Any]:
    return {
        "token": logprob.token,
        "text": logprob.text,
        "bytes": list(logprob.piece),
        "logprob": logprob.logprob,
        **({"top": [_bytes_as_numbers(other) for other in logprob.top]} if logprob.top else {}),
    }


def _numbers_as_bytes(value: Any, _: object) -> TokenLogprob:
    try:
        logprob = value["logprob"]
        return TokenLogprob(
            token=int(value["token"]),
            piece=bytes(value["bytes"]),
            # JSON has no infinity; it comes as null.
            logprob=float("-inf") if logprob is None else float(logprob),
            top=[_numbers_as_bytes(other, _) for other in value.get("top", ())],
        )
    except (TypeError, KeyError, ValueError, AttributeError):
        raise ProtocolError("bad logprobs") from None


_converter.register_structure_hook(TokenLogprob, _numbers_as_bytes)
_converter.register_unstructure_hook(TokenLogprob, _bytes_as_numbers)
_register(ToolCall)
_register(Message, tool_calls=override(struct_hook=_many("tool_calls", ToolCall)))
_register(Tool, function=override(omit=True))
_register(
    Request,
    history=override(struct_hook=_many("history", Message)),
    tools=override(struct_hook=_many("tools", Tool)),
)
_register(Completion, value=override(omit=True))
_register(Choice)
_register(EngineConfig, lane=override(omit=True))
