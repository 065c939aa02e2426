"""What the runtime has to know about an engine: sizes, states, limits and licences, all derived by the compiler.

The compiler writes an ``EnginePlan`` into the manifest (``as_dict``), the loader reads it back (``from_dict``).
Nothing in the runtime holds a block size, a window or a number of kept rows of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import lcm
from typing import TYPE_CHECKING, Any

from deepinfer.errors import ArtifactError, InternalError, RequestError

if TYPE_CHECKING:
    from deepinfer.codegen.plan.cache_plan import CachePlan
    from deepinfer.dsl.graph import Graph
    from deepinfer.dsl.model import Model

RING, PAGED = "ring", "paged"
OFF, EXACT = "off", "exact"
ReplayOption = str | int | None


@dataclass(frozen=True)
class StatePlan:
    """One declared state as it lies in memory.

    Args:
        kind: ``ring`` (windows, group tails; one per slot) or ``paged`` (entries in blocks).
        rows: ring rows R, or entries per block.
        record_bytes: bytes of one row or entry.
        axis: row axis that a ring is extended on, ``T`` or ``T_kept``.
        ratio: positions per entry (rings: 1).
        reach: rows of a ring before position n that the next step may read.
        resume: rows of a ring before the edge of a block that new rows behind the edge read; what a window snapshot
            holds. 0 for rings that only kept rows extend: the end of a prompt fills them again.
    """

    name: str
    kind: str
    rows: int
    record_bytes: int
    axis: str = "T"
    ratio: int = 1
    reach: int = 0
    resume: int = 0

    @property
    def snapshot(self) -> int:
        """Rows of a ring before the edge of a block that a window snapshot in memory holds. Of rings that only kept
        rows extend they are valid where every row so far was kept; then nothing has to fill them again."""
        return self.resume if self.axis == "T" else self.reach

    @property
    def unit_bytes(self) -> int:
        """Bytes of one slot (ring) or one block (paged)."""
        return self.rows * self.record_bytes


@dataclass(frozen=True)
class PinPlan:
    """A selection that may be given from outside: ``k`` int32 a row, on the rows of ``axis``; -1: none."""

    k: int
    axis: str


@dataclass(frozen=True)
class Replay:
    """What one replay option means for a prompt.

    Args:
        keep: rows at its end that all layers compute; None: every row.
        rerun, exact_rerun: rows in front of a prefix hit whose windows are gone that run again: as many as the
            training allows, and as give exact entries.
        depth: rows, up to and with the first one whose logits are wanted, that run at least after such a hit;
            0: no more than ``keep`` asks for.
    """

    keep: int | None
    rerun: int
    depth: int = 0


@dataclass(frozen=True)
class EnginePlan:
    """An engine as the runtime sees it.

    Args:
        limits: most rows of a step by axis: ``step``, ``kept``, ``wanted``, ``seq``.
        block_tokens: positions of a block (B). ``window``: W. ``draft_tokens``: m, 0 without a draft head.
        draft_filler: token id of a draft block's rows after the anchor.
        lookback: ids before a row that the row reads.
        replay: default of the option, ``off``, ``exact`` or a number of rows.
        exact_keep: kept rows that give the results of a run that keeps all, for one wanted row; each further
            wanted row adds one.
        least_keep: fewest kept rows that the model's training allows (``exact_keep`` without such a licence).
        rerun, exact_rerun: rows in front of a prefix hit whose windows are gone that run again: as many as the
            training allows, and as give exact entries.
        host_lag: steps that the host may lag behind (L): the rings have slack for them.
    """

    model: str
    target: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    limits: Mapping[str, int]
    block_tokens: int
    window: int
    states: tuple[StatePlan, ...]
    pins: Mapping[str, PinPlan] = field(default_factory=dict)
    entries: tuple[str, ...] = ("step",)
    draft_tokens: int = 0
    draft_filler: int = 0
    lookback: int = 0
    replay: str = OFF
    exact_keep: int = 1
    least_keep: int = 1
    rerun: int = 0
    exact_rerun: int = 0
    host_lag: int = 0

    def __post_init__(self) -> None:
        cut = [s.name for s in self.states if s.kind == PAGED and self.block_tokens % s.ratio]
        if cut:
            raise InternalError(f"a block of {self.block_tokens} positions cuts an entry of {', '.join(cut)}")

    @property
    def rings(self) -> tuple[StatePlan, ...]:
        return tuple(s for s in self.states if s.kind == RING)

    @property
    def paged(self) -> tuple[StatePlan, ...]:
        return tuple(s for s in self.states if s.kind == PAGED)

    @property
    def entry_positions(self) -> int:
        """The cache may be cut at multiples of this many positions: no entry covers such a boundary."""
        return lcm(1, *(s.ratio for s in self.paged))

    @property
    def resume_bytes(self) -> int:
        """Bytes of a window snapshot at the edge of a block."""
        return sum(s.resume * s.record_bytes for s in self.rings)

    @property
    def snapshot_bytes(self) -> int:
        """The same with the rings that only kept rows extend: what a snapshot takes in memory."""
        return sum(s.snapshot * s.record_bytes for s in self.rings)

    @property
    def rewind_rows(self) -> int:
        """Written rows that may be taken back: rings still hold what the rows before them read."""
        return min((s.rows - s.reach for s in self.rings), default=self.max_model_len)

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks that the longest sequence holds, with rows of one verify beyond its end."""
        return self.blocks_for(self.max_model_len + self.draft_tokens)

    def blocks_for(self, rows: int) -> int:
        return -(-rows // self.block_tokens)

    @property
    def licensed(self) -> bool:
        """Whether the model was trained for bounded replay."""
        return self.least_keep < self.exact_keep

    def replay_rows(self, option: ReplayOption, wanted: int = 1) -> Replay:
        """What a replay option asks for.

        Args:
            option: ``off``, ``exact``, a number of rows, or None for the engine's default.
            wanted: last rows whose logits will be asked for.

        Raises:
            RequestError: an unknown option, or fewer rows than the model was trained for.
        """
        chosen = self.replay if option is None else option
        if isinstance(chosen, str) and chosen.isdigit():
            chosen = int(chosen)
        # A row's logits hang on exact_keep rows above the last layer that the cache reads, and on exact_rerun below it.
        exact = Replay(None, self.exact_rerun, self.exact_keep + self.exact_rerun)
        if chosen == OFF:
            return Replay(None, self.rerun) if self.licensed else exact
        if chosen == EXACT:
            return replace(exact, keep=self.exact_keep + wanted - 1)
        if not isinstance(chosen, int) or isinstance(chosen, bool):
            raise RequestError("unknown replay option", where="replay", found=chosen,
                               allowed="off, exact or a number of rows")
        if chosen < self.least_keep:
            why = ("the model was trained for no fewer rows than that" if self.licensed
                   else "this model was not trained for bounded replay")
            raise RequestError(f"replay keeps too few rows: {why}", where="replay", found=chosen,
                               allowed=f"off, exact or a number >= {self.least_keep}")
        return Replay(chosen, self.rerun) if self.licensed else replace(exact, keep=chosen)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        return asdict(self)

    @staticmethod
    def from_dict(raw: Mapping[str, Any], where: str = "manifest.json") -> EnginePlan:
        """The plan that ``as_dict`` wrote; ArtifactError when it is not one."""
        try:
            values = dict(raw)
            values["states"] = tuple(StatePlan(**s) for s in raw["states"])
            values["pins"] = {k: PinPlan(**p) for k, p in raw["pins"].items()}
            values["entries"] = tuple(raw["entries"])
            return EnginePlan(**values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ArtifactError("the plan for the runtime is damaged", where=where, found=error,
                                next_step="compile the engine again") from None


def engine_plan(model: Model, graphs: Mapping[str, Graph], cache: CachePlan, *, target: str,
                limits: Mapping[str, int]) -> EnginePlan:
    """The plan of a lowered model: its narrowed graphs by entry, its cache plan, the row limits of a step."""
    pins: dict[str, PinPlan] = {}
    for graph in graphs.values():
        for node in graph.nodes:
            if node.attrs.get("pin"):
                pins[node.attrs["pin"]] = PinPlan(node.type.static_dims[-1], str(node.type.rows))
    clock, options = cache.clock, model.options
    states = [StatePlan(r.name, RING, r.ring_rows, r.record_bytes, str(r.axis), reach=r.rows,
                        resume=r.resume_rows) for r in cache.rings]
    states += [StatePlan(p.name, PAGED, clock.block // p.tokens_per_entry, p.record_bytes, ratio=p.tokens_per_entry)
               for p in cache.paged]
    return EnginePlan(
        model=model.name, target=target, vocab_size=model.vocab_size, max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs, limits=dict(limits), block_tokens=clock.block, window=clock.window,
        states=tuple(states), pins=pins, entries=tuple(graphs), draft_tokens=clock.draft,
        draft_filler=model.draft_filler, lookback=clock.lookback, replay=options.replay,
        exact_keep=clock.exact_keep, least_keep=clock.least_keep,
        rerun=clock.exact_rerun if clock.rerun is None else clock.rerun, exact_rerun=clock.exact_rerun,
        host_lag=clock.host_lag)
