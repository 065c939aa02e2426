"""Blocks that the cache knows: a tree of chains by key, with lineage, least recently used blocks at the front.

A block's *history* is the list of inexact replays that its entries depend on, its own and those of the blocks before
it; an empty history is an exact block. Every block's history begins with that of the block before it, so a request
that adopts a chain adopts one history.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime.clock import Replayed
from deepinfer.runtime.pool import Pool
from deepinfer.runtime.prefix.chain import BlockChain

History = tuple[Replayed, ...]
NO_WINDOWS = -1


class Node:
    """Block ``number`` of a chain. ``ids``: its B token ids as little-endian i32; ``windows``: number of the snapshot
    at its end; ``loaded``: it came from a tier and nobody has adopted it yet."""

    __slots__ = ("alive", "block", "children", "history", "ids", "key", "loaded", "number", "parent", "windows")

    def __init__(self, key: bytes, number: int, ids: bytes, block: int, parent: Node | None,
                 history: History) -> None:
        self.key, self.number, self.ids, self.block = key, number, ids, block
        self.parent, self.history = parent, history
        self.children: set[Node] = set()
        self.windows = NO_WINDOWS
        self.alive, self.loaded = True, False

    @property
    def exact(self) -> bool:
        return not self.history


class BlockTree:
    """Holds each of its blocks once in the pool. ``dropped``: called with every node that leaves the tree."""

    def __init__(self, pool: Pool, dropped: Callable[[Node], None]) -> None:
        self.pool = pool
        self._dropped = dropped
        self._nodes: dict[bytes, Node] = {}
        self._order: OrderedDict[Node, None] = OrderedDict()
        self._cached = np.zeros(pool.size, dtype=bool)

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def find(self, key: bytes) -> Node | None:
        return self._nodes.get(key)

    def match(self, chain: BlockChain, ids: bytes, most: int) -> list[Node]:
        """Leading blocks of a sequence that are here, up to ``most``: ids are compared, a key alone proves nothing."""
        found: list[Node] = []
        for number in range(min(most, len(chain))):
            node = self._nodes.get(chain[number])
            if node is None or node.ids != ids_of(ids, number, chain.block):
                break
            found.append(node)
        return found

    def insert(self, node: Node) -> None:
        """A block whose bytes are final; the tree becomes one more holder of it."""
        self.pool.share(node.block)
        self._nodes[node.key] = node
        self._order[node] = None
        self._cached[node.block] = True
        if node.parent is not None:
            node.parent.children.add(node)

    def touch(self, nodes: Sequence[Node]) -> None:
        """A chain was used just now; what lies deeper goes first when room is needed."""
        for node in reversed(nodes):
            self._order.move_to_end(node)

    def remove(self, node: Node) -> None:
        """Forget a block and everything behind it."""
        if node.parent is not None:
            node.parent.children.discard(node)
        stack = [node]
        while stack:
            gone = stack.pop()
            stack += gone.children
            gone.children = set()
            gone.alive = False
            del self._nodes[gone.key], self._order[gone]
            self._cached[gone.block] = False
            self._dropped(gone)
            self.pool.give_back(gone.block)

    @property
    def evictable(self) -> int:
        """Blocks that nobody else holds."""
        return int(np.count_nonzero(self.pool.held_once(self._cached)))

    def evict(self, need: int) -> int:
        """Give up ``need`` blocks that nobody else holds, ends of chains first, or as many as there are."""
        before = self.pool.free
        for leaves in (True, False):
            while (left := need - (self.pool.free - before)) > 0:
                victims = self._oldest(left, leaves)
                if not victims:
                    break
                for node in victims:
                    if node.alive:
                        self.remove(node)
        return self.pool.free - before

    def _oldest(self, count: int, leaves: bool) -> list[Node]:
        """Up to ``count`` blocks that may go. Blocks that somebody holds count as used now: no call meets them again
        before it has seen all others."""
        found: list[Node] = []
        in_use: list[Node] = []
        for node in self._order:
            if self.pool.shared(node.block):
                in_use.append(node)
            elif not (leaves and node.children):
                found.append(node)
                if len(found) == count:
                    break
        for node in in_use:
            self._order.move_to_end(node)
        return found

    def held(self) -> Iterable[int]:
        return [node.block for node in self._nodes.values()]


def id_bytes(ids: NDArray[np.int64]) -> bytes:
    """Token ids as the cache compares them."""
    return ids.astype("<i4").tobytes()


def ids_of(ids: bytes, number: int, block: int) -> bytes:
    """Those of block ``number``."""
    return ids[4 * number * block : 4 * (number + 1) * block]
