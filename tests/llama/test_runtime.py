"""A step does what its plan says or nothing, and the pool is what the books say."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llamad_trio.core.config import EngineConfig
from llamad_trio.core.plan import SamplerSpec, StepPlan, StepResult, StepStatus, Trim, Work
from llamad_trio.core.sampling import SamplingParams
from llamad_trio.llama.runtime import LlamaRuntime
from tests.models import DECODER_KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.models import Kind, TinyModels

    Logits = NDArray[np.float32]

kinds = pytest.mark.parametrize("kind", DECODER_KINDS)

GREEDY = SamplingParams(
    greedy=True,
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repeat_penalty=1.0,
    penalty_window=0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    seed=0,
)

# Logits that ought to be equal differ by this much, depending on the cells they come from.
ROUNDING = 1e-3

# Letters of the tiny vocabulary, in an order without a pattern.
TEXT = [262 + (7 * i * i + 3 * i) % 34 for i in range(1600)]


class Books:
    """A runtime, and what its sequences hold."""

    def __init__(self, runtime: LlamaRuntime) -> None:
        self.runtime = runtime
        self.tokens: dict[int, list[int]] = {}
        self._has_sampler: set[int] = set()

    def plan(self, *additions: tuple[int, Sequence[int]], trims: Sequence[Trim] = ()) -> StepPlan:
        """A step that adds tokens to sequences, and samples a token of each."""
        for trim in trims:
            self.tokens[trim.seq] = self.tokens[trim.seq][: trim.keep]
        new = [seq for seq, _ in additions if seq not in self._has_sampler]
        self._has_sampler.update(new)
        return StepPlan(
            work=tuple(
                Work(seq, seq, len(self.tokens.get(seq, [])), tokens, sample=True)
                for seq, tokens in additions
            ),
            trims=tuple(trims),
            new_samplers=tuple(SamplerSpec(request_id=seq, params=GREEDY, seen=()) for seq in new),
        )

    def step(self, *additions: tuple[int, Sequence[int]], trims: Sequence[Trim] = ()) -> StepResult:
        """Run such a step, and book it."""
        result = self.runtime.step(self.plan(*additions, trims=trims))
        if result.status is StepStatus.DONE:
            for seq, tokens in additions:
                self.tokens.setdefault(seq, []).extend(tokens)
        for seq in result.cleared:
            self.tokens[seq] = []
        return result

    def logits(self, seq: int, tokens: Sequence[int]) -> Logits:
        """Add tokens to a sequence, and return the logits after them."""
        assert self.step((seq, tokens)).status is StepStatus.DONE
        logits: Logits = self.runtime._context.logits(1)[0].copy()
        return logits

    def check(self) -> None:
        """The pool is what the books say."""
        for seq, tokens in self.tokens.items():
            assert self.runtime._context.n_resident(seq) == len(tokens)


@contextmanager
def opened(path: Path, *, n_ctx: int = 2048) -> Iterator[Books]:
    config = EngineConfig(
        n_threads=1,
        n_slots=3,
        n_ctx=n_ctx,
        n_batch=1024,
        type_k="f32",
        type_v="f32",
        flash_attn=False,
    )
    runtime = LlamaRuntime(path, config, 1, lambda fraction: True)
    try:
        runtime.warm_up()
        yield Books(runtime)
    finally:
        runtime.close()


# -- steps ----------------------------------------------------------------------------------


@kinds
def test_a_step_samples_for_each_row_what_it_samples_alone(
    tiny_model: TinyModels, kind: Kind
) -> None:
    with opened(tiny_model(kind)) as alone:
        expected = {
            seq: alone.step((seq, TEXT[seq : seq + n])).sampled[seq]
            for seq, n in ((0, 40), (1, 7), (2, 23))
        }
    with opened(tiny_model(kind)) as together:
        result = together.step((0, TEXT[0:40]), (1, TEXT[1:8]), (2, TEXT[2:25]))
        assert result.status is StepStatus.DONE
        assert result.sampled == expected
        assert result.elapsed_s > 0
        assert not result.failures
        assert not result.cleared
        together.check()


@kinds
def test_only_rows_that_ask_for_it_are_sampled(tiny_model: TinyModels, kind: Kind) -> None:
    with opened(tiny_model(kind)) as books:
        plan = StepPlan(
            work=(
                Work(10, 0, 0, TEXT[:20], sample=False),
                Work(11, 1, 0, TEXT[:20], sample=True),
                Work(12, 2, 0, TEXT[:30], sample=False),
            ),
            new_samplers=(SamplerSpec(request_id=11, params=GREEDY, seen=()),),
        )
        result = books.runtime.step(plan)
        assert set(result.sampled) == {11}
        again = books.runtime.step(
            StepPlan(
                work=(Work(13, 1, 0, TEXT[:20], sample=True),),
                trims=(Trim(1, 0),),
                old_samplers=(11,),
                new_samplers=(SamplerSpec(request_id=13, params=GREEDY, seen=()),),
            )
        )
        assert again.sampled[13] == result.sampled[11]


def test_a_sampled_token_tells_its_bytes_and_whether_it_ends(tiny_model: TinyModels) -> None:
    with opened(tiny_model("attention")) as books:
        sampled = books.step((0, TEXT[:40])).sampled[0]
        assert sampled.piece == books.runtime.detokenize([sampled.token]).encode()
        assert not sampled.ends
        ends = [
            t for t in range(books.runtime.model.n_vocab) if books.runtime.model.ends_generation(t)
        ]
        assert [books.runtime.detokenize([t]) for t in ends] == ["</s>", "<|im_end|>"]
        assert [books.runtime.model.piece(t) for t in ends] == [b"", b""]


@kinds
def test_whether_memory_can_go_back_is_found_out(tiny_model: TinyModels, kind: Kind) -> None:
    with opened(tiny_model(kind)) as books:
        assert books.runtime.facts.can_rewind == (kind in {"attention", "sliding-window"})
        books.tokens = {0: [], 1: [], 2: []}
        books.check()  # the warm-up has left nothing


@pytest.mark.parametrize("kind", ["attention", "sliding-window"])
def test_a_trimmed_sequence_goes_on_as_a_fresh_one(tiny_model: TinyModels, kind: Kind) -> None:
    with opened(tiny_model(kind)) as books:
        books.step((0, TEXT[:60]))
        books.step((0, TEXT[100:110]), trims=[Trim(0, 50)])
        books.check()
        trimmed = books.logits(0, TEXT[:5])
        books.logits(1, TEXT[:50])
        books.logits(1, TEXT[100:110])
        np.testing.assert_allclose(trimmed, books.logits(1, TEXT[:5]), atol=ROUNDING)


@pytest.mark.parametrize("kind", ["attention", "sliding-window", "hybrid"])
def test_a_full_pool_has_no_room_and_keeps_what_it_has(tiny_model: TinyModels, kind: Kind) -> None:
    with opened(tiny_model(kind), n_ctx=256) as books:
        books.step((0, TEXT[:200]))
        result = books.step((1, TEXT[:100]))
        assert result.status is StepStatus.NO_ROOM
        assert not result.sampled
        books.tokens.setdefault(1, [])
        books.check()
        assert books.step((0, TEXT[:10])).status is StepStatus.DONE


@pytest.mark.parametrize("keep", [1, 10, 16, 17, 40, 44, 50, 60, 61, 90, 99])
def test_a_window_that_was_given_away_is_noticed_before_it_is_built_on(
    tiny_model: TinyModels, keep: int
) -> None:
    # Layers with a sliding window give the cells that have left it to whoever comes next: after a
    # trim, what the next token looks at may be gone.
    with opened(tiny_model("sliding-window"), n_ctx=512) as books:
        books.step((1, TEXT[:100]))
        books.step((0, TEXT[:100]))
        # A few cells of the first become free, then come those of the second.
        books.step((2, TEXT[300:350]), trims=[Trim(1, 95)])
        books.check()
        result = books.step((0, TEXT[200:210]), trims=[Trim(0, keep)])
        if keep >= 90:
            assert result.status is StepStatus.DONE
        if result.status is not StepStatus.DONE:
            assert result.status is StepStatus.ABORTED
            assert result.cleared == {0}
            books.check()
            assert books.step((0, [*TEXT[:keep], *TEXT[200:210]])).status is StepStatus.DONE
        books.check()
        reused = books.logits(0, TEXT[:3])
        books.step((1, [*TEXT[:keep], *TEXT[200:210]]), trims=[Trim(1, 0)])
        np.testing.assert_allclose(reused, books.logits(1, TEXT[:3]), atol=ROUNDING)


# -- abort ----------------------------------------------------------------------------------


@kinds
def test_an_aborted_step_leaves_what_was_before_or_nothing_of_its_sequences(
    tiny_model: TinyModels, kind: Kind
) -> None:
    with opened(tiny_model(kind)) as books:
        for seq in (0, 1, 2):
            books.step((seq, TEXT[seq : seq + 30]))
        books.runtime.request_abort()
        result = books.step((0, TEXT[500:1300]), (1, TEXT[40:41]))
        assert result.status is StepStatus.ABORTED
        assert not result.sampled
        assert result.cleared == (set() if books.runtime.facts.can_rewind else {0, 1})
        books.check()
        # Until it is taken back, every step is aborted.
        assert books.step((2, TEXT[50:51])).status is StepStatus.ABORTED
        books.check()
        books.runtime.clear_abort()
        reference = {}
        with opened(tiny_model(kind)) as undisturbed:
            for seq in (0, 1, 2):
                undisturbed.step((seq, TEXT[seq : seq + 30]))
                reference[seq] = undisturbed.logits(seq, TEXT[60:66])
        for seq in (0, 1, 2):
            missing = TEXT[seq + len(books.tokens[seq]) : seq + 30]
            if missing:
                books.step((seq, missing))
            np.testing.assert_allclose(
                books.logits(seq, TEXT[60:66]), reference[seq], atol=ROUNDING
            )
        books.check()


@kinds
def test_a_step_that_runs_is_aborted_from_another_thread(
    tiny_model: TinyModels, kind: Kind
) -> None:
    with opened(tiny_model(kind)) as books:
        books.step((0, TEXT[:30]))
        statuses: set[StepStatus] = set()
        # The flag may also come before the step or after it: each is a way to be right.
        for attempt in range(20):
            begin = threading.Barrier(2)

            def abort(begin: threading.Barrier = begin) -> None:
                begin.wait()
                books.runtime.request_abort()

            thread = threading.Thread(target=abort)
            thread.start()
            begin.wait()
            result = books.step((1, TEXT[attempt : attempt + 900]))
            thread.join()
            books.runtime.clear_abort()
            statuses.add(result.status)
            books.tokens.setdefault(1, [])
            books.check()
            if result.status is StepStatus.DONE:
                books.runtime._context.trim(1, 0)
                books.tokens[1] = []
        assert StepStatus.ABORTED in statuses
        assert statuses <= {StepStatus.ABORTED, StepStatus.DONE}
        after = books.logits(0, TEXT[30:33])
    with opened(tiny_model(kind)) as undisturbed:
        undisturbed.step((0, TEXT[:30]))
        np.testing.assert_allclose(after, undisturbed.logits(0, TEXT[30:33]), atol=ROUNDING)


def test_a_long_prompt_of_a_real_model_is_aborted(smollm2_path: Path) -> None:
    with opened(smollm2_path) as books:
        prompt = list(range(1000, 1800))
        timer = threading.Thread(target=books.runtime.request_abort)
        timer.start()
        result = books.step((0, prompt))
        timer.join()
        assert result.status is StepStatus.ABORTED
        books.tokens.setdefault(0, [])
        books.check()
        books.runtime.clear_abort()
        assert books.step((0, prompt[:10])).status is StepStatus.DONE


# -- failures -------------------------------------------------------------------------------


def test_logits_that_are_no_numbers_fail_only_their_request(
    tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tiny_model("attention")) as books:
        context = books.runtime._context
        get_logits = type(context).logits

        def spoil(n_outputs: int) -> Logits:
            logits = get_logits(context, n_outputs)
            logits[0, 5] = np.nan
            return logits

        monkeypatch.setattr(context, "logits", spoil)
        result = books.step((0, TEXT[:5]), (1, TEXT[:5]))
        assert result.status is StepStatus.DONE
        assert set(result.failures) == {0}
        assert set(result.sampled) == {1}


def test_a_batch_that_llama_cpp_refuses_fails_and_clears_its_sequences(
    tiny_model: TinyModels,
) -> None:
    with opened(tiny_model("attention")) as books:
        books.step((0, TEXT[:10]))
        books.step((1, TEXT[:10]))
        # Positions with a gap.
        result = books.runtime.step(StepPlan(work=(Work(0, 0, 50, TEXT[:5], sample=True),)))
        assert result.status is StepStatus.FAILED
        assert result.reason
        books.tokens[0] = []
        books.check()
        assert books.step((0, TEXT[:5])).status is StepStatus.DONE


# -- vocabulary -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", " ", "the cat", "naïve 猫 👩\u200d👩\u200d👧", "a\n\tb  c", "<|im_end|>", "x" * 5000],
)
def test_text_survives_being_tokenised(
    tiny_model: TinyModels, smollm2_path: Path, text: str
) -> None:
    for path in (tiny_model("attention"), smollm2_path):
        with opened(path, n_ctx=256) as books:
            for special in (False, True):
                tokens = books.runtime.tokenize(text, add_special=False, parse_special=special)
                assert books.runtime.detokenize(tokens) == text
                assert all(0 <= token < books.runtime.facts.n_vocab for token in tokens)


def test_pieces_are_the_bytes_of_the_text(smollm2_path: Path) -> None:
    text = "naïve 猫 👩\u200d👩\u200d👧 and so on"
    with opened(smollm2_path, n_ctx=256) as books:
        tokens = books.runtime.tokenize(text, add_special=False, parse_special=False)
        pieces = [books.runtime.model.piece(token) for token in tokens]
    assert b"".join(pieces) == text.encode()


def test_control_tokens_are_parsed_only_when_asked_for(tiny_model: TinyModels) -> None:
    with opened(tiny_model("attention")) as books:
        tokenize = books.runtime.tokenize
        (marker,) = tokenize("<|im_end|>", add_special=False, parse_special=True)
        assert marker not in tokenize("<|im_end|>", add_special=False, parse_special=False)
        plain = tokenize("the", add_special=False, parse_special=False)
        assert tokenize("the", add_special=True, parse_special=False) == [1, *plain]


# -- the log --------------------------------------------------------------------------------


def test_llama_cpp_logs_to_logging(
    tiny_model: TinyModels, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        caplog.at_level("DEBUG", logger="llamad_trio.llama_cpp"),
        opened(tiny_model("attention")),
    ):
        pass
    records = [r for r in caplog.records if r.name == "llamad_trio.llama_cpp"]
    assert any("llama_model_loader" in r.getMessage() or "arch" in r.getMessage() for r in records)
    assert all(r.getMessage() == r.getMessage().strip() != "" for r in records)
    assert max(r.levelno for r in records) <= 30
    assert capfd.readouterr() == ("", "")


def test_an_abort_is_no_error_in_the_log(
    tiny_model: TinyModels, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tiny_model("attention")) as books:
        caplog.clear()
        books.runtime.request_abort()
        assert books.step((0, TEXT[:100])).status is StepStatus.ABORTED
        assert [r for r in caplog.records if r.levelno >= 30] == []
