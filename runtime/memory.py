"""The memory of sequences: a ring slot and a block table each, shared and copied as the clock's transitions say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import InternalError
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.pool import Pool


class Bytes(Protocol):
    """What has the states of an engine: the engine itself, or what runs it."""

    def state(self, name: str, unit: int) -> NDArray[np.uint8]:
        """Writable bytes of one slot of a ring, or of one block of a paged state."""
        ...


@dataclass(frozen=True)
class Use:
    """What a part of the cache takes now: ``bytes`` in the memory of the ``engine`` or of the ``host`` (``tier``);
    ``ratio``: of its units, those held, where it has a fixed number."""

    group: str
    tier: str
    bytes: int
    ratio: float | None = None


class Holding:
    """A slot and the blocks of one sequence; block b holds positions b*B .. b*B + B - 1. A view of the slot's row of
    all block tables."""

    def __init__(self, slot: int, tables: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        self.slot = slot
        self._table, self._counts = tables[slot], counts

    @property
    def count(self) -> int:
        """Blocks held."""
        return int(self._counts[self.slot])

    @property
    def blocks(self) -> NDArray[np.int32]:
        """[count] i32, a view that the next step may be given."""
        held: NDArray[np.int32] = self._table[: self._counts[self.slot]]
        return held

    def append(self, block: int) -> None:
        self.extend([block])

    def extend(self, blocks: list[int]) -> None:
        count = self.count
        self._table[count : count + len(blocks)] = blocks
        self._counts[self.slot] = count + len(blocks)

    def replace(self, index: int, block: int) -> None:
        self._table[index] = block

    def cut(self, count: int) -> list[int]:
        """Keep the first ``count`` blocks; those behind them, the last one first."""
        gone: list[int] = self.blocks[count:][::-1].tolist()
        self._counts[self.slot] -= len(gone)
        return gone


@dataclass(eq=False)
class Spilled:
    """The exact memory of a sequence without a slot: ring bytes by state, and for each block either its bytes by state
    or, while others share it, the block itself (``kept``, by index), which is held and never written."""

    rings: dict[str, NDArray[np.uint8]]
    blocks: list[dict[str, NDArray[np.uint8]]]
    kept: dict[int, int]

    @property
    def bytes(self) -> int:
        """Host memory that it takes."""
        return sum(a.nbytes for a in self.rings.values()) + sum(a.nbytes for b in self.blocks for a in b.values())


class SequenceMemory:
    """All slots and blocks of an engine. ``engine.state`` is used to copy, nothing else of it.

    ``promised_slots`` and ``promised_blocks`` are free and kept so for forks that are certain to come.
    """

    def __init__(self, plan: EnginePlan, engine: Bytes, slots: int, blocks: int) -> None:
        self.plan, self.engine = plan, engine
        self.slots, self.blocks = Pool(slots, "slot"), Pool(blocks, "block")
        self.live: set[Holding] = set()
        self.spilled: set[Spilled] = set()
        self.block_bytes = sum(s.unit_bytes for s in plan.paged)
        self.cached: Callable[[], Iterable[int]] = lambda: ()  # blocks that a prefix cache holds
        self.promised_slots = self.promised_blocks = 0
        self.tables = np.zeros((slots, plan.blocks_per_sequence), dtype=np.int32)
        self.counts = np.zeros(slots, dtype=np.int32)  # blocks of each slot's sequence

    @property
    def free_slots(self) -> int:
        """Slots that nobody holds or was promised."""
        return self.slots.free - self.promised_slots

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds or was promised."""
        return self.blocks.free - self.promised_blocks

    def open(self) -> Holding:
        """A slot without blocks; ask ``free_slots`` first."""
        slot = self.slots.take()
        self.counts[slot] = 0
        holding = Holding(slot, self.tables, self.counts)
        self.live.add(holding)
        return holding

    def need(self, holding: Holding, first: int, stop: int) -> int:
        """Free blocks that ``prepare`` with the same arguments takes."""
        shared = sum(self.blocks.shared(int(b)) for b in self._written(holding, first, stop))
        return max(0, self.plan.blocks_for(stop) - holding.count) + shared

    def prepare(self, holding: Holding, first: int, stop: int) -> bool:
        """Blocks for rows up to ``stop``, those that rows from ``first`` on write into held by nobody else.

        False, and nothing changed, when fewer blocks are free than that takes.
        """
        if self.need(holding, first, stop) > self.free_blocks:
            return False
        for index in range(first // self.plan.block_tokens, holding.count):
            block = int(holding.blocks[index])
            if self.blocks.shared(block):
                own = self.blocks.take()
                self._copy_block(block, own)
                holding.replace(index, own)
                self.blocks.give_back(block)
        self.grow(holding, max(0, self.plan.blocks_for(stop) - holding.count))
        return True

    def grow(self, holding: Holding, blocks: int) -> None:
        """``blocks`` further blocks; ask ``free_blocks`` first."""
        holding.extend(self.blocks.take_some(blocks))

    def fork_need(self, rows: int) -> int:
        """Free blocks that a fork of a sequence with ``rows`` committed rows takes: its tail block."""
        return int(rows % self.plan.block_tokens > 0)

    def fork(self, holding: Holding, rows: int) -> Holding:
        """An independent copy of the first ``rows`` rows: full blocks are shared, the tail block and rings copied.

        Ask ``free_slots`` and ``free_blocks`` first, or redeem what was promised.
        """
        if not self.slots.free or self.blocks.free < self.fork_need(rows):
            raise InternalError("a fork without room for it")
        other = self.open()
        for block in holding.blocks[: rows // self.plan.block_tokens].tolist():
            self.blocks.share(block)
            other.append(block)
        if rows % self.plan.block_tokens:
            tail = self.blocks.take()
            self._copy_block(int(holding.blocks[rows // self.plan.block_tokens]), tail)
            other.append(tail)
        for s in self.plan.rings:
            self.engine.state(s.name, other.slot)[:] = self.engine.state(s.name, holding.slot)
        return other

    def shorten(self, holding: Holding, rows: int) -> None:
        """Give back the blocks beyond the first ``rows`` rows."""
        self.blocks.give_back_all(holding.cut(min(holding.count, self.plan.blocks_for(rows))))

    def close(self, holding: Holding) -> None:
        """Give everything back."""
        self.shorten(holding, 0)
        self.slots.give_back(holding.slot)
        self.live.discard(holding)

    def spill_bytes(self, holding: Holding) -> int:
        """Host bytes that ``spill`` takes: of rings, and of blocks that nobody shares."""
        own = sum(not self.blocks.shared(b) for b in holding.blocks.tolist())
        return sum(s.unit_bytes for s in self.plan.rings) + own * self.block_bytes

    def spill(self, holding: Holding) -> Spilled:
        """Move what is private to a sequence to the host and give its memory back; shared blocks stay where they are
        and held. ``resume`` is the exact inverse."""
        rings = {s.name: self.engine.state(s.name, holding.slot).copy() for s in self.plan.rings}
        table = holding.blocks.tolist()
        kept = {i: block for i, block in enumerate(table) if self.blocks.shared(block)}
        for block in kept.values():
            self.blocks.share(block)
        out = Spilled(rings, [{} if i in kept else self._bytes(block) for i, block in enumerate(table)], kept)
        self.close(holding)
        self.spilled.add(out)
        return out

    def unpin(self, spilled: Spilled) -> None:
        """Move the kept blocks to the host too."""
        for i, block in spilled.kept.items():
            spilled.blocks[i] = self._bytes(block)
            self.blocks.give_back(block)
        spilled.kept.clear()

    def resume(self, spilled: Spilled) -> Holding:
        """Bring a spilled sequence back; ask ``free_slots`` and ``free_blocks`` first."""
        holding = self.open()
        for name, data in spilled.rings.items():
            self.engine.state(name, holding.slot)[:] = data
        for i, parts in enumerate(spilled.blocks):
            if i in spilled.kept:
                holding.append(spilled.kept[i])
                continue
            block = self.blocks.take()
            for name, data in parts.items():
                self.engine.state(name, block)[:] = data
            holding.append(block)
        self.spilled.discard(spilled)
        return holding

    def forget(self, spilled: Spilled) -> None:
        """A spilled sequence will not come back."""
        for block in spilled.kept.values():
            self.blocks.give_back(block)
        self.spilled.discard(spilled)

    def _bytes(self, block: int) -> dict[str, NDArray[np.uint8]]:
        return {s.name: self.engine.state(s.name, block).copy() for s in self.plan.paged}

    def uses(self) -> list[Use]:
        """Blocks (with those that only a prefix cache holds), rings of running sequences, preempted sequences."""
        ring = sum(s.unit_bytes for s in self.plan.rings)
        pools = (("pages", self.blocks, self.block_bytes), ("windows", self.slots, ring))
        held = [Use(name, "engine", (pool.size - pool.free) * size, 1 - pool.free / max(1, pool.size))
                for name, pool, size in pools]
        return [*held, Use("preempted", "host", sum(s.bytes for s in self.spilled))]

    def check(self) -> None:
        """The books against every holding that is alive and the blocks that a prefix cache holds; InternalError when
        they differ."""
        self.blocks.check([*self.cached(), *(block for h in self.live for block in h.blocks.tolist()),
                           *(block for spilled in self.spilled for block in spilled.kept.values())])
        self.slots.check(h.slot for h in self.live)

    def _written(self, holding: Holding, first: int, stop: int) -> NDArray[np.int32]:
        """Held blocks that rows first .. stop - 1 write into, and those after them, which are not read any more."""
        return holding.blocks[first // self.plan.block_tokens:] if stop > first else holding.blocks[:0]

    def _copy_block(self, source: int, target: int) -> None:
        for s in self.plan.paged:
            self.engine.state(s.name, target)[:] = self.engine.state(s.name, source)
