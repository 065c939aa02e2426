"""The commit of a ring: this step's rows of a state go to their places in the slots. The same kernel for every
engine."""

from __future__ import annotations

from deepinfer.backends.ascend950.signature import declared
from deepinfer.backends.ascend950.source import SUFFIX, VECTOR, AscendSource, Stage, text_of
from deepinfer.backends.grid import Grid
from deepinfer.backends.signature import COMMIT, COMMIT_PARAMETERS

_PIECE = 4096  # bytes of a record that are copied in one step


def source() -> AscendSource:
    """One item is one row of the state's axis."""
    text = text_of("commit", symbol=COMMIT, parameters=", ".join(map(declared, COMMIT_PARAMETERS)), piece=_PIECE)
    stage = Stage(COMMIT, VECTOR, Grid(), (("UB", 2 * _PIECE),))
    return AscendSource(COMMIT, text, SUFFIX, 1, 1, 0, family="commit", parameters=COMMIT_PARAMETERS, stages=(stage,))
