"""Reasoning is found by the tags of the model's own template."""

from __future__ import annotations

import re

import pytest

from llamad_trio.chat.reasoning import (
    ReasoningTags,
    detect_reasoning,
    opened_by,
    reasoning_lead,
)

THINK = ReasoningTags("<think>", "</think>")
MAGISTRAL = ReasoningTags("[THINK]", "[/THINK]")


@pytest.mark.parametrize(
    ("source", "tags"),
    [
        ("{{ '<think>' ~ message.reasoning_content ~ '</think>' }}", THINK),
        ("{{ message.content.split('</think>')[-1] }}", THINK),
        ("{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}", THINK),
        ("{{ '[THINK]' + block.thinking + '[/THINK]' }}", MAGISTRAL),
        ("{{ message.content }}", None),
        ("I think so", None),
    ],
)
def test_the_tags_are_those_in_the_template(source: str, tags: ReasoningTags | None) -> None:
    assert detect_reasoning(source) == tags


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|Assistant|><think>", True),
        ("<think>\n\n</think>\n\n", False),
        ("what does <think> mean?<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_a_prompt_that_ends_in_an_opening_tag_leaves_reasoning_open(
    prompt: str, opened: bool
) -> None:
    assert opened_by(prompt, THINK) is opened


@pytest.mark.parametrize("tags", [THINK, MAGISTRAL])
@pytest.mark.parametrize("inside", ["", "a", "<", "</", "<</thin", "[[/THIN", "x</thin </", "\n"])
def test_the_lead_of_text_tags_ends_at_the_first_closing_tag(
    tags: ReasoningTags, inside: str
) -> None:
    lead = reasoning_lead(tags, lambda text: f'"{text}"', opened=True)
    regex = re.compile(lead[1 : lead.index("/ /[")].replace("\\/", "/"), re.DOTALL)
    assert regex.fullmatch(inside + tags.close)
    assert not regex.fullmatch(inside + tags.close + tags.close)
    assert not regex.fullmatch(inside)
