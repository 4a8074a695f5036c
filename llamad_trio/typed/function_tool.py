"""A typed Python function as a tool, and a model's arguments as the function's.

Reads signatures, hints and docstrings; calls nothing.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence

from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.tools import Tool
from llamad_trio.typed.docstrings import Documentation, read_docstring
from llamad_trio.typed.instances import instance_of_type
from llamad_trio.typed.members import Member, peel, resolve_hints
from llamad_trio.typed.schema import schema_of_members

_EMPTY = inspect.Parameter.empty
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
    summary = documentation.summary or read_docstring(_named_part(item).__doc__).summary
    members = [_member(parameter, name, documentation) for parameter in parameters]
    schema = schema_of_members(name, members)
    return Tool(name=name, description=summary, schema=schema, function=item)


def _member(parameter: inspect.Parameter, tool: str, documentation: Documentation) -> Member:
    name = parameter.name
    if parameter.kind in _VARIADIC:
        raise ProtocolError(f"{tool}: a tool cannot take *{name}")
    if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
        raise ProtocolError(f"{tool}: {name!r} is positional-only; tools are called by name")
    if parameter.annotation is _EMPTY:
        raise ProtocolError(f"{tool}: parameter {name!r} has no type hint")
    return Member(
        name=name,
        attribute=name,
        hint=parameter.annotation,
        required=parameter.default is _EMPTY,
        description=peel(parameter.annotation).description or documentation.parameters.get(name),
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
    named = {each.name: each for each in parameters if each.kind not in _VARIADIC}
    complaints = [
        f"missing argument {name!r}"
        for name, parameter in named.items()
        if parameter.default is _EMPTY and name not in arguments
    ]
    made: dict[str, object] = {}
    for name, value in arguments.items():
        if name in named and named[name].annotation is not _EMPTY:
            try:
                made[name] = instance_of_type(value, named[name].annotation, place=name)
            except ValueError as error:
                complaints.append(str(error))
        elif name in named or len(named) < len(parameters):
            made[name] = value
        else:
            takes = f"it takes {', '.join(named)}" if named else "it takes none"
            complaints.append(f"unknown argument {name!r}: {takes}")
    if complaints:
        raise ValueError(f"{tool.name}: " + "; ".join(complaints))
    return made


def _parameters(item: Callable[..., object], name: str) -> Sequence[inspect.Parameter]:
    """What it can be called with, each with its type for an annotation, if it has one."""
    try:
        signature = inspect.signature(item)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"{name}: its signature cannot be read: {error}") from error
    hints = resolve_hints(_definition(item), name)
    # `signature` takes what a partial binds by position out, but not what it binds by name.
    bound = item.keywords if isinstance(item, functools.partial) else ()
    return [
        parameter.replace(annotation=hints.get(parameter.name, _EMPTY))
        for parameter in signature.parameters.values()
        if parameter.name not in bound
    ]


def _named_part(item: object) -> object:
    """What has the name: the function in a partial, the function of a method, else the item."""
    while isinstance(item, functools.partial):
        item = item.func
    return item.__func__ if isinstance(item, types.MethodType) else item


def _definition(item: object) -> object:
    """What has the hints and the docstring: the function itself, or `__call__` of an object."""
    named = _named_part(item)
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
    named = _named_part(item)
    name = getattr(named, "__name__", None)
    if name == "<lambda>":
        raise ProtocolError("a lambda has no type hints: write a function")
    return name if isinstance(name, str) else type(named).__name__
