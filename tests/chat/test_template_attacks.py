"""A hostile chat template ends as an error or as harmless text, in bounded time and memory.

The attacks run in a process of their own, whose memory is limited: one that ends the
process, or needs more, fails its test alone.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator

import attrs
import pytest

from llamad_trio.chat.meter import FULL, QUICK, RenderLimits, TemplateTimeout
from llamad_trio.chat.template import ChatTemplate
from llamad_trio.core.errors import ProtocolError, UnsupportedFeature

MEMORY_BYTES = 450 * 1024 * 1024  # the 256 MiB a template may hold, one value more, and a copy

VICTIM = """
import json, resource, sys
from llamad_trio.chat.meter import RenderLimits
from llamad_trio.chat.template import ChatTemplate
from llamad_trio.core.errors import LlamadError

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]),) * 2)
# As programs do; what relies on Python's usual limit would end this process.
sys.setrecursionlimit(50_000)
for line in sys.stdin:
    source, *limits = json.loads(line)
    try:
        template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
        text = template.render([{"role": "user", "content": "hi"}], limits=RenderLimits(*limits))
        answer = ["text", text[:1000]]
    except LlamadError as error:
        answer = [type(error).__name__, error.reason]
    print(json.dumps(answer), flush=True)
"""


@attrs.define
class Victim:
    """A process that renders what it is sent, with a share of the memory a template may need.

    One that has ended is followed by a new one.
    """

    share: int
    process: subprocess.Popen[str] | None = None

    @property
    def n_chars(self) -> int:
        """The characters that fit in that memory."""
        return FULL.n_chars // self.share

    def render(
        self, source: str, time_s: float = 0.05, n_chars: int | None = None
    ) -> tuple[str, str]:
        """The error's type and reason, or "text" and the text."""
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, "-c", VICTIM, str(MEMORY_BYTES // self.share)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([source, time_s, n_chars or self.n_chars]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the process ended with {self.process.wait()}"
        kind, reason = json.loads(answer)
        assert "MemoryError" not in reason
        return kind, reason


@pytest.fixture(scope="module")
def victim(request: pytest.FixtureRequest) -> Iterator[Victim]:
    if not sys.platform.startswith("linux"):
        pytest.skip("limits a process's memory as Linux does")
    victim = Victim(getattr(request, "param", 1))
    yield victim
    if victim.process is not None:
        with victim.process as process:
            process.kill()


def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="", eos_token="")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__']['__base__'] }}",
        "{{ (''|attr('__class__'))|attr('__base__')|attr('__subclasses__') }}",
        "{{ [''] | map(attribute='__class__') | map(attribute='__mro__') | list }}",
        "{{ [''] | map('attr', '__class__') | map('attr', '__mro__') | first }}",
        "{{ messages | map(attribute='__class__.__mro__') | list }}",
        "{{ [''] | sort(attribute='__class__.__mro__') }}",
        "{{ [''] | groupby('__class__.__mro__') }}",
        "{{ [''] | selectattr('__class__.__mro__') | list }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{0[__class__][__mro__]}'.format('') }}",
        "{{ '{x.__class__.__mro__}'.format_map({'x': ''}) }}",
        "{{ ('{0.__class__.__mro__}'|safe).format('') }}",
        "{{ ['{0.__class__.__mro__}'] | map('attr', 'format') | first() }}"
        "{{ (['{0.__class__.__mro__}'] | map('attr', 'format') | first)('') }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ joiner.__init__.__globals__ }}",
        "{{ cycler(1).items.__class__.__mro__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ namespace().__init__.__globals__ }}",
        "{{ namespace()._Namespace__attrs.clear() }}",
        "{{ namespace(a=1)._Namespace__attrs }}",
        "{{ namespace().__class__ }}",
        "{{ namespace()['__class__'](a=1) }}",
        "{{ range.__self__.__class__ }}",
        "{{ lipsum.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ self.__class__.__mro__ }}",
        "{{ dict.mro() }}",
        "{% for x in 'a' %}{{ loop.__init__.__globals__ }}{% endfor %}",
        "{% for x in 'a' %}{{ loop._iterator.gi_frame.f_back }}{% endfor %}",
        "{% for x in 'a' %}{{ loop.cycle.__func__.__globals__ }}{% endfor %}",
        "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
        "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
        "{{ nobody.__init__.__globals__ }}",
        "{{ ''.join.__self__.__class__ }}",
        "{{ ''.format.__wrapped__.__self__ }}",
        "{{ 'x'.encode().decode() }}",
        "{{ (1).to_bytes(1000000000, 'big') }}",
        "{{ 'x'.translate({120: 'y'}) }}",
        "{{ environment.filters }}",
        "{% import messages as m %}",
        "{% from 'os' import popen %}",
        "{% extends 'x' %}",
        "{{ (messages | map('attr', 'copy') | first).__self__.__class__.__mro__ }}",
    ],
)
def test_no_way_leads_out(victim: Victim, source: str) -> None:
    kind, reason = victim.render(source)
    assert kind in ("ProtocolError", "UnsupportedFeature") or reason == "", reason


LOOP = "{% for i in range(100000) %}"
NESTED = LOOP * 4
END = "{% endfor %}" * 4
FOREVER = NESTED + END
# 2 ** 60 items on paper.
TUPLES = "{% set ns = namespace(x=()) %}" + "{% set ns.x = (ns.x, ns.x) %}" * 60
DEEP = "{% set ns = namespace(x=()) %}{% for i in range(999) %}{% set ns.x = (ns.x,) %}{% endfor %}"
BIG = "{% set big = 'x' * 16000000 %}"


def is_stopped(kind: str, reason: str) -> bool:
    """Whether a template was stopped, or uses what is not there."""
    parts = (
        *("too large", "needs more than", "Range too big", "has no attribute", "no Block"),
        *("a number is needed", "No filter named", "arguments are unpacked"),
        "a format may only have fields",
    )
    return kind == "TemplateTimeout" or any(part in reason for part in parts)


@pytest.mark.parametrize(
    "source",
    [
        FOREVER,
        f"{NESTED}{{{{ '' }}}}{END}",
        f"{NESTED}{{% if false %}}{{% endif %}}{END}",
        f"{NESTED}{{% set a = i %}}{END}",
        "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) if (0" + " ~ 0" * 2000 + ") == '' %}{% endfor %}",
        "{% macro m() %}" + FOREVER + "{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for x in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
        "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        + ("{% call m() %}" * 15 + FOREVER + "{% endcall %}" * 15),
        "{% block a %}" + FOREVER + "{% endblock %}{{ self.a() }}",
        "{% filter upper %}" + FOREVER + "{% endfilter %}",
        "{% set x %}" + FOREVER + "{% endset %}",
        LOOP + "{% set x = range(100000) | list %}{% endfor %}",
        LOOP + "{% set x = range(100000) | sum %}{% endfor %}",
        LOOP + "{% set x = range(100000) | map('string') | list %}{% endfor %}",
        LOOP + "{% set x = range(100000) | select('divisibleby', 3) | list %}{% endfor %}",
        LOOP + "{% set x = range(100000) | sort %}{% endfor %}",
        LOOP + "{% set x = range(100000) | batch(2) | list %}{% endfor %}",
        LOOP + "{% set x = 'y' in range(100000) | list %}{% endfor %}",
        LOOP + "{% set x = -1 in range(100000) | map('abs') %}{% endfor %}",
        BIG + LOOP + "{% set x = 'y' in big %}{% endfor %}",
        BIG + LOOP + "{% set x = big[1:] == big[:-1] %}{% endfor %}",
        BIG + LOOP + "{% set x = big.count('xx') %}{% endfor %}",
        BIG + "{% for c in big %}{% endfor %}",
        TUPLES + FOREVER,
    ],
)
def test_endless_work_is_stopped(victim: Victim, source: str) -> None:
    assert is_stopped(*victim.render(source))


def test_the_error_says_how_long_it_was_and_is_a_protocol_error() -> None:
    template = compiled(FOREVER)
    with pytest.raises(ProtocolError, match=r"took longer than 0\.01 s") as caught:
        template.render([], limits=RenderLimits(0.01, FULL.n_chars))
    assert type(caught.value) is TemplateTimeout
    assert type(pickle.loads(pickle.dumps(caught.value))) is TemplateTimeout


def test_a_second_attempt_with_more_time_may_succeed() -> None:
    template = compiled(LOOP + "x{% endfor %}")
    with pytest.raises(TemplateTimeout):
        template.render([], limits=QUICK)
    assert len(template.render([], limits=RenderLimits(60.0, FULL.n_chars))) == 100_000


@pytest.mark.parametrize(
    "source",
    [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m() %}{{ caller() }}{% endmacro %}"
        "{% macro n() %}{% call m() %}{{ n() }}{% endcall %}{% endmacro %}{{ n() }}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{% set ns = namespace() %}{% macro m() %}{{ ns.m() }}{% endmacro %}"
        "{% set ns.m = m %}{{ m() }}",
    ],
)
def test_endless_recursion_is_stopped(victim: Victim, source: str) -> None:
    _, reason = victim.render(source, 10.0)
    assert "RecursionError" in reason or "no Block" in reason


@pytest.mark.parametrize(
    "expression",
    [
        "(0,) * 10 ** 12",
        "'%1000000000d' % 1",
        "'%.1000000000f' % 1.5",
        "'%*d' % (1000000000, 1)",
        "'%(a(b))1000000000d' % {'a(b)': 1}",
        "'%1000000000d' | format(1)",
        "'%1000000000d' is odd",
        "'%1000000000d' is divisibleby 7",
        "('%1000000000d' | safe) % 1",
        "'{:>1000000000}'.format(1)",
        "'{:.1000000000f}'.format(1.5)",
        "'{:>{}}'.format(1, 1000000000)",
        "'{:>\u0661\u0660\u0660\u0660\u0660\u0660}'.format(1)",
        "'{x:>1000000000}'.format_map({'x': 1})",
        "('{:>1000000000}' | safe).format(1)",
        "('{0}' * 20000).format('x' * 100000)",
        "('%(a)s' * 10000) % {'a': 'x' * 100000}",
        "'x'.ljust(1000000000)",
        "'x'.rjust(1000000000)",
        "'x'.center(1000000000)",
        "'x'.zfill(1000000000)",
        "'x' | center(1000000000)",
        "('x' | safe).ljust(1000000000)",
        "'\\t'.expandtabs(1000000000)",
        "('x' * 100000).replace('', 'x' * 100000)",
        "('x' * 100000) | replace('x', 'x' * 100000)",
        "('x' * 100000).join('y' * 100000)",
        "range(100000) | join('x' * 100000)",
        "(['x' * 1000000] * 1000) | join",
        "''.join(['x' * 1000000] * 1000)",
        "('\\n' * 100000) | indent(100000)",
        "('\\n' * 100000) | indent('x' * 100000)",
        "[[1]] | tojson(indent=1000000000)",
        "range(1000) | list | tojson(separators=('x' * 1000000, ':'))",
        "[1] | batch(1000000000, 0) | list",
        "[1] | slice(1000000000) | list",
        "range(10 ** 9) | list",
        "('x ' * 8000000).split()",
        "('x ' * 8000000).split('x')",
        "('x ' * 8000000).rsplit('x')",
        "('\\n' * 8000000).splitlines()",
        "('x ' * 8000000) | list",
        "('x ' * 8000000) | title",
        "('x ' * 8000000) | map('upper') | list",
        "('a' * 8000000).rfind('b' + 'a' * 4000000)",
        "('b' * 8000000).strip('a' * 8000000 + 'b')",
        "('b' * 8000000) | trim('a' * 8000000 + 'b')",
        "1 | round(-1000000000)",
        "1.5 | round(1000000000, 'ceil')",
        "('9' * 1000000) | int",
        "('f' * 8000000) | int(base=16)",
        "('9' * 8000000) | float",
        "('[1]' * 100000) | map('list') | map('list') | sum(start=[]) | length * 'x' * 1000000000",
        "[[]] | sort(attribute='a,' * 1000000)",
        "range(100000) | map(attribute='a.' * 100000, default={}) | list",
        "strftime_now('%1000000d' * 100000)",
        "raise_exception('x' * 1000000000)",
        "'x'.format(*('x' * 10000000000))",
    ],
)
def test_one_call_does_not_multiply(victim: Victim, expression: str) -> None:
    assert is_stopped(*victim.render(f"{{% set x = {expression} %}}", 5.0))


@pytest.mark.parametrize(
    "step",
    [
        "{% set ns.x = ns.x ~ ns.x %}",
        "{% set ns.x = ns.x + ns.x %}",
        "{% set ns.x = [ns.x, ns.x] | join %}",
        "{% set ns.x = '%s%s' % (ns.x, ns.x) %}",
        "{% set ns.x = '%s%s' | format(ns.x, ns.x) %}",
        "{% set ns.x = '{0}{0}'.format(ns.x) %}",
        "{% set ns.x = ns.x.replace('x', 'xx') %}",
        "{% set ns.x = ''.join([ns.x, ns.x]) %}",
        "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}",
        "{% macro m() %}{{ ns.x }}{{ ns.x }}{% endmacro %}{% set ns.x = m() %}",
        "{% set ns.x = ns.x | tojson | tojson %}",
        "{% set ns.x = ns.x | string | replace('x', 'xx') | escape %}",
        "{% set ns.l = ns.l + ns.l %}",
        "{% set ns.l = ns.l * 2 %}",
        "{% set ns.l = (ns.l, ns.l) | sum(start=()) %}",
        "{% set ns.n = ns.n * ns.n %}",
        "{% set ns.keep = [ns.keep, namespace(dict(range(100000) | batch(2)))] %}",
        "{% macro m() %}{% set ns.keep = [ns.keep, varargs] %}{% endmacro %}{{ m(*range(100000)) }}",
        "{% set ns.keep = [ns.keep, dict(a=loop.index, b=[1, 2, 3])] %}",
    ],
)
def test_steps_do_not_add_up(victim: Victim, step: str) -> None:
    before = "{% set ns = namespace(x='x', l=(1, 2), n=3, keep=[]) %}" + LOOP * 2
    source = before + step + "{% endfor %}" * 2
    assert is_stopped(*victim.render(source, 0.4))


@pytest.mark.parametrize("victim", [4, pytest.param(1, marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize(
    "value",
    [
        "'x' * 10000000 ~ loop.index",
        "'é' * 7000 ~ loop.index",
        "'🌍' * 1000 ~ loop.index",
        "range(100000) | list",
        "range(1000) | list",
        "('x' * 10000 ~ loop.index).split('y')",
        "'xy'.split",
        "own",
        "namespace(a=i)",
        "m(" + "1," * 1000 + ")",
    ],
)
def test_what_is_kept_does_not_add_up(victim: Victim, value: str) -> None:
    source = (
        "{% set ns = namespace(keep=[]) %}"
        "{% macro m() %}{% set ns.keep = [ns.keep, varargs] %}{% endmacro %}"
        "{% for i in range(100000) %}{% for j in range(10) %}"
        "{% macro own() %}{% endmacro %}"
        "{% set ns.keep = [ns.keep, " + value + "] %}{% endfor %}{% endfor %}"
    )
    _, reason = victim.render(source, 120.0)
    assert f"more than {victim.n_chars} characters" in reason


@pytest.mark.parametrize(
    "source",
    [
        "{% macro m() %}" + NESTED + "x{% if i %}{% endif %}x" + END + "{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{{ 'x' * 10000000 ~ n }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
        NESTED + "{{ 'x' * 1000000 }}" + END,
        "{% set x %}" + NESTED + "{{ 'x' * 1000 }}" + END + "{% endset %}",
        "{% for x in ['x' * 1000000] * 100000 %}{{ loop | join }}{% endfor %}",
        "{% block a %}" + LOOP + "{{ 'x' * 1000 }}{% endfor %}{% endblock %}{{ self.a() }}",
    ],
)
def test_what_is_written_does_not_add_up(victim: Victim, source: str) -> None:
    assert is_stopped(*victim.render(source, 0.4))


@pytest.mark.parametrize("make", [TUPLES, DEEP])
@pytest.mark.parametrize(
    "use",
    [
        "{{ ns.x }}",
        "{{ ns.x ~ '' }}",
        "{{ ns.x | string }}",
        "{{ ns.x | tojson }}",
        "{{ ns.x | tojson(indent=2) }}",
        "{{ ns.x | join }}",
        "{{ [ns.x, ns.x] | sort }}",
        "{{ [ns.x, ns.x] | min }}",
        "{{ [ns.x, ns.x] | unique | list }}",
        "{{ '%s' % (ns.x,) }}",
        "{{ '{}'.format(ns.x) }}",
        "{{ '{!r:>5}'.format(ns.x) }}",
        "{{ ns.x | upper }}",
        "{{ ns.x in [1] }}",
        "{{ [1] | select('equalto', ns.x) | list }}",
        "{{ {}[ns.x] }}",
        "{{ {}.get(ns.x) }}",
        "{{ {ns.x: 1} }}",
        "{{ {}[(ns.x,)] }}",
        "{{ dict([(ns.x, 1)]) }}",
        "{{ [1] | map(ns.x) | list }}",
        "{{ ns.x is filter }}",
        "{{ raise_exception(ns.x) }}",
        "{{ [1].index(ns.x) }}",
        "{% for i in [1] %}{{ loop.changed(ns.x) }}{% endfor %}",
    ],
)
def test_data_that_is_small_only_in_memory(victim: Victim, make: str, use: str) -> None:
    kind, reason = victim.render(make + use, 10.0, 1_000_000)
    assert is_stopped(kind, reason) or "unhashable" in reason


def test_data_too_deep_for_the_stack(victim: Victim) -> None:
    kind, reason = victim.render(DEEP.replace("999", "99999") + "{{ {ns.x: 1} }}", 30.0)
    assert kind == "ProtocolError"
    assert "too large" in reason


def test_an_error_does_not_keep_the_templates_values() -> None:
    template = compiled("{% set x = 'x' * 10000000 %}{{ 1 // 0 }}")
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError) as caught:
            template.render([])
        assert tracemalloc.get_traced_memory()[0] < 1_000_000, caught
    finally:
        tracemalloc.stop()


def test_a_namespace_that_holds_itself_is_harmless(victim: Victim) -> None:
    source = "{% set a = namespace() %}{% set a.x = [a, a] %}{% set a.y = a.x %}{{ a }}{{ a.x }}"
    assert victim.render(source) == ("text", "<Namespace>[<Namespace>, <Namespace>]")


@pytest.mark.parametrize("count", [1, 100])
def test_adding_a_text_up_bit_by_bit_is_not_an_attack(victim: Victim, count: int) -> None:
    source = (
        "{% set ns = namespace(x='', l=[]) %}{% for i in range(1000) %}"
        "{% set ns.x = ns.x + 'y' * " + str(count) + " %}{% set ns.l = ns.l + [i] %}"
        "{% endfor %}{{ ns.x | length }} {{ ns.l | length }}"
    )
    assert victim.render(source, 10.0) == ("text", f"{1000 * count} 1000")


@pytest.mark.parametrize(
    "source",
    [
        "x" * 1_000_000,
        "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
        "{{ " + "[" * 100_000 + "]" * 100_000 + " }}",
        "{{ " + "not " * 50_000 + "1 }}",
        "{{ " + "-" * 100_000 + "1 }}",
        "{{ " + "1 + " * 50_000 + "1 }}",
        "{{ " + "1 and " * 5_000 + "1 }}",
        "{{ " + "1 < " * 50_000 + "1 }}",
        "{{ " + "'a' ~ " * 30_000 + "'a' }}",
        "{{ x" + ".a" * 100_000 + " }}",
        "{{ x" + "[0]" * 50_000 + " }}",
        "{{ x" + "()" * 50_000 + " }}",
        "{{ x" + " | abs" * 30_000 + " }}",
        "{{ 1" + " if 1 else 1" * 10_000 + " }}",
        "{{ [" + "0," * 50_000 + "] }}",
        "{{ f(" + "0," * 50_000 + ") }}",
        "{% if x %}" * 10_000 + "{% endif %}" * 10_000,
        "{% for x in y %}" * 50 + "{% endfor %}" * 50,
        "{% macro m() %}" * 5_000 + "{% endmacro %}" * 5_000,
        "{% if x %}" + "{% elif x %}" * 5_000 + "{% endif %}",
        "{{ x }}" * 30_000,
        "{% set x = 1 %}" * 15_000,
        "{{ " + "9" * 100_000 + " }}",
        "{{ 0x" + "f" * 100_000 + " }}",
        "{%" * 100_000,
        "{{ '" * 50_000,
        "{#" * 100_000,
        "{% raw %}" * 20_000,
        "{{ " + "1_" * 100_000 + " }}",
        "{% " + "-" * 100_000,
    ],
    ids=lambda source: f"{source[:12]}…",
)
def test_a_hostile_source_is_unsupported(victim: Victim, source: str) -> None:
    assert victim.render(source)[0] == "UnsupportedFeature"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ " + "1 + " * 100 + "1 }}", "nests deeper than 100 levels"),
        ("{% if x %}" + "{% elif x %}" * 101 + "{% endif %}", "more than 100 `elif`"),
        ("{{ [" + "0," * 10_000 + "] }}", "more than 10000 parts"),
        ("x" * 300_000, "longer than 65536 characters"),
    ],
    ids=["nesting", "elif", "parts", "length"],
)
def test_a_source_is_refused_before_python_sees_it(source: str, reason: str) -> None:
    with pytest.raises(UnsupportedFeature, match=reason):
        compiled(source)


def test_nothing_is_worked_out_while_compiling() -> None:
    source = "{% if false %}{{ 'x' * 10 ** 8 }}{{ 'x'.center(10 ** 8) }}{% endif %}"
    tracemalloc.start()
    try:
        compiled(source)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
