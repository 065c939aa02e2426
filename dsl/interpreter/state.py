"""Values of state handles. They are immutable: a write makes a new value, so a copied sequence shares everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deepinfer.dsl.state import GroupTail, Paged, State, Window
from deepinfer.errors import InternalError


@dataclass(frozen=True)
class Ring:
    """Rows of a window or a group tail at positions ``first .. first + len(rows) - 1`` ([n, features]).

    The interpreter keeps every row since ``first`` (an engine keeps the last few): which of them a reader may use
    follows from its window and ``first``.
    """

    first: int
    rows: Tensor

    @property
    def stop(self) -> int:
        return self.first + len(self.rows)

    def extended(self, start: int, rows: Tensor) -> Ring:
        """Rows from ``start`` on replaced by ``rows``. Rows before a gap cannot be in any later window and go."""
        if not len(rows):
            return self
        if start > self.stop or start < self.first:
            return Ring(start, rows)
        return Ring(self.first, torch.cat((self.rows[: start - self.first], rows)))

    def from_position(self, first: int) -> Ring:
        """Without the rows before ``first``."""
        return self if first <= self.first else Ring(first, self.rows[first - self.first:])


@dataclass(frozen=True)
class Entries:
    """Paged entries 0 .. len - 1 ([n, features])."""

    rows: Tensor

    def written(self, at: int, rows: Tensor, floor: int) -> Entries:
        """Entries from ``at`` on become ``rows``; those below entry ``floor`` stay as they are."""
        skip = max(0, min(floor - at, len(rows)))
        at, rows = at + skip, rows[skip:]
        if at > len(self.rows) and len(rows):
            raise InternalError(f"entry {at} would be written after {len(self.rows)} entries")
        return Entries(torch.cat((self.rows[:at], rows))) if len(rows) else self


StateValue = Ring | Entries


def empty(state: State, dtype: torch.dtype) -> StateValue:
    """The value of a state at the start of a sequence."""
    none = torch.zeros((0, state.record.features), dtype=dtype)
    if isinstance(state, Paged):
        return Entries(none)
    if isinstance(state, Window | GroupTail):
        return Ring(0, none)
    raise InternalError(f"state {state.name} has no value in the interpreter")


@dataclass
class SequenceState:
    """State of one sequence by state name."""

    values: dict[str, StateValue] = field(default_factory=dict)

    def fork(self) -> SequenceState:
        """An independent copy."""
        return SequenceState(dict(self.values))

    def only_entries(self, states: Mapping[str, State], tokens: int) -> SequenceState:
        """What a prefix cache of the first ``tokens`` positions holds: their paged entries and nothing else."""
        kept: dict[str, StateValue] = {}
        for name, value in self.values.items():
            state = states[name]
            if isinstance(state, Paged) and isinstance(value, Entries):
                kept[name] = replace(value, rows=value.rows[: tokens // state.tokens_per_entry])
        return SequenceState(kept)
