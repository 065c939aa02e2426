"""Index scores of cache entries and the top-k selections made of them.

A selection finds the digits of the least rank that is taken, eight bits at a time, by histograms; then it collects and
sorts what is taken. Its time grows with the entries, its registers do not. Scores are kept in the scratch. For few rows
programs share the entries of a row: one stage makes scores, one for each digit counts, one collects, and a last one
sorts; where blocks are listed, whose ranks have more digits and whose entries are few, one program a row selects. For
many rows one program does it all, row by row.
"""

from __future__ import annotations

from typing import Any

from deepinfer.backends.cuda_sm100.families.reader import Reader, holds_bf16, in_words
from deepinfer.backends.cuda_sm100.signature import Signature
from deepinfer.backends.cuda_sm100.source import CudaSource, Stage, Variant, render
from deepinfer.backends.cuda_sm100.tile.axes import power_of_two
from deepinfer.backends.grid import Grid
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.errors import InternalError

KEYS = 64  # entries of a step: the side of a product with 64 rows
SHARED = ((4, 256, 32), (64, 32, 8))  # rows that share programs -> programs of a row that score, that select
_PERSISTENT = 264  # programs that fill a device, one row after the other
PARTS = max(parts for *_, parts in SHARED)
_SPAN, _SHARED_SPAN = 2048, 1024  # scores that a selection looks at in one step, of one program and of one of several
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
    words = exact and in_words(spec.operands[keys], d)
    reader = Reader(signature, "tl.bfloat16" if exact else "tl.float32", words)
    room, selections = 0, []
    for n, s in enumerate(spec.get("selections")):
        made = _selection(signature, n, dict(s), rounds)
        made["room"], room = room, room + 8 * made["kept"]
        if made["listed"]:
            made["scores"], room = room, room + -(-made["count"] * made["within"] // _SPAN) * _SPAN * 4
        else:
            made["counts"], room = room, room + 4 * (len(made["digits"]) * 256 + 1) * PARTS
        selections.append(made)
    digits = 0 if any(s["listed"] for s in selections) else max(len(s["digits"]) for s in selections)
    size = 2 if rounds else 4
    slots = max(SHARED[-1][0], _PERSISTENT)
    key = reader.block("key", "record", spec.operands[keys], d, 1)
    places = {name: (signature.value(i), signature.row_of(spec.operands[i].rows)) for name, i in (("q", q), ("w", w))}
    return render(spec, signature, _variants(spec.symbol, heads, d, exact, digits), scratch=(slots * room, 0),
                  entries=(slots * size, spec.get("ratio")), selections=selections, heads=heads, d=d,
                  ratio=spec.get("ratio"), element=reader.element, key=key, places=places, room=room, size=size,
                  held="tl.bfloat16" if rounds else "tl.float32", record=reader.entry(keys, "e", "e_ok"),
                  within=reader.entries_within(keys, "block", "place"),
                  aligned=ALIGNED, persistent=_PERSISTENT, plain=not all(s["listed"] for s in selections),
                  rounds=rounds, words=words, up=repr(reader.up), parts=digits > 0, most_digits=digits,
                  precision="" if exact else ', input_precision="tf32x3"')


def _variants(symbol: str, heads: int, d: int, exact: bool, digits: int) -> list[Variant]:
    """``digits``: of the ranks of selections that programs share, 0 where each is one program's."""
    sizes = (("H", max(16, power_of_two(heads))), ("D", max(16, power_of_two(d))), ("KEYS", KEYS))
    names = (*(f"count{n}" for n in range(digits)), "collect")
    out = []
    for rows, scoring, parts in SHARED:
        stages = [Stage(f"{symbol}_scores", Grid(times=scoring), 4, (*sizes, ("PARTS", scoring)), 1, True, exact,
                        otherwise=(8,))]
        if digits:
            span, shared = ("SPAN", _SHARED_SPAN), ("PARTS", parts)
            stages += [*(Stage(f"{symbol}_{x}", Grid(times=parts), 4, (span, shared), 1, True, otherwise=(8,))
                         for x in names), Stage(f"{symbol}_sort", Grid(), 4, (shared,), 1, True)]
        else:
            stages.append(Stage(f"{symbol}_select", Grid(), 8, (("SPAN", 2 * _SPAN),), 1, True, otherwise=(16,)))
        out.append(Variant(rows, tuple(stages)))
    whole = Stage(symbol, Grid(fixed=_PERSISTENT), 4, (*sizes, ("SPAN", _SPAN)), 1, True, exact,
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
           "count": 0, "within": s["within_block"], "digits": digits, "scores": -1, "counts": -1}
    if s["block"] and s["block"] != power_of_two(s["block"]):
        raise InternalError(f"blocks of entries have a power of two, not {s['block']}")
    if s["pin"] >= 0:
        out["given"], out["pinned"] = signature.pin(s["pin"], "given"), place(s["pin"], signature.pin(s["pin"]))
    if s["within"] >= 0:
        out["listed"] = place(s["within"], signature.value(s["within"]))
        out["count"] = signature.operand(s["within"]).size
        out["digits"] = list(range(56, -1, -8))  # blocks are listed best first: equal scores are told by entry
    return out
