"""Draws: the token behind a row of logits, by the options that a step brings for the row (README.md)."""

from __future__ import annotations

import math
from typing import Any

from deepinfer.backends.cuda_sm100.signature import Signature
from deepinfer.backends.cuda_sm100.source import CudaSource, Stage, Variant, render
from deepinfer.backends.grid import Grid
from deepinfer.codegen.kernels.spec import KernelSpec

_PIECE = 4096  # logits that a program looks at in one step
WORDS = 8  # of a row: DrawWord of runtime/native/device/draws.h
_PLACES: dict[str, Any] = {"TOKEN": 1, "KEY": 2, "TEMPERATURE": 3, "TOP_K": 4, "TOP_P": 5, "MIN_P": 6, "BARE": 7}
_MODES: dict[str, Any] = {"NONE": 0, "CHOOSE": 1, "GIVEN": 3, "LARGEST": 4}


def emit(spec: KernelSpec) -> CudaSource:
    """One program is one row of logits."""
    signature = Signature(spec)
    signature.axis("seq")
    signature.axis("pos")
    signature.draws()
    logits, out = spec.operands[spec.get("logits")], spec.operands[spec.get("out")]
    lead = math.prod(logits.dims[:-1])
    piece = min(_PIECE, 1 << (logits.dims[-1] - 1).bit_length())
    stage = Stage(spec.symbol, Grid(times=lead), 8, (("PIECE", piece),), hot=True, otherwise=(16,))
    return render(spec, signature, [Variant(0, (stage,))], size=logits.dims[-1], lead=lead, words=WORDS,
                  ahead=spec.get("ahead"), logits=signature.value(spec.get("logits")),
                  logits_at=signature.row_of(logits.rows), out=signature.value(spec.get("out")),
                  out_at=signature.row_of(out.rows),
                  kind="tl.int32" if signature.element(spec.get("out")) == "*i32" else "tl.int64", **_PLACES, **_MODES)
