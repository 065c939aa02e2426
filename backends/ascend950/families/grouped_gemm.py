"""Contractions of rows with the experts they picked: pairs of row and slot, ordered by expert, share weights."""

from __future__ import annotations

from deepinfer.backends.ascend950.families.contract import (
    ROWS,
    Plan,
    component_tiles,
    element_of,
    planned,
    question_of,
)
from deepinfer.backends.ascend950.memory import Memory
from deepinfer.backends.ascend950.signature import Signature
from deepinfer.backends.ascend950.source import MIX, VECTOR, AscendSource, Stage, render
from deepinfer.backends.ascend950.tile.printer import Constants
from deepinfer.backends.grid import Grid
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.errors import InternalError

PIECE = 4096  # picks that the grouping looks at in one step


def emit(spec: KernelSpec) -> AscendSource:
    program = spec.slot("epilogue")
    if program is None:
        raise InternalError(f"{spec.title}: a grouped gemm has an epilogue")
    signature, constants = Signature(spec), Constants()
    x, picks = spec.operands[spec.get("x")], spec.operands[spec.get("experts")]
    operands: tuple[int, ...] = spec.get("weights")
    slots, k, experts = picks.dims[-1], x.dims[-1], spec.operands[operands[0]].dims[0]
    if x.rows != spec.rows or picks.rows != spec.rows:
        raise InternalError("a grouped gemm reads rows and picks of its own axis")
    element = element_of(x, [spec.operands[i] for i in operands])
    widths = [d[-1] for d in spec.get("results")]
    plan = Plan(spec, signature, constants, element, k, (slots,), 1, max(widths))
    tiles = component_tiles(plan, program, operands, widths)
    count = sum(t["tiles"] for t in tiles)
    order = Memory("UB", spec.title)
    for name, size in (("picks", 4 * PIECE), ("words", 8 * PIECE), ("mine", 4 * PIECE), ("counts", 1024)):
        order.new(name, size + 512)
    order.place()
    group = Stage(f"{spec.symbol}_group", VECTOR, Grid(fixed=experts))
    main = Stage(spec.symbol, MIX, Grid(slots, ROWS, experts, count))
    signature.scratch()
    return render(spec, signature, [group, main], list(plan.memories), constants=bytes(constants.blob),
                  question=question_of(plan, tiles, main, 2), scratch=(4 * (experts + 8), 4 * slots),
                  **planned(plan, tiles), count=count, x=signature.value(spec.get("x")), x_slot=len(x.dims) > 1,
                  slots=slots, experts=experts, picks=signature.value(spec.get("experts")),
                  x_kind=signature.element(spec.get("x")), piece=PIECE,
                  long_picks=signature.element(spec.get("experts")) == "*i64",
                  order={b.name: b.offset for b in order.buffers.values()}, order_buffers=order.declared(),
                  order_at=-(-(experts + 1) // 8) * 8)
