"""A typed Python function as a tool, and a model's arguments as the function's.

Reads signatures, hints and docstrings; calls nothing.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence

import attrs

from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.tools import Tool
from llamad_trio.typed.docstrings import read_docstring
from llamad_trio.typed.instances import instance_of_type
from llamad_trio.typed.members import Member, peel, resolved_hints
from llamad_trio.typed.schema import schema_of_members

_VARIADIC = frozenset({inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD})


def tool_from(item: Callable[..., object] | Tool) -> Tool:
    """A tool from a function with type hints; a `Tool` as it is.

    The name is the function's, the description its docstring's first paragraph, the schema
    that of its parameters with what the docstring or `Annotated` says of each.  Takes
    functions, sync or async, bound methods, `functools.partial` (without what it binds), and
    objects with `__call__`.

    Raises:
        ProtocolError: a lambda, a class, a generator function, a parameter without a hint or
            that has no name to call it by, a type that has no schema.
    """
    if isinstance(item, Tool):
        return item
    definition = _definition(item)
    name = _name(item)
    if inspect.isgeneratorfunction(definition) or inspect.isasyncgenfunction(definition):
        raise ProtocolError(f"{name} is a generator function: a tool returns its one result")
    parameters = _parameters(item, name)
    # Not `inspect.getdoc`, which finds "Call self as a function." for an undocumented `__call__`.
    documentation = read_docstring(definition.__doc__)
    summary = documentation.summary or read_docstring(_named(item).__doc__).summary
    members: list[Member] = []
    for parameter in parameters:
        if parameter.variadic:
            raise ProtocolError(f"{name}: a tool cannot take *{parameter.name}")
        if parameter.positional_only:
            raise ProtocolError(
                f"{name}: {parameter.name!r} is positional-only; tools are called by name"
            )
        if not parameter.hinted:
            raise ProtocolError(f"{name}: parameter {parameter.name!r} has no type hint")
        described = peel(parameter.hint).description
        members.append(
            Member(
                name=parameter.name,
                attribute=parameter.name,
                hint=parameter.hint,
                required=parameter.required,
                description=described or documentation.parameters.get(parameter.name),
            )
        )
    return Tool(
        name=name,
        description=summary,
        schema=schema_of_members(name, members),
        function=item,
    )


def call_arguments(tool: Tool, arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments a model gave, as the tool's function takes them.

    A function of a hand-written `Tool` may have parameters without hints, and `**kwargs`:
    those get the JSON data as it is.

    Raises:
        ValueError: arguments that are missing, unknown or of a wrong type, all of them named
            in one message, for the model to read.
        ProtocolError: the tool has no function, or one with hints that cannot be read.
    """
    if tool.function is None:
        raise ProtocolError(f"the tool {tool.name!r} has no function to call")
    parameters = _parameters(tool.function, tool.name)
    named = {parameter.name: parameter for parameter in parameters if not parameter.variadic}
    open_ended = any(parameter.variadic for parameter in parameters)
    complaints = [
        f"missing argument {parameter.name!r}"
        for parameter in named.values()
        if parameter.required and parameter.name not in arguments
    ]
    made: dict[str, object] = {}
    for key, value in arguments.items():
        parameter = named.get(key)
        if parameter is None and not open_ended:
            complaints.append(f"unknown argument {key!r}: {_taken(list(named))}")
        elif parameter is None or not parameter.hinted:
            made[key] = value
        else:
            try:
                made[key] = instance_of_type(value, parameter.hint, place=key)
            except ValueError as error:
                complaints.append(str(error))
    if complaints:
        raise ValueError(f"{tool.name}: " + "; ".join(complaints))
    return made


@attrs.frozen
class _Parameter:
    name: str
    hint: object
    hinted: bool
    required: bool
    variadic: bool
    positional_only: bool


def _parameters(item: Callable[..., object], name: str) -> Sequence[_Parameter]:
    try:
        signature = inspect.signature(item)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"{name}: its signature cannot be read: {error}") from error
    hints = resolved_hints(_definition(item), name)
    bound = _bound_names(item)
    return [
        _Parameter(
            name=parameter.name,
            hint=hints.get(parameter.name),
            hinted=parameter.name in hints,
            required=parameter.default is inspect.Parameter.empty,
            variadic=parameter.kind in _VARIADIC,
            positional_only=parameter.kind is inspect.Parameter.POSITIONAL_ONLY,
        )
        for parameter in signature.parameters.values()
        if parameter.name not in bound
    ]


def _named(item: object) -> object:
    """What has the name: the function in a partial, the function of a method, else the item."""
    while isinstance(item, functools.partial):
        item = item.func
    return item.__func__ if isinstance(item, types.MethodType) else item


def _definition(item: object) -> object:
    """What has the hints and the docstring: the function itself, or `__call__` of an object."""
    named = _named(item)
    if not callable(item):
        raise ProtocolError(f"a tool must be callable, not {type(item).__name__}")
    if isinstance(named, type):
        raise ProtocolError(f"{named.__name__} is a class; a tool is a function or an instance")
    if hasattr(named, "__annotations__") and hasattr(named, "__name__"):
        return named
    call: object = type(named).__call__
    if not hasattr(call, "__annotations__"):
        raise ProtocolError(f"{_name(item)}: a built-in function has no type hints")
    return call


def _name(item: object) -> str:
    named = _named(item)
    name = getattr(named, "__name__", None)
    if name == "<lambda>":
        raise ProtocolError("a lambda has no type hints: write a function")
    return name if isinstance(name, str) else type(named).__name__


def _bound_names(item: object) -> frozenset[str]:
    # `signature` takes what a partial binds by position out, but not what it binds by name.
    return frozenset(item.keywords) if isinstance(item, functools.partial) else frozenset()


def _taken(names: Sequence[str]) -> str:
    return f"it takes {', '.join(names)}" if names else "it takes none"
