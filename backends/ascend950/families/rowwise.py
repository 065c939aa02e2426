"""Row-local work: one tile program a row, rows dealt to the vector cores."""

from __future__ import annotations

from deepinfer.backends.ascend950.cost import Question
from deepinfer.backends.ascend950.memory import Memory, single
from deepinfer.backends.ascend950.signature import Signature
from deepinfer.backends.ascend950.source import VECTOR, AscendSource, Stage, render
from deepinfer.backends.ascend950.target import MOST_BLOCKS
from deepinfer.backends.ascend950.tile.printer import Printer
from deepinfer.backends.grid import Grid
from deepinfer.codegen.kernels.spec import KernelSpec, TileProgram
from deepinfer.errors import InternalError, PlanError


def emit(spec: KernelSpec) -> AscendSource:
    program = spec.slot("body")
    if program is None:
        raise InternalError(f"{spec.title}: a rowwise kernel without a body")
    signature, memory, printer, used = _fitting(spec, program)
    turns = any(b.copies > 1 and b.turn == "io" for b in memory.buffers.values())
    stage = Stage(spec.symbol, VECTOR, Grid(), (("UB", used),))

    def resolved(lines: list[str]) -> list[str]:
        return [printer.resolve(x) for x in lines]

    question = Question(spec.symbol, VECTOR, stage.grid, overlapped=turns)
    return render(spec, signature, [stage], [memory], question=question, constants=bytes(printer.constants.blob),
                  functions=resolved(printer.functions), heads=resolved(printer.heads), loads=resolved(printer.loads),
                  body=resolved(printer.lines), waits=not _arrives(printer), stores=resolved(printer.stores),
                  turns=turns, buffers=memory.declared(), scratch=(MOST_BLOCKS * printer.spilled, 0),
                  spilled=printer.spilled)


def _fitting(spec: KernelSpec, program: TileProgram) -> tuple[Signature, Memory, Printer, int]:
    """Rows whole in UB, else in pieces, else in pieces with what is kept of them in memory."""
    for pieces, spills in ((False, False), (True, False)):
        try:
            return _planned(spec, program, pieces=pieces, spills=spills)
        except PlanError:
            continue
    return _planned(spec, program, pieces=True, spills=True)


def _arrives(printer: Printer) -> bool:
    """Whether the vector unit waits for a copy into UB before its first function anyhow: copies in are in order, so
    that what was loaded in front of all rows is there too."""
    first = next((x for x in printer.lines if "asc_vf_call" in x or x.startswith("asc_lock(PIPE_V, ")), "")
    return bool(printer.loads) or first.startswith("asc_lock(PIPE_V, ")


def _planned(spec: KernelSpec, program: TileProgram, *, pieces: bool,
             spills: bool) -> tuple[Signature, Memory, Printer, int]:
    """The printed program and its plan; the copies of two rows where they fit."""
    signature, memory = Signature(spec), Memory("UB", spec.title)
    signature.axis("seq")
    printer = Printer(program, signature, memory, pieces=pieces, spills=spills)
    printer.statements()
    if printer.spilled:
        signature.scratch()
    try:
        used = memory.place()
    except PlanError:
        single(b for b in memory.buffers.values() if b.turn == "io")
        used = memory.place()
    return signature, memory, printer, used
