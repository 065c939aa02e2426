"""Draws: the token of the largest logit. What a request wants drawn otherwise is not made here."""

from __future__ import annotations

import math

from deepinfer.backends.ascend950 import cost
from deepinfer.backends.ascend950.memory import Memory
from deepinfer.backends.ascend950.signature import C_TYPES, Signature
from deepinfer.backends.ascend950.source import VECTOR, AscendSource, Grid, Stage, render
from deepinfer.backends.ascend950.target import VECTOR_BYTES
from deepinfer.codegen.kernels.spec import KernelSpec

_PIECE = 4096  # logits that a core looks at in one step


def emit(spec: KernelSpec) -> AscendSource:
    """One item is one row of logits; pieces of it come in while the one before is looked at."""
    signature, memory = Signature(spec), Memory("UB", spec.title)
    signature.axis("seq")
    logits, out = spec.operands[spec.get("logits")], spec.operands[spec.get("out")]
    lead, size = math.prod(logits.dims[:-1]), logits.dims[-1]
    element = C_TYPES[signature.element(spec.get("logits"))]
    bytes_of = 2 if element == "bfloat16_t" else 4
    piece = min(_PIECE, -(-size // 64) * 64)
    pieces = memory.new("logits", piece * bytes_of, copies=2)
    best, where, token = (memory.new(name, VECTOR_BYTES) for name in ("best", "where", "token"))
    used = memory.place()
    stage = Stage(spec.symbol, VECTOR, Grid(times=lead), (("UB", used),))
    work = cost.rowwise(VECTOR, stage.grid, size / 64 * 5, -(-size // piece), True)
    return render(spec, signature, [stage], [memory], work=work, size=size, lead=lead, piece=piece, bytes=bytes_of,
                  ub="uint16_t" if bytes_of == 2 else "float", element=element,
                  out_bytes=8 if signature.element(spec.get("out")) == "*i64" else 4,
                  logits=signature.value(spec.get("logits")), logits_at=signature.row_of(logits.rows),
                  out=signature.value(spec.get("out")), out_at=signature.row_of(out.rows), pieces=pieces,
                  best=best.offset, where=where.offset, token=token.offset, buffers=memory.declared())
