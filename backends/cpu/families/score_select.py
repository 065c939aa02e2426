"""Index scores of cache entries and the top-k selections made of them."""

from __future__ import annotations

from math import lcm
from typing import Any

from deepinfer.backends.base import Source
from deepinfer.backends.cpu.families.attend import KEYS, padded
from deepinfer.backends.cpu.operands import Operands
from deepinfer.backends.cpu.source import render
from deepinfer.backends.cpu.storage import c_type, decode_lines
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.errors import InternalError

_MARKS_BYTES = (1 << 15) // 8  # DI_MARKS
PARTS = 16  # of a row's entries, when a step has few rows
FEW = 8  # rows: more keep all threads busy as they are
LEAST = 4096  # entries of a part: fewer are not worth the second stage


def emit(spec: KernelSpec) -> Source:
    """One item is one part of a row's entries: where a step has few rows with many entries each, every part leaves its
    best to the second stage, which chooses among them; else the first part takes the whole row. Selections that read
    the scores through the same filter share one pass over the entries."""
    operands = Operands(spec)
    q, keys, w = (spec.get(x) for x in ("q", "keys", "w"))
    heads, d = spec.operands[q].dims
    ratio = spec.get("ratio")
    if spec.get("rounds") not in ("", "bf16"):
        raise InternalError(f"scores are held in bf16 or f32, not {spec.get('rounds')}")
    dp = padded(d)
    at = padded(4 * (heads * dp + padded(heads) + KEYS * dp + heads * KEYS + KEYS) + 64 * dp, 64)
    passes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    selections = [dict(s) for s in spec.get("selections")]
    exchange = 0
    for n, s in enumerate(selections):
        s["n"], s["keys"] = n, at
        at += padded(8 * (2 * s["k"] + KEYS), 64)
        s["left"], s["slot"] = exchange, padded(s["k"], 8)
        exchange += FEW * PARTS * 8 * s["slot"]
        if s["block"] and s["within"] >= 0:
            raise InternalError("blocks are chosen among all entries, not within listed blocks")
        s["out"] = operands.place(s["out"]).pointer
        s["given"] = operands.place(s["pin"]).pointer if s["pin"] >= 0 else ""
        passes.setdefault((s["within"], s["within_block"]), []).append(s)
    marks, at = at, at + _MARKS_BYTES
    unit = lcm(KEYS, *(max(s["block"], s["within_block"], 1) for s in selections))
    groups = [{"selections": found, "list": operands.place(within).pointer if within >= 0 else "", "block": block,
               "count": spec.operands[within].size if within >= 0 else 0}
              for (within, block), found in passes.items()]
    qp, wp = operands.place(q), operands.place(w)
    words = all(c_type(spec.operands[i].type) == "uint16_t" for i in (q, keys))
    state = operands.state(keys)
    return render(spec, rows_per_item=1, items_per_tile=PARTS, scratch_bytes=at, exchange_bytes=exchange, parts=PARTS,
                  few=FEW, least=LEAST, unit=unit, call_lines=operands.call_lines(),
                  row_lines=operands.row_lines(), heads=heads, d=d, dp=dp, ratio=ratio, groups=groups, marks=marks,
                  selections=selections, q=qp.pointer, w=wp.pointer, state=state,
                  decode=decode_lines(spec.operands[keys].type, "r", "x"),
                  round="true" if spec.get("rounds") else "false", words="DI_WORDS" if words else "false")
