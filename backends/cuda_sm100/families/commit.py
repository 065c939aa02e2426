"""The commit of a ring: this step's rows of a state go to their places in the slots. The same kernel for every
engine."""

from __future__ import annotations

from deepinfer.backends.cuda_sm100.signature import Parameter
from deepinfer.backends.cuda_sm100.source import SUFFIX, CudaSource, Grid, Stage, Variant, text_of

SYMBOL = "di_commit"
_PIECE = 1024  # bytes of a record that a program copies in one step
_PARAMETERS = (
    Parameter("row_first", "i32", ("launch", "row_first")), Parameter("row_stop", "i32", ("launch", "row_stop")),
    Parameter("axis_rows", "*i32", ("axis", "rows")), Parameter("axis_seq", "*i32", ("axis", "seq")),
    Parameter("axis_first", "*i32", ("axis", "first")), Parameter("axis_pos", "*i64", ("axis", "pos")),
    Parameter("seq_slot", "*i32", ("seq", "slot")), Parameter("base", "*u8", ("state", 0, "base")),
    Parameter("stride", "i64", ("state", 0, "stride")), Parameter("fresh", "*u8", ("state", 0, "fresh")),
    Parameter("ring", "i32", ("state", 0, "ring")), Parameter("record", "i32", ("state", 0, "record")))


def source() -> CudaSource:
    """One program is one row of the state's axis; rows that the ring does not hold are left out, so that no place is
    written twice."""
    text = text_of("commit", symbol=SYMBOL, parameters=", ".join(p.name for p in _PARAMETERS))
    stage = Stage(SYMBOL, Grid(), 4, (("PIECE", _PIECE),), hot=True)
    return CudaSource(SYMBOL, text, SUFFIX, 1, 1, 0, "commit", _PARAMETERS, (Variant(0, (stage,)),))
