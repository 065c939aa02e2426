"""The way between the cache in memory and a tier below it: blocks are loaded before a request runs, and stored when
they are new.

Exact blocks lie in the tier under their chain key. A replayed block hangs on a history, so its key does too: runs that
replayed at different places never meet there, and whoever looks for a replayed block says which history it would adopt.
A load ends in the tree of the cache before anybody adopts it; only what was proved gets there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import RequestError
from deepinfer.runtime import events
from deepinfer.runtime.clock import STEP, Replayed
from deepinfer.runtime.plan import EnginePlan, StatePlan
from deepinfer.runtime.prefix.chain import KEYS, BlockChain, digest
from deepinfer.runtime.prefix.counters import PrefixCounters
from deepinfer.runtime.prefix.tree import BlockTree, History, Node, ids_of
from deepinfer.runtime.store.tier import Flags, Status, Ticket, Tier

if TYPE_CHECKING:
    from deepinfer.runtime.memory import SequenceMemory
    from deepinfer.runtime.sequence import Sequence

PATIENCE = 60.0  # seconds that an engine with nothing else to do waits; the tier's own limit is below it
_MOMENT = 0.001
_QUEUED_SHARE = 4  # no more than this part of the pool waits to be stored


def stored_key(key: bytes, history: History) -> bytes:
    """[16] under which a tier keeps a block."""
    if not history:
        return key
    places = b"".join(r.start.to_bytes(8, "little") + r.floor.to_bytes(8, "little") for r in history)
    return digest(b"replayed", key, places)


@dataclass
class Load:
    """Blocks on their way: ``first`` is the number of the first one, ``pins`` the blocks of memory before it."""

    ticket: Ticket
    chain: BlockChain
    ids: bytes
    first: int
    blocks: list[int]
    histories: list[History]
    parent: Node | None
    pins: list[int]
    staging: list[list[NDArray[np.uint8]]]


@dataclass
class Storing:
    """A block that is being stored, pinned until it is."""

    ticket: Ticket
    block: int


class TierLink:
    """See the module."""

    def __init__(self, plan: EnginePlan, tier: Tier, tree: BlockTree, memory: SequenceMemory,
                 counters: PrefixCounters) -> None:
        self.plan, self.tier, self.tree, self.counters = plan, tier, tree, counters
        self.memory = memory
        self._groups = sections_of(plan, tier.sections)
        self._loads: dict[Sequence, Load] = {}
        self._tried: WeakSet[Sequence] = WeakSet()
        self._storing: list[Storing] = []

    # ---- up: from the tier into memory ------------------------------------------------------------------------------
    def pending(self, s: Sequence, chain: BlockChain, ids: bytes, nodes: list[Node], most: int, exact: bool,
                alone: bool) -> bool:
        """Whether blocks behind those that memory holds are on their way for a waiting sequence.

        Args:
            nodes: blocks of the chain in memory that ``s`` may adopt. ``most``: blocks it may adopt in all.
            exact: only exact ones. ``alone``: nothing else runs, so that waiting costs nobody anything.
        """
        if s not in self._loads and s not in self._tried:
            self._tried.add(s)
            self._begin(s, chain, ids, nodes, most, exact)
        load = self._loads.get(s)
        if load is None:
            return False
        self.tier.poll(load.ticket, time.monotonic() + PATIENCE if alone else None)
        self.poll()
        return s in self._loads

    def _begin(self, s: Sequence, chain: BlockChain, ids: bytes, nodes: list[Node], most: int, exact: bool) -> None:
        history = nodes[-1].history if nodes else ()
        histories, keys = self._present(chain, len(nodes), most, history, exact)
        pool = self.tree.pool
        pins = [node.block for node in nodes]
        whole = self.plan.blocks_for(len(ids) // 4) + 1
        if not keys or self.memory.free_blocks + self.tree.evictable < whole - sum(pool.shared(b) for b in pins):
            return
        for block in pins:
            pool.share(block)
        if self.memory.free_blocks < len(keys):
            self.tree.evict(len(keys) - self.memory.free_blocks)
        blocks = [pool.take() for _ in range(max(0, min(len(keys), self.memory.free_blocks)))]
        staging = [self._buffers(block) for block in blocks]
        first, count = len(nodes), len(blocks)
        wanted = np.frombuffer(ids, "<i4")[first * chain.block : (first + count) * chain.block]
        names = np.frombuffer(b"".join(keys[:count]), dtype=KEYS)
        ticket = self.tier.fetch(names, wanted, staging, exact=exact)
        self._loads[s] = Load(ticket, chain.fork(), ids, first, blocks, histories, nodes[-1] if nodes else None, pins,
                              staging)

    def _present(self, chain: BlockChain, first: int, most: int, history: History,
                 exact: bool) -> tuple[list[History], list[bytes]]:
        """Histories and keys of blocks that the tier probably holds: first of the history so far, then behind a replay
        at the end of what was found, and so on."""
        histories: list[History] = []
        keys: list[bytes] = []
        while first + len(keys) < most:
            at = first + len(keys)
            names = [stored_key(chain[i], history) for i in range(at, most)]
            found = self.tier.lookup(np.frombuffer(b"".join(names), dtype=KEYS), exact)
            keys += names[:found]
            histories += [history] * found
            floor = (first + len(keys)) * self.plan.block_tokens
            start = floor - self.plan.rerun
            if exact or not self.plan.licensed or start <= 0 or (not found and history and history[-1].floor == floor):
                break
            history = (*history, Replayed(STEP, start, floor))
        return histories, keys

    def poll(self) -> None:
        """Take what has arrived into the tree, and let go of what was stored."""
        for s, load in list(self._loads.items()):
            if load.ticket.done:
                del self._loads[s]
                self._arrived(load)
        self._storing = [x for x in self._storing if not self._stored(x)]

    def _arrived(self, load: Load) -> None:
        pool, parent = self.tree.pool, load.parent
        good = load.ticket.leading if parent is None or parent.alive else 0
        for i, block in enumerate(load.blocks):
            number = load.first + i
            key = load.chain[number]
            if i < good and self.tree.find(key) is None:
                self._unpack(block, load.staging[i])
                parent = Node(key, number, ids_of(load.ids, number, load.chain.block), block, parent,
                              load.histories[i])
                parent.loaded = True
                self.tree.insert(parent)
            else:
                good = min(good, i)
            pool.give_back(block)
        for block in load.pins:
            pool.give_back(block)
        bad = [status for status in load.ticket.statuses if status not in (Status.OK, Status.MISS)]
        if bad:
            events.warn("prefix_load_cut", blocks=len(load.blocks), used=good, first=bad[0].value)

    # ---- down: from memory into the tier ----------------------------------------------------------------------------
    def store(self, node: Node, parent: bytes, cls: str | None) -> None:
        """Store a block that is new. ``parent``: key of the block before it in the tier."""
        if len(self._storing) >= max(1, self.tree.pool.size // _QUEUED_SHARE):
            self.counters.unstored.add()
            return
        try:
            ticket = self.tier.publish(
                stored_key(node.key, node.history), parent, node.number, np.frombuffer(node.ids, "<i4"),
                self._packed(node.block), flags=Flags.NONE if node.exact else Flags.REPLAYED, cls=cls or "chat")
        except RequestError as error:  # a class that this store does not have
            self.counters.unstored.add()
            events.warn("prefix_not_stored", reason=error)
            return
        self.tree.pool.share(node.block)
        self._storing.append(Storing(ticket, node.block))

    def wait(self) -> None:
        """Let what is on its way in both directions arrive: somebody needs the room, and nothing else runs."""
        until = time.monotonic() + PATIENCE
        for load in list(self._loads.values()):
            self.tier.poll(load.ticket, until)
        self.poll()
        self.wait_stored()

    def wait_stored(self) -> None:
        """Let what is being stored end: nothing else runs, and somebody needs the room that it takes."""
        until = time.monotonic() + PATIENCE
        while self._storing and time.monotonic() < until:
            self.poll()
            if self._storing:
                time.sleep(_MOMENT)

    def _stored(self, x: Storing) -> bool:
        done = x.ticket.done  # asked once: it may end at any moment
        if done:
            self.tree.pool.give_back(x.block)
        return done

    # ---- books ------------------------------------------------------------------------------------------------------
    def held(self) -> Iterable[int]:
        """Blocks that loads and stores hold."""
        for load in self._loads.values():
            yield from load.blocks
            yield from load.pins
        for x in self._storing:
            yield x.block

    def close(self) -> None:
        """Let what is queued be stored, and give up what is on its way."""
        self.tier.close()
        self.poll()

    def _state(self, name: str, block: int) -> NDArray[np.uint8]:
        return self.memory.engine.state(name, block)

    # ---- payload ----------------------------------------------------------------------------------------------------
    def _buffers(self, block: int) -> list[NDArray[np.uint8]]:
        """Where a fetch writes: the block itself, or memory of its own for a section that joins several states or lies
        on a device."""
        return [self._state(g[0].name, block) if self._in_place(g, block) else
                np.zeros(sum(s.unit_bytes for s in g), np.uint8) for g in self._groups]

    def _in_place(self, group: list[StatePlan], block: int) -> bool:
        return len(group) == 1 and isinstance(self._state(group[0].name, block), np.ndarray)

    def _unpack(self, block: int, parts: list[NDArray[np.uint8]]) -> None:
        for group, part in zip(self._groups, parts, strict=True):
            if not self._in_place(group, block):
                for s, piece in zip(group, _split(group, part), strict=True):
                    self._state(s.name, block)[:] = piece

    def _packed(self, block: int) -> list[Any]:
        return [np.asarray(self._state(g[0].name, block)) if len(g) == 1 else
                np.concatenate([self._state(s.name, block) for s in g]) for g in self._groups]


def _split(group: list[StatePlan], part: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    at = 0
    for s in group:
        yield part[at : at + s.unit_bytes]
        at += s.unit_bytes


def sections_of(plan: EnginePlan, sections: Iterable[tuple[str, int]]) -> list[list[StatePlan]]:
    """The paged states that each section of a record joins."""
    states, out = list(plan.paged), []
    for _, size in sections:
        group: list[StatePlan] = []
        while sum(s.unit_bytes for s in group) < size:
            group.append(states.pop(0))
        out.append(group)
    return out
