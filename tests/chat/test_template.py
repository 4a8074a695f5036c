"""Chat templates render as the model's authors meant, and can harm nobody."""

from __future__ import annotations

import contextlib
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


def exceeded(source: str, n_chars: int) -> TemplateTimeout:
    """The error when `source` may make `n_chars` characters."""
    with pytest.raises(TemplateTimeout) as caught:
        compiled(source).render([], limits=RenderLimits(10.0, n_chars), x="x" * 10_000)
    return caught.value


class TestFamilies:
    def test_chatml(self) -> None:
        assert compiled(CHATML).render([SYSTEM, USER]) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\nGrüße, 世界 🌍<|im_end|>\n"
            "<|im_start|>assistant\n"
        )

    def test_gemma(self) -> None:
        assert compiled(GEMMA).render([USER, ANSWER, AGAIN]) == (
            "<s><start_of_turn>user\nGrüße, 世界 🌍<end_of_turn>\n"
            "<start_of_turn>model\nHallo<end_of_turn>\n"
            "<start_of_turn>user\n1 < 2 && 'so'?<end_of_turn>\n"
            "<start_of_turn>model\n"
        )

    def test_llama3(self) -> None:
        assert compiled(LLAMA3).render([SYSTEM, AGAIN]) == (
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\n1 < 2 && 'so'?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        )

    def test_mistral(self) -> None:
        assert compiled(MISTRAL).render([SYSTEM, USER, ANSWER, AGAIN]) == (
            "<s>[INST] Grüße, 世界 🌍[/INST] Hallo</s>[INST] Be brief.\n\n1 < 2 && 'so'?[/INST]"
        )

    @pytest.mark.parametrize("source", [CHATML, GEMMA, LLAMA3])
    def test_the_generation_prompt_is_a_suffix_that_can_be_left_out(self, source: str) -> None:
        template = compiled(source)
        with_prompt = template.render([USER])
        without = template.render([USER], add_generation_prompt=False)
        assert with_prompt.startswith(without)
        assert with_prompt != without

    def test_bos_is_written_once_and_only_where_the_template_writes_it(self) -> None:
        assert compiled(LLAMA3).render([SYSTEM, USER]).count("<s>") == 1
        assert "<s>" not in compiled(CHATML).render([SYSTEM, USER])

    @given(st.text())
    def test_content_arrives_verbatim(self, content: str) -> None:
        prompt = compiled(CHATML).render([{"role": "user", "content": content}])
        assert prompt == f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


class TestRefusals:
    def test_a_refused_system_role_is_reported_in_the_templates_words(self) -> None:
        with pytest.raises(ProtocolError, match="no system turns, please") as caught:
            compiled(GEMMA).render([SYSTEM, USER])
        assert "refused" in caught.value.reason

    def test_a_refused_order_is_reported_in_the_templates_words(self) -> None:
        with pytest.raises(ProtocolError, match="user and assistant must take turns"):
            compiled(MISTRAL).render([USER, USER])

    def test_a_message_that_quotes_everything_is_cut(self) -> None:
        assert len(refusal("{{ raise_exception(big) }}", big="x" * 1_000_000)) < 2000

    def test_the_error_pickles(self) -> None:
        with pytest.raises(ProtocolError) as caught:
            compiled(GEMMA).render([SYSTEM])
        assert pickle.loads(pickle.dumps(caught.value)).reason == caught.value.reason

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
    def test_a_failing_template_fails_the_request_and_says_why(
        self, source: str, reason: str
    ) -> None:
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
            ("{% include 'other' %}", "no Include"),
            ("{{ f(*x) }}", "unpacked"),
            ("{{ 1 < 2 < 3 }}", "chain of comparisons"),
            ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
        ],
    )
    def test_a_template_that_does_not_compile_is_unsupported(
        self, source: str, reason: str
    ) -> None:
        with pytest.raises(UnsupportedFeature) as caught:
            compiled(source)
        assert caught.value.feature == "chat template"
        assert reason in caught.value.reason


class TestDialect:
    """What templates written for transformers count on."""

    def test_block_tags_leave_no_blank_lines(self) -> None:
        assert rendered("a\n  {% if true %}\nb\n  {% endif %}\nc\n") == "a\nb\nc"

    def test_tojson_is_json_and_not_html(self) -> None:
        assert rendered("{{ x | tojson }}", x={"b": "<é'&>", "a": [1, None, True]}) == (
            """{"b": "<é'&>", "a": [1, null, true]}"""
        )

    def test_tojson_arguments(self) -> None:
        source = "{{ x | tojson(indent=1, separators=(',', ':'), sort_keys=true) }}"
        assert rendered(source, x={"b": 1, "a": 2}) == '{\n "a":2,\n "b":1\n}'
        assert rendered("{{ 'é' | tojson(ensure_ascii=true) }}") == r'"\u00e9"'

    def test_loop_controls(self) -> None:
        source = (
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
            "{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        )
        assert rendered(source) == "023"

    def test_the_generation_tag_renders_its_body_in_a_scope_of_its_own(self) -> None:
        source = (
            "{% set who = 'outer' %}{% for m in messages %}"
            "{% generation %}{% set who = 'inner' %}[{{ m.role }} {{ who }}]{% endgeneration %}"
            "{{ who }}{% endfor %}"
        )
        assert rendered(source) == "[user inner]outer"

    def test_strftime_now_is_today(self) -> None:
        before = dt.date.today()
        text = rendered("{{ strftime_now('%Y-%m-%d') }}")
        assert before.isoformat() <= text <= dt.date.today().isoformat()

    def test_tools_and_documents_are_none_unless_given(self) -> None:
        source = "{{ tools is none and documents is none }}"
        assert rendered(source) == "True"
        assert rendered(source, tools=[]) == "False"

    def test_variables_reach_the_template_and_may_replace_its_tokens(self) -> None:
        assert rendered("{{ enable_thinking }} {{ bos_token }}", enable_thinking=False) == (
            "False <s>"
        )
        assert rendered("{{ bos_token }}", bos_token="") == ""

    def test_any_mapping_and_sequence_will_do(self) -> None:
        source = "{{ (messages + [1]) | length }}{{ messages[0].parts | tojson }}"
        messages = (MappingProxyType({"role": "user", "parts": ("a", "b")}),)
        assert compiled(source).render(messages) == '2["a", "b"]'

    def test_text_is_taken_as_text_whatever_its_type_makes_of_it(self) -> None:
        class Role(str, enum.Enum):  # noqa: UP042  (its str() is not its text)
            USER = "user"

        class Html(str):
            def __html__(self) -> str:
                return "html"

            def __str__(self) -> str:
                return "str"

        message = {"role": Role.USER, "content": Html("<b>")}
        assert compiled("{{ messages[0].role ~ messages[0].content ~ '<i>' }}").render(
            [message]
        ) == ("user<b><i>")

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            (b"bytes", "x is not JSON data: there is bytes in it"),
            ({"a": [object()]}, "there is object in it"),
            (print, "builtin_function_or_method"),
            ({(1,): "one"}, "keys must be"),
        ],
    )
    def test_what_is_not_data_is_refused_by_its_name(self, value: object, reason: str) -> None:
        assert reason in refusal("", x=value)

    def test_data_that_contains_itself_is_refused(self) -> None:
        knot: list[object] = []
        knot.append(knot)
        assert "x is not JSON data: Circular reference" in refusal("", x=knot)


class TestSandbox:
    @pytest.mark.parametrize(
        "source",
        [
            "{{ ''.__class__.__mro__ }}",
            "{{ ''['__class__']['__mro__'] }}",
            "{{ '{0.__class__.__mro__}'.format('') }}",
            "{{ cycler.__init__.__globals__ }}",
            "{{ raise_exception.__globals__.json }}",
            "{{ strftime_now.__globals__['json'] }}",
            "{{ self.__init__.__globals__ }}",
            "{{ ''.__class__() }}",
        ],
    )
    def test_no_way_out_through_attributes(self, source: str) -> None:
        refusal(source)

    @pytest.mark.parametrize("source", ["{{ ''.__class__ }}", "{{ ''['__class__'] }}"])
    def test_a_private_attribute_alone_is_nothing(self, source: str) -> None:
        assert rendered(source) == ""

    @pytest.mark.parametrize(
        "source",
        [
            "{{ messages.append(1) }}",
            "{{ messages.clear() }}",
            "{{ messages[0].update(role='system') }}",
            "{{ messages[0]['pop']('role') }}",
        ],
    )
    def test_mutating_methods_are_refused(self, source: str) -> None:
        assert "has no attribute" in refusal(source)

    @pytest.mark.parametrize(
        "source",
        [
            "{{ dict.update(messages[0], role='system') }}",
            "{{ dict.clear(x) }}",
            "{{ dict.pop(x.deep[0], 'a') }}",
        ],
    )
    def test_the_callers_data_is_out_of_reach(self, source: str) -> None:
        messages = [{"role": "user", "content": "hi"}]
        x = {"deep": [{"a": 1}]}
        before = copy.deepcopy((messages, x))
        with contextlib.suppress(ProtocolError):
            compiled(source).render(messages, x=x)
        assert (messages, x) == before


class TestBounds:
    def test_endless_output_is_stopped_while_it_is_written(self) -> None:
        # Both loops together would write 10 GB.
        source = "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}"
        assert "more than 10000000 characters" in str(exceeded(source, 10_000_000))

    @pytest.mark.parametrize(
        "source", ["{{ x }}", "{{ x ~ '' }}", "{% set y %}{{ x }}{% endset %}"]
    )
    def test_what_is_made_is_counted(self, source: str) -> None:
        limits = RenderLimits(1.0, 10_100 if source == "{{ x }}" else 20_100)
        assert compiled(source).render([], limits=limits, x="x" * 10_000) is not None
        exceeded(source, limits.n_chars // 2 - 100)

    @pytest.mark.parametrize(
        "expression",
        ["'x' * 10 ** 12", "10 ** 12 * 'x'", "[0] * 10 ** 12", "9 ** (9 ** 9)", "x * x"],
    )
    def test_small_values_do_not_multiply_into_huge_ones(self, expression: str) -> None:
        assert "too large" in refusal(f"{{{{ {expression} }}}}", x=2**1000)

    def test_ordinary_arithmetic_works(self) -> None:
        assert rendered("{{ '=' * 3 }}{{ 3 * 4 }}{{ 2 ** 10 }}{{ 2 ** -1 }}{{ 1.5 * 2 }}") == (
            "===1210240.53.0"
        )

    @pytest.mark.parametrize(
        "source",
        [
            "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
            "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        ],
    )
    def test_endless_recursion_ends_as_an_error(self, source: str) -> None:
        assert "RecursionError" in refusal(source)


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
