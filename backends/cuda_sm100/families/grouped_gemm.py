"""Contractions of rows with the experts they picked: pairs of row and slot, ordered by expert, share weights."""

from __future__ import annotations

from dataclasses import replace

from deepinfer.backends.cuda_sm100.families.contract import (
    Epilogue,
    anchor,
    columns_of,
    components,
    depth,
    kinds_of,
    weight_of,
)
from deepinfer.backends.cuda_sm100.schedule import Schedule, default_schedule
from deepinfer.backends.cuda_sm100.signature import Signature
from deepinfer.backends.cuda_sm100.source import CudaSource, Stage, Variant, render
from deepinfer.backends.cuda_sm100.tile.axes import power_of_two
from deepinfer.backends.grid import Grid
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.errors import InternalError

# Few and many pairs of an expert: picks that the grouping looks at in one step, inputs that a program spreads in one,
# warps, and programs besides those of the experts, which spread inputs.
_SHARED = 32  # as many experts a pair: no two pairs are expected to pick the same
_FEW, _MANY = (1024, 512, 4, 0), (4096, 2048, 8, 1024)


def emit(spec: KernelSpec, schedule: Schedule | None = None) -> CudaSource:
    program = spec.slot("epilogue")
    if program is None:
        raise InternalError(f"{spec.title}: a grouped gemm has an epilogue")
    signature, schedule = Signature(spec), schedule or default_schedule(spec)
    x, picks = spec.operands[spec.get("x")], spec.operands[spec.get("experts")]
    operands: tuple[int, ...] = spec.get("weights")
    weights = [weight_of(spec.operands[i]) for i in operands]
    slots, k, experts = picks.dims[-1], x.dims[-1], spec.operands[operands[0]].dims[0]
    kinds = kinds_of(x, weights)
    epilogue = Epilogue(program, signature)
    signature.axis("seq")
    signature.scratch()
    tiles, widest = [], 0
    for number, c in enumerate(components(epilogue.ops, len(operands))):
        n = spec.get("results")[c.anchors[0]][-1]
        widest = max(widest, n)
        anchors = [anchor(signature, operands[i], weights[i], i, k, kinds) for i in c.anchors]
        tiles.append({"number": number, "n": n, "anchors": anchors, "lines": epilogue.lines(c, (slots,), 1)})
    # Words of eight codes, where all weights have them: the inputs are put into their order once, for all experts.
    words = kinds.exact and not kinds.thirds and all(w.format == "mxfp4" for w in weights)
    spread = next((chunk for chunk in (128, 64, 32) if words and k % chunk == 0), 0)
    one = all(len(t["anchors"]) == 1 for t in tiles)  # two expanded weights of a deep step fill the registers
    variants: list[Variant] = []
    depths: list[int] = []
    for t in schedule.tiles:
        bn = columns_of(widest, t.columns, kinds)
        count = sum(-(-y["n"] // bn) for y in tiles)
        depths.append(max(spread, depth(k, weights, kinds, t.depth)))
        main = Stage(spec.symbol, Grid(slots, t.tokens, experts, count), t.warps,
                     (("BT", t.tokens), ("BN", bn), ("BK", depths[-1]), ("SINGLE", 0)), t.pipeline, hot=True,
                     matrix=kinds.exact, otherwise=(8,) if t.warps < 8 and not one else ())
        scan, copy, warps, more = _FEW if 0 < t.rows <= 16 else _MANY
        copied = (("COPY", copy), ("ALONE", 0)) if spread else ()
        group = Stage(f"{spec.symbol}_group", Grid(fixed=experts + (more if spread else 0)), warps,
                      (("SCAN", scan), *copied), 1)
        if not variants and spread:  # so few pairs that hardly two share an expert: they need no order
            alone = replace(group, grid=Grid(1, 1, 0, -(-x.size // copy)), constants=(
                ("SCAN", scan), ("COPY", copy), ("ALONE", 1)))
            single = replace(main, grid=Grid(slots, 1, 0, count), constants=(*main.constants[:3], ("SINGLE", 1)))
            variants.append(Variant(max(1, experts // (_SHARED * slots)), (alone, single)))
        variants.append(Variant(t.rows * experts // slots, (group, main)))
    order = -(-(experts + 1) // 64) * 64
    return render(spec, signature, variants, scratch=(4 * order + 64, 4 * slots + (2 * x.size if spread else 0)), k=k,
                  slots=slots, experts=experts, wide=power_of_two(experts), order=order, spread=spread,
                  picks=signature.value(spec.get("experts")), picks_at=signature.row_of(picks.rows),
                  picks_kind=signature.element(spec.get("experts")), x=signature.value(spec.get("x")),
                  x_at=signature.row_of(x.rows), x_row=x.size, x_slot=k if len(x.dims) > 1 else 0, tiles=tiles,
                  even=k % max(depths) == 0, kinds=kinds)
