"""The commit of a ring: this step's rows of a state go to their places in the slots. The same kernel for every
engine."""

from __future__ import annotations

from deepinfer.backends.cuda_sm100.source import SUFFIX, CudaSource, Stage, Variant, text_of
from deepinfer.backends.grid import Grid
from deepinfer.backends.signature import COMMIT, COMMIT_PARAMETERS

SYMBOL = COMMIT
_PIECE = 1024  # bytes of a record that a program copies in one step


def source() -> CudaSource:
    """One program is one row of the state's axis; rows that the ring does not hold are left out, so that no place is
    written twice."""
    text = text_of("commit", symbol=SYMBOL, parameters=", ".join(p.name for p in COMMIT_PARAMETERS))
    stage = Stage(SYMBOL, Grid(), 4, (("PIECE", _PIECE),), hot=True)
    return CudaSource(SYMBOL, text, SUFFIX, 1, 1, 0, family="commit", parameters=COMMIT_PARAMETERS,
                      variants=(Variant(0, (stage,)),))
