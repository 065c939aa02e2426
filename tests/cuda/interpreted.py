"""Runs kernels in Triton's interpreter on the CPU, with casts and products that are right.

The interpreter of Triton 3.9 truncates where it should round to bf16 and FP8, and multiplies bf16 matrices as integers.
Both are replaced here; casts then agree with torch bit for bit, and products are added up in steps of 16 features like
those of tensor cores, so that the order of sums shows, and the shapes of tiles do not.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from cpu.harness import Array, Param, State, Step
from cuda import ptx
from cuda.arguments import Arguments, arguments

from deepinfer.backends.cuda_sm100.source import CudaSource, Variant
from deepinfer.codegen.kernels.spec import KernelSpec

_TORCH = {"fp8e4nv": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


_STEP = 16  # features that an instruction sums at once


@cache
def mend_interpreter() -> None:
    """Replaces casts and products of the interpreter."""
    import triton.runtime.interpreter as it
    from triton import language as tl

    original = it._convert_float

    def convert(x: Array, src: Any, dst: Any, mode: Any) -> Array:
        if src.name not in _TORCH or dst.name not in _TORCH or mode not in (None, it._ir.ROUNDING_MODE.RTNE):
            result: Array = original(x, src, dst, mode)
            return result
        raw = np.ascontiguousarray(x).view(getattr(np, f"uint{src.primitive_bitwidth}")).reshape(-1)
        t = torch.from_numpy(raw).view(_TORCH[src.name])
        if dst.name.startswith("fp8"):
            most = torch.finfo(_TORCH[dst.name]).max
            t = t.float()
            t = torch.where(t.isnan(), t, t.clamp(-most, most))
        wide = t.to(_TORCH[dst.name]).view(getattr(torch, f"uint{dst.primitive_bitwidth}"))
        out: Array = wide.numpy().reshape(x.shape)
        return out

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        def up(h: Any) -> Array:
            if not h.dtype.scalar.is_floating():
                data: Array = h.data
                return data
            return convert(h.data, h.dtype.scalar, tl.float32, None).view(np.float32)

        if d.data.dtype != np.float32:
            return it.TensorHandle(np.matmul(up(a), up(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)
        x, y, total = up(a).astype(np.float64), up(b).astype(np.float64), d.data
        for k in range(0, x.shape[-1], _STEP):
            total = (total + x[..., k: k + _STEP] @ y[..., k: k + _STEP, :]).astype(np.float32)
        return it.TensorHandle(total, d.dtype.scalar)

    def multiply(self: Any, a: Any, b: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return self.binary_op(a, b, np.multiply)
        wide = [convert(h.data, tl.bfloat16, tl.float32, None).view(np.float32) for h in (a, b)]
        return it.TensorHandle(convert(wide[0] * wide[1], tl.float32, tl.bfloat16, None), a.dtype.scalar)

    def assembly(self: Any, text: str, constraints: str, values: Any, types: Any, pure: bool, pack: int) -> Any:
        assert pack == 1
        words = [np.ascontiguousarray(v.data).view(np.uint32) for v in values]
        made = [it.TensorHandle(w.view(np.int32), tl.int32) for w in ptx.run(text, words, len(types))]
        return SimpleNamespace(get_result=made.__getitem__)

    it._convert_float = convert
    it.InterpreterBuilder.create_inline_asm = assembly
    it.InterpreterBuilder.create_fmul = multiply
    it.InterpreterBuilder.create_dot = dot


_FOLDER = Path(tempfile.mkdtemp(prefix="di-interpreted-"))
_MADE: dict[str, tuple[CudaSource, ModuleType]] = {}


def module_of(source: CudaSource) -> ModuleType:
    """The functions of a source, imported from a file: Triton reads their text."""
    file = _FOLDER / f"{source.symbol}.py"
    file.write_text(source.text, encoding="utf-8")
    found = importlib.util.spec_from_file_location(source.symbol, file)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def source_of(spec: KernelSpec) -> CudaSource:
    source: CudaSource = import_module(f"deepinfer.backends.cuda_sm100.families.{spec.family}").emit(spec)
    return source


def _made(spec: KernelSpec) -> tuple[CudaSource, ModuleType]:
    if spec.digest() not in _MADE:
        mend_interpreter()
        source = source_of(spec)
        _MADE[spec.digest()] = source, module_of(source)
    return _MADE[spec.digest()]


def variant_for(source: CudaSource, rows: int) -> Variant:
    return next(v for v in source.variants if not v.rows or rows <= v.rows)


def tensor(x: Array) -> torch.Tensor:
    """A view of the same memory; 16-bit words are bf16."""
    if x.dtype == np.uint16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def run(spec: KernelSpec, step: Step, operands: Sequence[Array | Param | State | None], *, isa: str = "",
        rows: str = "", variant: int | None = None, draws: Array | None = None) -> dict[int, Array]:
    """As ``cpu.harness.run``; ``variant``: number of the variant to run instead of the one for the number of rows."""
    return run_arguments(spec, arguments(spec, _made(spec)[0], step, operands, rows, draws), variant)


def run_arguments(spec: KernelSpec, made: Arguments, variant: int | None = None) -> dict[int, Array]:
    """The same on arguments that are ready; arrays are written in place."""
    source, module = _made(spec)
    chosen = variant_for(source, made.rows) if variant is None else source.variants[variant]
    values = [tensor(v) if isinstance(v, np.ndarray) else v for v in made.values]
    for stage in chosen.stages:
        blocks = stage.grid.blocks(made.rows)
        if blocks:
            with np.errstate(all="ignore"):
                getattr(module, stage.function)[(blocks,)](*values, **dict(stage.constants))
    return made.outputs
