"""Windows in a tier: for models that are not trained for bounded replay, whose rows in front of a hit would otherwise
run again as far as an exact result needs.

Windows at the ends of prompts and answers are stored; a request whose blocks are there asks for those at the last edges
that serve it. They are read while it waits, and proved like blocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Series
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.prefix.chain import KEYS, digest
from deepinfer.runtime.prefix.link import PATIENCE
from deepinfer.runtime.prefix.tree import NO_WINDOWS, Node
from deepinfer.runtime.prefix.windows import WindowPool
from deepinfer.runtime.store.tier import Status, Ticket, Tier

if TYPE_CHECKING:
    from deepinfer.runtime.sequence import Sequence

_EDGES = 2  # edges that are asked for: where the hit lies and the one before
_QUEUED = 64  # snapshots that may wait to be stored


def window_key(key: bytes) -> bytes:
    """[16] of the windows behind a block."""
    return digest(b"windows", key)


@dataclass
class _Fetch:
    ticket: Ticket
    node: Node
    payload: NDArray[np.uint8]


class WindowLink:
    """``tier``: of records whose payload is a snapshot."""

    def __init__(self, plan: EnginePlan, tier: Tier, windows: WindowPool) -> None:
        self.plan, self.tier, self.windows = plan, tier, windows
        self._fetches: dict[Sequence, list[_Fetch]] = {}
        self._tried: WeakSet[Sequence] = WeakSet()
        self._storing: list[Ticket] = []

    def pending(self, s: Sequence, nodes: Series[Node], alone: bool) -> bool:
        """Whether windows for a waiting sequence are on their way. ``nodes``: blocks whose edges would serve it."""
        if s not in self._tried and self.windows.units:
            self._tried.add(s)
            wanted = [n for n in nodes[-_EDGES:] if n.windows == NO_WINDOWS]
            found = [self._fetch(n) for n in wanted if self.tier.lookup(_keys(n))]
            if found and nodes[-1].windows == NO_WINDOWS:
                self._fetches[s] = found
        for fetch in self._fetches.get(s, ()):
            self.tier.poll(fetch.ticket, time.monotonic() + PATIENCE if alone else None)
        self.poll()
        return s in self._fetches

    def _fetch(self, node: Node) -> _Fetch:
        payload = np.zeros(self.plan.resume_bytes, np.uint8)
        return _Fetch(self.tier.fetch(_keys(node), np.frombuffer(node.ids, "<i4"), [[payload]], exact=True), node,
                      payload)

    def poll(self) -> None:
        """Take what has arrived into the pool of snapshots."""
        for s, fetches in list(self._fetches.items()):
            if all(f.ticket.done for f in fetches):
                del self._fetches[s]
                for f in fetches:
                    if f.ticket.statuses[0] is Status.OK and f.node.alive and f.node.windows == NO_WINDOWS:
                        f.node.windows, lost = self.windows.put(f.node, f.payload)
                        if lost is not None:
                            lost.windows = NO_WINDOWS
        self._storing = [t for t in self._storing if not t.done]

    def store(self, node: Node, cls: str | None) -> None:
        """Store the windows behind a block."""
        if node.windows == NO_WINDOWS or not node.exact or len(self._storing) >= _QUEUED:
            return
        payload = self.windows.payload(node.windows)
        self._storing.append(self.tier.publish(window_key(node.key), node.key, node.number,
                                               np.frombuffer(node.ids, "<i4"), [payload], cls=cls or "chat"))

    def close(self) -> None:
        """Let what is queued be stored."""
        self.tier.close()


def _keys(node: Node) -> NDArray[np.void]:
    return np.frombuffer(window_key(node.key), dtype=KEYS)
