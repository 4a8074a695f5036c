"""Chat templates render as the model's authors meant, and can harm nobody."""

from __future__ import annotations

import copy
import datetime as dt
import enum
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, strategies as st

from llamad_trio.chat.meter import RenderLimits, TemplateTimeout
from llamad_trio.chat.template import ChatTemplate
from llamad_trio.core.errors import ProtocolError, UnsupportedFeature

CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

GEMMA = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {{- raise_exception('no system turns, please') }}
    {%- endif %}
    {%- set name = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + name + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}
"""

LLAMA3 = """\
{% for message in messages %}
{% set turn = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' %}
{% set turn = turn + message['content'] | trim + '<|eot_id|>' %}
{{ bos_token + turn if loop.first else turn }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""

MISTRAL = """\
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content + '\n\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system, turns = '', messages %}
{%- endif %}
{{- bos_token }}
{%- for turn in turns %}
    {%- if (turn.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {%- if turn.role == 'user' %}
        {{- '[INST] ' + (system if loop.last else '') + turn.content + '[/INST]' }}
    {%- else %}
        {{- ' ' + turn.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Grüße, 世界 🌍"}
ANSWER = {"role": "assistant", "content": "Hallo"}
AGAIN = {"role": "user", "content": "1 < 2 && 'so'?"}


def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


def rendered(source: str, **variables: Any) -> str:
    return compiled(source).render([USER], **variables)


def refusal(source: str, **variables: Any) -> str:
    """The reason for which rendering `source` fails."""
    with pytest.raises(ProtocolError) as caught:
        rendered(source, **variables)
    return caught.value.reason


# -- families -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "messages", "prompt"),
    [
        (
            CHATML,
            [SYSTEM, USER],
            "<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\nGrüße, 世界 🌍<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            GEMMA,
            [USER, ANSWER, AGAIN],
            "<s><start_of_turn>user\nGrüße, 世界 🌍<end_of_turn>\n"
            "<start_of_turn>model\nHallo<end_of_turn>\n"
            "<start_of_turn>user\n1 < 2 && 'so'?<end_of_turn>\n"
            "<start_of_turn>model\n",
        ),
        (
            LLAMA3,
            [SYSTEM, AGAIN],
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\n1 < 2 && 'so'?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            MISTRAL,
            [SYSTEM, USER, ANSWER, AGAIN],
            "<s>[INST] Grüße, 世界 🌍[/INST] Hallo</s>[INST] Be brief.\n\n1 < 2 && 'so'?[/INST]",
        ),
    ],
    ids=["chatml", "gemma", "llama3", "mistral"],
)
def test_a_template_renders_as_its_authors_meant(
    source: str, messages: list[dict[str, str]], prompt: str
) -> None:
    assert compiled(source).render(messages) == prompt


@pytest.mark.parametrize("source", [CHATML, GEMMA, LLAMA3])
def test_the_generation_prompt_is_a_suffix_that_can_be_left_out(source: str) -> None:
    template = compiled(source)
    with_prompt = template.render([USER])
    without = template.render([USER], add_generation_prompt=False)
    assert with_prompt.startswith(without)
    assert with_prompt != without


@given(st.text())
def test_content_arrives_verbatim(content: str) -> None:
    prompt = compiled(CHATML).render([{"role": "user", "content": content}])
    assert prompt == f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


# -- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "messages", "reason"),
    [
        (GEMMA, [SYSTEM, USER], "no system turns, please"),
        (MISTRAL, [USER, USER], "user and assistant must take turns"),
    ],
)
def test_a_refusal_is_reported_in_the_templates_words(
    source: str, messages: list[dict[str, str]], reason: str
) -> None:
    with pytest.raises(ProtocolError, match=f"refused.*{reason}") as caught:
        compiled(source).render(messages)
    assert pickle.loads(pickle.dumps(caught.value)).reason == caught.value.reason


def test_a_message_that_quotes_everything_is_cut() -> None:
    assert len(refusal("{{ raise_exception(big) }}", big="x" * 1_000_000)) < 2000


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ nobody.home }}", "'nobody' is undefined"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ nobody | tojson }}", "not JSON serializable"),
    ],
)
def test_a_failing_template_fails_the_request_and_says_why(source: str, reason: str) -> None:
    assert reason in refusal(source)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("one\n{% if %}\n{% endif %}", "line 2"),
        ("{% for m in messages %}", "end of template"),
        ("{% unknown_tag %}", "unknown_tag"),
        ("{{ messages | no_such_filter }}", "no_such_filter"),
        ("{% generation %}open", "endgeneration"),
        ("{% break %}", "outside loop"),
        ("{{ 1 < 2 < 3 }}", "chain of comparisons"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
        # What no chat template uses is not there.
        ("{% include 'other' %}", "no Include"),
        ("{% block a %}{% endblock %}", "no Block"),
        ("{% autoescape true %}{{ '<' }}{% endautoescape %}", "no ScopedEvalContextModifier"),
        ("{{ f(*x) }}", "unpacked"),
        ("{{ messages | pprint }}", "pprint"),
        ("{{ 'http://a' | urlize }}", "urlize"),
        ("{{ 'a b' | wordwrap(1) }}", "wordwrap"),
        ("{{ {'a': 1} | xmlattr }}", "xmlattr"),
        ("{{ x | attr('y') }}", "attr"),
        ("{{ '%s' | format(1) }}", "format"),
        ("{{ [1] | batch(2) }}", "batch"),
    ],
)
def test_a_template_that_does_not_compile_is_unsupported(source: str, reason: str) -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        compiled(source)
    assert caught.value.feature == "chat template"
    assert reason in caught.value.reason


# -- what templates written for transformers count on -----------------------------------------


@pytest.mark.parametrize(
    ("source", "variables", "text"),
    [
        # Block tags leave no blank lines.
        ("a\n  {% if true %}\nb\n  {% endif %}\nc\n", {}, "a\nb\nc"),
        # JSON is no HTML.
        (
            "{{ x | tojson }}",
            {"x": {"b": "<é'&>", "a": [1, None]}},
            """{"b": "<é'&>", "a": [1, null]}""",
        ),
        (
            "{{ x | tojson(indent=1, separators=(',', ':'), sort_keys=true) }}",
            {"x": {"b": 1, "a": 2}},
            '{\n "a":2,\n "b":1\n}',
        ),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", {}, r'"\u00e9"'),
        # Loops can be left and continued.
        (
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
            "{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            {},
            "023",
        ),
        # The tag `generation` renders its body, in a scope of its own.
        (
            "{% set who = 'outer' %}{% for m in messages %}"
            "{% generation %}{% set who = 'inner' %}[{{ m.role }} {{ who }}]{% endgeneration %}"
            "{{ who }}{% endfor %}",
            {},
            "[user inner]outer",
        ),
        # Tools and documents are none unless given; the template's tokens can be replaced.
        ("{{ tools is none and documents is none }}", {}, "True"),
        ("{{ tools is none and documents is none }}", {"tools": []}, "False"),
        ("{{ enable_thinking }} {{ bos_token }}", {"enable_thinking": False}, "False <s>"),
        ("{{ bos_token }}", {"bos_token": ""}, ""),
        # Macros, namespaces and the methods of text and dicts.
        ("{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('ab'.upper()) }}", {}, "ABAB"),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages if m.role in ['user'] %}"
            "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }} {{ ns }}",
            {},
            "1 <Namespace>",
        ),
        ("{{ dict(a=1).items() }}{{ x[(1, 2)] is defined }}", {"x": {}}, "[('a', 1)]False"),
        ("{{ [3, 1] | sort | join('<') }}{{ 'a-b'.split('-') }}", {}, "1<3['a', 'b']"),
        ("{{ '{}+{x}'.format(1, x='2' | int) }}{{ 4 is even }}", {}, "1+2True"),
        ("{{ '=' * 3 }}{{ 3 * 4 }}{{ 2 ** 10 }}{{ 2 ** -1 }}{{ 1.5 * 2 }}", {}, "===1210240.53.0"),
        # A private attribute is nothing.
        ("{{ ''.__class__ }}{{ ''['__class__'] }}", {}, ""),
    ],
)
def test_the_dialect_is_that_of_transformers(
    source: str, variables: dict[str, Any], text: str
) -> None:
    assert rendered(source, **variables) == text


def test_strftime_now_is_today() -> None:
    before = dt.date.today()
    text = rendered("{{ strftime_now('%Y-%m-%d') }}")
    assert before.isoformat() <= text <= dt.date.today().isoformat()


def test_any_mapping_and_sequence_will_do() -> None:
    source = "{{ (messages + [1]) | length }}{{ messages[0].parts | tojson }}"
    messages = (MappingProxyType({"role": "user", "parts": ("a", "b")}),)
    assert compiled(source).render(messages) == '2["a", "b"]'


def test_text_is_taken_as_text_whatever_its_type_makes_of_it() -> None:
    class Role(str, enum.Enum):  # noqa: UP042  (its str() is not its text)
        USER = "user"

    class Html(str):
        def __html__(self) -> str:
            return "html"

        def __str__(self) -> str:
            return "str"

    template = compiled("{{ messages[0].role ~ messages[0].content ~ '<i>' }}")
    assert template.render([{"role": Role.USER, "content": Html("<b>")}]) == "user<b><i>"


def test_what_is_not_data_is_refused_by_its_name() -> None:
    knot: list[object] = []
    knot.append(knot)
    refused: list[tuple[object, str]] = [
        (b"bytes", "x is not JSON data: there is bytes in it"),
        ({"a": [object()]}, "there is object in it"),
        (print, "builtin_function_or_method"),
        ({(1,): "one"}, "keys must be"),
        (knot, "x is not JSON data: Circular reference"),
    ]
    for value, reason in refused:
        assert reason in refusal("", x=value)


# -- the sandbox; see also the attacks ----------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0]['pop']('role') }}",
        "{{ dict.update(messages[0], role='system') }}",
        "{{ dict.clear(x) }}",
        "{{ dict.pop(x.deep[0], 'a') }}",
    ],
)
def test_the_callers_data_is_out_of_reach(source: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    x = {"deep": [{"a": 1}]}
    before = copy.deepcopy((messages, x))
    with pytest.raises(ProtocolError, match="has no attribute"):
        compiled(source).render(messages, x=x)
    assert (messages, x) == before


# -- bounds; see also the attacks ---------------------------------------------------------------


def assert_exceeded(source: str, n_chars: int) -> None:
    """Rendering `source` makes more than `n_chars` characters, and is stopped."""
    with pytest.raises(TemplateTimeout, match=f"more than {n_chars} characters"):
        compiled(source).render([], limits=RenderLimits(10.0, n_chars), x="x" * 10_000)


def test_endless_output_is_stopped_while_it_is_written() -> None:
    # Both loops together would write 10 GB.
    loop = "{% for a in range(100000) %}"
    assert_exceeded(f"{loop}{loop}x{{% endfor %}}{{% endfor %}}", 10_000_000)


@pytest.mark.parametrize(
    ("source", "n_chars"),
    [("{{ x }}", 10_100), ("{{ x ~ '' }}", 20_100), ("{% set y %}{{ x }}{% endset %}", 20_100)],
)
def test_what_is_made_is_counted(source: str, n_chars: int) -> None:
    limits = RenderLimits(1.0, n_chars)
    assert compiled(source).render([], limits=limits, x="x" * 10_000) is not None
    assert_exceeded(source, n_chars // 2 - 100)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ 'x' * 10 ** 12 }}", "too large"),
        ("{{ [0] * 10 ** 12 }}", "too large"),
        ("{{ 9 ** (9 ** 9) }}", "too large"),
        ("{{ x * x }}", "too large"),
        ("{{ ('9' * 2000) | int }}", "too large"),
        ("{{ '%99d' % 1 }}", "a number is needed"),
        ("{{ '%99d' is odd }}", "a number is needed"),
        ("{{ '{:>99}'.format(1) }}", "a format may only have"),
        ("{% for m in messages %}{{ {loop: 1} }}{% endfor %}", "too large"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
    ],
)
def test_what_is_small_does_not_become_huge(source: str, reason: str) -> None:
    assert reason in refusal(source, x=2**1000)


# -- the object ---------------------------------------------------------------------------------


def test_threads_render_one_template_at_the_same_time() -> None:
    template = compiled(MISTRAL)

    def render(n: int) -> str:
        return template.render([{"role": "user", "content": f"q{n}"}, ANSWER, AGAIN])

    alone = [render(n) for n in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(render, range(200))) == alone


def test_templates_with_the_same_source_and_tokens_are_equal() -> None:
    assert compiled(CHATML) == compiled(CHATML)
    assert compiled(CHATML) != compiled(GEMMA)
    assert compiled(CHATML) != ChatTemplate(CHATML, bos_token="", eos_token="</s>")
