"""Row-local work: one tile program per row."""

from __future__ import annotations

from deepinfer.backends.base import Source
from deepinfer.backends.cpu.operands import Operands
from deepinfer.backends.cpu.source import render
from deepinfer.backends.cpu.tile.printer import row_printer
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.errors import InternalError


def emit(spec: KernelSpec) -> Source:
    program = spec.slot("body")
    if program is None:
        raise InternalError(f"{spec.title}: a rowwise kernel without a body")
    operands = Operands(spec)
    printer = row_printer(program, spec.operands, operands.place)
    printer.state = operands.state
    body = printer.lines()
    scratch = printer.scratch.lay_out()
    return render(spec, rows_per_item=1, items_per_tile=1, scratch_bytes=scratch, statics=printer.statics,
                  call_lines=[*operands.call_lines(), *printer.scratch.declarations()], row_lines=operands.row_lines(),
                  body=body)
