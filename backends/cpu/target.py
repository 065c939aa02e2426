"""The CPU as data: what its skeletons carry, and the instruction sets it is built for."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from deepinfer.backends.base import ALL, HOST, Capabilities, Roof

CAPABILITIES = Capabilities(
    target="cpu",
    prologue={},
    epilogue={"gemm": "element", "grouped_gemm": "element"},
    shared_input=True,
    barrier_us=2.0,
    on_chip_bytes=1 << 20,
    draws=True,
    fetches=True,
    roofs=(Roof("2 cores of an AMD EPYC", 47.1e9, 138e9, "measured: a read loop over 1 GiB, bf16 dot products"),),
)


@dataclass(frozen=True)
class Variant:
    """One instruction set.

    ``features``: what a processor needs to run it, in the compiler's words; one -m flag for each of them and
    ``other_flags`` build for it.
    """

    name: str
    features: tuple[str, ...] = ()
    other_flags: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        return *(f"-m{x}" for x in self.features), *self.other_flags

    @property
    def test(self) -> str:
        """C expression that is true where it runs."""
        return " && ".join(f'__builtin_cpu_supports("{x}")' for x in self.features) or "true"

    def includes(self, other: Variant) -> bool:
        """Whether a processor that runs this one runs the other one too."""
        return set(self.features) >= set(other.features)


# The vector header of gcc 12 makes "undefined" vectors that its own warnings take for mistakes.
_QUIET = ("-Wno-uninitialized", "-Wno-maybe-uninitialized")
_AVX2 = ("avx2", "fma")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
PORTABLE = Variant("portable")
AVX2 = Variant("avx2", _AVX2)
AVX512 = Variant("avx512", _AVX512, ("-mprefer-vector-width=512", *_QUIET))
# Adds byte permutations and the bf16 dot product; only contractions gain by it.
AVX512_BF16 = Variant("avx512_bf16", (*_AVX512, "avx512vbmi", "avx512bf16"), AVX512.other_flags)


def variants(contracts: bool, isa: str = ALL, machine: str | None = None) -> tuple[Variant, ...]:
    """Variants to build a kernel in for a kind of machine (default: this one), the plainest first; the last that runs
    is used. ``contracts``: the kernel multiplies with weights. ``isa``: ``host`` leaves the last that runs here."""
    if (machine or platform.machine()).lower() not in ("x86_64", "amd64"):
        return (PORTABLE,)
    found = (PORTABLE, AVX2, AVX512, AVX512_BF16) if contracts else (PORTABLE, AVX2, AVX512)
    return found if isa != HOST else tuple(v for v in found if set(v.features) <= processor_features())[-1:]


@lru_cache(maxsize=1)
def processor_features() -> frozenset[str]:
    """What this machine's processor can do, in the compiler's words (the kernel writes avx512_bf16)."""
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    words = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(words.replace("_", "").split())
