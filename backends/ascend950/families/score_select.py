"""Index scores of cache entries and the top-k selections made of them.

The vector cores decode 64 entries at a time, the cube core multiplies them with the queries, one vector core weighs the
products and keeps the best so far: memory does not grow with the context.
"""

from __future__ import annotations

from typing import Any

from deepinfer.backends.ascend950.cost import Question
from deepinfer.backends.ascend950.families.attend import KEYS, MINE, Rows, slots_of
from deepinfer.backends.ascend950.families.contract import places
from deepinfer.backends.ascend950.memory import Memory, padded
from deepinfer.backends.ascend950.signature import Signature
from deepinfer.backends.ascend950.source import MIX, AscendSource, Stage, render
from deepinfer.backends.ascend950.tile.function import FORMATS
from deepinfer.backends.cpu.storage import stored
from deepinfer.backends.grid import Grid
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.errors import InternalError, PlanError

PIECE = 4096  # entries whose scores are held at a time
_MOST = 65535  # what a bin of a histogram counts up to


def emit(spec: KernelSpec) -> AscendSource:
    signature = Signature(spec)
    if spec.get("rounds") not in ("", "bf16"):
        raise InternalError(f"scores are held in bf16 or f32, not {spec.get('rounds')}")
    q, keys, w = (spec.get(x) for x in ("q", "keys", "w"))
    heads, d = spec.operands[q].dims
    signature.axis("seq"), signature.axis("pos")
    exact = all(stored(spec.operands[i].type).name == "bf16" for i in (q, keys))
    size = 2 if exact else 4
    rows, wide = padded(heads, 32), padded(d, 64)
    selections = [_selection(signature, n, dict(s)) for n, s in enumerate(spec.get("selections"))]
    passes = _passes(selections)
    pitch = _rows(signature, keys, d, passes)
    memories = _memories(spec, passes, selections, size, rows, wide, pitch)
    for m in memories:
        m.place()
    at: dict[str, Any] = {}
    for m in memories:
        at |= places(m)
    stage, bits = Stage(spec.symbol, MIX, Grid()), 16 if spec.get("rounds") else 32
    question = Question(spec.symbol, MIX, stage.grid, keys=(("visible", 1.0),), overlapped=False,
                        known=tuple((s["given"], 0) for s in selections if s["given"]))
    kinds = {i: signature.element(i) for i in (q, w)}
    return render(spec, signature, [stage], memories, question=question, at=at, passes=passes, heads=heads, d=d,
                  selections=selections, rows=rows, wide=wide, size=size, keys=KEYS, mine=MINE, formats=FORMATS,
                  piece=PIECE, element="bfloat16_t" if exact else "float",
                  ub_element="uint16_t" if exact else "float", ratio=spec.get("ratio"),
                  rounds=int(bool(spec.get("rounds"))), depth=256 // size, grain=32 // size,
                  q=signature.value(q), q_at=signature.row_of(spec.operands[q].rows), q_kind=kinds[q],
                  w=signature.value(w), w_at=signature.row_of(spec.operands[w].rows), w_kind=kinds[w],
                  ub_buffers=memories[0].declared(), l1_buffers=memories[1].declared(),
                  cube_buffers=[x for m in memories[1:] for x in m.declared()],
                  shift=32 - bits, bits=bits)


def _rows(signature: Signature, keys: int, d: int, passes: list[dict[str, Any]]) -> int:
    """How the entries of each pass are found; returns the bytes of a key's slot."""
    s, op = signature, signature.operand(keys)
    slots, pitch = slots_of(op, d, 1)
    blocks = f"{s.seq('blocks')} + seq * {s.seq('width')}"
    entry = (f"di_entry({s.state(keys, 'base')}, {s.state(keys, 'stride')}, {blocks}, {s.step('block_tokens')}, "
             f"{op.get('ratio')}, {op.get('record_bytes')}, e)")
    for p in passes:
        find = ["int64_t e = j;"] if not p["list"] else [
            f"int64_t e = di_gm_load({p['list']} + j / {p['within']});",
            f"e = e < 0 ? 0 : e * {p['within']} + j % {p['within']};"]
        find += ["if (e >= visible) e = 0;", f"__gm__ uint8_t* const record = {entry};"]
        p["rows"] = Rows(find, slots, pitch, d)
    return pitch


def _passes(selections: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What scores are made: of all entries, and of those in listed blocks."""
    out: list[dict[str, Any]] = []
    plain = [s for s in selections if not s["listed"]]
    if plain:
        out.append({"count": "visible", "list": "", "within": 1, "shift": 0, "listed": 0, "selections": plain})
    for s in selections:
        if s["listed"]:
            out.append({"count": f"(visible > 0 ? {s['count'] * s['within']} : 0)", "list": s["listed"],
                        "within": s["within"], "shift": s["within"].bit_length() - 1, "listed": s["count"],
                        "selections": [s]})
    return out


def _selection(signature: Signature, n: int, s: dict[str, Any]) -> dict[str, Any]:
    if s["block"] and s["within"] >= 0:
        raise InternalError("blocks are chosen among all entries, not within listed blocks")
    for size in (s["block"], s["within_block"]):
        if size and (size & (size - 1) or size > PIECE):
            raise InternalError(f"blocks of entries have a power of two, not {size}")

    def place(i: int, base: str) -> str:
        op = signature.operand(i)
        return f"{base} + ({signature.row_of(op.rows)}) * {op.size}"

    if padded(s["k"], 64) + PIECE > _MOST:
        raise PlanError(f"a selection of {s['k']} entries does not fit into the counts of a histogram", found=s["k"],
                        allowed=f"at most {_MOST - PIECE}", next_step="choose fewer entries")
    out = {"n": n, "k": s["k"], "kept": padded(s["k"], 64), "block": s["block"], "given": "", "pinned": "",
           "listed": "", "count": 0, "within": s["within_block"] or 1,
           "out": place(s["out"], signature.value(s["out"]))}
    if s["pin"] >= 0:
        out["given"], out["pinned"] = signature.pin(s["pin"], "given"), place(s["pin"], signature.pin(s["pin"]))
    if s["within"] >= 0:
        out["listed"] = place(s["within"], signature.value(s["within"]))
        out["count"] = signature.operand(s["within"]).size
    return out


def _memories(spec: KernelSpec, passes: list[dict[str, Any]], selections: list[dict[str, Any]], size: int, rows: int,
              wide: int, pitch: int) -> list[Memory]:
    ub, l1, l0a, l0b, l0c = (Memory(s, spec.title) for s in ("UB", "L1", "L0A", "L0B", "L0C"))
    q = stored(spec.operands[spec.get("q")].type).name
    ub.new("q_raw", 8 * wide * (2 if q == "bf16" else 4) + 256)
    ub.new("q_wide", 8 * wide * size)
    ub.new("raw", MINE * pitch + 512)
    ub.new("scales", MINE * 256 + 256)
    ub.new("keys", MINE * wide * 4 + 512)
    if size == 2:
        ub.new("narrow", MINE * wide * 2)
    ub.new("products", rows * KEYS * 4)
    ub.new("w_raw", rows * 4 + 512)
    ub.new("w", rows * 4 + 512)
    ub.new("scores", PIECE * 4 + 256)
    ub.new("numbers", PIECE * 4 + 256)
    ub.new("listed", max((p["listed"] for p in passes), default=0) * 4 + 512)
    ub.new("threshold", 512)
    ub.new("bins", 512)
    most = max(s["kept"] for s in selections)
    for name in ("best", "best_places", "ordered"):
        ub.new(name, most * 4 + 512)
    for s in selections:
        room = s["kept"] + PIECE // max(1, s["block"])
        ub.new(f"keys{s['n']}", room * 4 + 256)
        ub.new(f"places{s['n']}", room * 4 + 256)
    l1.new("queries", rows * wide * size)
    l1.new("l1_keys", KEYS * wide * size)
    l0a.new("left", rows * 256, 2)
    l0b.new("right", KEYS * 256, 2)
    l0c.new("s", rows * KEYS * 4)
    return [ub, l1, l0a, l0b, l0c]
