"""Row-local work: one tile program per row, or per part of a row where parts do not need each other."""

from __future__ import annotations

from deepinfer.backends.cpu.tile.index import Ix
from deepinfer.backends.cuda_sm100.families.parts import emit as parts_in_tiles
from deepinfer.backends.cuda_sm100.signature import Signature
from deepinfer.backends.cuda_sm100.source import CudaSource, Stage, Variant, render
from deepinfer.backends.cuda_sm100.tile.axes import NOTHING, Axes
from deepinfer.backends.cuda_sm100.tile.printer import Printer
from deepinfer.backends.cuda_sm100.tile.program import cleaned, parts_of, size
from deepinfer.backends.grid import Grid
from deepinfer.codegen.kernels.spec import KernelSpec, TileOp
from deepinfer.errors import InternalError

_LEAST_PARTS = 9  # fewer are computed in one program, which shares what they have in common


def emit(spec: KernelSpec) -> CudaSource:
    program = spec.slot("body")
    if program is None:
        raise InternalError(f"{spec.title}: a rowwise kernel without a body")
    ops = cleaned(program, spec.operands)
    if any(o.op == "contract" for o in ops):
        return parts_in_tiles(spec, ops)
    parts = parts_of(ops)
    parts = parts if parts >= _LEAST_PARTS else 1
    axes = Axes()
    _print(spec, ops, axes, parts)
    axes = axes.again()
    signature, body = _print(spec, ops, axes, parts)
    stage = Stage(spec.symbol, Grid(times=parts), _warps(ops, parts), otherwise=(8, 32))
    return render(spec, signature, [Variant(0, (stage,))], parts=parts, axes=axes.lines, body=body)


def _print(spec: KernelSpec, ops: list[TileOp], axes: Axes, parts: int) -> tuple[Signature, list[str]]:
    signature = Signature(spec)
    signature.axis("seq")
    printer = Printer(ops, signature, axes)
    part: Ix | None = None
    if parts > 1:
        part = printer.named("part", parts, NOTHING)
    return signature, printer.statements(part)


def _warps(ops: list[TileOp], parts: int) -> int:
    """By the widest block."""
    widest = max((size(o) // parts for o in ops if o.op not in ("load", "const")), default=1)
    widest = min(widest, max((o.dims[-1] for o in ops if o.dims), default=1) * 4)
    for elements, warps in ((256, 1), (1024, 4), (4096, 8)):
        if widest <= elements:
            return warps
    return 16
