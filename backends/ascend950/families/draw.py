"""Draws: the token behind a row of logits, by the options that a step brings for the row."""

from __future__ import annotations

import math

from deepinfer.backends.ascend950.cost import Question
from deepinfer.backends.ascend950.memory import Memory
from deepinfer.backends.ascend950.signature import C_TYPES, Signature
from deepinfer.backends.ascend950.source import VECTOR, AscendSource, Stage, render
from deepinfer.backends.ascend950.target import VECTOR_BYTES
from deepinfer.backends.grid import Grid
from deepinfer.codegen.kernels.spec import KernelSpec

_PIECE = 4096  # logits that a core looks at in one step
WORDS = 8  # of a row: DrawWord of runtime/native/device/draws.h
_PLACES = {"TOKEN": 1, "KEY": 2, "TEMPERATURE": 3, "TOP_K": 4, "TOP_P": 5, "MIN_P": 6, "BARE": 7}
_MODES = {"NONE": 0, "CHOOSE": 1, "GIVEN": 3, "LARGEST": 4}
_DRAWN = (("mode", _MODES["CHOOSE"]), ("numbers", 1), ("heat", 1), ("top_k", 0), ("top_p", 0x3FF0000000000000))


def emit(spec: KernelSpec) -> AscendSource:
    """One item is one row of logits; pieces of it come in while the one before is looked at."""
    signature, memory = Signature(spec), Memory("UB", spec.title)
    signature.axis("seq"), signature.axis("pos"), signature.draws()
    logits, out = spec.operands[spec.get("logits")], spec.operands[spec.get("out")]
    lead, size = math.prod(logits.dims[:-1]), logits.dims[-1]
    element = C_TYPES[signature.element(spec.get("logits"))]
    bytes_of = 2 if element == "bfloat16_t" else 4
    piece = min(_PIECE, -(-size // 64) * 64)
    pieces = memory.new("logits", piece * bytes_of, copies=2)
    for name in ("best", "where", "tops", "wrong", "whole", "token"):
        memory.new(name, VECTOR_BYTES)
    memory.new("answers", 3 * VECTOR_BYTES)
    used = memory.place()
    at = {name: b.offset for name, b in memory.buffers.items()}
    stage = Stage(spec.symbol, VECTOR, Grid(times=lead), (("UB", used),))
    question = Question(spec.symbol, VECTOR, stage.grid, known=_DRAWN)  # with a temperature and no cut
    return render(spec, signature, [stage], [memory], question=question, size=size, lead=lead, piece=piece,
                  bytes=bytes_of, ub="uint16_t" if bytes_of == 2 else "float", element=element,
                  out_bytes=8 if signature.element(spec.get("out")) == "*i64" else 4, words=WORDS,
                  ahead=spec.get("ahead"), logits=signature.value(spec.get("logits")),
                  logits_at=signature.row_of(logits.rows), out=signature.value(spec.get("out")),
                  out_at=signature.row_of(out.rows), pieces=pieces, best=at["best"], where=at["where"],
                  tops_at=at["tops"], wrong_at=at["wrong"], whole_at=at["whole"], token_at=at["token"],
                  answers_at=at["answers"], buffers=memory.declared(), numbers=_PLACES | _MODES)
