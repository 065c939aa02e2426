"""What one step brings for one sequence, and which rows each row axis has in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer.dsl.types import KEPT, SEQ, STEP, WANTED, Rows
from deepinfer.errors import InternalError


@dataclass(frozen=True)
class Override:
    """Rows given from outside: ``rows`` [n, d] replace the value at absolute ``positions`` [n] i64."""

    positions: Tensor
    rows: Tensor


@dataclass(frozen=True)
class StepRows:
    """One sequence's part of a step.

    Args:
        ids: token ids of the rows, at positions ``start .. start + len(ids) - 1``.
        start: position of the first row (c).
        prompt_end: position after the last row of the whole prompt (N); None: the end of this step.
        keep: rows at positions >= prompt_end - keep are kept (K); None: all rows.
        wanted: the last rows whose logits are asked for; None: all kept rows.
        write_floor: no paged entry of positions below it is written (h).
        history: ids at positions 0 .. start - 1, or at least the last ones that a look-back reads.
        window_start: window name -> first position whose row may be read; a window that is not named may be read as far
            back as it holds rows.
        overrides: name -> rows given from outside. Their positions, also those before ``start``, stop a look-back.
    """

    ids: Sequence[int]
    start: int = 0
    prompt_end: int | None = None
    keep: int | None = None
    wanted: int | None = None
    write_floor: int = 0
    history: Sequence[int] = ()
    window_start: Mapping[str, int] = field(default_factory=dict)
    overrides: Mapping[str, Override] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        """Position after the last row."""
        return self.start + len(self.ids)

    @property
    def first_kept(self) -> int:
        """Position of the first kept row (``stop`` when there is none)."""
        end = self.stop if self.prompt_end is None else self.prompt_end
        return self.start if self.keep is None else min(max(self.start, end - self.keep), self.stop)

    @property
    def first_wanted(self) -> int:
        return self.first_kept if self.wanted is None else self.stop - self.wanted


class Frame:
    """Positions of the rows of every axis in a step."""

    def __init__(self, rows: StepRows) -> None:
        if rows.first_wanted < rows.first_kept:
            raise InternalError(f"{rows.wanted} rows are wanted and {rows.stop - rows.first_kept} are kept")
        self.rows = rows

    def span(self, axis: Rows) -> tuple[int, int]:
        """First position and position after the last, for the axes that hold rows of the step."""
        first = {STEP: self.rows.start, KEPT: self.rows.first_kept, WANTED: self.rows.first_wanted}
        if axis not in first:
            raise InternalError(f"axis {axis} holds no rows of the step")
        return first[axis], self.rows.stop

    def positions(self, axis: Rows) -> Tensor:
        """[rows] i64: position of each row; on T/r the first position of each group that the step completes,
        on S the step's first."""
        if axis == SEQ:
            return torch.tensor([self.rows.start])
        if axis.kind == "groups":
            r = axis.ratio
            return torch.arange(self.rows.start // r, self.rows.stop // r) * r
        return torch.arange(*self.span(axis))

    def count(self, axis: Rows) -> int:
        return 1 if axis == SEQ else len(self.positions(axis))

    def narrowed(self, x: Tensor, source: Rows, to: Rows) -> Tensor:
        """Rows of ``to`` out of a value on ``source``; both end with the step's last row."""
        skip = self.span(to)[0] - self.span(source)[0]
        if skip < 0:
            raise InternalError(f"rows of {to} are not a part of {source}")
        return x[skip:]

    def token_ids(self) -> Tensor:
        return torch.tensor(self.rows.ids, dtype=torch.int64)

    def lookback(self, n: int) -> Tensor:
        """[T, n] i64: ids at i, i-1, .., i-n+1; -1 from the sequence start or an overridden position on."""
        given = {p for o in self.rows.overrides.values() for p in o.positions.tolist()}
        known = [*self.rows.history, *self.rows.ids]
        first = self.rows.start - len(self.rows.history)
        out = torch.full((len(self.rows.ids), n), -1, dtype=torch.int64)
        for row in range(len(self.rows.ids)):
            for back in range(n):
                p = self.rows.start + row - back
                if p < 0 or p in given:
                    break
                if p < first:
                    raise InternalError(f"the row at position {self.rows.start + row} looks back at {p}; "
                                        f"history starts at {first}")
                out[row, back] = known[p - first]
        return out

    def override(self, name: str, x: Tensor, axis: Rows) -> Tensor:
        """``x`` with the rows of ``overrides[name]`` put in."""
        given = self.rows.overrides.get(name)
        if given is None:
            return x
        first, stop = self.span(axis)
        inside = (given.positions >= first) & (given.positions < stop)
        out = x.clone()
        out[given.positions[inside] - first] = given.rows[inside].to(x.dtype)
        return out
