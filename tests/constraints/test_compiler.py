"""Compiled constraints: what may come next, what must, and one tokenizer for all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import attrs
import numpy as np
import pytest

from llamad_trio.constraints.compiler import Compiler, Matcher
from llamad_trio.constraints.constraint import Constraint
from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.request import Request
from llamad_trio.llama.model import LlamaModel, LlamaVocabulary, load_model
from llamad_trio.llama.sampler import MAX_TOGETHER, Sampler
from llamad_trio.scheduling.plan import Prepared, resolve_sampling
from tests.matching import allowed

if TYPE_CHECKING:
    from tests.models import TinyModels

SCHEMA = Constraint(
    "json_schema",
    {
        "type": "object",
        "properties": {"key": {"enum": ["one", "other"]}, "n": {"type": "integer"}},
        "required": ["key", "n"],
        "additionalProperties": False,
    },
)


class CountingVocabulary(LlamaVocabulary):
    made = 0

    def pieces(self) -> Sequence[bytes]:
        self.made += 1
        return super().pieces()


@pytest.fixture
def model(tiny_model: TinyModels) -> Iterator[LlamaModel]:
    model = load_model(tiny_model("attention"), EngineConfig(), lambda _: True)
    yield model
    model.close()


@pytest.fixture
def compiler(model: LlamaModel) -> Compiler:
    return Compiler(CountingVocabulary(model))


def accept(matcher: Matcher, model: LlamaModel, text: str) -> bool:
    by_piece = {model.piece(token): token for token in range(model.n_vocab)}
    return all(matcher.accept([by_piece[char.encode()]]) for char in text)


def test_a_mask_is_what_each_token_says_of_itself(compiler: Compiler, model: LlamaModel) -> None:
    matcher = compiler.compile(SCHEMA)
    rng = np.random.default_rng(1)
    for _ in range(30):
        matcher.accept(matcher.forced_tokens())  # of which the mask has only the usual tokens
        if matcher.is_complete:
            break
        logits = np.ones(model.n_vocab, dtype=np.float32)
        assert matcher.apply(logits)
        mask = logits == 1
        assert mask.tolist() == [matcher.allows(token) for token in range(model.n_vocab)]
        assert np.isneginf(logits[~mask]).all()
        allowed = [t for t in np.flatnonzero(mask) if not model.ends_generation(int(t))]
        matcher.accept([int(rng.choice(allowed))])
    assert matcher.error is None


def test_forced_tokens_are_those_that_masks_leave_alone(
    compiler: Compiler, model: LlamaModel
) -> None:
    together, one_by_one = compiler.compile(SCHEMA), compiler.compile(SCHEMA)
    forced = together.forced_tokens()
    assert len(forced) > 5
    for token in forced:
        assert np.flatnonzero(allowed(one_by_one, model.n_vocab)).tolist() == [token]
        assert one_by_one.accept([token])
    assert allowed(one_by_one, model.n_vocab).sum() > 1


def test_the_tokenizer_is_made_once(compiler: Compiler) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(compiler.compile, [SCHEMA] * 4))
    compiler.compile(Constraint("regex", "a"))
    assert isinstance(compiler.vocabulary, CountingVocabulary)
    assert compiler.vocabulary.made == 1


def test_free_text_has_no_control_tokens(compiler: Compiler, model: LlamaModel) -> None:
    mask = allowed(compiler.compile(Constraint("regex", r"(.|\n)*")), model.n_vocab)
    control = [t for t in model.special_tokens[0].values() if not model.ends_generation(t)]
    assert control
    assert not mask[control].any()


def test_a_constraint_can_begin_after_a_text(compiler: Compiler, model: LlamaModel) -> None:
    matcher = compiler.compile(Constraint("regex", "[xy]z", after="</think>"))
    assert accept(matcher, model, "any { thing </think>\n\nx")
    assert not matcher.may_end
    assert not matcher.allows(next(t for t in range(model.n_vocab) if model.piece(t) == b"q"))
    assert accept(matcher, model, "z")
    assert matcher.is_complete


def test_a_constraint_can_begin_after_a_control_token(
    compiler: Compiler, model: LlamaModel
) -> None:
    text, token = next(
        (text, t) for text, t in model.special_tokens[0].items() if not model.ends_generation(t)
    )
    matcher = compiler.compile(Constraint("regex", "xy", after=text))
    assert accept(matcher, model, f"spelt out {text} is none, ")
    assert matcher.accept([token])
    assert accept(matcher, model, "xy")
    assert matcher.is_complete


@pytest.mark.parametrize("after", [None, "</think>"])
@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("regex", r"[a&&b]"),
        Constraint("regex", r"a[^\s\S]"),
        Constraint("lark", "start: X\nX: /a/ & /b/"),
        Constraint("lark", "start: @body"),
    ],
    ids=lambda value: getattr(value, "source", value),
)
def test_what_no_text_satisfies_is_refused_wherever_it_begins(
    compiler: Compiler, constraint: Constraint, after: str | None
) -> None:
    with pytest.raises(ProtocolError):
        compiler.compile(attrs.evolve(constraint, after=after))


@pytest.mark.parametrize(
    ("source", "text"), [("a{2}/b", "aa/b"), (r"a\/b", "a/b"), (r"[/]\\/", "/\\/")]
)
def test_slashes_in_a_regular_expression_are_its_own(
    compiler: Compiler, model: LlamaModel, source: str, text: str
) -> None:
    matcher = compiler.compile(Constraint("regex", source))
    assert accept(matcher, model, text)
    assert matcher.is_complete


def test_what_is_not_allowed_ends_it(compiler: Compiler, model: LlamaModel) -> None:
    matcher = compiler.compile(Constraint("regex", "ab"))
    assert not accept(matcher, model, "b")
    assert matcher.error
    assert not matcher.apply(np.zeros(model.n_vocab, dtype=np.float32))


def test_what_cannot_be_written_is_refused(compiler: Compiler) -> None:
    with pytest.raises(ProtocolError, match="regex"):
        compiler.compile(Constraint("regex", "a&&b("))


def test_forced_text_without_end_is_taken_in_parts(compiler: Compiler, model: LlamaModel) -> None:
    request = Prepared(
        id=1,
        tokens=(),
        max_tokens=1,
        sampling=resolve_sampling(Request("x", temperature=0.0), n_ctx=2048, fresh_seed=0),
        constraint=compiler.compile(Constraint("lark", 'start: "ab"{5000} "c"')),
    )
    sampler = Sampler(request, model)
    parts: list[bytes] = []
    logits = np.zeros(model.n_vocab, dtype=np.float32)
    is_complete = False
    while not is_complete:
        sampled = sampler.sample(cast("Any", None), 0, logits)
        parts.append(sampled.piece + b"".join(piece for _, piece in sampled.forced))
        assert len(sampled.forced) < MAX_TOGETHER
        is_complete = sampled.is_complete
    assert b"".join(parts) == b"ab" * 5000 + b"c"
    assert len(parts) == math.ceil(10_001 / MAX_TOGETHER)
