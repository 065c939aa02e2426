"""The Ascend backend as the compiler sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from deepinfer.backends.ascend950 import BUILT, TARGETS
from deepinfer.backends.ascend950.target import CAPABILITIES
from deepinfer.backends.base import ALL, Binary, Capabilities, Source
from deepinfer.backends.cpu.storage import stored
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.dsl.types import DType
from deepinfer.errors import InternalError

FAMILIES = ("rowwise", "gemm", "grouped_gemm", "attend", "score_select", "draw")


class AscendBackend:
    """Prints AscendC; without CANN its engines hold sources and the CPU twin that runs them."""

    TARGETS = TARGETS
    BUILT = BUILT

    def capabilities(self, target: str) -> Capabilities:
        if target not in TARGETS:
            raise InternalError(f"the Ascend backend serves {', '.join(TARGETS)}, not {target}")
        return CAPABILITIES

    def stored(self, dtype: DType) -> DType:
        """Plain dtype of a value in the arena, as on the CPU: bf16 holds encoded activations exactly."""
        return stored(dtype)

    def emit(self, spec: KernelSpec) -> Source:
        """Text of a kernel; equal specs give equal text."""
        if spec.family not in FAMILIES:
            raise InternalError(f"the Ascend backend has no kernels of family {spec.family}")
        source: Source = import_module(f"deepinfer.backends.ascend950.families.{spec.family}").emit(spec)
        return source

    def compile(self, sources: Sequence[Source], *, jobs: int, isa: str = ALL,
                progress: Callable[[str], None] | None = None) -> Binary:
        """``kernels.bin``, ``kernels.json`` and ``constants.bin``."""
        from deepinfer.backends.ascend950.toolchain import compile_sources

        return compile_sources(TARGETS[0], sources, jobs=jobs, isa=isa, progress=progress)


def backend(target: str) -> AscendBackend:
    """The backend for one of ``TARGETS``."""
    return AscendBackend()
