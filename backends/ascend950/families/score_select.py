"""Index scores of cache entries and the top-k selections made of them.

A vector core takes a row: entries come in tiles of 64, are decoded and scored with a key in each lane, and join the
best so far a span at a time. What is kept does not grow with the context.
"""

from __future__ import annotations

from typing import Any

from deepinfer.backends.ascend950.memory import Memory, padded, single
from deepinfer.backends.ascend950.signature import BYTES, Signature
from deepinfer.backends.ascend950.source import VECTOR, AscendSource, Grid, Stage, render
from deepinfer.backends.ascend950.target import LANES
from deepinfer.backends.ascend950.tile.special import FORMATS
from deepinfer.backends.cpu.storage import record_parts
from deepinfer.codegen.kernels.spec import KernelSpec, Operand
from deepinfer.errors import InternalError, PlanError

SPAN = 512  # entries between two selections


def emit(spec: KernelSpec) -> AscendSource:
    """One item is one row of queries."""
    signature, memory = Signature(spec), Memory("UB", spec.title)
    if spec.get("rounds") not in ("", "bf16"):
        raise InternalError(f"scores are held in bf16 or f32, not {spec.get('rounds')}")
    q, keys, w = (spec.get(x) for x in ("q", "keys", "w"))
    heads, d = spec.operands[q].dims
    signature.axis("seq"), signature.axis("pos"), signature.step("block_tokens")
    key = _key(spec.operands[keys], d, memory)
    rows = {"q": _row(signature, memory, "q", q), "w": _row(signature, memory, "w", w)}
    memory.new("turned", d * LANES * 4)
    memory.new("span keys", SPAN * 4), memory.new("span numbers", SPAN * 4)
    memory.new("least", LANES * 4), memory.new("most", LANES * 4)
    selections = [_selection(signature, memory, n, dict(s)) for n, s in enumerate(spec.get("selections"))]
    passes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for s in selections:
        passes.setdefault((s["within"], s["within_block"]), []).append(s)
    try:
        used = memory.place()
    except PlanError:
        single(memory.buffers.values())
        used = memory.place()
    at = {name: b.offset for name, b in memory.buffers.items()}
    step = {name: b.stride if b.copies > 1 else 0 for name, b in memory.buffers.items()}
    groups = [{"selections": found, "block": block, "list": _place(signature, within) if within >= 0 else "",
               "count": spec.operands[within].size if within >= 0 else 0} for (within, block), found in passes.items()]
    return render(spec, signature, [Stage(spec.symbol, VECTOR, Grid(), (("UB", used),))], [memory], heads=heads, d=d,
                  dp=padded(d, LANES), ratio=spec.get("ratio"), rounds=int(bool(spec.get("rounds"))), key=key,
                  rows=rows, groups=groups, selections=selections, at=at, step=step, span=SPAN, lanes=LANES,
                  base=signature.state(keys, "base"), stride=signature.state(keys, "stride"),
                  blocks=signature.seq("blocks"), width=signature.seq("width"), buffers=memory.declared())


def _place(signature: Signature, i: int) -> str:
    op = signature.operand(i)
    return f"{signature.value(i)} + ({signature.row_of(op.rows)}) * {op.size}"


def _row(signature: Signature, memory: Memory, name: str, i: int) -> dict[str, Any]:
    """A row of floats or bf16, which lies as floats in UB."""
    size, elements = BYTES[signature.element(i)], signature.operand(i).size
    memory.new(name, elements * 4)
    if size == 2:
        memory.new(f"{name} raw", elements * 2)
    return {"name": name, "elements": elements, "size": size, "at": _place(signature, i)}


def _key(op: Operand, d: int, memory: Memory) -> dict[str, Any]:
    """How the keys' records are read and decoded."""
    parts = record_parts(op.type)
    if len(parts) != 1:
        raise InternalError(f"index keys are records of one part, not {op.dtype}")
    part, dp = parts[0], padded(d, LANES)
    t = part.dtype
    found = {"record": op.get("record_bytes"), "codes": part.codes, "scales": part.scales, "bytes": t.data_bytes(d),
             "scale_bytes": 0, "format": "", "four": False, "across": 0,
             "wide": "uint16_t" if t.name == "bf16" else "float"}
    if t.is_block:
        four = FORMATS[t.name] != "DI_MXFP8"
        found |= {"format": FORMATS[t.name], "four": four, "scale_bytes": t.scale_bytes(d), "pitch": dp // (1 + four),
                  "across": t.block[1].bit_length() - 1}
        memory.new("scale bytes", (LANES + 1) * 32, copies=2)
        memory.new("scales", LANES * LANES * 4)
        if t.scale_bytes(d) > 32:
            raise InternalError(f"index keys of {d} features have more scales than a block of bytes")
    else:
        found["pitch"] = dp * (2 if t.name == "bf16" else 4)
    memory.new("codes", LANES * found["pitch"] + 256, copies=2)
    memory.new("keys", LANES * dp * 4)
    return found


def _selection(signature: Signature, memory: Memory, n: int, s: dict[str, Any]) -> dict[str, Any]:
    if s["block"] and (s["within"] >= 0 or SPAN % s["block"]):
        raise InternalError(f"blocks of {s['block']} entries are not chosen here")
    kept, new = padded(s["k"], LANES), padded(SPAN // s["block"], LANES) if s["block"] else SPAN
    for what, size in (("keys", kept + new), ("numbers", kept + new), ("kept keys", kept), ("kept numbers", kept),
                       ("out", kept)):
        memory.new(f"{what} {n}", size * 4)
    given = pinned = ""
    if s["pin"] >= 0:
        op = signature.operand(s["pin"])
        given = signature.pin(s["pin"], "given")
        pinned = f"{signature.pin(s['pin'])} + ({signature.row_of(op.rows)}) * {op.size}"
    return {**s, "n": n, "kept": kept, "to": _place(signature, s["out"]), "given": given, "pinned": pinned}
