"""The CPU as data: what its skeletons carry, and the instruction sets it is built for."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from deepinfer.backends.base import Capabilities

CAPABILITIES = Capabilities(
    target="cpu",
    prologue={},
    epilogue={"gemm": "element", "grouped_gemm": "element"},
    shared_input=True,
    barrier_us=2.0,
    on_chip_bytes=1 << 20,
)


@dataclass(frozen=True)
class Variant:
    """One instruction set. ``flags`` build for it; ``test``: C expression that is true where it runs."""

    name: str
    flags: tuple[str, ...]
    test: str


_AVX512 = ("f", "bw", "dq", "vl")
PORTABLE = Variant("portable", (), "true")
AVX512 = Variant("avx512", (*(f"-mavx512{x}" for x in _AVX512), "-mfma", "-mprefer-vector-width=512"),
                 " && ".join(f'__builtin_cpu_supports("avx512{x}")' for x in _AVX512))


def variants(machine: str | None = None) -> tuple[Variant, ...]:
    """Variants for a kind of machine (default: this one), the plainest first; the last that runs is used."""
    x86 = (machine or platform.machine()).lower() in ("x86_64", "amd64")
    return (PORTABLE, AVX512) if x86 else (PORTABLE,)
