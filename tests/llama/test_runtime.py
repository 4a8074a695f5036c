"""A step does what its plan says or nothing, and the pool is what the books say."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from llamad_trio.llama.llama_runtime import LlamaRuntime
from llamad_trio.scheduling.plan import Copy, Drop, Prepared, StepPlan, StepResult, StepStatus, Work
from tests.llama.test_kv_reuse import EXACT, GREEDY, opened_runtime
from tests.models import DECODER_KINDS, proven_here

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from llamad_trio.scheduling.plan import MemoryOp
    from tests.models import Kind, TinyModels

    Logits = NDArray[np.float32]

kinds = pytest.mark.parametrize("kind", DECODER_KINDS)
attention = pytest.mark.parametrize("kind", ["attention"])

# Logits that ought to be equal differ by this much, depending on the cells they come from.
ROUNDING = 1e-3

# Letters of the tiny vocabulary, in an order without a pattern.
TEXT = [262 + (7 * i * i + 3 * i) % 34 for i in range(1600)]


def greedy(request_id: int) -> Prepared:
    """A request that takes the likeliest token."""
    return Prepared(id=request_id, tokens=(), max_tokens=1, sampling=GREEDY)


class Books:
    """A runtime, and what its sequences hold."""

    def __init__(self, runtime: LlamaRuntime) -> None:
        self.runtime = runtime
        self.tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
        self._has_sampler: set[int] = set()

    def plan(
        self, *additions: tuple[int, Sequence[int]], memory: Sequence[MemoryOp] = ()
    ) -> StepPlan:
        """A step that adds tokens to sequences, and samples a token of each."""
        for operation in memory:
            match operation:
                case Drop(seq=seq):
                    self.tokens[seq] = []
                case Copy(src=src, dst=dst, n=n):
                    self.tokens[dst] = self.tokens[src][:n]
        new = [seq for seq, _ in additions if seq not in self._has_sampler]
        self._has_sampler.update(new)
        return StepPlan(
            work=tuple(
                Work(seq, seq, len(self.tokens[seq]), tokens, sample=True)
                for seq, tokens in additions
            ),
            memory=tuple(memory),
            new_samplers=tuple(map(greedy, new)),
        )

    def step(
        self, *additions: tuple[int, Sequence[int]], memory: Sequence[MemoryOp] = ()
    ) -> StepResult:
        """Run such a step, and book it."""
        result = self.runtime.step(self.plan(*additions, memory=memory))
        if result.status is StepStatus.DONE:
            for seq, tokens in additions:
                self.tokens[seq].extend(tokens)
        for seq in result.cleared:
            self.tokens[seq] = []
        return result

    def logits(self, seq: int, tokens: Sequence[int]) -> Logits:
        """Add tokens to a sequence, and return the logits after them."""
        assert self.step((seq, tokens)).status is StepStatus.DONE
        return self.last_logits()

    def last_logits(self) -> Logits:
        """The logits of the first row of the last step."""
        logits: Logits = self.runtime._context.logits(1)[0].copy()
        return logits

    def check(self) -> None:
        """The pool is what the books say."""
        for seq, tokens in self.tokens.items():
            assert self.runtime._context.n_resident(seq) == len(tokens)


@contextmanager
def opened(path: Path, *, n_ctx: int = 2048) -> Iterator[Books]:
    config = attrs.evolve(proven_here(EXACT), n_ctx=n_ctx, n_batch=1024)
    with opened_runtime(path, config) as runtime:
        yield Books(runtime)


@pytest.fixture
def books(tiny_model: TinyModels, kind: Kind) -> Iterator[Books]:
    """Of a tiny model of the kind that the test is for."""
    with opened(tiny_model(kind)) as books:
        yield books


@pytest.fixture
def undisturbed(tiny_model: TinyModels, kind: Kind) -> Iterator[Books]:
    """Another like it, which computes what is expected."""
    with opened(tiny_model(kind)) as books:
        yield books


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
def test_only_rows_that_ask_for_it_are_sampled(books: Books) -> None:
    plan = StepPlan(
        work=(
            Work(10, 0, 0, TEXT[:20], sample=False),
            Work(11, 1, 0, TEXT[:20], sample=True),
            Work(12, 2, 0, TEXT[:30], sample=False),
        ),
        new_samplers=(greedy(11),),
    )
    result = books.runtime.step(plan)
    assert set(result.sampled) == {11}
    again = books.runtime.step(
        StepPlan(
            work=(Work(13, 1, 0, TEXT[:20], sample=True),),
            memory=(Drop(1),),
            old_samplers=(11,),
            new_samplers=(greedy(13),),
        )
    )
    assert again.sampled[13] == result.sampled[11]


@attention
def test_a_sampled_token_tells_its_bytes_and_whether_it_ends(books: Books) -> None:
    sampled = books.step((0, TEXT[:40])).sampled[0]
    assert sampled.piece == books.runtime.detokenize([sampled.token]).encode()
    assert not sampled.ends
    ends = [t for t in range(books.runtime.model.n_vocab) if books.runtime.model.ends_generation(t)]
    assert [books.runtime.detokenize([t]) for t in ends] == ["</s>", "<|im_end|>"]
    assert [books.runtime.model.piece(t) for t in ends] == [b"", b""]


@kinds
def test_whether_memory_can_go_back_is_found_out(books: Books, kind: Kind) -> None:
    assert books.runtime.facts.can_rewind == (kind in {"attention", "sliding-window"})
    books.check()  # the warm-up has left nothing


@pytest.mark.parametrize("kind", ["attention", "sliding-window"])
def test_a_copy_of_a_prefix_goes_on_as_a_fresh_sequence(books: Books) -> None:
    books.step((0, TEXT[:60]))
    books.step((1, TEXT[100:110]), memory=[Copy(0, 1, 50)])
    books.check()
    copied = books.logits(1, TEXT[:5])
    books.step((2, TEXT[:50]))
    books.step((2, TEXT[100:110]))
    np.testing.assert_allclose(copied, books.logits(2, TEXT[:5]), atol=ROUNDING)


@kinds
def test_a_copy_of_a_whole_sequence_goes_on_exactly_as_that_would_have(
    books: Books, undisturbed: Books
) -> None:
    undisturbed.step((0, TEXT[:60]))
    expected = undisturbed.logits(0, TEXT[100:110])
    books.step((0, TEXT[:60]))
    # In the same cells: where they come from decides how llama.cpp rounds.
    books.step((1, TEXT[100:110]), memory=[Copy(0, 1, 60), Drop(0)])
    books.check()
    np.testing.assert_array_equal(books.last_logits(), expected)


@kinds
def test_what_a_copy_goes_on_with_is_not_in_the_original(books: Books, undisturbed: Books) -> None:
    undisturbed.step((0, TEXT[:60]))
    expected = undisturbed.logits(0, TEXT[100:110])
    books.step((0, TEXT[:60]))
    books.step((1, TEXT[200:230]), (2, TEXT[300:303]), memory=[Copy(0, 1, 60), Copy(0, 2, 60)])
    books.step((1, TEXT[230:240]))
    books.check()
    np.testing.assert_allclose(books.logits(0, TEXT[100:110]), expected, atol=ROUNDING)


@kinds
def test_a_dropped_sequence_leaves_its_copies(books: Books) -> None:
    books.step((0, TEXT[:60]))
    books.step((1, TEXT[100:110]), memory=[Copy(0, 1, 60), Copy(1, 2, 60), Drop(0)])
    # Whoever comes next must not get the cells.
    books.step((0, TEXT[300:400]))
    books.check()
    copied = books.logits(2, TEXT[100:110])
    np.testing.assert_allclose(books.logits(1, TEXT[:5]), books.logits(2, TEXT[:5]), atol=ROUNDING)
    books.step((0, TEXT[:60]), memory=[Drop(0)])
    np.testing.assert_allclose(copied, books.logits(0, TEXT[100:110]), atol=ROUNDING)


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_what_cannot_be_copied_ends_the_step_before_it_computes(books: Books) -> None:
    books.step((0, TEXT[:60]))
    result = books.step((1, TEXT[100:110]), (2, TEXT[:5]), memory=[Copy(0, 1, 50)])
    assert result.status is StepStatus.ABORTED
    assert result.cleared == {1}
    assert not result.sampled
    books.check()
    # A sequence that was emptied afterwards is not missed.
    result = books.step((2, TEXT[:5]), memory=[Copy(0, 1, 50), Drop(1)])
    assert result.status is StepStatus.DONE
    books.check()


@pytest.mark.parametrize("kind", ["attention", "sliding-window", "hybrid"])
def test_a_full_pool_has_no_room_and_keeps_what_it_has(tiny_model: TinyModels, kind: Kind) -> None:
    with opened(tiny_model(kind), n_ctx=256) as books:
        books.step((0, TEXT[:200]))
        result = books.step((1, TEXT[:100]))
        assert result.status is StepStatus.NO_ROOM
        assert not result.sampled
        books.check()
        assert books.step((0, TEXT[:10])).status is StepStatus.DONE


@pytest.mark.parametrize("keep", [1, 10, 16, 17, 40, 44, 50, 60, 61, 90, 99])
def test_a_window_that_was_given_away_is_noticed_before_it_is_built_on(
    tiny_model: TinyModels, keep: int
) -> None:
    # Layers with a sliding window give the cells that have left it to whoever comes next: after a
    # trim, what the next token looks at may be gone.
    with opened(tiny_model("sliding-window"), n_ctx=512) as books:
        books.step((0, TEXT[:100]))
        books.step((1, TEXT[300:350]))
        result = books.step((2, TEXT[200:210]), memory=[Copy(0, 2, keep)])
        if keep >= 90:
            assert result.status is StepStatus.DONE
        if result.status is not StepStatus.DONE:
            assert result.status is StepStatus.ABORTED
            assert result.cleared == {2}
            books.check()
            assert books.step((2, [*TEXT[:keep], *TEXT[200:210]])).status is StepStatus.DONE
        books.check()
        reused = books.logits(2, TEXT[:3])
        books.step((1, [*TEXT[:keep], *TEXT[200:210]]), memory=[Drop(1)])
        np.testing.assert_allclose(reused, books.logits(1, TEXT[:3]), atol=ROUNDING)


# -- abort ----------------------------------------------------------------------------------


@kinds
def test_an_aborted_step_leaves_what_was_before_or_nothing_of_its_sequences(
    books: Books, undisturbed: Books
) -> None:
    for seq in (0, 1, 2):
        books.step((seq, TEXT[seq : seq + 30]))
    books.runtime.request_abort()
    result = books.step((0, TEXT[500:1300]), (1, TEXT[40:41]))
    assert result.status is StepStatus.ABORTED
    assert not result.sampled
    # States are moved by steps of several sequences: also those of others.
    facts = books.runtime.facts
    assert result.cleared == (set() if facts.can_rewind else set(range(facts.n_seqs)))
    books.check()
    # Until it is taken back, every step is aborted.
    assert books.step((2, TEXT[50:51])).status is StepStatus.ABORTED
    books.check()
    books.runtime.clear_abort()
    reference = {}
    for seq in (0, 1, 2):
        undisturbed.step((seq, TEXT[seq : seq + 30]))
        reference[seq] = undisturbed.logits(seq, TEXT[60:66])
    for seq in (0, 1, 2):
        missing = TEXT[seq + len(books.tokens[seq]) : seq + 30]
        if missing:
            books.step((seq, missing))
        np.testing.assert_allclose(books.logits(seq, TEXT[60:66]), reference[seq], atol=ROUNDING)
    books.check()


@kinds
def test_an_aborted_step_leaves_those_who_had_no_part_in_it_right_or_empty(
    books: Books, undisturbed: Books
) -> None:
    # The state of the second sequence lies between those that the step wants side by side.
    arrivals = (0, 2, 1)
    for seq in arrivals:
        undisturbed.step((seq, TEXT[seq : seq + 30]))
    expected = undisturbed.logits(2, TEXT[60:66])
    for seq in arrivals:
        books.step((seq, TEXT[seq : seq + 30]))
    books.runtime.request_abort()
    assert books.step((0, TEXT[500:510]), (1, TEXT[40:50])).status is StepStatus.ABORTED
    books.runtime.clear_abort()
    books.check()
    if not books.tokens[2]:
        books.step((2, TEXT[2:32]))
    np.testing.assert_allclose(books.logits(2, TEXT[60:66]), expected, atol=ROUNDING)


@kinds
def test_an_aborted_step_of_one_sequence_costs_no_other_anything(
    books: Books, undisturbed: Books
) -> None:
    undisturbed.step((0, TEXT[:30]))
    expected = undisturbed.logits(0, TEXT[60:66])
    books.step((0, TEXT[:30]))
    books.runtime.request_abort()
    result = books.step((1, TEXT[40:50]), memory=[Copy(0, 1, 30)])
    books.runtime.clear_abort()
    assert result.status is StepStatus.ABORTED
    assert result.cleared <= {1}
    books.check()
    np.testing.assert_array_equal(books.logits(0, TEXT[60:66]), expected)


@kinds
def test_a_step_that_runs_is_aborted_from_another_thread(books: Books, undisturbed: Books) -> None:
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
        books.check()
        if result.status is StepStatus.DONE:
            books.runtime._context.trim(1, 0)
            books.tokens[1] = []
    assert StepStatus.ABORTED in statuses
    assert statuses <= {StepStatus.ABORTED, StepStatus.DONE}
    after = books.logits(0, TEXT[30:33])
    undisturbed.step((0, TEXT[:30]))
    np.testing.assert_allclose(after, undisturbed.logits(0, TEXT[30:33]), atol=ROUNDING)


# -- failures -------------------------------------------------------------------------------


@attention
def test_logits_that_are_no_numbers_fail_only_their_request(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@attention
def test_a_batch_that_llama_cpp_refuses_fails_and_clears_its_sequences(books: Books) -> None:
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


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[LlamaRuntime]:
    """For what changes nothing of it."""
    with opened(smollm2_path, n_ctx=256) as books:
        yield books.runtime


@pytest.fixture(scope="module")
def tiny(tiny_model: TinyModels) -> Iterator[LlamaRuntime]:
    with opened(tiny_model("attention"), n_ctx=256) as books:
        yield books.runtime


TEXTS = [
    *("", " ", "the cat", " two  spaces ", "a\n\tb  c", " the  cat\n\tand\0 the hat ", "x" * 5000),
    *("naïve café", "猫と犬", "مرحبا", "naïve 猫 👩\u200d👩\u200d👧 and", "👩\u200d👩\u200d👧 🎉"),
    "<|im_end|>",
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text)[:20])
def test_text_survives_being_tokenised(
    tiny: LlamaRuntime, smollm2: LlamaRuntime, text: str
) -> None:
    for runtime in (tiny, smollm2):
        for special in (False, True):
            tokens = runtime.tokenize(text, add_special=False, parse_special=special)
            assert runtime.detokenize(tokens) == text
            assert all(0 <= token < runtime.facts.n_vocab for token in tokens)
    tokens = smollm2.tokenize(text, add_special=False, parse_special=False)
    assert b"".join(map(smollm2.model.piece, tokens)) == text.encode()


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=40))
@example(text="naïve 猫 👩\u200d👩\u200d👧 <s></s><0x41>")
def test_any_text_survives_a_vocabulary_of_bytes(tiny: LlamaRuntime, text: str) -> None:
    tokens = tiny.tokenize(text, add_special=False, parse_special=False)
    # SentencePiece writes a space as U+2581, so that one character cannot come back as itself.
    assert tiny.detokenize(tokens) == text.replace("\u2581", " ")


@attention
def test_control_tokens_are_parsed_only_when_asked_for(books: Books) -> None:
    tokenize = books.runtime.tokenize
    (marker,) = tokenize("<|im_end|>", add_special=False, parse_special=True)
    assert marker not in tokenize("<|im_end|>", add_special=False, parse_special=False)
    plain = tokenize("the", add_special=False, parse_special=False)
    assert tokenize("the", add_special=True, parse_special=False) == [1, *plain]


# -- the log --------------------------------------------------------------------------------


def test_llama_cpp_logs_to_logging(
    tiny_model: TinyModels, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level("DEBUG", logger="llamad_trio.llama_cpp"), opened(tiny_model("attention")):
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
