"""Contractions of the same rows with one or more weights, and the epilogue on their results."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

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
from deepinfer.backends.cuda_sm100.schedule import MANY, Schedule, Tile, default_schedule, part_of
from deepinfer.backends.cuda_sm100.signature import Signature
from deepinfer.backends.cuda_sm100.source import CudaSource, Stage, Variant, render
from deepinfer.backends.grid import Grid
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.errors import InternalError

_SUMMED = (16, 64)  # rows and columns that a program adds parts of
_PAIRED = 16  # tokens of a tile up to which FP8 weights are read in words, where an epilogue follows the sums
_READY = (64, 256)  # rows and features of weights that a program makes ready


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
            a["place"], a["n"], place = place, n, place + n
        tiles.append({"number": number, "n": n, "columns": n // groups, "anchors": anchors,
                      "lines": epilogue.lines(c, lead, groups)})
    depths = [depth(k, weights, kinds, t.depth) for t in schedule.tiles]
    parts, share = part_of(k, schedule.parts, max(depths))
    leads = math.prod(lead)
    apart = schedule.apart if parts > 1 else 0
    if apart:
        signature.scratch()
    roomy = fits_wide_tile(max(len(t["anchors"]) for t in tiles), epilogue.ops)
    packed = [a for t in tiles for a in t["anchors"]]
    ready = made_ready(packed, k) if any(t.ready for t in schedule.tiles) else None
    if ready:
        signature.scratch()

    def variant(t: Tile, deep: int) -> Variant:
        bn = columns_of(widest, t.columns if roomy else min(64, t.columns), kinds)
        count = sum(-(-y["columns"] // bn) * groups for y in tiles)
        constants = (("BT", t.tokens), ("BN", bn), ("BK", deep))
        wide = (*constants, ("GROUP", t.group))
        split = 0 < t.rows <= apart
        name, times = (f"{spec.symbol}_part", parts) if split else (spec.symbol, 1)
        ahead = ready if t.ready and not split else None
        stages = [Stage(f"{spec.symbol}_wide" if ahead else name, Grid(leads, t.tokens, 0, count * times), t.warps,
                        constants if split else wide, t.pipeline, hot=True, matrix=kinds.exact,
                        otherwise=(8,) if t.warps < 8 else ())]
        if ahead:
            blocks = ahead["anchors"][-1]["stop"] * ahead["steps"]
            made = (("BN", _READY[0]), ("BK", _READY[1]))
            stages.insert(0, Stage(f"{spec.symbol}_ready", Grid(fixed=blocks), 4, made, 1))
        if split:
            few = min(t.tokens, _SUMMED[0])
            across = sum(-(-y["columns"] // _SUMMED[1]) * groups for y in tiles)
            stages.append(Stage(f"{spec.symbol}_sum", Grid(leads, few, 0, across), 4, (("BT", few), ("BN", _SUMMED[1])),
                                1))
        smaller = smaller_tile(t, bn)
        return Variant(t.rows // leads if t.rows else 0, tuple(stages), variant(smaller, deep) if smaller else None)

    variants = [variant(t, deep) for t, deep in zip(schedule.tiles, depths, strict=True)]
    variants = [v for n, v in enumerate(variants) if v.rows or n == len(variants) - 1]
    words = k % 16 == 0 and all(a["raised"] and a["format"] == "mxfp8" for a in packed)
    room = parts * leads * place * 4
    fixed = max(0 if apart >= MANY else parts * apart * place * 4, 2 * place * k if ready else 0)
    scratch = (fixed, room if apart >= MANY else 0)
    return render(spec, signature, variants, scratch=scratch, k=k, x=signature.value(spec.get("x")),
                  x_at=signature.row_of(x.rows), x_row=signature.elements(spec.get("x")), groups=groups,
                  lead=leads, tiles=tiles, even=k % max(depths) == 0, kinds=kinds, parts=parts, share=share, wide=place,
                  ready=ready, words=words, paired=_PAIRED,
                  stride=f"(row_stop - row_first) * {leads}" if apart >= MANY else apart)


def smaller_tile(t: Tile, columns: int) -> Tile | None:
    """What takes the place of a tile whose sums do not fit into the registers: half of its longer side."""
    if t.tokens * columns <= 64 * 64:
        return None
    return replace(t, columns=columns // 2) if columns >= max(t.tokens, 128) else replace(t, tokens=t.tokens // 2)


def made_ready(anchors: list[dict[str, Any]], k: int) -> dict[str, Any] | None:
    """How packed weights are made bf16 ahead of a product of many rows; None where they are not packed."""
    if not all(a["raised"] for a in anchors):
        return None
    blocks = 0
    for a in anchors:
        a["start"], blocks = blocks, blocks - (-a["n"] // _READY[0])
        a["stop"] = blocks
        base = f"(ready + {a['place'] * k})" if a["place"] else "ready"
        a["ready"] = {"base": base, "k": k, "block": (0, 0), "raised": False, "format": "bf16"}
    return {"anchors": anchors, "steps": -(-k // _READY[1]), "even": k % _READY[1] == 0}
