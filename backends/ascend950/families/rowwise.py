"""Row-local work: one tile program a row, rows dealt to the vector cores."""

from __future__ import annotations

from deepinfer.backends.ascend950.memory import Memory, single
from deepinfer.backends.ascend950.signature import Signature
from deepinfer.backends.ascend950.source import VECTOR, AscendSource, Grid, Stage, render
from deepinfer.backends.ascend950.tile.printer import Printer
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.errors import InternalError, PlanError


def emit(spec: KernelSpec) -> AscendSource:
    program = spec.slot("body")
    if program is None:
        raise InternalError(f"{spec.title}: a rowwise kernel without a body")
    signature, memory = Signature(spec), Memory("UB", spec.title)
    signature.axis("seq")
    printer = Printer(program, signature, memory)
    printer.statements()
    try:
        used = memory.place()
    except PlanError:
        single(memory.buffers.values())
        used = memory.place()
    turns = any(b.copies > 1 for b in memory.buffers.values())
    stage = Stage(spec.symbol, VECTOR, Grid(), (("UB", used),))

    def resolved(lines: list[str]) -> list[str]:
        return [printer.resolve(x) for x in lines]

    return render(spec, signature, [stage], [memory], constants=bytes(printer.constants.blob),
                  functions=resolved(printer.functions), heads=resolved(printer.heads), loads=resolved(printer.loads),
                  body=resolved(printer.lines), stores=resolved(printer.stores), turns=turns,
                  buffers=memory.declared())
