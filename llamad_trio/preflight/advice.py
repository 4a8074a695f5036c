"""What a verdict means, in words: what was found, why that may be, and the command that mends it."""

from __future__ import annotations

from collections.abc import Collection

import attrs

from llamad_trio.preflight.instructions import (
    Compiler,
    available_sets,
    built_sets,
    rebuild_command,
)
from llamad_trio.preflight.verdict import Verdict

NO_COMPILER = "install a C++ compiler first (Debian and Ubuntu: apt-get install build-essential)"


@attrs.frozen
class Advice:
    """For a verdict that is not good.

    Args:
        verdict: what was found.
        flags: of the CPU, as Linux tells them.
        compiler: what there is here, if it is known.
        python: the interpreter that llama.cpp is installed for.
        binding_version: of llama-cpp-python, if it is known.
    """

    verdict: Verdict
    flags: Collection[str]
    compiler: Compiler | None
    python: str = attrs.field(kw_only=True)
    binding_version: str | None = attrs.field(kw_only=True)

    @property
    def text(self) -> str:
        """All of it, on one line."""
        parts = [self.finding, self.instruction_sets, self.cause, f"{self.remedy}: {self.command}"]
        return "; ".join(part for part in parts if part)

    @property
    def finding(self) -> str:
        """What was found when it was tried."""
        plain, extra = self.verdict.plain, self.verdict.extra
        if plain.is_good:
            return (
                "llama.cpp does not work on this machine with its special weight buffers "
                f"(use_extra_bufts): {extra.detail}; without them, more slowly, it does"
            )
        return f"llama.cpp does not work on this machine: {plain.detail}"

    @property
    def instruction_sets(self) -> str:
        """What it was built for, and what this CPU has of that."""
        built, has = built_sets(self.verdict.system_info), available_sets(self.flags)
        if not built or not has:
            return ""
        lacks = ", ".join(sorted(built - has)) or "nothing of these"
        return f"built for {', '.join(sorted(built))}; this CPU lacks {lacks}"

    @property
    def cause(self) -> str:
        """Why that is, where it is known."""
        if "amx_tile" in self.flags and self.compiler is not None and self.compiler.breaks_amx:
            return f"{self.compiler} compiles AMX code that faults (mended in 12.4, 13.3 and 14)"
        return ""

    @property
    def remedy(self) -> str:
        """What to do with `command`."""
        compile_it = "compile it for this machine"
        return compile_it if self.compiler is not None else f"{NO_COMPILER}, then {compile_it}"

    @property
    def command(self) -> str:
        """The shell command that compiles llama.cpp anew."""
        return rebuild_command(self.python, self.binding_version, self.flags, self.compiler)
