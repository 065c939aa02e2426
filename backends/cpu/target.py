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
# The vector header of gcc 12 makes "undefined" vectors that its own warnings take for mistakes.
_QUIET = ("-Wno-uninitialized", "-Wno-maybe-uninitialized")
PORTABLE = Variant("portable", (), "true")
AVX512 = Variant("avx512", (*(f"-mavx512{x}" for x in _AVX512), "-mfma", "-mprefer-vector-width=512",
                            *_QUIET),
                 " && ".join(f'__builtin_cpu_supports("avx512{x}")' for x in _AVX512))


# Adds byte permutations and the bf16 dot product; only contractions gain by it.
AVX512_BF16 = Variant("avx512_bf16", (*AVX512.flags, "-mavx512vbmi", "-mavx512bf16"),
                      f'{AVX512.test} && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16")')


def variants(contracts: bool, machine: str | None = None) -> tuple[Variant, ...]:
    """Variants of a kernel for a kind of machine (default: this one), the plainest first; the last that runs is used.
    ``contracts``: the kernel multiplies with weights."""
    if (machine or platform.machine()).lower() not in ("x86_64", "amd64"):
        return (PORTABLE,)
    return (PORTABLE, AVX512, AVX512_BF16) if contracts else (PORTABLE, AVX512)
