"""Declared state: what a sequence keeps between steps, with its retention and its replay licence.

Three kinds, and no others:

- ``Window``: the last rows of a sequence, a ring of ``rows + slack`` records. ``extend`` gives a *view* (old ring
  followed by this step's rows); the ring commits after the layer's last reader.
- ``Paged``: one record per ``tokens_per_entry`` tokens, in blocks of the prefix cache, never rewritten.
- ``GroupTail``: raw f32 rows ``[values | gates]`` of the group that is still open (and of those a rejected draft may
  reopen). ``pool`` turns each completed group into one entry:
  ``sum_t softmax_t(gate_t) * value_t`` per feature over the group's rows; with ``overlap`` rows are 2D wide and an
  entry pools the lower half of the previous group's rows and the upper half of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from deepinfer.dsl.build import current
from deepinfer.dsl.graph import Node
from deepinfer.dsl.types import DType
from deepinfer.errors import SpecError

S = TypeVar("S", bound="State")
PREFIX = "prefix"  # retention: written once at or above the floor, shared by prefix, kept with the prefix cache


def ring_slack(draft_tokens: int, host_lag: int) -> int:
    """Ring rows beyond the window, so that rows written by a verify of ``draft_tokens`` drafts never overwrite a
    row still needed: m in the plain loop, m + L(m + 1) when the host lags L steps (runtime clock, R)."""
    return draft_tokens + host_lag * (draft_tokens + 1)


def backtrack(draft_tokens: int) -> int:
    """Rows a rejected verify may take back: the drafts and the anchor."""
    return draft_tokens + 1


@dataclass
class State:
    """Common part. ``record`` is the stored row; ``name`` is unique in a model (``win.3``)."""

    name: str
    record: DType

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()

    @property
    def record_bytes(self) -> int:
        return self.record.row_bytes(self.record.features)

    def handle(self) -> Node:
        """The current handle in the graph being traced."""
        return current().handle(self)

    def _write(self, op: str, value: Node) -> Node:
        b = current()
        if value.type.dims != (self.record.features,):
            raise SpecError(f"state {self.name} takes rows of {self.record.features} features", found=str(value.type))
        encoded = b.add("encode", (value,), dtype=str(self.record))
        return b.write(self, b.add(op, (self.handle(), encoded), state=self.name))


@dataclass
class Window(State):
    """The last ``rows`` rows. ``absent_before``: licence for bounded replay: rows more than this many positions
    before the end of a prompt may be missing (None: no licence). ``first_position``: rows below this position are never
    stored nor read (a draft layer that joins a token with what the position before it left has no row 0)."""

    rows: int = 0
    slack: int = 0
    absent_before: int | None = None
    first_position: int = 0

    @property
    def ring_rows(self) -> int:
        return self.rows + self.slack

    def extend(self, value: Node) -> Node:
        """Append this step's rows; returns the view [old ring | new rows]."""
        return self._write("extend", value)

    def previous(self, view: Node, at: Node, back: int = 1) -> Node:
        """[features] of the row ``back`` positions before each position ``at`` [] in a view of this window."""
        return current().add("previous", (view, at), back=back, dim=self.record.features)


@dataclass
class Paged(State):
    """One record per ``tokens_per_entry`` positions; entry j is visible to row i iff j < (i + 1) //
    tokens_per_entry."""

    tokens_per_entry: int = 1
    keep: str = PREFIX

    def append(self, value: Node) -> Node:
        """Write the completed entries of this step (rows on T/tokens_per_entry, or on T when it is 1)."""
        return self._write("append", value)


@dataclass
class GroupTail(State):
    """Raw rows of open groups. ``tail_rows = (groups_back * group + group - 1) + slack`` at least; slack is the
    number of rows a rejected verify may take back."""

    group: int = 1
    overlap: bool = False
    slack: int = 0

    @property
    def ring_rows(self) -> int:
        previous = self.group if self.overlap else 0
        return previous + self.group - 1 + self.slack

    def pool(self, values: Node, gates: Node) -> Node:
        """Entries of the groups this step completes, from values and gates [T, D] (overlap: [T, 2D])."""
        b = current()
        view = self._write("extend", b.add("concat", (values, gates), dim=0))
        width = values.type.size
        return b.add("pool", (view,), state=self.name, ratio=self.group, overlap=self.overlap,
                     dim=width // 2 if self.overlap else width)


@dataclass
class States:
    """The states of a model by name, in declaration order."""

    by_name: dict[str, State] = field(default_factory=dict)

    def add(self, state: S) -> S:
        if state.name in self.by_name:
            raise SpecError("a state is declared twice", found=state.name)
        self.by_name[state.name] = state
        return state

    def __iter__(self) -> Iterator[State]:
        return iter(self.by_name.values())

    def __getitem__(self, name: str) -> State:
        return self.by_name[name]
