"""Memory plan: every byte a model takes on disk, and an engine in memory, known before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deepinfer.codegen.plan.arena import ALIGNMENT
from deepinfer.codegen.plan.cache_plan import CachePlan
from deepinfer.dsl.model import Model
from deepinfer.dsl.params import ParamDecl, StoredTensor
from deepinfer.errors import PlanError


@dataclass(frozen=True)
class StorageGroup:
    """Tensors of one storage format: how many (scales counted) and their bytes. ``table``: lookup tables."""

    format: str
    tensors: int
    bytes: int
    table: bool = False


@dataclass(frozen=True)
class IgnoredGroup:
    """Tensors of the official checkpoint that the engine leaves out, and why."""

    pattern: str
    reason: str
    tensors: int
    bytes: int


@dataclass(frozen=True)
class CheckpointSizes:
    """A checkpoint as the model expects it. ``derived_bytes``: parameters made at load time, which no file holds."""

    groups: tuple[StorageGroup, ...]
    ignored: tuple[IgnoredGroup, ...]
    derived_bytes: int = 0

    @property
    def tensors(self) -> int:
        return sum(g.tensors for g in self.groups) + sum(g.tensors for g in self.ignored)

    @property
    def disk_bytes(self) -> int:
        """All tensors, ignored ones included: what a download takes."""
        return sum(g.bytes for g in self.groups) + self.ignored_bytes

    @property
    def table_bytes(self) -> int:
        return sum(g.bytes for g in self.groups if g.table)

    @property
    def ignored_bytes(self) -> int:
        return sum(g.bytes for g in self.ignored)

    @property
    def weight_bytes(self) -> int:
        """What the engine reads, and what it makes from it, lookup tables left out."""
        return sum(g.bytes for g in self.groups if not g.table) + self.derived_bytes

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> CheckpointSizes:
        return CheckpointSizes(tuple(StorageGroup(**g) for g in raw["groups"]),
                               tuple(IgnoredGroup(**g) for g in raw["ignored"]), raw["derived_bytes"])


def checkpoint_sizes(model: Model) -> CheckpointSizes:
    """Sizes of the checkpoint of a traced model, from what its parameters declare."""
    groups: dict[tuple[str, bool], list[StoredTensor]] = {}
    derived = 0
    for p in model.params.declared.values():
        if p.derive:
            derived += _bytes([p.stored()])
        else:
            groups.setdefault((str(p.dtype), p.table), []).extend(_tensors(p))
    made = [StorageGroup(name, len(tensors), _bytes(tensors), table) for (name, table), tensors in groups.items()]
    made.sort(key=lambda g: -g.bytes)
    ignored = [IgnoredGroup(i.pattern, i.reason, len(i.tensors), _bytes(i.tensors.values())) for i in model.ignored]
    return CheckpointSizes(tuple(made), tuple(ignored), derived)


def _tensors(p: ParamDecl) -> list[StoredTensor]:
    return [p.stored()] * len(p.names) + ([p.stored_scale()] * len(p.scale_names) if p.scale_names else [])


def _bytes(tensors: Iterable[StoredTensor]) -> int:
    return sum(t.nbytes for t in tensors)


@dataclass(frozen=True)
class StepMemory:
    """Memory that steps share: values in flight, and working space of each thread (of each kernel instance)."""

    arena: int
    scratch: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose for ``sequences`` sequences of ``tokens`` tokens at once.

    ``tables`` may lie in host memory or be mapped from disk. ``step`` is None where no target was compiled for.
    """

    sequences: int
    tokens: int
    weights: int
    tables: int
    slots: int
    blocks: int
    block_count: int
    step: StepMemory | None = None

    @property
    def total(self) -> int:
        """Everything but the lookup tables."""
        return self.weights + self.slots + self.blocks + (self.step.arena + self.step.scratch if self.step else 0)


def memory_plan(sizes: CheckpointSizes, cache: CachePlan, sequences: int, tokens: int,
                step: StepMemory | None = None) -> MemoryPlan:
    """Memory of an engine. Each ring and each block of a state starts on a cache line, as the runner lays them out."""
    if sequences < 1 or tokens < 1:
        raise PlanError("memory is planned for at least one sequence of one token", found=f"{sequences} of {tokens}")
    count = sequences * cache.clock.blocks(tokens)
    slots = sequences * sum(_aligned(r.ring_bytes) for r in cache.rings)
    blocks = count * sum(_aligned(p.block_bytes) for p in cache.paged)
    return MemoryPlan(sequences, tokens, sizes.weight_bytes, sizes.table_bytes, slots, blocks, count, step)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
