"""What the tests of sessions share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llamad_trio import open_engine
from tests.support import EXACT

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from llamad_trio import Engine, Session

# Longer than the sliding window.
PREFIX = "the cat and the rat ran in the rain,"
SUFFIX = "then they rested in a tent"


def opened(path: Path, n_ctx: int = 512, **settings: Any) -> AbstractAsyncContextManager[Engine]:
    return open_engine(path, EXACT, n_ctx=n_ctx, **settings)


async def tokens_of(engine: Engine, text: str) -> list[int]:
    """A text's tokens as a raw prompt: tiny models begin with BOS."""
    return [1, *await engine.tokenize(text, special=True)]


async def said(session: Session, n: int = 16) -> str:
    """What the session says, greedily."""
    async with session.decode(max_tokens=n, temperature=0) as tokens:
        return (await tokens.result()).text


async def raw(engine: Engine, text: str, n: int = 16) -> str:
    """What a plain request says."""
    return await engine.complete_text(text, raw=True, max_tokens=n, temperature=0)


async def cold(path: Path, text: str, n: int = 16) -> str:
    """What is said where nothing is reused."""
    async with opened(path, kv_cache=False) as engine:
        return await raw(engine, text, n)
