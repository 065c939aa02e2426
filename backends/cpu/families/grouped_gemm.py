"""Contractions of rows with the experts they picked: rows that share an expert share its weights."""

from __future__ import annotations

from typing import Any

from deepinfer.backends.base import Source
from deepinfer.backends.cpu.families.gemm import (
    MICRO_ROWS,
    TOGETHER,
    Epilogue,
    Rows,
    column_tile,
    components,
    follow,
    weight_type,
)
from deepinfer.backends.cpu.operands import Operands, row_of
from deepinfer.backends.cpu.source import render
from deepinfer.backends.cpu.storage import c_type
from deepinfer.backends.cpu.tile.program import analyse
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.errors import InternalError

ROWS = 512  # rows of one item: an expert's columns are read once for all of them


def emit(spec: KernelSpec) -> Source:
    operands, statics = Operands(spec), list[str]()
    program = spec.slot("epilogue")
    if program is None:
        raise InternalError(f"{spec.title}: a grouped gemm has an epilogue")
    x, experts = spec.operands[spec.get("x")], spec.operands[spec.get("experts")]
    weights: tuple[int, ...] = spec.get("weights")
    slots, k, count = experts.dims[-1], x.dims[-1], spec.operands[weights[0]].dims[0]
    analysis = analyse(program, spec.operands, keeps=False)
    epilogue = Epilogue(analysis, operands, statics)
    tiles, item, width = [], 0, 0
    for c in components(analysis, len(weights)):
        n = spec.get("results")[c.anchors[0]][-1]
        tile = column_tile(n, n)
        anchors: list[dict[str, Any]] = [
            {"i": i, "type": weight_type(spec.operands[weights[i]], k), "param": operands.param(weights[i])}
            for i in c.anchors]
        for a, i in zip(anchors, [*c.anchors[1:], c.anchors[0]], strict=True):
            follow(a, spec.operands[weights[i]], operands, weights[i], k)
            a["last"] = a is anchors[-1]
        lines = epilogue.lines(c, (slots,), "slot")
        together, stop = max(1, TOGETHER // tile), item + -(-n // tile)
        tiles.append({"first": item, "stop": stop, "columns": tile, "together": together, "n": n, "lines": lines,
                      "anchors": anchors})
        item = stop
        width = max(width, tile * together * len(c.anchors))
    picks, base = operands.base(spec.get("experts")), operands.base(spec.get("x"))
    tile_bytes = MICRO_ROWS * width * 4
    order_bytes = -(-(ROWS * slots + count + 1) * 4 // 64) * 64
    packed = Rows(x, [spec.operands[i] for i in weights], MICRO_ROWS, k, tile_bytes + order_bytes)
    return render(spec, rows_per_item=ROWS, items_per_tile=item, scratch_bytes=packed.at, rows=packed.text,
                  statics=statics, call_lines=operands.call_lines(), row_lines=operands.row_lines(), tiles=tiles, k=k,
                  slots=slots, experts=count, picks=picks, picks_at=row_of(spec.rows, experts.rows), x=base,
                  x_at=row_of(spec.rows, x.rows), x_kind=c_type(x.type), x_row=x.size,
                  x_slot=k if len(x.dims) > 1 else 0, tile_bytes=tile_bytes)
