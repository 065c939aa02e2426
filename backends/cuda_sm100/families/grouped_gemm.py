"""Contractions of rows with the experts they picked: pairs of row and slot, ordered by expert, share weights."""

from __future__ import annotations

from deepinfer.backends.cuda_sm100.families.contract import (
    Epilogue,
    columns_of,
    components,
    depth,
    exact_in_bf16,
    fits_wide_tile,
    weight_of,
)
from deepinfer.backends.cuda_sm100.families.gemm import anchor, kinds
from deepinfer.backends.cuda_sm100.signature import Signature
from deepinfer.backends.cuda_sm100.source import CudaSource, Grid, Stage, Variant, render
from deepinfer.backends.cuda_sm100.tile.axes import power_of_two
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.errors import InternalError

# Pairs of an expert, on average, that a variant is for -> (pairs of a tile, columns of one, warps, features of a step)
_TILES = ((16, 16, 64, 4, 128), (64, 64, 64, 4, 64), (0, 128, 128, 8, 64))
_SCAN = 1024  # picks that the grouping looks at in one step


def emit(spec: KernelSpec) -> CudaSource:
    program = spec.slot("epilogue")
    if program is None:
        raise InternalError(f"{spec.title}: a grouped gemm has an epilogue")
    signature = Signature(spec)
    x, picks = spec.operands[spec.get("x")], spec.operands[spec.get("experts")]
    operands: tuple[int, ...] = spec.get("weights")
    weights = [weight_of(spec.operands[i]) for i in operands]
    slots, k, experts = picks.dims[-1], x.dims[-1], spec.operands[operands[0]].dims[0]
    bf16 = exact_in_bf16(x, weights)
    epilogue = Epilogue(program, signature)
    signature.axis("seq")
    signature.scratch()
    step, tiles, widest = depth(k, weights, bf16), [], 0
    for number, c in enumerate(components(epilogue.ops, len(operands))):
        n = spec.get("results")[c.anchors[0]][-1]
        widest = max(widest, n)
        anchors = [anchor(signature, operands[i], weights[i], i, k) for i in c.anchors]
        tiles.append({"number": number, "n": n, "anchors": anchors, "lines": epilogue.lines(c, (slots,), 1)})
    group = Stage(f"{spec.symbol}_group", Grid(fixed=experts), 4, (("SCAN", _SCAN),), 1)
    one = all(len(t["anchors"]) == 1 for t in tiles)  # two expanded weights of a deep step fill the registers
    roomy = fits_wide_tile(max(len(t["anchors"]) for t in tiles), epilogue.ops)
    variants = []
    for share, tile, wide, warps, most in _TILES:
        bn = columns_of(widest, wide if roomy else min(wide, 64))
        count = sum(-(-t["n"] // bn) for t in tiles)
        hopper = bf16 and bn >= 64
        deep = depth(k, weights, bf16, most if one else 64)
        main = Stage(spec.symbol, Grid(slots, tile, experts, count), warps if hopper else 4,
                     (("BT", tile), ("BN", bn), ("BK", deep)), 4, hot=True, matrix=hopper)
        variants.append(Variant(share * experts // slots, (group, main)))
    return render(spec, signature, variants, scratch=(4 * (experts + 64), 4 * slots), k=k, slots=slots,
                  experts=experts, wide=power_of_two(experts), order=experts + 64,
                  picks=signature.value(spec.get("experts")), picks_at=signature.row_of(picks.rows),
                  picks_kind=signature.element(spec.get("experts")), x=signature.value(spec.get("x")),
                  x_at=signature.row_of(x.rows), x_row=x.size, x_slot=k if len(x.dims) > 1 else 0, tiles=tiles,
                  bf16=bf16, even=k % step == 0, kinds=kinds(bf16))
