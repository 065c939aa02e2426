"""Draws: the token behind a row of logits."""

from __future__ import annotations

from deepinfer.backends.base import Source
from deepinfer.backends.cpu.operands import Operands
from deepinfer.backends.cpu.source import render
from deepinfer.codegen.kernels.spec import KernelSpec

_LANE = 16  # tokens that a lane of the scratch is rounded up to, as di_draw_scratch does


def emit(spec: KernelSpec) -> Source:
    """One item is one row; the scratch holds three f64 and one i32 for each token."""
    operands = Operands(spec)
    logits, out = spec.get("logits"), spec.get("out")
    size = spec.operands[logits].dims[-1]
    lane = -(-size // _LANE) * _LANE
    read, write = operands.place(logits).pointer, operands.place(out).pointer
    return render(spec, rows_per_item=1, items_per_tile=1, scratch_bytes=lane * (3 * 8 + 4),
                  call_lines=operands.call_lines(), row_lines=operands.row_lines(), size=size, logits=read, out=write,
                  ahead=spec.get("ahead"))
