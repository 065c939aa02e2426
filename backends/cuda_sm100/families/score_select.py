"""Index scores of cache entries and the top-k selections made of them.

Scores are kept in the scratch: for few rows by programs that share the entries of a row, then one program a row
selects; for many rows one program does both, row by row. A selection finds the digits of the least rank that is taken,
eight bits at a time, by histograms; then it collects and sorts what is taken. Its time grows with the entries, its
registers do not.
"""

from __future__ import annotations

from typing import Any

from deepinfer.backends.cuda_sm100.families.reader import Reader, holds_bf16
from deepinfer.backends.cuda_sm100.signature import Signature
from deepinfer.backends.cuda_sm100.source import CudaSource, Stage, Variant, render
from deepinfer.backends.cuda_sm100.tile.axes import power_of_two
from deepinfer.backends.grid import Grid
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.errors import InternalError

KEYS = 64  # entries of a step: the side of a product with 64 rows
SHARED = ((4, 256), (64, 32))  # rows that share programs -> programs of a row
_PERSISTENT = 264  # programs that fill a device, one row after the other
_SPAN = 2048  # scores that a selection looks at in one step
ALIGNED = 4096  # entries that the capacity is rounded up to


def emit(spec: KernelSpec) -> CudaSource:
    signature = Signature(spec)
    if spec.get("rounds") not in ("", "bf16"):
        raise InternalError(f"scores are held in bf16 or f32, not {spec.get('rounds')}")
    q, keys, w = (spec.get(x) for x in ("q", "keys", "w"))
    heads, d = spec.operands[q].dims
    signature.axis("seq"), signature.axis("pos"), signature.scratch()
    signature.step("block_tokens"), signature.seq("width")
    exact, rounds = (holds_bf16(spec.operands[q]) and holds_bf16(spec.operands[keys])), bool(spec.get("rounds"))
    reader = Reader(signature, "tl.bfloat16" if exact else "tl.float32")
    room, selections = 0, []
    for n, s in enumerate(spec.get("selections")):
        made = _selection(signature, n, dict(s), rounds)
        made["room"], room = room, room + 8 * made["kept"]
        if made["listed"]:
            made["scores"], room = room, room + -(-made["count"] * made["within"] // _SPAN) * _SPAN * 4
        selections.append(made)
    size = 2 if rounds else 4
    slots = max(SHARED[-1][0], _PERSISTENT)
    key = reader.block("key", "record", spec.operands[keys], d, 1)
    places = {name: (signature.value(i), signature.row_of(spec.operands[i].rows)) for name, i in (("q", q), ("w", w))}
    return render(spec, signature, _variants(spec.symbol, heads, d, exact), scratch=(slots * room, 0),
                  entries=(slots * size, spec.get("ratio")), selections=selections, heads=heads, d=d,
                  ratio=spec.get("ratio"), element=reader.element, key=key, places=places, room=room, size=size,
                  held="tl.bfloat16" if rounds else "tl.float32", record=reader.entry(keys, "e", "e_ok"),
                  aligned=ALIGNED, persistent=_PERSISTENT, plain=not all(s["listed"] for s in selections),
                  rounds=rounds, precision="" if exact else ', input_precision="tf32x3"')


def _variants(symbol: str, heads: int, d: int, exact: bool) -> list[Variant]:
    sizes = (("H", max(16, power_of_two(heads))), ("D", max(16, power_of_two(d))), ("KEYS", KEYS))
    out = []
    for rows, parts in SHARED:
        scores = Stage(f"{symbol}_scores", Grid(times=parts), 4, (*sizes, ("PARTS", parts)), 2, True, exact)
        select = Stage(f"{symbol}_select", Grid(), 8, (("SPAN", 2 * _SPAN),), 1, True, otherwise=(16,))
        out.append(Variant(rows, (scores, select)))
    whole = Stage(symbol, Grid(fixed=_PERSISTENT), 4, (*sizes, ("SPAN", _SPAN)), 2, True, exact,
                  otherwise=((("SPAN", _SPAN // 2),),))
    return [*out, Variant(0, (whole,))]


def _selection(signature: Signature, n: int, s: dict[str, Any], rounds: bool) -> dict[str, Any]:
    if s["block"] and s["within"] >= 0:
        raise InternalError("blocks are chosen among all entries, not within listed blocks")

    def place(i: int, base: str) -> str:
        op = signature.operand(i)
        return f"{base} + ({signature.row_of(op.rows)}) * {op.size}"

    digits = [56, 48] if rounds else [56, 48, 40, 32]  # of the score; of equal ones the first come first
    out = {"n": n, "k": s["k"], "kept": power_of_two(s["k"]), "block": s["block"],
           "out": place(s["out"], signature.value(s["out"])), "given": "", "pinned": "", "listed": "",
           "count": 0, "within": s["within_block"], "digits": digits, "scores": -1}
    if s["block"] and s["block"] != power_of_two(s["block"]):
        raise InternalError(f"blocks of entries have a power of two, not {s['block']}")
    if s["pin"] >= 0:
        out["given"], out["pinned"] = signature.pin(s["pin"], "given"), place(s["pin"], signature.pin(s["pin"]))
    if s["within"] >= 0:
        out["listed"] = place(s["within"], signature.value(s["within"]))
        out["count"] = signature.operand(s["within"]).size
        out["digits"] = list(range(56, -1, -8))  # blocks are listed best first: equal scores are told by entry
    return out
