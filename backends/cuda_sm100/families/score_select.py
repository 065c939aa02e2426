"""Index scores of cache entries and the top-k selections made of them."""

from __future__ import annotations

from typing import Any

from deepinfer.backends.cuda_sm100.families.attend import KEYS
from deepinfer.backends.cuda_sm100.families.reader import Reader, holds_bf16
from deepinfer.backends.cuda_sm100.signature import Signature
from deepinfer.backends.cuda_sm100.source import CudaSource, Grid, Stage, Variant, render
from deepinfer.backends.cuda_sm100.tile.axes import power_of_two
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.errors import InternalError


def emit(spec: KernelSpec) -> CudaSource:
    """One program is one row. Each selection goes over the entries once, in pieces whose best are merged with the best
    so far: memory does not grow with the context."""
    signature = Signature(spec)
    if spec.get("rounds") not in ("", "bf16"):
        raise InternalError(f"scores are held in bf16 or f32, not {spec.get('rounds')}")
    q, keys, w = (spec.get(x) for x in ("q", "keys", "w"))
    heads, d = spec.operands[q].dims
    signature.axis("seq"), signature.axis("pos"), signature.scratch()
    exact = holds_bf16(spec.operands[q]) and holds_bf16(spec.operands[keys])
    reader = Reader(signature, "tl.bfloat16" if exact else "tl.float32")
    selections = [_selection(signature, n, dict(s)) for n, s in enumerate(spec.get("selections"))]
    key = reader.block("key", "record", spec.operands[keys], d, 1)
    scratch = max(s["piece"] for s in selections) * 4
    stage = Stage(spec.symbol, Grid(), 4, (("H", max(16, power_of_two(heads))), ("D", max(16, power_of_two(d))),
                                           ("KEYS", KEYS)), 2)
    places = {name: (signature.value(i), signature.row_of(spec.operands[i].rows)) for name, i in (("q", q), ("w", w))}
    return render(spec, signature, [Variant(0, (stage,))], scratch=(0, scratch), selections=selections, heads=heads,
                  d=d, ratio=spec.get("ratio"), element=reader.element, key=key, places=places, scratch_row=scratch,
                  record=reader.entry(keys, "e", "e_ok"), rounds=bool(spec.get("rounds")),
                  precision="" if exact else ', input_precision="tf32x3"')


def _selection(signature: Signature, n: int, s: dict[str, Any]) -> dict[str, Any]:
    if s["block"] and s["within"] >= 0:
        raise InternalError("blocks are chosen among all entries, not within listed blocks")

    def place(i: int, base: str) -> str:
        op = signature.operand(i)
        return f"{base} + ({signature.row_of(op.rows)}) * {op.size}"

    kept = max(power_of_two(s["k"]), KEYS)
    out = {"n": n, "k": s["k"], "kept": kept, "block": s["block"], "piece": kept * max(1, s["block"]),
           "out": place(s["out"], signature.value(s["out"])), "given": "", "pinned": "", "listed": "",
           "count": 0, "within": s["within_block"]}
    if out["piece"] % KEYS or (s["block"] and s["block"] != power_of_two(s["block"])):
        raise InternalError(f"blocks of entries have a power of two, not {s['block']}")
    if s["pin"] >= 0:
        out["given"], out["pinned"] = signature.pin(s["pin"], "given"), place(s["pin"], signature.pin(s["pin"]))
    if s["within"] >= 0:
        out["listed"] = place(s["within"], signature.value(s["within"]))
        out["count"] = signature.operand(s["within"]).size
    return out
