"""Draws: the token of the largest logit. What a request wants drawn otherwise is not made here (README.md)."""

from __future__ import annotations

import math

from deepinfer.backends.cuda_sm100.signature import Signature
from deepinfer.backends.cuda_sm100.source import CudaSource, Grid, Stage, Variant, render
from deepinfer.codegen.kernels.spec import KernelSpec

_PIECE = 4096  # logits that a program looks at in one step


def emit(spec: KernelSpec) -> CudaSource:
    """One program is one row of logits."""
    signature = Signature(spec)
    signature.axis("seq")
    logits, out = spec.operands[spec.get("logits")], spec.operands[spec.get("out")]
    lead = math.prod(logits.dims[:-1])
    stage = Stage(spec.symbol, Grid(times=lead), 8, (("PIECE", _PIECE),), hot=True)
    return render(spec, signature, [Variant(0, (stage,))], size=logits.dims[-1], lead=lead,
                  logits=signature.value(spec.get("logits")), logits_at=signature.row_of(logits.rows),
                  out=signature.value(spec.get("out")), out_at=signature.row_of(out.rows),
                  kind="tl.int32" if signature.element(spec.get("out")) == "*i32" else "tl.int64")
