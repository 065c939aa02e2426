"""Steps that are sent while the step before them runs: two kernels that are the same for every engine.

``di_accept`` stands behind the draws of a step and leaves on the device how far each sequence came; ``di_follow``
stands in front of a step and puts positions, ids and groups of its sequences where the host could not know them.
"""

from __future__ import annotations

from deepinfer.backends.cuda_sm100.source import SUFFIX, CudaSource, Stage, Variant, text_of
from deepinfer.backends.grid import Grid
from deepinfer.backends.signature import Parameter

FOLLOW, ACCEPT = "di_follow", "di_accept"
_TOGETHER = 128  # sequences that a program looks at together


# Words of the table, as runtime/native/device/following.h has them: where arrays lie in the integers of a step, and
# from "axes" on those of each axis.
_TABLE = ("axes", "source", "draft", "verified", "c", "from_step", "from_kept", "token_ids", "lookback")
_AXIS = ("rows", "seq", "step_row", "first", "pos", "ratio")
AXIS_WORDS = len(_AXIS)
_STEP, _WANTED, _SEQ, _GROUPS = 0, 2, 3, 4  # axes; those of groups from _GROUPS on


_COMMON = (
    Parameter("row_first", "i32", ("launch", "row_first")), Parameter("row_stop", "i32", ("launch", "row_stop")),
    Parameter("words", "*i64", ("follow", "words")), Parameter("halves", "*i32", ("follow", "halves")),
    Parameter("table", "*i64", ("follow", "table")), Parameter("after_n", "*i64", ("after", "n")),
    Parameter("after_ids", "*i64", ("after", "ids")), Parameter("lookback_width", "i32", ("step", "lookback_width")))
_FOLLOW = (*_COMMON, Parameter("after_drafts", "*i64", ("after", "drafts")),
           Parameter("drafts", "i32", ("sequence", "drafts")), Parameter("filler", "i64", ("sequence", "filler")))
_ACCEPT = (*_COMMON, Parameter("tokens", "*i64", ("draw", "tokens")))


def word(name: str) -> int:
    """Of an array of the step."""
    return _TABLE.index(name)


def word_of(name: str) -> int:
    """Of an array of the first axis; those of the next one lie ``AXIS_WORDS`` behind."""
    return len(_TABLE) + _AXIS.index(name)


def _axis(axis: int | str, name: str) -> str:
    """``axis``: a number, or the name of the variable that holds it."""
    return f"{word_of(name)} + {axis} * {AXIS_WORDS}"


def _source(symbol: str, parameters: tuple[Parameter, ...]) -> CudaSource:
    text = text_of(symbol.removeprefix("di_"), symbol=symbol, parameters=", ".join(p.name for p in parameters),
                   table=word, axis=_axis, STEP=_STEP, WANTED=_WANTED, SEQ=_SEQ, GROUPS=_GROUPS)
    stage = Stage(symbol, Grid(fixed=1), 4, (("SEQS", _TOGETHER),))
    return CudaSource(symbol, text, SUFFIX, 1, 1, 0, family="follow", parameters=parameters,
                      variants=(Variant(0, (stage,)),))


def follow() -> CudaSource:
    """One program; see the module."""
    return _source(FOLLOW, _FOLLOW)


def accept() -> CudaSource:
    """One program; see the module."""
    return _source(ACCEPT, _ACCEPT)
