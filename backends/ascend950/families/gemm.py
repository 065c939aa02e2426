"""Contractions of the same rows with one or more weights, and the epilogue on their results."""

from __future__ import annotations

import math

from deepinfer.backends.ascend950.families.contract import ROWS, Plan, component_tiles, element_of, planned, question_of
from deepinfer.backends.ascend950.signature import Signature
from deepinfer.backends.ascend950.source import MIX, AscendSource, Stage, render
from deepinfer.backends.ascend950.tile.printer import Constants
from deepinfer.backends.grid import Grid
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.errors import InternalError


def emit(spec: KernelSpec) -> AscendSource:
    program = spec.slot("epilogue")
    if program is None or spec.slot("prologue") is not None or spec.get("x") < 0:
        raise InternalError(f"{spec.title}: a gemm of the Ascend backend has an epilogue and no prologue")
    signature, constants = Signature(spec), Constants()
    x = spec.operands[spec.get("x")]
    operands: tuple[tuple[int, int], ...] = spec.get("weights")
    groups = operands[0][1]
    lead = x.dims[:-1] if groups == 1 else ()
    leads = math.prod(lead)
    element = element_of(x, [spec.operands[i] for i, _ in operands])
    widths = [math.prod(d[len(lead):]) // groups for d in spec.get("results")]
    plan = Plan(spec, signature, constants, element, x.dims[-1], lead, groups, max(widths))
    tiles = component_tiles(plan, program, [i for i, _ in operands], widths)
    count = sum(t["tiles"] for t in tiles)
    own = x.rows == spec.rows
    if not own:
        signature.axis("seq")
    stage = Stage(spec.symbol, MIX, Grid(leads, ROWS, 0, count), ())
    row = signature.row_of(x.rows, "row", "seq")
    return render(spec, signature, [stage], list(plan.memories), constants=bytes(constants.blob),
                  question=question_of(plan, tiles, stage), **planned(plan, tiles), count=count,
                  x=signature.value(spec.get("x")), x_row=signature.elements(spec.get("x")),
                  x_group=x.dims[-1] if groups > 1 else 0, own=own, row=row, x_kind=signature.element(spec.get("x")))
