"""The CUDA backend as the compiler sees it: one for each architecture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module

from deepinfer.backends.base import ALL, Binary, Capabilities, Source
from deepinfer.backends.cpu.storage import stored
from deepinfer.backends.cuda_sm100 import BUILT, TARGETS
from deepinfer.backends.cuda_sm100.source import CudaSource
from deepinfer.backends.cuda_sm100.target import ARCHS, built
from deepinfer.backends.cuda_sm100.tune.database import DEFAULT, TUNED, database_for, installed_triton
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.dsl.types import DType
from deepinfer.errors import InternalError

FAMILIES = ("rowwise", "gemm", "grouped_gemm", "attend", "score_select", "draw")


class CudaBackend:
    """Prints Triton and compiles it to cubins; needs no GPU."""

    TARGETS = TARGETS
    BUILT = BUILT

    def __init__(self, target: str) -> None:
        if target not in ARCHS:
            raise InternalError(f"the CUDA backend serves {', '.join(ARCHS)}, not {target}")
        self.target = target
        self.database = database_for(target)

    def capabilities(self, target: str) -> Capabilities:
        return built(target)

    def stored(self, dtype: DType) -> DType:
        """Plain dtype of a value in the arena, as on the CPU: bf16 holds encoded activations exactly."""
        return stored(dtype)

    def emit(self, spec: KernelSpec) -> Source:
        """Text of a kernel; equal specs and schedules give equal text."""
        if spec.family not in FAMILIES:
            raise InternalError(f"the CUDA backend has no kernels of family {spec.family}")
        emit = import_module(f"deepinfer.backends.cuda_sm100.families.{spec.family}").emit
        if spec.family not in TUNED:
            source: Source = emit(spec)
            return source
        schedule = self.database.schedule(spec, installed_triton()) if self.database else None
        made: CudaSource = emit(spec, schedule)
        known = f"measured on {self.database.device}" if self.database and schedule else DEFAULT
        return replace(made, schedule=known)

    def compile(self, sources: Sequence[Source], *, jobs: int, isa: str = ALL,
                progress: Callable[[str], None] | None = None) -> Binary:
        """``kernels.bin`` and ``kernels.json``; ToolchainError without Triton."""
        from deepinfer.backends.cuda_sm100.toolchain import compile_sources

        return compile_sources(self.target, sources, jobs=jobs, isa=isa, progress=progress)


def backend(target: str) -> CudaBackend:
    """The backend for one of ``TARGETS``."""
    return CudaBackend(target)
