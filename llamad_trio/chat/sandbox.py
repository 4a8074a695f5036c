"""The Jinja that chat templates run in: what transformers offers, bounded.

A template is somebody else's program.  Four walls hold it:

- Names: a value has the methods that `functions` lists, and no other attribute.
- Source: its length, its parts and their nesting are bounded before Python compiles it.
- Time: each turn of a loop, each call and filter reports to the rendering's `Meter`.
- Size: so does each value made, and before it is made if it could be large.

The reports are filters that no template can name, put around parts of its syntax tree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from llamad_trio.chat.functions import METHODS, TEMPLATE_FILTERS, TEMPLATE_TESTS, Function, is_in
from llamad_trio.chat.meter import MAX_INT_BITS, NODE_CHARS, SCALARS, TooLarge, current_meter

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from jinja2.runtime import Context

_MAX_SOURCE_CHARS = 64 * 1024
"""Longest source.  The longest known one has 20,000 characters."""

_MAX_PARTS = 10_000
"""Most nodes of a source's syntax tree.  Compiling as many takes a second."""

_MAX_NESTING = 100
"""Deepest nesting of a source; the deepest known one has 29 levels.  Python's own compiler
recurses over what comes of it, in C, and over a chain of `elif`."""

_WRITTEN_CHARS = 2
"""What a reference to a text counts for: its 8 bytes, at four a character."""

_MACRO_CHARS = 192
"""What a macro counts for each time its definition is passed: its 700 bytes."""

_LOOP_NAMES = {"depth", "depth0", "first", "index", "index0", "last", "length"}
_LOOP_NAMES |= {"nextitem", "previtem", "revindex", "revindex0"}


# -- the source ---------------------------------------------------------------------------------


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks what the model wrote: renders its body.

    The body keeps a scope of its own, as in transformers: what it sets does not leak out.
    """

    tags = {"generation"}  # noqa: RUF012  (declared so by the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _check_tree(tree: nodes.Template) -> None:
    """Refuse what Python's compiler might not survive, and what no chat template uses."""
    n_parts = depth = 0
    level: list[nodes.Node] = [tree]
    while level:
        depth += 1
        n_parts += len(level)
        if depth > _MAX_NESTING:
            raise TooLarge(f"it nests deeper than {_MAX_NESTING} levels")
        if n_parts > _MAX_PARTS:
            raise TooLarge(f"it has more than {_MAX_PARTS} parts")
        for node in level:
            _check_node(node)
        level = [child for node in level for child in node.iter_child_nodes()]


def _check_node(node: nodes.Node) -> None:
    match node:
        case nodes.If(elif_=elifs) if len(elifs) > _MAX_NESTING:
            raise TooLarge(f"it has more than {_MAX_NESTING} `elif` in a row")
        case nodes.Const(value=int(number)) if number.bit_length() > MAX_INT_BITS:
            raise TooLarge("a number is too large")
        case nodes.Call() | nodes.Filter() | nodes.Test() if node.dyn_args or node.dyn_kwargs:
            raise jinja2.TemplateAssertionError("arguments are unpacked", node.lineno)
        case nodes.Compare(ops=[_, _, *_]):
            raise jinja2.TemplateAssertionError("a chain of comparisons", node.lineno)
        case (
            nodes.Block()
            | nodes.Extends()
            | nodes.Include()
            | nodes.Import()
            | nodes.FromImport()
            | nodes.EvalContextModifier()  # autoescape
        ):
            raise jinja2.TemplateAssertionError(f"no {type(node).__name__}, please", node.lineno)


# -- reports ------------------------------------------------------------------------------------


def _step(value: object) -> object:
    current_meter().step()
    return value


def _slice(value: Any, start: Any, stop: Any, step: Any) -> Any:
    meter = current_meter()
    meter.check(len(value))
    return meter.count_made(value[start:stop:step])


def _join(values: tuple[object, ...]) -> str:
    meter = current_meter()
    return meter.join(map(meter.text, values))


def _add(values: tuple[Any, ...]) -> Any:
    meter = current_meter()
    for value in values:
        if type(value) is not str:
            break
    else:
        return meter.join(values)
    total, *more = values
    for value in more:
        # What `safe` has marked escapes the other.
        meter.check(5 * sum(len(side) for side in (total, value) if isinstance(side, Sized)))
        total = meter.count_made(total + value)
    return total


_REPORTS: dict[str, Function] = {
    "(add)": _add,
    "(compared)": lambda value: current_meter().allow_comparing(value),
    "(in)": is_in,
    "(join)": _join,
    "(macro)": lambda _value: current_meter().spend(_MACRO_CHARS),
    "(made)": lambda value: current_meter().count_made(value),
    "(slice)": _slice,
    "(step)": _step,
}


def _apply(name: str, node: Any, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _alone(name: str, lineno: int) -> nodes.ExprStmt:
    """A report that is a statement."""
    return nodes.ExprStmt(_apply(name, nodes.Const(None, lineno=lineno)), lineno=lineno)


class _Reporting(NodeTransformer):
    """Puts the reports into a template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        node.body.insert(0, _alone("(step)", node.lineno))
        if node.test is not None:  # which may never enter the body
            node.test = _apply("(step)", node.test)
        return self.generic_visit(node)

    def visit_Macro(self, node: nodes.Node) -> list[nodes.Node]:  # noqa: N802
        return [_alone("(macro)", node.lineno), self.generic_visit(node)]

    visit_CallBlock = visit_Macro  # noqa: N815  (its body is a macro)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        # As an expression, the template's own text is counted when it is written.
        return nodes.Const(node.data, lineno=node.lineno)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:  # noqa: N802
        # One step for all of `a + b + …`, which is what most templates do most.
        terms = [node.right]
        while isinstance(node.left, nodes.Add):
            node = node.left
            terms.append(node.right)
        terms.append(node.left)
        return self._apply_to_all("(add)", terms[::-1])

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        return self._apply_to_all("(join)", node.nodes)

    def _apply_to_all(self, name: str, parts: list[nodes.Expr]) -> nodes.Node:
        values = [self.visit(part) for part in parts]
        return _apply(name, nodes.Tuple(values, "load", lineno=parts[0].lineno))

    def visit_List(self, node: Any) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _apply("(made)", node)

    visit_Tuple = visit_Dict = visit_List  # noqa: N815

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        node.key = _apply("(compared)", node.key)
        return self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        none = nodes.Const(None, lineno=node.lineno)
        return _apply("(slice)", node.node, *(end or none for end in ends))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        (operand,) = node.ops
        if "in" in operand.op:
            found = _apply("(in)", node.expr, operand.expr)
            return found if operand.op == "in" else nodes.Not(found, lineno=node.lineno)
        if not isinstance(operand.expr, nodes.Const):  # where that ends, the comparison does
            node.expr = _apply("(compared)", node.expr)
            operand.expr = _apply("(compared)", operand.expr)
        return node


# -- the environment ----------------------------------------------------------------------------


@jinja2.pass_context
def _written(_context: Context, value: object) -> str:
    """What `{{ value }}` writes."""
    meter = current_meter()
    meter.spend(_WRITTEN_CHARS)
    return value if type(value) is str else meter.text(value)


class _Namespace(Namespace):
    def __init__(self, /, *args: Any, **kwargs: object) -> None:
        super().__init__(_dict(*args, **kwargs))

    def __repr__(self) -> str:
        return "<Namespace>"  # not what it holds, which may be itself


def _dict(*args: Any, **kwargs: object) -> Any:
    current_meter().weigh(*args)
    return current_meter().count_made(dict(*args, **kwargs))


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment, shared by all threads.  Its templates can call `functions`, too."""

    intercepted_binops = frozenset({"*", "**", "%"})
    concat = staticmethod(lambda texts: current_meter().join(texts))

    def __init__(self, functions: dict[str, Callable[..., object]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
            # With these two, nothing is worked out while compiling, when there is no meter.
            optimized=False,
            finalize=_written,
        )
        self.filters = TEMPLATE_FILTERS | _REPORTS
        self.tests = dict(TEMPLATE_TESTS)
        self.globals = {"dict": _dict, "namespace": _Namespace, "range": safe_range, **functions}

    def compile_source(self, source: str) -> jinja2.Template:
        """A template that reports to the current meter."""
        if len(source) > _MAX_SOURCE_CHARS:
            raise TooLarge(f"it is longer than {_MAX_SOURCE_CHARS} characters")
        tree = self.parse(source)
        _check_tree(tree)
        _Reporting().visit(tree)
        tree.set_environment(self)
        return self.from_string(tree)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`obj.attribute`: a method, else an item."""
        kind = type(obj)
        if kind in METHODS and attribute in METHODS[kind]:
            return functools.partial(METHODS[kind][attribute], obj)
        try:
            if kind is LoopContext and attribute in _LOOP_NAMES:
                return getattr(obj, attribute)
            if kind is _Namespace and not attribute.startswith("_"):
                return getattr(obj, attribute)
            return obj[attribute]
        except (AttributeError, LookupError, TypeError):
            return self.undefined(obj=obj, name=attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]`: an item, else what `getattr` gives."""
        if type(argument) not in SCALARS:
            current_meter().weigh(argument)
        try:
            return obj[argument]
        except (AttributeError, LookupError, TypeError):
            if isinstance(argument, str):
                return self.getattr(obj, argument)
            return self.undefined(obj=obj, name=argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """`obj(…)`.  Whatever that is, it counts what it returns."""
        if type(obj) is functools.partial:  # what `getattr` made of a method: the shortest way
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return obj(*args, **kwargs)
        meter = current_meter()
        meter.enter(len(args) + len(kwargs))
        result = context.call(obj, *args, **kwargs)
        meter.leave()
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`, for the intercepted ones."""
        meter = current_meter()
        match operator, left, right:
            case ("*", Sized() as value, int(times)) | ("*", int(times), Sized() as value):
                meter.check(times * len(value) * (1 if isinstance(value, str) else NODE_CHARS))
            case "**", int(), int() if left.bit_length() * right > MAX_INT_BITS:
                raise TooLarge("a number is too large")
            case "%", str(), _:
                raise TypeError("a number is needed, not text")
        return meter.count_made(self.binop_table[operator](left, right))
