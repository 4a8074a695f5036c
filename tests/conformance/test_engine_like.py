"""Every `EngineLike` keeps one set of promises: the scripted engine, the real one, and a
`RemoteEngine` with either behind its socket.  What is here holds for all of them, word for
word; a program that takes one takes any.

The streams and events of engines are in `test_streams`, what replies can be made to be in
`test_results`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import attrs
import msgspec
import pytest
import trio

from llamad_trio import (
    Busy,
    Completion,
    Engine,
    EngineClosed,
    EngineConfig,
    EngineLike,
    EngineStats,
    InferenceError,
    LlamadError,
    Message,
    ModelInfo,
    PromptTooLong,
    ProtocolError,
    RemoteEngine,
    Request,
    Tool,
    UnsupportedFeature,
)
from tests.conformance.engines import FAILURE, N_CTX
from tests.support import ENDLESS, read_all, until, until_idle, until_queued

if TYPE_CHECKING:
    from tests.conformance.engines import Opener, Pair

CAT = Request("the cat", max_tokens=16, temperature=0)

Question = Callable[[EngineLike], Coroutine[Any, Any, object]]

QUESTIONS: list[Question] = [
    lambda engine: engine.complete(CAT),
    lambda engine: engine.complete_text(CAT),
    lambda engine: engine.render("x"),
    lambda engine: engine.count_tokens("x"),
    lambda engine: engine.tokenize("x"),
    lambda engine: engine.detokenize([97]),
    lambda engine: engine.score("x", ["y"]),
    lambda engine: engine.choose("x", ["y"]),
]


def without_times(done: Completion) -> Completion:
    """What two runs of one request have in common."""
    return attrs.evolve(done, ttft_s=0.0, duration_s=0.0, cached_tokens=0)


def takes_any(engine: EngineLike) -> EngineLike:
    return engine


async def test_type_checkers_take_every_engine_for_an_engine_like(pair: Pair) -> None:
    local: Engine = pair.behind
    assert takes_any(local) is local
    if isinstance(pair.engine, RemoteEngine):
        remote: RemoteEngine = pair.engine
        assert takes_any(remote) is remote
    for name in vars(EngineLike):
        assert hasattr(pair.engine, name) or name.startswith("_")


# -- completions ----------------------------------------------------------------------------


async def test_a_completion_reports_what_was_done(pair: Pair) -> None:
    done = await pair.engine.complete(CAT)
    assert done.text
    assert done.prompt_tokens == await pair.engine.count_tokens(CAT)
    assert done.generated_tokens == 16
    assert (done.finish_reason, done.stop_sequence) == ("length", None)
    assert (done.cached_tokens, done.value, done.logprobs) == (0, None, None)
    assert 0 < done.ttft_s <= done.duration_s
    assert (done.reasoning, done.tool_calls, done.unfinished) == (None, (), "")
    assert get_type_hints(Completion).keys() == attrs.asdict(done).keys()


async def test_a_prompt_that_was_computed_is_reused_and_that_is_told(pair: Pair) -> None:
    first = await pair.engine.complete(CAT)
    again = await pair.engine.complete(CAT)
    assert 0 < again.cached_tokens < again.prompt_tokens
    assert without_times(again) == without_times(first)


FIELDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.5, "seed": 7},
    {"temperature": 1.5, "seed": 2**32 - 1, "top_k": 0, "top_p": 1.0, "min_p": 0.02},
    {"temperature": 1.0, "seed": 3, "repeat_penalty": 1.8, "repeat_last_n": 8},
    {"temperature": 1.0, "seed": 3, "presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"temperature": 0, "raw": True},
    {"temperature": 0, "system": "a hat", "stop": ["e", "a", ""]},
    {"temperature": 0, "session": "one"},
    {"temperature": 0, "template_vars": {"unused": [1, None, "ü", 10**30]}},
    {"max_tokens": 1},
]


async def test_every_field_means_what_it_means_to_the_engine_behind(pair: Pair) -> None:
    for fields in FIELDS:
        asked = attrs.evolve(CAT, **{"seed": 1, **fields})
        await pair.behind.complete(asked)  # so that both reuse the same
        there = await pair.behind.complete(asked)
        here = await pair.engine.complete(asked)
        assert without_times(here) == without_times(there), fields
        assert here.cached_tokens == there.cached_tokens


async def test_complete_text_is_the_text_of_the_completion(pair: Pair) -> None:
    assert (
        await pair.engine.complete_text(CAT)
        == (await pair.engine.complete(CAT)).text
        == await pair.engine.complete_text("the cat", max_tokens=16, temperature=0)
    )
    # What is given beside a request overrides that.
    assert (await pair.engine.complete(CAT, max_tokens=3)).generated_tokens == 3
    assert CAT.max_tokens == 16


async def test_a_prompt_of_tokens_is_used_as_it_is(pair: Pair) -> None:
    tokens = await pair.engine.tokenize("the cat")
    n_tokens = len(tokens)
    asked = Request(tokens, max_tokens=8, temperature=0)
    tokens.clear()  # it was read
    done = await pair.engine.complete(asked)
    assert done.prompt_tokens == n_tokens == await pair.engine.count_tokens(asked)
    assert done.text == await pair.behind.complete_text(asked)
    assert await pair.engine.render(asked) == "the cat"


async def test_system_and_history_are_part_of_the_prompt(pair: Pair) -> None:
    asked = Request(
        "and then? the cat",
        system="a hat",
        history=[Message("user", "one"), Message("assistant", "two")],
        max_tokens=4,
        temperature=0,
    )
    rendered = await pair.engine.render(asked)
    turns = ["[system] a hat", "[user] one", "[assistant] two", "[user] and then?", "[assistant] "]
    places = [rendered.find(turn) for turn in turns[:-1]] + [rendered.rfind(turns[-1])]
    assert places == sorted(places)
    assert places[0] == 0
    done = await pair.engine.complete(asked)
    assert done.prompt_tokens == await pair.engine.count_tokens(asked)
    raw = Request(rendered, raw=True, max_tokens=4, temperature=0)
    assert await pair.engine.complete_text(raw) == done.text


async def test_without_a_prompt_the_history_is_answered(pair: Pair) -> None:
    asked = Request(None, history=[Message("user", "the cat")], max_tokens=16, temperature=0)
    assert await pair.engine.render(asked) == await pair.engine.render("the cat")
    assert await pair.engine.complete_text(asked) == await pair.engine.complete_text(CAT)


async def test_a_raw_prompt_passes_the_template_by(pair: Pair) -> None:
    assert await pair.engine.render("the cat", raw=True) == "the cat"
    done = await pair.engine.complete("the cat", raw=True, max_tokens=1)
    assert done.prompt_tokens == await pair.engine.count_tokens("the cat", raw=True)
    assert done.prompt_tokens < (await pair.engine.complete(CAT)).prompt_tokens


class Text(str):
    """Such as what a program's own templates make."""

    __slots__ = ()


class Number(int):
    """Such as a token that knows its name."""


async def test_text_and_numbers_may_be_of_a_class_of_their_own(pair: Pair) -> None:
    assert await pair.engine.complete_text(Text("the cat"), max_tokens=16, temperature=0) == (
        await pair.engine.complete_text(CAT)
    )
    tokens = [Number(token) for token in await pair.engine.tokenize(Text("the cat"))]
    assert await pair.engine.detokenize(tokens) == "the cat"
    assert len(await pair.engine.score("the cat", [Text("a")])) == 1


# -- text and tokens ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "the cat", " two  spaces ", "naïve 猫 👩\u200d👩\u200d👧", "a\n\tb"]
)
async def test_text_comes_back_from_its_tokens(pair: Pair, text: str) -> None:
    tokens = await pair.engine.tokenize(text)
    assert tokens == await pair.behind.tokenize(text)
    assert all(type(token) is int for token in tokens)
    assert await pair.engine.detokenize(tokens) == text
    assert await pair.engine.detokenize(tuple(tokens)) == text


async def test_questions_are_answered_as_by_the_engine_behind(pair: Pair) -> None:
    questions: list[Question] = [
        lambda engine: engine.tokenize("<|im_end|>"),
        lambda engine: engine.tokenize("<|im_end|>", special=True),
        lambda engine: engine.detokenize(range(97, 105)),
        lambda engine: engine.count_tokens(Request(range(97, 105))),
        lambda engine: engine.count_tokens("the cat and " * 500, raw=True),
    ]
    for question in questions:
        assert await question(pair.engine) == await question(pair.behind)


async def test_questions_are_answered_while_all_slots_are_busy(opener: Opener) -> None:
    async with opener(n_slots=1) as pair, pair.engine.stream(CAT, max_tokens=ENDLESS) as tokens:
        await tokens.receive()
        assert await pair.engine.detokenize(await pair.engine.tokenize("a hat")) == "a hat"
        assert await pair.engine.count_tokens(CAT) > 2
        assert pair.behind.stats().slots["free"] == 0


# -- looking around -------------------------------------------------------------------------


async def test_what_is_known_of_the_model_is_what_the_engine_behind_knows(pair: Pair) -> None:
    assert isinstance(pair.engine.info, ModelInfo)
    assert pair.engine.info == pair.behind.info
    assert isinstance(pair.engine.config, EngineConfig)
    assert pair.engine.config == attrs.evolve(pair.behind.config, lane=None)
    assert pair.engine.config.n_ctx == N_CTX


async def test_stats_tell_of_a_request_when_it_has_ended(pair: Pair) -> None:
    before = pair.engine.stats()
    assert isinstance(before, EngineStats)
    assert before.requests == {"completed": 0, "failed": 0, "cancelled": 0}
    done = await pair.engine.complete(CAT)
    async with pair.engine.stream(CAT) as tokens:
        await tokens.result()
    stats = pair.engine.stats()
    assert stats.requests == {"completed": 2, "failed": 0, "cancelled": 0}
    assert stats.steps >= before.steps + 16
    assert stats.cached_tokens > 0
    assert stats.prefill_tokens >= done.prompt_tokens
    await until_idle(pair.behind)
    # Counted since: nothing but what became of the slot.
    of_slots = ("slots", "kv_used_tokens", "kv_retained_tokens", "kv_free_tokens")
    now = pair.behind.stats()
    assert attrs.evolve(now, **{name: getattr(stats, name) for name in of_slots}) == stats
    assert {type(value) for value in stats.slots.values()} == {int}


# -- cancelling -----------------------------------------------------------------------------


async def cancel_when(
    condition: Callable[[], bool], function: Callable[[], Coroutine[Any, Any, object]]
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(function)
        await until(condition)
        nursery.cancel_scope.cancel()


async def test_a_completion_is_cancelled_while_it_waits(opener: Opener) -> None:
    async with opener(n_slots=1) as pair:
        async with pair.engine.stream(CAT, max_tokens=ENDLESS) as running:
            await running.receive()
            await cancel_when(
                lambda: pair.behind.stats().queued == 1, lambda: pair.engine.complete("a number")
            )
            await until_queued(pair.behind, 0)
            await running.receive()
        await until_idle(pair.behind)
        assert pair.behind.stats().requests == {"completed": 0, "failed": 0, "cancelled": 2}


@pytest.mark.parametrize(
    ("state", "asked"),
    [("prefill", Request([97] * 7000)), ("decode", attrs.evolve(CAT, max_tokens=ENDLESS))],
    ids=["prefill", "decode"],
)
async def test_a_completion_is_cancelled_while_it_is_computed(
    pair: Pair, state: str, asked: Request
) -> None:
    await cancel_when(
        lambda: pair.behind.stats().slots[state] == 1, lambda: pair.engine.complete(asked)
    )
    await until_idle(pair.behind)
    assert pair.behind.stats().prefill_tokens < 7000
    assert pair.behind.stats().requests == {"completed": 0, "failed": 0, "cancelled": 1}
    assert (await pair.engine.complete(CAT)).generated_tokens == 16


async def test_nothing_is_computed_in_a_cancelled_scope(pair: Pair) -> None:
    for question in QUESTIONS:
        with trio.CancelScope() as scope:
            scope.cancel()
            await question(pair.engine)
        assert scope.cancelled_caught
    await until_idle(pair.behind)
    assert pair.behind.stats().steps == 0
    assert await pair.engine.detokenize(await pair.engine.tokenize("a hat")) == "a hat"


# -- errors ---------------------------------------------------------------------------------


def pick(n: int) -> int:
    """Pick a number."""
    return n


BAD_FIELDS: list[dict[str, Any]] = [
    {"temprature": 1.0},
    {"max_tokens": "5"},
    {"max_tokens": 5.5},
    {"max_tokens": True},
    {"temperature": "hot"},
    {"raw": 1},
    {"stop": "x"},
    {"stop": [1]},
    {"system": 5},
    {"system": "a\0b"},
    {"system": "\ud800"},
    {"history": "x"},
    {"history": [{"role": "user", "content": "x"}]},
    {"json_schema": "x"},
    {"json_schema": {"type": "nonsense"}},
    {"regex": "("},
    {"lark": "start: nonsense"},
    {"grammar": "root ::= ("},
    {"grammar": 'root ::= "a"', "grammar_root": "other"},
    {"grammar": 'root ::= "a"', "regex": "a"},
    {"logprobs": "x"},
    {"tools": "x"},
    {"tools": [5]},
    {"tools": [lambda: 1]},
    {"tools": [pick], "tool_choice": "nothing"},
    {"tools": [pick, pick]},
    {"tools": [pick], "tool_format": "morse"},
    {"tools": [Tool("f", "", {"type": "array"})]},
    {"tools": [Tool("f", "", {"properties": {"a": {"type": "no such type"}}})]},
    {"tools": [pick], "json_schema": {"type": "integer"}},
    {"tools": [pick], "regex": "a"},
    {"tools": [pick], "raw": True},
    {"template_vars": {"x": object()}},
    {"raw": True, "system": "x"},
    {"into": bytes},
    {"into": Annotated[int, msgspec.Meta(ge=5, le=4)]},
    {"into": int, "regex": "5"},
    {"into": int, "json_schema": {}},
]


def completing(request: Any, **fields: Any) -> Question:
    return lambda engine: engine.complete(request, **fields)


async def error_of(question: Question, engine: EngineLike) -> LlamadError | None:
    try:
        await question(engine)
    except LlamadError as error:
        return error
    return None


def told(error: LlamadError | None) -> tuple[object, ...]:
    """All that an error tells: errors are equal only to themselves."""
    return (type(error), str(error), *(error.__reduce__() if error else ()))


async def check_same_error(pair: Pair, question: Question) -> LlamadError | None:
    """The error of a question, which is the one that the engine behind raises."""
    error = await error_of(question, pair.engine)
    assert told(error) == told(await error_of(question, pair.behind))
    return error


async def test_a_bad_field_is_a_protocol_error_that_says_what(pair: Pair) -> None:
    for fields in BAD_FIELDS:
        error = await check_same_error(pair, completing("a number", **fields))
        assert isinstance(error, ProtocolError), fields
    await until_idle(pair.behind)
    assert pair.behind.stats().steps == 0


BAD_PROMPTS: list[Any] = [
    *(5, None, b"the cat", ["the cat"], [1.5], [True], "a\0b", "\ud800", [-1], [10**9], [10**30]),
    [],
]

OF_A_PROMPT: list[Callable[[Any], Question]] = [
    lambda prompt: completing(prompt, max_tokens=1),
    lambda prompt: lambda engine: engine.complete_text(prompt, max_tokens=1),
    lambda prompt: lambda engine: engine.render(prompt),
    lambda prompt: lambda engine: engine.count_tokens(prompt),
    lambda prompt: lambda engine: engine.score(prompt, ["a"]),
    lambda prompt: lambda engine: engine.choose(prompt, ["a"]),
]


async def test_a_bad_prompt_is_a_protocol_error(pair: Pair) -> None:
    for prompt in BAD_PROMPTS:
        assert isinstance(await error_of(completing(prompt), pair.engine), ProtocolError), prompt
        for asked in OF_A_PROMPT:
            error = await check_same_error(pair, asked(prompt))
            # Nothing is the matter with no tokens, until something is to follow them.
            assert isinstance(error, ProtocolError) or (prompt == [] and error is None), prompt


BAD_QUESTIONS: dict[str, list[tuple[Any, ...]]] = {
    "tokenize": [(5,), (None,), (b"x",), ([1],), ("a\0b",), ("\udfff",)],
    "detokenize": [("abc",), (b"abc",), (5,), (None,), (["a"],), ([True],), ([-1],), ([10**30],)],
    "score": [
        ("x", texts) for texts in ("abc", b"abc", 5, None, [5], [b"a"], ["a\0b"], ["\ud800"])
    ],
    "choose": [
        ("x", texts) for texts in ("abc", None, [object()], [], [""], ["a", ""], ["a", "a"])
    ],
}


async def ask(engine: EngineLike, name: str, arguments: tuple[Any, ...]) -> object:
    return await getattr(engine, name)(*arguments)


async def test_a_bad_question_is_a_protocol_error(pair: Pair) -> None:
    questions: list[Callable[[Any], Coroutine[Any, Any, object]]] = [
        lambda engine: engine.render("x", nonsense=1),
        lambda engine: engine.count_tokens("x", nonsense=1),
        lambda engine: engine.score("x", ["a"], nonsense=1),
        lambda engine: engine.detokenize([5, engine.info.n_vocab]),
        lambda engine: engine.complete([1, engine.info.n_vocab]),
        *(
            partial(ask, name=name, arguments=arguments)
            for name, calls in BAD_QUESTIONS.items()
            for arguments in calls
        ),
    ]
    for n, question in enumerate(questions):
        for engine in (pair.engine, pair.behind):
            assert isinstance(await error_of(question, engine), ProtocolError), n
    assert pair.behind.stats().steps == 0


async def test_a_request_to_stream_is_checked_as_it_is_entered(pair: Pair) -> None:
    for opened in (pair.engine.stream, pair.engine.stream_events):
        with pytest.raises(ProtocolError, match="nonsense"):
            async with opened("the cat", nonsense=1):  # type: ignore[call-arg]
                pass


async def test_a_prompt_that_is_too_long_is_told_with_its_length(pair: Pair) -> None:
    error = await check_same_error(
        pair, lambda engine: engine.complete(Request([97] * (N_CTX + 100)))
    )
    assert isinstance(error, PromptTooLong)
    assert error.tokens == N_CTX + 100
    assert error.budget < N_CTX
    for text in ("the cat " * 4000, "x" * 200_000):
        error = await check_same_error(pair, completing(text))
        assert isinstance(error, PromptTooLong)
    assert pair.behind.stats().steps == 0
    assert pair.behind.stats().requests == {"completed": 0, "failed": 6, "cancelled": 0}


async def test_what_the_template_cannot_do_is_an_unsupported_feature(opener: Opener) -> None:
    plain = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    async with opener(chat_template=plain) as pair:
        error = await check_same_error(pair, completing("a call", tools=[pick]))
        assert isinstance(error, UnsupportedFeature)
        assert "tool" in error.feature + error.reason


async def test_without_a_template_only_raw_prompts_are_taken(opener: Opener) -> None:
    async with opener(chat_template=None) as pair:
        assert not pair.engine.info.has_template
        error = await check_same_error(pair, completing(CAT))
        assert isinstance(error, ProtocolError)
        assert "template" in error.reason
        assert (await pair.engine.complete(CAT, raw=True)).generated_tokens == 16


async def test_a_request_beyond_the_queue_is_refused_with_its_length(opener: Opener) -> None:
    async with opener(n_slots=1, max_queue=1) as pair, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: pair.engine.complete(CAT, max_tokens=ENDLESS))
        await until(lambda: pair.behind.stats().decode_tokens > 0)
        nursery.start_soon(lambda: pair.engine.complete(CAT, max_tokens=ENDLESS))
        await until_queued(pair.behind, 1)
        for _ in range(2):
            with pytest.raises(Busy) as caught:
                await pair.engine.complete(CAT)
            assert told(caught.value) == told(Busy(1, 1))
            with pytest.raises(Busy):
                async with pair.engine.stream(CAT) as tokens:
                    await tokens.receive()
            with pytest.raises(Busy):
                await pair.engine.score("x", ["y"])
        nursery.cancel_scope.cancel()


async def test_a_failed_step_fails_its_requests_and_no_other(pair: Pair) -> None:
    pair.fail_next_step()
    with pytest.raises(InferenceError) as caught:
        await pair.engine.complete(CAT)
    assert told(caught.value) == told(InferenceError(FAILURE))
    async with pair.engine.stream(CAT, max_tokens=ENDLESS) as tokens:
        first = await tokens.receive()
        pair.fail_next_step()
        with pytest.raises(InferenceError, match=FAILURE):
            await read_all(tokens)
        for ask in (tokens.receive, tokens.result):
            with pytest.raises(InferenceError, match=FAILURE):
                await ask()
        assert tokens.text.startswith(first)
        assert tokens.completion is None
    assert (await pair.engine.complete(CAT)).generated_tokens == 16
    assert pair.behind.stats().requests == {"completed": 1, "failed": 2, "cancelled": 0}


async def test_after_its_block_an_engine_is_closed(opener: Opener) -> None:
    async with opener() as pair:
        engine = pair.engine
        at_first = engine.is_open
        assert at_first
        await engine.complete(CAT)
    assert not engine.is_open
    questions: list[Question] = [
        *QUESTIONS,
        lambda engine: engine.stream(CAT).__aenter__(),
        lambda engine: engine.stream_events(CAT).__aenter__(),
    ]
    for question in questions:
        with pytest.raises(EngineClosed):
            await question(engine)
    # What was known is still known.
    assert engine.info.n_vocab > 0
    assert engine.config.n_ctx == N_CTX
    assert engine.stats().requests["completed"] == 1
