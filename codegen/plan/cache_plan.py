"""Cache plan: what a sequence keeps, what the prefix cache stores, what a resume point needs; in exact
numbers.

Everything follows from the declared states and the axis liveness found for each of them. The constants of
the request clock (B, W, m, L, K, E; R and P of each ring) are computed here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from deepinfer.codegen.passes.narrow import Narrowing
from deepinfer.dsl.model import Model
from deepinfer.dsl.state import GroupTail, Paged, State, Window, backtrack, ring_slack
from deepinfer.dsl.types import STEP, Rows
from deepinfer.errors import InternalError, PlanError

LINE_BYTES = 128  # what devices load at once; pages of a pool of whole blocks start on a multiple of it


@dataclass(frozen=True)
class Clock:
    """Constants of the request clock: ``block`` B positions of a prefix-cache block; ``window`` W rows;
    ``draft`` m tokens a verify may bring besides the anchor; ``host_lag`` L steps; ``lookback`` E ids before
    a row; ``keep`` K rows kept at the end of a prompt by default (None: all), ``exact_keep`` the K that
    loses nothing; ``rerun`` rows in front
    of a prefix hit that run again when their windows are gone, ``exact_rerun`` those that lose nothing."""

    block: int
    window: int
    draft: int
    host_lag: int
    lookback: int
    keep: int | None
    least_keep: int
    exact_keep: int
    rerun: int | None
    exact_rerun: int

    @property
    def ring_slack(self) -> int:
        """Least rows a ring has beyond its window (R - W)."""
        return ring_slack(self.draft, self.host_lag)

    def blocks(self, tokens: int) -> int:
        """Blocks of a sequence of ``tokens`` tokens, with room for the rows of its last verify."""
        return -(-(tokens + self.draft) // self.block)


@dataclass(frozen=True)
class PagedPlan:
    """A state with one record per ``tokens_per_entry`` positions."""

    name: str
    tokens_per_entry: int
    record_bytes: int
    block_bytes: int

    @property
    def bytes_per_token(self) -> Fraction:
        return Fraction(self.record_bytes, self.tokens_per_entry)


@dataclass(frozen=True)
class RingPlan:
    """Records of the last positions of a sequence: a window, or the raw rows of open groups.

    ``rows``: what a reader may need; ``ring_rows``: with slack for rows that a rejected verify wrote (R of a
    window, P of a group tail). ``axis``: rows that extend it. ``resume_rows``: rows of it that the new rows
    after a block edge need.
    """

    name: str
    kind: str
    rows: int
    ring_rows: int
    record_bytes: int
    axis: Rows
    resume_rows: int

    @property
    def ring_bytes(self) -> int:
        return self.ring_rows * self.record_bytes


@dataclass(frozen=True)
class CachePlan:
    """See the module. Bytes are payload unless a name says otherwise."""

    clock: Clock
    paged: tuple[PagedPlan, ...]
    rings: tuple[RingPlan, ...]

    @property
    def bytes_per_token(self) -> Fraction:
        """Growth of a long sequence."""
        return sum((p.bytes_per_token for p in self.paged), Fraction(0))

    @property
    def block_bytes(self) -> int:
        """Payload of one prefix-cache block: the entries of B positions of every paged state."""
        return sum(p.block_bytes for p in self.paged)

    @property
    def page_bytes(self) -> int:
        """A block as a page of a pool that holds whole blocks: a multiple of the largest record, so that
        record numbers
        count through page edges, and of ``LINE_BYTES``."""
        unit = math.lcm(LINE_BYTES, max((p.record_bytes for p in self.paged), default=1))
        return -(-self.block_bytes // unit) * unit

    @property
    def resume_bytes(self) -> int:
        """Payload of a resume point at a block edge: the ring rows that new rows read. Rings that only the
        last rows of
        a prompt extend are not part of it: replay fills them."""
        return sum(r.resume_rows * r.record_bytes for r in self.rings)

    @property
    def slot_bytes(self) -> int:
        """What a running sequence holds besides its blocks."""
        return sum(r.ring_bytes for r in self.rings)

    def ring_bytes(self, resumed: bool, kind: str = "window") -> int:
        """Bytes of the rings, slack included, that a resume point needs (or does not need)."""
        return sum(r.ring_bytes for r in self.rings if r.kind == kind and (r.axis == STEP) == resumed)

    def as_dict(self) -> dict[str, Any]:
        """For the manifest: the parts, from which the sums follow."""
        return {"clock": asdict(self.clock), "paged": [asdict(p) for p in self.paged],
                "rings": [asdict(r) | {"axis": str(r.axis)} for r in self.rings]}

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> CachePlan:
        """What ``as_dict`` wrote."""
        rings = tuple(RingPlan(**{**r, "axis": Rows.parse(r["axis"])}) for r in raw["rings"])
        return CachePlan(Clock(**raw["clock"]), tuple(PagedPlan(**p) for p in raw["paged"]), rings)


def cache_plan(model: Model, narrowing: Narrowing) -> CachePlan:
    """The plan of a model whose ``step`` graph was narrowed.

    Raises PlanError when a block does not hold whole entries, a ring is too short for the drafts and the
    host's lag, or the replay option keeps too few rows.
    """
    r, opt = narrowing.replay, model.options
    clock = Clock(model.block_tokens, model.window, model.draft_tokens, opt.host_lag, model.lookback_tokens,
                  r.keep(opt.replay), r.smallest, r.exact_keep, r.licensed_rerun, r.exact_rerun)
    paged, rings = [], []
    for s in model.states:
        if isinstance(s, Paged):
            paged.append(_paged(s, clock))
        else:
            rings.append(_ring(s, clock, narrowing.state_axis))
    return CachePlan(clock, tuple(paged), tuple(rings))


def _whole(s: State, tokens: int, clock: Clock) -> None:
    if clock.block % tokens:
        raise PlanError("a block of the prefix cache would end inside an entry", where=f"state {s.name}",
                        found=f"{tokens} tokens per entry in blocks of {clock.block}",
                        allowed=f"divisors of {clock.block}")


def _paged(s: Paged, clock: Clock) -> PagedPlan:
    _whole(s, s.tokens_per_entry, clock)
    entries = clock.block // s.tokens_per_entry
    return PagedPlan(s.name, s.tokens_per_entry, s.record_bytes, entries * s.record_bytes)


def _ring(s: State, clock: Clock, axes: dict[str, Rows]) -> RingPlan:
    if s.name not in axes:
        raise InternalError(f"state {s.name} is declared and never written")
    axis = axes[s.name]
    if isinstance(s, Window):
        _enough(s, s.slack, clock.ring_slack, "slack rows for the drafts of the verifies in flight")
        resume_rows = s.rows if axis == STEP else 0
        return RingPlan(s.name, s.kind, s.rows, s.ring_rows, s.record_bytes, axis, resume_rows)
    if isinstance(s, GroupTail):
        _whole(s, s.group, clock)
        _enough(s, s.slack, backtrack(clock.draft), "slack rows for a rejected verify")
        # At a block edge no group is open; with overlap the group before the edge is still read.
        return RingPlan(s.name, s.kind, s.ring_rows - s.slack, s.ring_rows, s.record_bytes, axis,
                        s.group if s.overlap else 0)
    raise InternalError(f"state {s.name} has no place in a cache plan")


def _enough(s: State, found: int, least: int, what: str) -> None:
    if found < least:
        raise PlanError(f"a ring has too few {what}", where=f"state {s.name}", found=found,
                        allowed=f">= {least}", next_step="leave ring_slack to the compiler, or raise it")
