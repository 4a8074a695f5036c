"""The engines that have to behave alike, each with the engine that does its work.

Decides what they run; what they must do is in the tests.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from llamad_trio import EngineLike, ToolCall, connect, open_engine, serve_unix
from llamad_trio.chat.tools.formats import TOOL_FORMATS
from llamad_trio.llama.context import Batch
from llamad_trio.system.nursery import open_plain_nursery
from llamad_trio.testing import ScriptedModel, open_scripted_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    import pytest

    from llamad_trio import Engine, EngineConfig

__all__ = ["FAILURE", "N_CTX", "TEMPLATE", "Opener", "Pair"]

N_CTX = 8192

FAILURE = "llama_decode returned -3"

TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{# <tool_call>{"name": #}
{%- for message in messages %}[{{ message.role }}] {{ message.content }}
{%- for call in message.tool_calls or [] %} calls {{ call.function | tojson }}{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}[assistant] {% endif %}"""
"""Tools in the Hermes syntax; of ordinary letters, which every vocabulary has."""

REPLIES = {
    # Without end, as far as these tests go; characters of one, two, three and four bytes.
    "the cat": '"Où?" said the cat, and 猫 meant 🐈.\n' * 300,
    "a number": "42",
    "an object": '{"n": 2, "ok": true}',
    "a call": TOOL_FORMATS["hermes"].write_calls([ToolCall("aaaaaaaaa", "pick", {"n": 2})]),
    "[tool]": "That is all.",
}
"""What the scripted model says, by what is in its prompt."""


@attrs.frozen(kw_only=True)
class Pair:
    """An engine as a program has it, and the one that does its work: perhaps the same.

    `fail_next_step` makes the next step fail for the reason `FAILURE`.
    """

    engine: EngineLike
    behind: Engine
    fail_next_step: Callable[[], None]


@attrs.frozen(kw_only=True)
class Opener:
    """Opens one of the engines.

    Attributes:
        is_remote: whether it is on the other side of a socket.
        model_path: of a GGUF with a chat template; `None` for the scripted model.
        config: what does not depend on the test.
    """

    is_remote: bool
    model_path: Callable[[str | None], Path] | None
    config: EngineConfig
    socket_path: Path
    monkeypatch: pytest.MonkeyPatch

    @asynccontextmanager
    async def __call__(
        self, *, chat_template: str | None = TEMPLATE, **overrides: Any
    ) -> AsyncIterator[Pair]:
        """Run it inside the block."""
        config = attrs.evolve(self.config, **{"n_ctx": N_CTX, **overrides})
        behind: AbstractAsyncContextManager[Engine]
        fail_next_step: Callable[[], None] = self._fail_next_step
        if self.model_path is not None:
            behind = open_engine(self.model_path(chat_template), config)
        else:
            # Steps take time on the clock, or no test could be quick enough for a prompt.
            model = ScriptedModel(
                REPLIES, prefill_s=1e-4, n_ctx_train=100_000, chat_template=chat_template
            )
            behind = open_scripted_engine(model, config)
            fail_next_step = partial(model.fail_next_step, FAILURE)
        async with behind as engine:
            if not self.is_remote:
                yield Pair(engine=engine, behind=engine, fail_next_step=fail_next_step)
                return
            async with open_plain_nursery() as nursery:
                await nursery.start(serve_unix, engine, self.socket_path)
                async with connect(self.socket_path) as remote:
                    yield Pair(engine=remote, behind=engine, fail_next_step=fail_next_step)
                nursery.cancel_scope.cancel()

    def _fail_next_step(self) -> None:
        decode = Batch.decode

        def fail(_batch: Batch, _context: object) -> int:
            self.monkeypatch.setattr(Batch, "decode", decode)
            return -3

        self.monkeypatch.setattr(Batch, "decode", fail)
