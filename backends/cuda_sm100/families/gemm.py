"""Contractions of the same rows with one or more weights, and the epilogue on their results."""

from __future__ import annotations

import math
from typing import Any

from deepinfer.backends.cuda_sm100.families.contract import (
    Epilogue,
    Weight,
    columns_of,
    components,
    depth,
    exact_in_bf16,
    fits_wide_tile,
    weight_of,
)
from deepinfer.backends.cuda_sm100.signature import Signature
from deepinfer.backends.cuda_sm100.source import CudaSource, Grid, Stage, Variant, render
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.errors import InternalError

# Rows that a variant is for -> (rows of a tile, columns of a tile, warps, features of a step)
_TILES = ((16, 16, 64, 4, 128), (64, 64, 64, 4, 64), (0, 128, 128, 8, 64))
MOST_SPLIT = 64  # rows (and inputs of them) whose parts are summed apart
_WANTED, _PARTS, _LEAST_PART = 66, 32, 256  # programs that half fill a device; most parts; least features of one


def emit(spec: KernelSpec) -> CudaSource:
    program = spec.slot("epilogue")
    if program is None or spec.slot("prologue") is not None or spec.get("x") < 0:
        raise InternalError(f"{spec.title}: a CUDA gemm has an epilogue and no prologue")
    signature = Signature(spec)
    x = spec.operands[spec.get("x")]
    operands: tuple[tuple[int, int], ...] = spec.get("weights")
    weights = [weight_of(spec.operands[i]) for i, _ in operands]
    k, groups = x.dims[-1], operands[0][1]
    lead = x.dims[:-1] if groups == 1 else ()
    bf16 = exact_in_bf16(x, weights)
    epilogue = Epilogue(program, signature)
    signature.axis("seq")
    tiles, widest = [], 0
    for number, c in enumerate(components(epilogue.ops, len(operands))):
        n = math.prod(spec.get("results")[c.anchors[0]][len(lead):])
        widest = max(widest, n // groups)
        anchors = [anchor(signature, operands[i][0], weights[i], i, k) for i in c.anchors]
        tiles.append({"number": number, "n": n, "columns": n // groups, "anchors": anchors,
                      "lines": epilogue.lines(c, lead, groups)})
    step = depth(k, weights, bf16)
    leads = math.prod(lead)
    one = all(len(t["anchors"]) == 1 for t in tiles)  # two expanded weights of a deep step fill the registers
    depths = [depth(k, weights, bf16, most if one else 64) for *_, most in _TILES]
    deepest = max(depths)
    splits, share = split(k, deepest, sum(-(-t["columns"] // columns_of(widest, 64)) * groups for t in tiles))
    place = 0
    for anchor_made, width in [(a, t["n"]) for t in tiles for a in t["anchors"]]:
        anchor_made["place"], place = place, place + width
    if splits > 1:
        signature.scratch()
    roomy = splits == 1 and fits_wide_tile(max(len(t["anchors"]) for t in tiles), epilogue.ops)
    variants = []
    for (rows, tile, wide, warps, _), deep in zip(_TILES, depths, strict=True):
        bn = columns_of(widest, wide if roomy else min(wide, 64))
        count = sum(-(-t["columns"] // bn) * groups for t in tiles)
        constants = (("BT", tile), ("BN", bn), ("BK", deep))
        hopper = bf16 and bn >= 64
        name, parts = (f"{spec.symbol}_part", splits) if splits > 1 and rows else (spec.symbol, 1)
        stages = [Stage(name, Grid(leads, tile, 0, count * parts), warps if hopper else 4, constants, 4, hot=True,
                        matrix=hopper, otherwise=() if one else (8,))]
        if parts > 1:
            stages.append(Stage(f"{spec.symbol}_sum", Grid(leads, tile, 0, count), 4, constants[:2], 1))
        variants.append(Variant(rows // leads if rows else 0, tuple(stages)))
    variants = [v for n, v in enumerate(variants) if v.rows or n == len(variants) - 1]
    scratch = splits * MOST_SPLIT * place * 4 if splits > 1 else 0
    return render(spec, signature, variants, scratch=(scratch, 0), k=k, x=signature.value(spec.get("x")),
                  x_at=signature.row_of(x.rows), x_row=signature.elements(spec.get("x")), groups=groups, lead=leads,
                  tiles=tiles, bf16=bf16, even=k % step == 0, kinds=kinds(bf16), splits=splits, share=share, wide=place,
                  most=MOST_SPLIT)


def split(k: int, step: int, tiles: int) -> tuple[int, int]:
    """(parts, features of each) that the contraction is summed in: more than one where there are few columns, since a
    step of one row would leave most of the device idle. By sizes alone, so that sums do not depend on the rows."""
    parts = 1
    while tiles * parts < _WANTED and parts < _PARTS and k >= 2 * parts * _LEAST_PART:
        parts *= 2
    share = -(-k // parts // step) * step
    return -(-k // share), share


def kinds(bf16: bool) -> dict[str, str]:
    return {"element": "tl.bfloat16", "precision": ""} if bf16 else {
        "element": "tl.float32", "precision": ', input_precision="tf32x3"'}


def anchor(signature: Signature, operand: int, w: Weight, i: int, k: int) -> dict[str, Any]:
    made = {"i": i, "format": w.format, "block": w.block, "codes": w.codes, "k": k, "data": "", "scale": ""}
    if w.format != "hadamard":
        made["data"] = signature.param(operand)
    if w.block[0]:
        made["scale"] = signature.param(operand, "scale")
    return made
