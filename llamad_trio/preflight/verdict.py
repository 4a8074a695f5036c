"""What is to be thought of llama.cpp here, from what the process said that tried it.

Decides whether an engine may trust it, and with which weight buffers; knows neither processes
nor files.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from typing import Any, Literal

import attrs

Outcome = Literal["works", "refused", "wrong", "died", "hung", "untried"]
"""`"works"`; `"refused"`: llama.cpp gave a clean error, as it will give an engine; `"wrong"`: the
numbers are not those of the plain kernels; `"died"`, `"hung"`; `"untried"`: it did not come to that."""

_FAULTS = frozenset(
    {signal.SIGILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGTRAP}
)


@attrs.frozen
class Attempt:
    """How it went with one kind of weight buffers, and what is told of that."""

    outcome: Outcome = "untried"
    detail: str = ""

    @property
    def is_good(self) -> bool:
        """Whether nothing speaks against it."""
        return self.outcome in ("works", "refused")


@attrs.frozen(kw_only=True)
class Verdict:
    """What a process found.

    Attributes:
        plain: with plain buffers for the weights.
        extra: with those of special kernels (AMX, repacked).
        system_info, version: llama.cpp's, if it could say.
        speeds: tokens a second by the number of threads, if they were measured.
        trouble: why the process could not try at all; nothing is known then.
    """

    plain: Attempt = Attempt()
    extra: Attempt = Attempt()
    system_info: str = ""
    version: str = ""
    devices: tuple[Mapping[str, str], ...] = ()
    speeds: Mapping[str, float] = attrs.field(factory=dict)
    trouble: str = ""

    @property
    def is_lasting(self) -> bool:
        """Whether it would be the same another time."""
        return not self.trouble and "hung" not in (self.plain.outcome, self.extra.outcome)

    def allows(self, use_extra_bufts: bool | None) -> bool | None:
        """Which buffers an engine can have: what it asks for, or plain ones if it leaves it open.

        `None` if there are none to be had, or it is not known.
        """
        if use_extra_bufts is not False and self.plain.is_good and self.extra.is_good:
            return True
        return False if use_extra_bufts is not True and self.plain.is_good else None

    def as_text(self) -> str:
        return json.dumps(attrs.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Verdict | None:
        """Read it again; `None` if it is no verdict."""
        try:
            raw: dict[str, Any] = json.loads(text)
            plain, extra = Attempt(**raw.pop("plain")), Attempt(**raw.pop("extra"))
            return cls(plain=plain, extra=extra, devices=tuple(raw.pop("devices")), **raw)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


def judge(lines: list[dict[str, Any]], status: int | None, last_words: str) -> Verdict:
    """The verdict on what a process told, in order, with the last line of its log.

    `status` is its exit status, negative or the number itself if it is that of a signal; `None` if
    it hung and was killed.
    """
    said: dict[str, Any] = {}
    attempts: dict[bool, Attempt] = {}
    trying: bool | None = None
    for line in lines:
        if "trying" in line:
            trying = line["trying"]
        elif "outcome" in line and trying is not None:
            attempts[trying], trying = _attempt(line["outcome"]), None
        else:
            said.update(line)
    ended = _end(status, last_words)
    trouble = ""
    if ended is not None and ended.outcome == "untried":
        trouble = ended.detail
    elif ended is not None and (trying is not None or not attempts):
        # What kills while the library is loaded kills whatever it is asked for.
        attempts[trying is True] = ended
    loaded = said.get("loaded", {})
    return Verdict(
        plain=attempts.get(False, Attempt()),
        extra=attempts.get(True, Attempt()),
        system_info=loaded.get("system", ""),
        version=loaded.get("version", ""),
        devices=tuple(loaded.get("devices", ())),
        speeds=said.get("speeds", {}),
        trouble=trouble,
    )


def _attempt(outcome: dict[str, Any]) -> Attempt:
    if "refused" in outcome:
        return Attempt("refused", outcome["refused"])
    if outcome["wrong"]:
        return Attempt("wrong", "it computes other numbers than the plain kernels do")
    return Attempt("works")


def _end(status: int | None, last_words: str) -> Attempt | None:
    if status == 0:
        return None
    if status is None:
        return Attempt("hung", "it did not end in time")
    if abs(status) in _FAULTS:
        number = signal.Signals(abs(status))
        detail = f"{number.name} ({signal.strsignal(number)})"
        return Attempt("died", f"{detail}: {last_words}" if last_words else detail)
    return Attempt("untried", last_words or f"it ended with status {status}")
