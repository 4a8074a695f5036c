"""A scripted model, to test programs without a GGUF and without waiting.

It takes llama.cpp's place under the real actors and the real scheduler: requests queue,
share slots, are preempted and cancelled as they are with a real model.  Steps take time
on Trio's clock only, so under `trio.testing.MockClock(autojump_threshold=0)` (the
`autojump_clock` fixture of pytest-trio) a minute of generation passes at once.

    async def test_my_app(autojump_clock):
        model = ScriptedModel({"2+2?": "4"}, decode_s=0.05)
        async with open_scripted_engine(model) as eng:
            assert await eng.complete_text("What is 2+2?") == "4"
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import attrs
import trio

from llamad_trio.constraints.constraint import Constraint
from llamad_trio.core.completion import TokenLogprob
from llamad_trio.core.config import ConfigFields, EngineConfig
from llamad_trio.core.engine_spec import EngineSpec
from llamad_trio.core.errors import LlamadError, SessionFatal
from llamad_trio.engine.assembly import run_engine
from llamad_trio.engine.engine import Engine
from llamad_trio.engine.loading import compile_template
from llamad_trio.scheduling.plan import (
    CompiledConstraint,
    Copy,
    Drop,
    Prepared,
    Sampled,
    StepPlan,
    StepResult,
    StepStatus,
    Work,
)
from llamad_trio.scheduling.runtime import ModelFacts
from llamad_trio.supervision.models import Models, open_models
from llamad_trio.watch.broadcast import Broadcast

if TYPE_CHECKING:
    import llguidance

    from llamad_trio.constraints.compiler import Compiler, Matcher

__all__ = ["ScriptedModel", "open_scripted_engine", "open_scripted_models"]

T = TypeVar("T")

Reply = str | Exception

_END = 0x110000
"""One token is one character, its id the code point; this one ends the generation."""

_UNLIKELY = -10.0

_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@attrs.define
class _Script:
    """What becomes of one request.

    Attributes:
        tokens: those it still gets.
        failure: why it gets no more.
        n_prompt: tokens before those that are scored.
        tells_logprobs: whether it is told how likely they are.
    """

    tokens: list[int] = attrs.field(factory=list)
    failure: str | None = None
    n_prompt: int | None = None
    tells_logprobs: bool = False


class ScriptedModel:
    """A model that answers by script, one token per character.

    Args:
        replies: a text for every request; or texts by a part of the prompt (the longest
            part found in it counts); or a function from the whole templated prompt to
            the reply.  An exception as the reply (or raised) fails that request with
            `InferenceError`; so does a prompt no part is found in, and a reply that the
            request's constraint does not allow.  `Engine.choose` takes the option that
            has most in common with the reply.
        decode_s: seconds on Trio's clock that a step takes.
        prefill_s: seconds each prompt token adds to its step.
        n_ctx_train: the context the model claims to be trained for, in tokens.
        can_rewind: whether its memory can go back, as that of attention models.
        chat_template: Jinja; `None` makes a model without one.

    Attributes:
        plans: every step that was run, for assertions.
    """

    def __init__(
        self,
        replies: Reply | Mapping[str, Reply] | Callable[[str], Reply] = "",
        *,
        decode_s: float = 0.0,
        prefill_s: float = 0.0,
        n_ctx_train: int = 4096,
        can_rewind: bool = True,
        chat_template: str | None = _TEMPLATE,
    ) -> None:
        self.plans: list[StepPlan] = []
        self._replies = replies
        self._decode_s = decode_s
        self._prefill_s = prefill_s
        self._scripts: defaultdict[int, _Script] = defaultdict(_Script)
        self._compiler: Compiler | None = None
        self._contexts: defaultdict[int, list[int]] = defaultdict(list)
        self._trouble: SessionFatal | str | None = None
        self._abort = trio.Event()
        self.facts: ModelFacts = ModelFacts(
            architecture="scripted",
            description="scripted model",
            name=None,
            n_params=0,
            file_bytes=0,
            n_vocab=_END + 1,
            n_ctx_train=n_ctx_train,
            chat_template=chat_template,
            bos_text="",
            eos_text="",
            max_bytes_per_token=4,
            can_rewind=can_rewind,
            n_seqs=0,
            identity="5c" * 32,
        )

    # -- trouble on demand ------------------------------------------------------------------

    def fail_next_step(self, reason: str = "scripted failure") -> None:
        """The next step fails: its requests get `InferenceError(reason)`, the engine goes on."""
        self._trouble = reason

    def crash_next_step(self, reason: str = "scripted crash") -> None:
        """The next step breaks the engine: everybody gets `SessionFatal(reason)`."""
        self._trouble = SessionFatal(reason)

    # -- scheduling.runtime.Runtime ---------------------------------------------------------

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """One token per character."""
        return [ord(char) for char in text]

    def detokenize(self, tokens: Sequence[int]) -> str:
        """One character per token."""
        return "".join(chr(token) for token in tokens if token != _END)

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """The UTF-8 of each token's character."""
        return [b"" if token == _END else chr(token).encode() for token in tokens]

    def compile(self, constraint: Constraint) -> Matcher:
        """As a real model does; each reply is checked against it."""
        if self._compiler is None:
            from llamad_trio.constraints.compiler import Compiler

            self._compiler = Compiler(_Bytes())
        return self._compiler.compile(constraint)

    def step(self, plan: StepPlan) -> StepResult:
        """What the step will come to, if it is not aborted while its time passes."""
        self.plans.append(plan)
        trouble, self._trouble = self._trouble, None
        if isinstance(trouble, SessionFatal):
            raise trouble
        self._arrange(plan)
        elapsed_s = self._decode_s + self._prefill_s * sum(
            len(work.tokens) for work in plan.work if len(work.tokens) > 1
        )
        for request_id in plan.old_samplers:
            self._scripts.pop(request_id, None)
        for request in plan.new_samplers:
            self._write_script(request)
        if trouble is not None:
            return StepResult(status=StepStatus.FAILED, reason=trouble, elapsed_s=elapsed_s)
        scores: dict[int, list[float]] = {}
        for work in plan.work:
            if work.targets:
                with self._failures_noted(work.request_id):
                    scores[work.request_id] = self._scores(work)
        asked = {work.request_id: work for work in plan.work if work.sample or work.targets}
        failures = {i: reason for i in asked if (reason := self._scripts[i].failure)}
        return StepResult(
            status=StepStatus.DONE,
            sampled={
                i: self._sample(self._scripts[i])
                for i, work in asked.items()
                if work.sample and i not in failures
            },
            scores=scores,
            failures=failures,
            elapsed_s=elapsed_s,
        )

    def request_abort(self) -> None:
        """End the time of the running step now."""
        self._abort.set()

    def clear_abort(self) -> None:
        """Let steps run again."""
        self._abort = trio.Event()

    # -- the lane's side --------------------------------------------------------------------

    async def pass_time(self, result: StepResult) -> StepResult:
        """Let the step's time pass on Trio's clock; a step that is aborted did nothing."""
        with trio.move_on_after(result.elapsed_s) as in_time:
            await self._abort.wait()
        if not in_time.cancelled_caught:
            cleared = () if self.facts.can_rewind else (w.seq for w in self.plans[-1].work)
            return StepResult(status=StepStatus.ABORTED, cleared=frozenset(cleared))
        for request_id in result.sampled:
            del self._scripts[request_id].tokens[0]
        if result.status is StepStatus.DONE:
            for work in self.plans[-1].work:
                self._contexts[work.seq][work.pos :] = work.tokens
        return result

    # -- the script -------------------------------------------------------------------------

    def _arrange(self, plan: StepPlan) -> None:
        """Keep in mind what each sequence holds: also of a step that is then aborted."""
        for operation in plan.memory:
            match operation:
                case Drop(seq=seq):
                    self._contexts.pop(seq, None)
                case Copy(src=src, dst=dst, n=n):
                    self._contexts[dst] = self._contexts[src][:n]

    def _scores(self, work: Work) -> list[float]:
        """0 for each target that is where the reply has it, else `_UNLIKELY`."""
        known = [*self._contexts[work.seq][: work.pos], *work.tokens]
        first = len(known) - len(work.targets)
        script = self._scripts[work.request_id]
        script.n_prompt = start = first + 1 if script.n_prompt is None else script.n_prompt
        reply = self._reply(self.detokenize(known[:start]))
        if isinstance(reply, Exception):
            raise reply
        said = [
            self.detokenize([*known[start : n + 1], t]) for n, t in enumerate(work.targets, first)
        ]
        return [0.0 if reply.startswith(text) else _UNLIKELY for text in said]

    def _write_script(self, request: Prepared) -> None:
        with self._failures_noted(request.id):
            reply = self._reply(self.detokenize(request.tokens))
            if isinstance(reply, Exception):
                raise reply
            if request.constraint is not None:
                _check_reply(reply, request.constraint)
            script = self._scripts[request.id]
            script.tokens = [*map(ord, reply), _END]
            script.tells_logprobs = request.n_logprobs is not None

    @contextmanager
    def _failures_noted(self, request_id: int) -> Iterator[None]:
        """What is raised becomes the request's own `InferenceError`."""
        try:
            yield
        except Exception as error:
            self._scripts[request_id].failure = f"{type(error).__name__}: {error}"

    def _sample(self, script: _Script) -> Sampled:
        token = script.tokens[0]
        piece = b"" if token == _END else chr(token).encode()
        told = TokenLogprob(token, piece, 0.0) if script.tells_logprobs else None
        return Sampled(token, piece, ends=token == _END, logprobs=told)

    def _reply(self, prompt: str) -> Reply:
        if callable(self._replies):
            return self._replies(prompt)
        if not isinstance(self._replies, Mapping):
            return self._replies
        found = [part for part in self._replies if part in prompt]
        if not found:
            raise LookupError(f"no reply is scripted for {prompt!r}")
        return self._replies[max(found, key=len)]


@attrs.frozen
class _ScriptedLane:
    """Steps on Trio's clock instead of a thread."""

    model: ScriptedModel

    @asynccontextmanager
    async def hosted(self) -> AsyncIterator[None]:
        yield

    async def run(
        self,
        job: Callable[[], T],
        *,
        abort: Callable[[], None],
        engine: object = None,
        weight: int = 1,
    ) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        result = job()
        if isinstance(result, StepResult):
            return await self.model.pass_time(result)  # type: ignore[return-value]
        await trio.lowlevel.checkpoint()
        return result


@asynccontextmanager
async def open_scripted_engine(
    model: ScriptedModel | Reply | Mapping[str, Reply] | Callable[[str], Reply],
    config: EngineConfig | None = None,
    **overrides: Unpack[ConfigFields],
) -> AsyncIterator[Engine]:
    """Run an engine on a scripted model inside the block.

    Args:
        model: a `ScriptedModel`, or the replies to make one of.
        config: settings, as for `open_engine`; the environment is not read.
        overrides: `EngineConfig` fields that replace the config's.

    Leaving the block, cancelling and crashes are as with `open_engine`.
    """
    config = EngineConfig.merge(config or EngineConfig(), overrides)
    async with _open_scripted(model, config) as engine:
        yield engine


@asynccontextmanager
async def _open_scripted(
    model: ScriptedModel | Reply | Mapping[str, Reply] | Callable[[str], Reply],
    config: EngineConfig,
    name: str = "",
    broadcast: Broadcast | None = None,
) -> AsyncIterator[Engine]:
    if not isinstance(model, ScriptedModel):
        model = ScriptedModel(model)
    resolved = config.resolve(
        n_ctx_train=model.facts.n_ctx_train, n_cores=1, max_slots=config.n_slots
    )
    template = compile_template(model.facts)
    model.facts = attrs.evolve(model.facts, n_seqs=resolved.n_slots + 16)
    lane = _ScriptedLane(model)
    async with run_engine(
        model, template, resolved, lane, name=name, broadcast=broadcast
    ) as engine:
        yield engine


@asynccontextmanager
async def open_scripted_models(
    models: Mapping[str, ScriptedModel | Reply | Mapping[str, Reply] | Callable[[str], Reply]],
    specs: Mapping[str, EngineSpec] | None = None,
    *,
    load_s: float = 0.0,
    **options: Any,
) -> AsyncIterator[Models]:
    """`open_models` on scripted models.

    Args:
        models: what is loaded, by `EngineSpec.model`: as for `open_scripted_engine`, or a
            `LlamadError` with which the load fails.  It is looked into at each load.
        specs: the models by name; `None` is one of each of `models`, by its name there.
        load_s: seconds on Trio's clock that a load takes.
        options: the other arguments of `open_models`.
    """

    @asynccontextmanager
    async def opener(name: str, spec: EngineSpec, broadcast: Broadcast) -> AsyncIterator[Engine]:
        await trio.sleep(load_s)
        model = models[spec.model]
        if isinstance(model, LlamadError):
            raise copy.copy(model)
        async with _open_scripted(model, spec.config, name, broadcast) as engine:
            yield engine

    specs = {name: EngineSpec(name) for name in models} if specs is None else specs
    async with open_models(specs, opener=opener, **options) as opened:
        yield opened


class _Bytes:
    """A vocabulary of single bytes, to check replies with."""

    def pieces(self) -> Sequence[bytes]:
        """Each byte, and an end."""
        return [*(bytes([byte]) for byte in range(256)), b"\xff<end>"]

    def tokenizer(self, pieces: Sequence[bytes]) -> llguidance.LLTokenizer:
        """llguidance's view of it."""
        import llguidance

        class Bytes:
            bos_token_id = None
            eos_token_id = len(pieces) - 1
            special_token_ids = (len(pieces) - 1,)
            tokens = pieces

            def __call__(self, text: bytes) -> list[int]:
                return list(text)

        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()), slices=[])

    def control_token(self, text: str) -> int | None:
        """There are none."""
        return None


def _check_reply(reply: str, constraint: CompiledConstraint) -> None:
    from llamad_trio.constraints.compiler import Matcher

    assert isinstance(constraint, Matcher)
    for n, char in enumerate(reply):
        if not constraint.accept(char.encode()):
            raise ValueError(
                f"the constraint does not allow the scripted reply: {reply[: n + 1]!r}"
            )
    if not constraint.may_end:
        raise ValueError(f"the constraint wants more than the scripted reply: {reply!r}")
