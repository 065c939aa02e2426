"""Memory plan: every byte a model takes on disk, and an engine in memory, known before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from deepinfer.codegen.plan.arena import ALIGNMENT
from deepinfer.codegen.plan.cache_plan import CachePlan
from deepinfer.codegen.plan.launch import LaunchTable
from deepinfer.dsl.model import Model
from deepinfer.dsl.params import ParamDecl, StoredTensor
from deepinfer.errors import ArtifactError, PlanError, SpecError


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
        """For the manifest."""
        return asdict(self)

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> CheckpointSizes:
        """What ``as_dict`` wrote."""
        return CheckpointSizes(tuple(StorageGroup(**g) for g in raw["groups"]),
                               tuple(IgnoredGroup(**g) for g in raw["ignored"]), raw["derived_bytes"])


def checkpoint_sizes(model: Model, headers: Mapping[str, StoredTensor] | None = None) -> CheckpointSizes:
    """Sizes of the checkpoint of a traced model, from what its parameters declare.

    ``headers``: those of the checkpoint at hand, which then say what is ignored; without them it is what the official
    checkpoint holds.
    """
    groups: dict[tuple[str, bool], list[StoredTensor]] = {}
    derived = 0
    for p in model.params.declared.values():
        if p.derive:
            derived += _bytes([p.stored()])
        else:
            groups.setdefault((str(p.dtype), p.table), []).extend(_tensors(p))
    made = [StorageGroup(name, len(tensors), _bytes(tensors), table) for (name, table), tensors in groups.items()]
    made.sort(key=lambda g: -g.bytes)
    ignored = []
    for i in model.ignored:
        tensors = [t for name, t in headers.items() if i.matches(name)] if headers else list(i.tensors.values())
        ignored.append(IgnoredGroup(i.pattern, i.reason, len(tensors), _bytes(tensors)))
    return CheckpointSizes(tuple(made), tuple(ignored), derived)


def _tensors(p: ParamDecl) -> list[StoredTensor]:
    return [p.stored()] * len(p.names) + ([p.stored_scale()] * len(p.scale_names) if p.scale_names else [])


def _bytes(tensors: Iterable[StoredTensor]) -> int:
    return sum(t.nbytes for t in tensors)


@dataclass(frozen=True)
class StepMemory:
    """Memory that all steps share: ``arena`` for the values in flight, ``scratch`` for each thread, ``exchange``
    between the stages of a kernel. ``sequence``: what a slot keeps between steps beside its rings (counts of tokens,
    drafts and their logits)."""

    arena: int
    scratch: int
    sequence: int = 0
    exchange: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose for ``sequences`` sequences of ``tokens`` tokens at once.

    ``tables``: lookup tables, which the memory of a device has to hold (``on_device``), while on the host they may stay
    on disk. ``slots``: rings of all sequences. ``blocks``: ``block_count`` cache blocks. ``arena``, ``scratch`` and
    ``drawing`` (token counts, drafts and their logits, of all sequences) are None where no target was compiled for,
    ``scratch`` on a device as well: its runner lays that out.
    """

    sequences: int
    tokens: int
    weights: int
    tables: int
    slots: int
    blocks: int
    block_count: int
    arena: int | None
    scratch: int | None
    drawing: int | None = None
    on_device: bool = False

    @property
    def total(self) -> int:
        """Everything that is known, but for lookup tables that may stay on disk."""
        return (self.weights + (self.tables if self.on_device else 0) + self.slots + self.blocks + (self.arena or 0)
                + (self.scratch or 0) + (self.drawing or 0))


@dataclass(frozen=True)
class Footprint:
    """Everything about a model's size that does not depend on how many sequences run; part of an engine's manifest.

    ``step`` is None where no target was compiled for. ``ignored_keys``: config keys that are not read, and why.
    """

    sizes: CheckpointSizes
    cache: CachePlan
    step: StepMemory | None = None
    ignored_keys: Mapping[str, str] = field(default_factory=dict)

    def memory(self, sequences: int, tokens: int, threads: int = 1, *, on_device: bool = False) -> MemoryPlan:
        """Memory of an engine on the host or on a device. Each ring and each block of a state starts on a cache line,
        as the runner lays it out."""
        if sequences < 1 or tokens < 1 or threads < 1:
            raise PlanError("memory is planned for at least one sequence of one token on one thread",
                            found=f"{sequences} of {tokens} on {threads}")
        count = sequences * self.cache.clock.blocks(tokens)
        slots = sequences * sum(_aligned(r.ring_bytes) for r in self.cache.rings)
        blocks = count * sum(_aligned(p.block_bytes) for p in self.cache.paged)
        arena = scratch = drawing = None
        if self.step is not None:
            arena, drawing = _aligned(self.step.arena), sequences * _aligned(self.step.sequence)
            if not on_device:
                scratch = threads * _aligned(self.step.scratch) + _aligned(self.step.exchange)
        return MemoryPlan(sequences, tokens, self.sizes.weight_bytes, self.sizes.table_bytes, slots, blocks, count,
                          arena, scratch, drawing, on_device)

    def as_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return {"sizes": self.sizes.as_dict(), "cache": self.cache.as_dict(),
                "step": asdict(self.step) if self.step else None, "ignored_keys": dict(self.ignored_keys)}

    @staticmethod
    def from_dict(raw: Mapping[str, Any], where: str = "manifest.json") -> Footprint:
        """What ``as_dict`` wrote; ArtifactError when it is not that."""
        try:
            step = StepMemory(**raw["step"]) if raw["step"] else None
            return Footprint(CheckpointSizes.from_dict(raw["sizes"]), CachePlan.from_dict(raw["cache"]), step,
                             dict(raw["ignored_keys"]))
        except (KeyError, TypeError, AttributeError, SpecError) as error:
            raise ArtifactError("the sizes of the engine are damaged", where=where, found=error,
                                next_step="compile the engine again") from None


def footprint(model: Model, cache: CachePlan, table: LaunchTable | None = None,
              headers: Mapping[str, StoredTensor] | None = None) -> Footprint:
    """Sizes of a traced model; ``table``: what was compiled for a target."""
    step = None
    if table is not None:
        step = StepMemory(max((e.arena_bytes for e in table.entries.values()), default=0),
                          max((k.scratch_bytes for k in table.kernels), default=0),
                          table.sequence.bytes if table.sequence else 0,
                          max((k.exchange_bytes for k in table.kernels), default=0))
    return Footprint(checkpoint_sizes(model, headers), cache, step, model.config.ignored)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
