"""Contractions of the same rows with one or more weights, and the epilogue on their results."""

from __future__ import annotations

import math

from deepinfer.backends.cuda_sm100.families.contract import (
    Epilogue,
    anchor,
    columns_of,
    components,
    depth,
    fits_wide_tile,
    kinds_of,
    weight_of,
)
from deepinfer.backends.cuda_sm100.schedule import MANY, Schedule, default_schedule, part_of
from deepinfer.backends.cuda_sm100.signature import Signature
from deepinfer.backends.cuda_sm100.source import CudaSource, Grid, Stage, Variant, render
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.errors import InternalError

_SUMMED = (16, 64)  # rows and columns that a program adds parts of


def emit(spec: KernelSpec, schedule: Schedule | None = None) -> CudaSource:
    program = spec.slot("epilogue")
    if program is None or spec.slot("prologue") is not None or spec.get("x") < 0:
        raise InternalError(f"{spec.title}: a CUDA gemm has an epilogue and no prologue")
    signature, schedule = Signature(spec), schedule or default_schedule(spec)
    x = spec.operands[spec.get("x")]
    operands: tuple[tuple[int, int], ...] = spec.get("weights")
    weights = [weight_of(spec.operands[i]) for i, _ in operands]
    k, groups = x.dims[-1], operands[0][1]
    lead = x.dims[:-1] if groups == 1 else ()
    kinds = kinds_of(x, weights)
    epilogue = Epilogue(program, signature)
    signature.axis("seq")
    tiles, widest, place = [], 0, 0
    for number, c in enumerate(components(epilogue.ops, len(operands))):
        n = math.prod(spec.get("results")[c.anchors[0]][len(lead):])
        widest = max(widest, n // groups)
        anchors = [anchor(signature, operands[i][0], weights[i], i, k, kinds) for i in c.anchors]
        for a in anchors:
            a["place"], place = place, place + n
        tiles.append({"number": number, "n": n, "columns": n // groups, "anchors": anchors,
                      "lines": epilogue.lines(c, lead, groups)})
    depths = [depth(k, weights, kinds, t.depth) for t in schedule.tiles]
    parts, share = part_of(k, schedule.parts, max(depths))
    leads = math.prod(lead)
    apart = schedule.apart if parts > 1 else 0
    if apart:
        signature.scratch()
    roomy = fits_wide_tile(max(len(t["anchors"]) for t in tiles), epilogue.ops)
    variants = []
    for t, deep in zip(schedule.tiles, depths, strict=True):
        bn = columns_of(widest, t.columns if roomy else min(64, t.columns), kinds)
        count = sum(-(-y["columns"] // bn) * groups for y in tiles)
        constants = (("BT", t.tokens), ("BN", bn), ("BK", deep))
        split = 0 < t.rows <= apart
        name, times = (f"{spec.symbol}_part", parts) if split else (spec.symbol, 1)
        stages = [Stage(name, Grid(leads, t.tokens, 0, count * times), t.warps, constants, t.pipeline,
                        hot=True, matrix=kinds.exact, otherwise=(8,) if t.warps < 8 else ())]
        if split:
            few = min(t.tokens, _SUMMED[0])
            wide = sum(-(-y["columns"] // _SUMMED[1]) * groups for y in tiles)
            stages.append(Stage(f"{spec.symbol}_sum", Grid(leads, few, 0, wide), 4, (("BT", few), ("BN", _SUMMED[1])),
                                1))
        variants.append(Variant(t.rows // leads if t.rows else 0, tuple(stages)))
    variants = [v for n, v in enumerate(variants) if v.rows or n == len(variants) - 1]
    room = parts * leads * place * 4
    scratch = (0, room) if apart >= MANY else (parts * apart * place * 4, 0)
    return render(spec, signature, variants, scratch=scratch, k=k, x=signature.value(spec.get("x")),
                  x_at=signature.row_of(x.rows), x_row=signature.elements(spec.get("x")), groups=groups,
                  lead=leads, tiles=tiles, even=k % max(depths) == 0, kinds=kinds, parts=parts, share=share, wide=place,
                  stride=f"(row_stop - row_first) * {leads}" if apart >= MANY else apart)
