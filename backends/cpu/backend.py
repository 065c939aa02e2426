"""The CPU backend as the compiler sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from deepinfer.backends.base import ALL, Binary, Capabilities, Source
from deepinfer.backends.cpu import BUILT, TARGETS
from deepinfer.backends.cpu.storage import stored
from deepinfer.backends.cpu.target import CAPABILITIES
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.dsl.types import DType
from deepinfer.errors import InternalError

_FAMILIES = ("rowwise", "gemm", "grouped_gemm", "attend", "score_select", "draw")


class CpuBackend:
    """Prints C++17 and compiles it with g++; needs no torch."""

    TARGETS = TARGETS
    BUILT = BUILT

    def capabilities(self, target: str) -> Capabilities:
        if target not in self.TARGETS:
            raise InternalError(f"the CPU backend serves {', '.join(self.TARGETS)}, not {target}")
        return CAPABILITIES

    def stored(self, dtype: DType) -> DType:
        """Plain dtype of a value in the arena."""
        return stored(dtype)

    def emit(self, spec: KernelSpec) -> Source:
        """C++ text of a kernel; equal specs give equal text."""
        if spec.family not in _FAMILIES:
            raise InternalError(f"the CPU backend has no kernels of family {spec.family}")
        source: Source = import_module(f"deepinfer.backends.cpu.families.{spec.family}").emit(spec)
        return source

    def compile(self, sources: Sequence[Source], *, jobs: int, isa: str = ALL,
                progress: Callable[[str], None] | None = None) -> Binary:
        """``kernels.so``; ToolchainError without a usable g++."""
        from deepinfer.backends.cpu.toolchain import compile_sources

        return compile_sources(sources, jobs=jobs, isa=isa, progress=progress)


BACKEND = CpuBackend()
