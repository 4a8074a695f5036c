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

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import attrs
import trio

from llamad_trio.actors.loading import compile_template
from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import SessionFatal
from llamad_trio.core.plan import Sampled, SamplerSpec, StepPlan, StepResult, StepStatus
from llamad_trio.core.runtime import ModelFacts
from llamad_trio.engine import Engine, run_engine

__all__ = ["ScriptedModel", "open_scripted_engine"]

T = TypeVar("T")

Reply = str | Exception

_END = 0x110000
"""One token is one character, its id the code point; this one ends the generation."""

_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class ScriptedModel:
    """A model that answers by script, one token per character.

    Args:
        replies: a text for every request; or texts by a part of the prompt (the longest
            part found in it counts); or a function from the whole templated prompt to
            the reply.  An exception as the reply (or raised) fails that request with
            `InferenceError`; so does a prompt no part is found in.
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
        self._scripts: dict[int, list[int]] = {}
        self._failures: dict[int, str] = {}
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

    # -- core.runtime.Runtime ---------------------------------------------------------------

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """One token per character."""
        return [ord(char) for char in text]

    def detokenize(self, tokens: Sequence[int]) -> str:
        """One character per token."""
        return "".join(chr(token) for token in tokens if token != _END)

    def step(self, plan: StepPlan) -> StepResult:
        """What the step will come to, if it is not aborted while its time passes."""
        self.plans.append(plan)
        trouble, self._trouble = self._trouble, None
        if isinstance(trouble, SessionFatal):
            raise trouble
        elapsed_s = self._decode_s + self._prefill_s * sum(
            len(work.tokens) for work in plan.work if len(work.tokens) > 1
        )
        for request_id in plan.old_samplers:
            self._scripts.pop(request_id, None)
            self._failures.pop(request_id, None)
        for spec in plan.new_samplers:
            self._write_script(spec)
        if trouble is not None:
            return StepResult(status=StepStatus.FAILED, reason=trouble, elapsed_s=elapsed_s)
        sampling = [work.request_id for work in plan.work if work.sample]
        return StepResult(
            status=StepStatus.DONE,
            sampled={i: _sampled(self._scripts[i][0]) for i in sampling if i in self._scripts},
            failures={i: self._failures[i] for i in sampling if i in self._failures},
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
            del self._scripts[request_id][0]
        return result

    # -- the script -------------------------------------------------------------------------

    def _write_script(self, spec: SamplerSpec) -> None:
        try:
            reply = self._reply(self.detokenize(spec.seen))
            if isinstance(reply, Exception):
                raise reply
        except Exception as error:  # becomes the request's own InferenceError
            self._failures[spec.request_id] = f"{type(error).__name__}: {error}"
        else:
            self._scripts[spec.request_id] = [*map(ord, reply), _END]

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

    async def run(self, job: Callable[[], T], *, abort: Callable[[], None]) -> T:
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
    **overrides: Any,
) -> AsyncIterator[Engine]:
    """Run an engine on a scripted model inside the block.

    Args:
        model: a `ScriptedModel`, or the replies to make one of.
        config: settings, as for `open_engine`; the environment is not read.
        overrides: `EngineConfig` fields that replace the config's.

    Leaving the block, cancelling and crashes are as with `open_engine`.
    """
    if not isinstance(model, ScriptedModel):
        model = ScriptedModel(model)
    config = attrs.evolve(config or EngineConfig(), **overrides)
    resolved = config.resolve(
        n_ctx_train=model.facts.n_ctx_train, n_cores=1, max_slots=config.n_slots
    )
    template = compile_template(model.facts)
    model.facts = attrs.evolve(model.facts, n_seqs=resolved.n_slots + 16)
    async with run_engine(model, template, resolved, _ScriptedLane(model)) as engine:
        yield engine


def _sampled(token: int) -> Sampled:
    if token == _END:
        return Sampled(token, b"", ends=True)
    return Sampled(token, chr(token).encode(), ends=False)
