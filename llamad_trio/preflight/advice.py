"""What a verdict means, in words: what was found, why that may be, and the command that mends it.

Knows what instruction sets and compilers are called; nothing of how they were found out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection

import attrs

from llamad_trio.preflight.verdict import Verdict

CPU_FLAGS: dict[str, str] = {
    # x86: llama.cpp's name and Linux's.
    "SSE3": "pni",
    "SSSE3": "ssse3",
    "AVX": "avx",
    "AVX_VNNI": "avx_vnni",
    "AVX2": "avx2",
    "F16C": "f16c",
    "FMA": "fma",
    "BMI2": "bmi2",
    "AVX512": "avx512f",
    "AVX512_VBMI": "avx512vbmi",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX_INT8": "amx_int8",
    # arm64
    "NEON": "asimd",
    "ARM_FMA": "asimd",
    "FP16_VA": "asimdhp",
    "DOTPROD": "asimddp",
    "MATMUL_INT8": "i8mm",
    "SVE": "sve",
    "SME": "sme",
}
"""The instruction sets that llama.cpp tells of (`llama_print_system_info`), and the flags by
which Linux tells of them in /proc/cpuinfo."""

NO_COMPILER = "install a C++ compiler first (Debian and Ubuntu: apt-get install build-essential)"

_WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"


@attrs.frozen
class CppCompiler:
    """The C++ compiler that a build here would use: `kind` is `"gcc"` or `"clang"`."""

    kind: str
    version: tuple[int, ...]

    @classmethod
    def from_version_text(cls, text: str) -> CppCompiler | None:
        """Read what `c++ --version` prints; `None` if it is neither of the two."""
        clang = re.search(r"clang version (\d+(?:\.\d+)*)", text)
        gcc = re.search(r"\s(\d+\.\d+(?:\.\d+)*)", text.partition("\n")[0])
        if clang:
            return cls("clang", tuple(map(int, clang[1].split("."))))
        if gcc and "Free Software Foundation" in text:
            return cls("gcc", tuple(map(int, gcc[1].split("."))))
        return None

    def breaks_amx(self, flags: Collection[str]) -> bool:
        """Whether it drops the tile configuration, so that the first AMX instruction faults.

        GCC's `_tile_loadconfig` named only 8 bytes of what it reads, until 12.4, 13.3 and 14.
        """
        if self.kind != "gcc" or "amx_tile" not in flags:
            return False
        return self.version < (12, 4) or (13,) <= self.version < (13, 3)

    def __str__(self) -> str:
        return f"{self.kind} {'.'.join(map(str, self.version))}"


def built_sets(system_info: str) -> frozenset[str]:
    """The instruction sets in llama.cpp's account of how it was compiled."""
    found = re.findall(r"(\w+) = (\d+)", system_info)
    return frozenset(name for name, value in found if name in CPU_FLAGS and value != "0")


def available_sets(flags: Collection[str]) -> frozenset[str]:
    """The same names, for a CPU with these flags."""
    return frozenset(name for name, flag in CPU_FLAGS.items() if flag in flags)


def advice_on(
    verdict: Verdict,
    flags: Collection[str],
    compiler: CppCompiler | None,
    *,
    python: str,
    binding_version: str | None,
) -> str:
    """All there is to say of a verdict that is not good, on one line.

    The flags are the CPU's, as Linux tells them; `python` is the interpreter that llama.cpp is
    installed for, and `binding_version` that of llama-cpp-python.
    """
    finding = f"llama.cpp does not work on this machine: {verdict.plain.detail}"
    if verdict.plain.is_good:
        finding = (
            "llama.cpp does not work on this machine with its special weight buffers "
            f"(use_extra_bufts): {verdict.extra.detail}; without them, more slowly, it does"
        )
    parts = [finding]
    built, has = built_sets(verdict.system_info), available_sets(flags)
    if built and has:
        lacks = ", ".join(sorted(built - has)) or "nothing of these"
        parts.append(f"built for {', '.join(sorted(built))}; this CPU lacks {lacks}")
    if compiler is not None and compiler.breaks_amx(flags):
        parts.append(f"{compiler} compiles AMX code that faults (mended in 12.4, 13.3 and 14)")
    first = "" if compiler is not None else f"{NO_COMPILER}, then "
    command = rebuild_command(python, binding_version, flags, compiler)
    return "; ".join([*parts, f"{first}compile it for this machine: {command}"])


def rebuild_command(
    python: str, version: str | None, flags: Collection[str], compiler: CppCompiler | None
) -> str:
    """The shell command that compiles llama.cpp for this machine, as fast as it can be here."""
    package = "llama-cpp-python" + (f"=={version}" if version else "")
    command = (
        f"{shlex.quote(python)} -m pip install --force-reinstall --no-deps --no-cache-dir "
        f"--no-binary llama-cpp-python {package}"
    )
    if compiler is not None and compiler.breaks_amx(flags):
        command = f'CFLAGS="{_WITHOUT_AMX}" CXXFLAGS="{_WITHOUT_AMX}" {command}'
    return command
