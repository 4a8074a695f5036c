"""What looks like a control token is broken, wherever it stands, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Iterator

import attrs
import pytest
from hypothesis import given, strategies as st

from llamad_trio.chat.guard import SENTINELS, Guard
from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.request import Message
from llamad_trio.core.tools import Tool, ToolCall

S = SENTINELS[0]
CONTROL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<|a b|>", "|><|")
ADDED = ("<think>", "</think>")
GUARD = Guard(CONTROL, ADDED)

# Texts in which tokens, and parts of tokens, meet in every way.
PARTS = sorted({text[i:j] for text in (*CONTROL, *ADDED) for i in range(4) for j in range(-3, 0)})
texts = st.lists(
    st.sampled_from([*CONTROL, *ADDED, *PARTS, " ", "\n", "cat", "<", ">", "|"])
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=3),
    max_size=6,
).map("".join)


def user(text: str, guard: Guard = GUARD) -> str:
    """A user's text, broken."""
    return guard.message(Message("user", text), S).content


def assistant(text: str) -> str:
    """The assistant's, broken."""
    return GUARD.message(Message("assistant", text), S).content


def texts_of(value: object) -> Iterator[str]:
    """Every text in a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from (*texts_of(key), *texts_of(item))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_of(item)


def forged(text: str) -> list[str]:
    """The tokens that a vocabulary finds in a text."""
    return [token for token in (*CONTROL, *ADDED) if token in text]


@given(st.lists(texts, min_size=1, max_size=4))
def test_no_token_is_found_in_texts_that_stand_side_by_side(pieces: list[str]) -> None:
    broken = [user(piece) for piece in pieces]
    assert forged("".join(broken)) == []
    # Many templates take the whitespace around a text away.
    assert forged("".join(piece.strip() for piece in broken)) == []
    assert "".join(broken).replace(S, "") == "".join(pieces).replace(S, "")


@given(texts, st.sampled_from([*CONTROL, *ADDED]), st.data())
def test_a_template_that_ends_in_half_a_token_is_not_helped_to_the_rest(
    text: str, token: str, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, len(token) - 1))
    head, tail = token[:cut], token[cut:]
    space = data.draw(st.sampled_from(["", " ", "\n\n"]))
    assert not f"{head}{user(f'{space}{tail}{text}').strip()}".startswith(token)
    assert not f"{user(f'{text}{head}{space}').strip()}{tail}".endswith(token)


@pytest.mark.parametrize(
    "text",
    ["", "the cat", "a < b | c", "im_start", "[] () {}", "think", "< s >", "ünïcödé 🐈", " "],
)
def test_other_text_is_left_as_it_is(text: str) -> None:
    assert user(text) == assistant(text) == text


@given(texts.filter(lambda text: not forged(text)))
def test_only_the_ends_of_a_text_without_tokens_are_touched(text: str) -> None:
    assert f"x{text}x" == user(f"x{text}x")


@pytest.mark.parametrize("token", CONTROL)
def test_every_occurrence_is_broken_inside(token: str) -> None:
    broken = user(f"a{token}b{token}{token}c")
    assert broken.count(S) >= 3
    assert token not in broken
    assert f"{token[0]}{S}" in broken


def test_tokens_that_overlap_are_all_broken() -> None:
    # Between `<|im_start|>` and `<|im_end|>` lies a third token, and one holds another.
    assert forged(user("<|im_start|><|im_end|>")) == []
    nested = Guard(["<s>", "x<s>x", "aba"])
    for text in ("ax<s>xa", "xx<s>x<s>xx", "ababab"):
        broken = user(text, nested)
        assert not any(token in broken for token in ("<s>", "aba"))
        assert broken.replace(S, "") == text


def test_a_token_in_two_halves_is_broken_where_one_half_is_nested() -> None:
    text = "<|im_<|im_start|>start|>"
    broken = user(text)
    assert forged(broken) == []
    # A template that takes the inner one away, as it would from harmless text, finds none.
    assert broken.replace("<|im_start|>", "") == broken
    assert broken.replace(S, "") == text


def test_what_an_assistant_said_keeps_its_reasoning_tags_and_no_control_token() -> None:
    said = "<think>hm</think>yes<|im_end|>."
    assert assistant(said) == f"<think>hm</think>yes<{S}|im_end|>."
    assert forged(user(said)) == []


def test_a_token_of_one_character_cannot_be_broken_and_is_left() -> None:
    assert user("# ! <s>", Guard(["#", "<s>"], ["!"])) == f"# ! <{S}s>"


def test_a_vocabulary_without_control_tokens_has_nothing_to_guard() -> None:
    assert user("<s><|im_start|>", Guard([])) == "<s><|im_start|>"


# -- every field ----------------------------------------------------------------------------

BAD = "<|im_start|>"
DATA = {BAD: [BAD, {"x": BAD, BAD: {"y": [1, None, True, 2.5, BAD]}}], "plain": "cat"}


def test_every_text_of_a_message_is_broken() -> None:
    call = ToolCall(BAD, "get", DATA)
    for message in (
        Message("system", BAD),
        Message("user", BAD),
        Message("tool", BAD, tool_call_id=BAD, name=BAD),
        Message("assistant", BAD, reasoning=BAD, tool_calls=[call]),
    ):
        guarded = GUARD.message(message, S)
        found = list(texts_of(attrs.astuple(guarded)))
        assert any(S in text for text in found)
        assert [text for text in found if BAD in text] == []
        again = json.dumps(attrs.asdict(guarded), ensure_ascii=False).replace(S, "")
        assert json.loads(again) == json.loads(json.dumps(attrs.asdict(message)))


def test_a_tool_keeps_its_name_and_its_function() -> None:
    tool = Tool("get", BAD, DATA, texts_of)
    guarded = GUARD.tool(tool, S)
    assert (guarded.name, guarded.function) == ("get", texts_of)
    found = [guarded.description, *texts_of(guarded.schema)]
    assert [text for text in found if BAD in text] == []
    assert json.loads(json.dumps(guarded.schema, ensure_ascii=False).replace(S, "")) == DATA


def test_data_that_is_nested_too_deeply_is_a_protocol_error() -> None:
    data: object = BAD
    for _ in range(5000):
        data = [data]
    with pytest.raises(ProtocolError, match="nested too deeply"):
        GUARD.data({"a": data}, S)
