"""A model and its context, ready to run steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import attrs
import llama_cpp
import llama_cpp.llama_cpp as lib
import numpy as np

from llamad_trio.constraints.compiler import Compiler, Matcher
from llamad_trio.constraints.constraint import Constraint
from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import ModelLoadError
from llamad_trio.llama import backend
from llamad_trio.llama.context import open_context
from llamad_trio.llama.model import LlamaModel, LlamaVocabulary, load_model
from llamad_trio.llama.sampler import ConstraintFailure, Sampler, log_softmax
from llamad_trio.scheduling.plan import (
    Copy,
    Drop,
    MemoryOp,
    Restore,
    Sampled,
    Save,
    StepPlan,
    StepResult,
    StepStatus,
    Work,
)
from llamad_trio.scheduling.runtime import ModelFacts
from llamad_trio.scheduling.snapshot_file import KVIdentity


class LlamaRuntime:
    """Runs step plans on a loaded model.  Implements `scheduling.runtime.Runtime`.

    Args:
        path: the GGUF file.
        config: as the caller gave it; `config` of the runtime is the resolved one.
        n_cores: physical cores this process may use.
        on_progress: as that of `load_model`.

    Raises:
        ModelLoadError: missing, unreadable, no GGUF, unsupported, out of memory, stopped.
        UnsupportedFeature: the model cannot continue a text.
    """

    def __init__(
        self, path: Path, config: EngineConfig, n_cores: int, on_progress: Callable[[float], bool]
    ) -> None:
        with contextlib.ExitStack() as undo, backend.large_blocks_apart():
            self.model: LlamaModel = load_model(path, config, on_progress)
            undo.callback(self.model.close)
            self._context = open_context(self.model, config, n_cores)
            undo.callback(self._context.close)
            self.config: EngineConfig = self._context.config
            self.facts: ModelFacts = self._read_facts()
            undo.pop_all()
        self._samplers: dict[int, Sampler] = {}
        self._compiler = Compiler(LlamaVocabulary(self.model))

    def _read_facts(self) -> ModelFacts:
        model = self.model
        control_tokens, added_tokens = model.special_tokens
        return ModelFacts(
            architecture=model.metadata("general.architecture") or "unknown",
            name=model.metadata("general.name"),
            description=model.description,
            n_params=int(lib.llama_model_n_params(model.pointer)),
            file_bytes=model.path.stat().st_size,
            n_vocab=model.n_vocab,
            n_ctx_train=model.n_ctx_train,
            chat_template=model.chat_template,
            bos_text=model.special_text(lib.llama_vocab_bos(model.vocab)),
            eos_text=model.special_text(lib.llama_vocab_eos(model.vocab)),
            max_bytes_per_token=model.max_bytes_per_token,
            control_tokens=control_tokens,
            added_tokens=added_tokens,
            can_rewind=False,  # until the warm-up has shown it
            n_seqs=self._context.n_seqs,
            identity="",  # until `identify`
            n_window=lib.llama_model_n_swa(model.pointer),
        )

    def identify(self, model_sha256: str) -> None:
        """Complete the facts with the identity, which needs the digest of the whole file."""
        model, config = self.model, self.config
        template = model.chat_template
        identity = KVIdentity(
            model_sha256=model_sha256,
            llama_build=f"{lib.llama_version().decode()} ({llama_cpp.__version__})",
            template_sha256="" if template is None else sha256(template.encode()).hexdigest(),
            context=(
                ("kind", "default"),
                ("type_k", config.type_k or "f16"),
                ("type_v", config.type_v or "f16"),
                ("flash_attn", str(config.flash_attn)),
                ("rope_freq_base", repr(config.rope_freq_base)),
                ("rope_freq_scale", repr(config.rope_freq_scale)),
                ("use_extra_bufts", str(config.use_extra_bufts is not False)),
            ),
            adds_bos=bool(lib.llama_vocab_get_add_bos(model.vocab)),
        )
        self.facts = attrs.evolve(self.facts, identity=identity.digest)

    # -- vocabulary: from any thread, as `LlamaModel` and `Compiler` say --------------------

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return self.model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        return self.model.detokenize(tokens)

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        return [self.model.piece(token, special=True) for token in tokens]

    def compile(self, constraint: Constraint) -> Matcher:
        return self._compiler.compile(constraint)

    # -- steps: from the lane's thread ------------------------------------------------------

    def warm_up(self) -> None:
        """Run a first small step, which also shows whether the memory can go back a token.

        Raises `ModelLoadError` if not even that can be computed.
        """
        context = self._context
        for pos in range(2):  # one by one: a batch may have room for no more
            context.batch.clear()
            context.batch.add([0], pos=pos, seq=0, n_outputs=1)
            code = context.batch.decode(context.pointer)
            if code != 0:
                raise ModelLoadError(
                    str(self.model.path), f"the first step failed with code {code}"
                )
        self.facts = attrs.evolve(self.facts, can_rewind=context.trim(0, 1))
        context.clear()

    def step(self, plan: StepPlan) -> StepResult:
        """Run one step.  Blocks for as long as it computes.

        Raises `SessionFatal` if after a failure the pool could not be brought back to what the
        plan started from.
        """
        start = time.perf_counter()
        for request_id in plan.old_samplers:
            self._samplers.pop(request_id).close()
        for request in plan.new_samplers:
            self._samplers[request.id] = Sampler(request, self.model)
        lost, saved = self._arrange(plan.memory)
        if lost:
            # The plan builds on what is gone: nothing of it can be computed.
            return StepResult(status=StepStatus.ABORTED, cleared=lost, saved=saved)
        result = self._compute(plan, start)
        return attrs.evolve(result, saved=saved) if saved else result

    def _compute(self, plan: StepPlan, start: float) -> StepResult:
        context, batch = self._context, self._context.batch
        if not plan.work:
            return StepResult(status=StepStatus.DONE)
        batch.clear()
        for work in plan.work:
            batch.add(work.tokens, pos=work.pos, seq=work.seq, n_outputs=work.n_outputs)
        if plan.n_threads:
            context.use_threads(plan.n_threads)
        began, had_core = time.perf_counter(), time.thread_time()
        code = batch.decode(context.pointer)
        if code != 0:
            return self._roll_back(plan, code)
        compute_s = time.perf_counter() - began
        waited_s = compute_s - (time.thread_time() - had_core)
        result = self._read_logits(plan.work)
        return attrs.evolve(
            result,
            elapsed_s=time.perf_counter() - start,
            compute_s=compute_s,
            waited_s=max(waited_s, 0.0),
        )

    def request_abort(self) -> None:
        """Stop the running step at the next graph node.  From any thread."""
        self._context.request_abort()

    def clear_abort(self) -> None:
        """Let steps run again.  From any thread, while none runs."""
        self._context.clear_abort()

    def close(self) -> None:
        """Free everything llama.cpp holds.  Nothing may be used afterwards."""
        for sampler in self._samplers.values():
            sampler.close()
        self._samplers.clear()
        self._compiler.close()
        self._context.close()
        self.model.close()
        backend.give_back_memory()

    def _arrange(self, operations: Sequence[MemoryOp]) -> tuple[frozenset[int], dict[int, bytes]]:
        """Make the memory operations; return the sequences that could not be given what they
        were to hold, and the states that were saved.
        """
        lost: set[int] = set()
        saved: dict[int, bytes] = {}
        for operation in operations:
            match operation:
                case Drop(seq=seq):
                    self._context.trim_or_clear(seq, 0)
                    lost.discard(seq)
                case Copy(src=src, dst=dst, n=n):
                    if not self._context.copy(src, dst, n):
                        lost.add(dst)
                case Save(seq=seq, key=key):
                    if state := self._context.save(seq):
                        saved[key] = state
                case Restore(seq=seq, state=state, length=length, n=n):
                    if not self._context.load(seq, state, length, n):
                        lost.add(seq)
        return frozenset(lost), saved

    def _read_logits(self, work: Sequence[Work]) -> StepResult:
        """What the logits of the last batch say."""
        context = self._context
        sampled: dict[int, Sampled] = {}
        scores: dict[int, Sequence[float]] = {}
        failures: dict[int, str] = {}
        if not context.batch.n_outputs:
            return StepResult(status=StepStatus.DONE)
        logits = context.logits(context.batch.n_outputs)
        end_row, end_output = 0, 0
        for item in work:
            end_row += len(item.tokens)
            end_output += item.n_outputs
            rows = logits[end_output - item.n_outputs : end_output]
            # The greatest logit is NaN if any is: one cheap look before llama.cpp asserts.
            if item.n_outputs and np.isnan(rows.max()):
                failures[item.request_id] = "the model computed logits that are not numbers"
            elif item.targets:
                told = log_softmax(rows)[np.arange(item.n_outputs), item.targets]
                scores[item.request_id] = told.tolist()
            elif item.sample:
                sampler = self._samplers[item.request_id]
                try:
                    sampled[item.request_id] = sampler.sample(context.pointer, end_row - 1, rows[0])
                except ConstraintFailure as failure:
                    failures[item.request_id] = f"constraint: {failure}"
        return StepResult(status=StepStatus.DONE, sampled=sampled, failures=failures, scores=scores)

    def _roll_back(self, plan: StepPlan, code: int) -> StepResult:
        """Bring the pool back to what it was before the plan's batch, or to less."""
        cleared = set()
        for work in plan.work:
            kept = self._context.trim_or_clear(work.seq, 0 if code < 0 else work.pos)
            if code < 0 or not kept:
                cleared.add(work.seq)
        if code != 1 and self.model.has_state and len(plan.work) > 1:
            # A batch of several sequences puts their states side by side first.  Those that are
            # in the way are booked where the batch would have moved them: they too are lost.
            self._context.clear()
            cleared = set(range(self.facts.n_seqs))
        if code < 0:
            status, reason = StepStatus.FAILED, f"llama_decode returned {code}"
        else:
            status, reason = StepStatus.NO_ROOM if code == 1 else StepStatus.ABORTED, ""
        return StepResult(status=status, cleared=frozenset(cleared), reason=reason)
