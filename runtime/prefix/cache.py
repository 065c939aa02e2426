"""The prefix cache in memory: what a request adopts, and what is kept of what it computes.

Blocks lie in the engine's own pool, where the cache is a holder like any sequence; blocks that only the cache holds are
given up when somebody needs room. Window snapshots at the ends of chains lie in a pool of their own. Which road a hit
takes is decided in ``road.py``, what a key is in ``chain.py``.

Lineage: entries that were computed behind an inexact replay depend on where it lay, so every block carries the replays
that it and the blocks before it hang on (``History``). They become part of the adopting request's replay log. Requests
that have to be exact adopt exact blocks only, and an exact block replaces a replayed one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime import events
from deepinfer.runtime.clock import STEP, Clock, Replayed
from deepinfer.runtime.memory import Use
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.prefix.chain import BlockChain, digest
from deepinfer.runtime.prefix.counters import PrefixCounters
from deepinfer.runtime.prefix.interface import MISS, PENDING, Hit
from deepinfer.runtime.prefix.link import TierLink, stored_key
from deepinfer.runtime.prefix.road import Road, choose, edges_to_keep, kept_rows, must_be_exact, replay_of
from deepinfer.runtime.prefix.roots import Roots
from deepinfer.runtime.prefix.tree import NO_WINDOWS, BlockTree, History, Node, id_bytes, ids_of
from deepinfer.runtime.prefix.window_link import WindowLink
from deepinfer.runtime.prefix.windows import WindowPool

if TYPE_CHECKING:
    from deepinfer.runtime.memory import SequenceMemory
    from deepinfer.runtime.metrics import Metrics
    from deepinfer.runtime.sequence import Sequence
    from deepinfer.runtime.store.tier import Tier

_WORTH, _USELESS = 2, 100  # windows of a found prefix that might have helped; requests in a row that it did not help
_ENDS = 2  # block edges behind each other whose windows are kept at the end of a chain


@dataclass(frozen=True)
class Found:
    """What ``lookup`` found: the chain's nodes up to the hit, and the road to take."""

    nodes: tuple[Node, ...]
    road: Road


@dataclass
class Progress:
    """How far a running sequence is published.

    Args:
        history: inexact replays of the sequence itself, in order. ``settled``: blocks that are published or known to
            be there. ``last``: node of the block before the next one.
        closed: the chain lies behind a block of another history: nothing more is published.
        pins: blocks of the cache that equal the sequence's own; held so that what hangs on them stays reachable.
        edges: positions in the prompt at which windows are kept. ``first_edge``: windows below it are not those of a
            run with this history.
        ends: nodes whose windows this sequence left while decoding.
    """

    chain: BlockChain
    history: History
    edges: tuple[int, ...]
    first_edge: int
    settled: int = 0
    last: Node | None = None
    closed: bool = False
    pins: list[int] = field(default_factory=list)
    ends: deque[Node] = field(default_factory=deque)

    def history_of(self, block: int, size: int) -> History:
        """Replays that entries of a block depend on."""
        return tuple(r for r in self.history if r.floor <= block * size)


class MemoryCache:
    """See the module and ``PrefixCache``.

    Args:
        snapshots: of windows that are kept at most; their memory is taken here.
        roots: what the first block's key hangs on, by tenant; None: nothing leaves this process.
        tier: what lies below memory, if anything does. ``window_tier``: the same for window snapshots.
    """

    def __init__(self, plan: EnginePlan, *, snapshots: int, roots: Roots | None = None,
                 tier: Tier | None = None, window_tier: Tier | None = None) -> None:
        self.plan, self.roots, self.tier = plan, roots or Roots(), tier
        self.link: TierLink | None = None
        self.counters = PrefixCounters()
        self.windows = WindowPool(plan, snapshots if plan.resume_bytes else 0)
        self.window_link = None if window_tier is None else WindowLink(plan, window_tier, self.windows)
        self._progress: dict[Sequence, Progress] = {}
        self._adopted: dict[Sequence, tuple[Node, ...]] = {}  # by sequences that have run no row since
        self._chains: WeakKeyDictionary[Sequence, BlockChain] = WeakKeyDictionary()
        self._useless: set[tuple[int, int]] = set()  # order and answer of requests

    def attach(self, memory: SequenceMemory, busy: Callable[[int], bool], metrics: Metrics) -> None:
        """See ``PrefixCache``."""
        self.tree = BlockTree(memory.blocks, self._dropped)
        self.windows.attach(lambda name, unit: memory.engine.state(name, unit))
        memory.cached = self.held
        self._busy = busy
        if self.tier is not None:
            self.link = TierLink(self.plan, self.tier, self.tree, memory, self.counters)
            for name, metric in vars(self.tier.metrics()).items():
                setattr(metrics, f"store_{name}", metric)
        self.counters.show(metrics)

    # ---- a waiting sequence -----------------------------------------------------------------------------------------
    def lookup(self, s: Sequence, patient: bool = False) -> Hit:
        """See ``PrefixCache``."""
        if s.request.prompt_logprobs is not None:
            return MISS
        ids = s.known_ids()
        option = s.request.params.replay
        exact, replay = must_be_exact(self.plan, option), replay_of(self.plan, option)
        nodes = self._match(s, ids, exact)
        if self.link is not None:
            self.link.poll()
            if not self._progress and self._short(s):
                self.link.wait_stored()
            most = (len(ids) - 1) // self.plan.block_tokens
            if len(nodes) < most and self.link.pending(s, self._chains[s], id_bytes(ids), nodes, most, exact,
                                                       alone=patient):
                return PENDING
            nodes = self._match(s, ids, exact)
        if self.window_link is not None:
            limit = min(len(nodes) * self.plan.block_tokens, len(ids) - kept_rows(self.plan, replay, exact))
            serving = nodes[: max(0, limit) // self.plan.block_tokens]
            if serving and self.window_link.pending(s, serving, alone=patient):
                return PENDING
        edges = [self._end(node) for node in nodes if node.windows != NO_WINDOWS]
        whole = [self._end(node) for node in nodes if node.windows != NO_WINDOWS and self.windows.whole(node.windows)]
        road = choose(self.plan, len(ids), len(nodes), edges, replay, exact, whole)
        self._watch(s, len(nodes), road)
        if road is None:
            return MISS
        kept = tuple(nodes[: road.floor // self.plan.block_tokens])
        return Hit(road.floor, tuple(node.block for node in kept), Found(kept, road))

    def wait(self) -> None:
        """See ``PrefixCache``."""
        if self.link is not None:
            self.link.wait()

    def _watch(self, s: Sequence, blocks: int, road: Road | None) -> None:
        """A cache that never helps says so: its blocks are there, and no request can begin behind them."""
        if road is not None:
            self._useless.clear()
        elif len(self._useless) < _USELESS and blocks * self.plan.block_tokens >= _WORTH * self.plan.window:
            self._useless.add((s.request.order, s.output.index))
            if len(self._useless) == _USELESS:
                events.warn("prefix_cache_unused", requests=_USELESS, blocks=blocks, replay=s.request.params.replay,
                            exact_keep=self.plan.exact_keep, windows=self.windows.held, reason="as many rows would run "
                            "as without it; bounded replay, longer prompts or more prefix_snapshots change that")

    def _short(self, s: Sequence) -> bool:
        """Whether a sequence has too few blocks, were all to be given up that only the cache holds."""
        need = self.plan.blocks_for(s.known) + 1 + s.request.to_fork
        return self.tree.pool.free + self.tree.evictable < need

    def _match(self, s: Sequence, ids: NDArray[np.int64], exact: bool) -> list[Node]:
        """Blocks of a sequence that it may adopt."""
        most = (len(ids) - 1) // self.plan.block_tokens
        nodes = self.tree.match(self._chain(s, ids[: most * self.plan.block_tokens]), id_bytes(ids), most)
        return nodes[: next((i for i, node in enumerate(nodes) if exact and not node.exact), len(nodes))]

    def _chain(self, s: Sequence, ids: NDArray[np.int64]) -> BlockChain:
        """Keys of a sequence's blocks, each hashed once."""
        chain = self._chains.get(s)
        if chain is None:
            chain = BlockChain(self.roots.root(s.request.params.cache_salt), self.plan.block_tokens)
            first = s.request.sequences[0] if s.request.sequences else None
            if first is not None and first is not s and first in self._chains:
                chain = self._chains[first].fork()
                chain.truncate(len(s.request.prompt_ids) // self.plan.block_tokens)
            self._chains[s] = chain
        chain.extend(ids, self._image_digests(s))
        return chain

    def _image_digests(self, s: Sequence) -> dict[int, bytes]:
        """By index of the block that an image begins in; what follows hangs on that block's key."""
        begun: dict[int, list[bytes]] = {}
        for position, content in s.request.images:
            begun.setdefault(position // self.plan.block_tokens, []).append(b"%d:" % position + content)
        return {block: digest(*found) for block, found in begun.items()}

    def stop(self, s: Sequence, first: int, stop: int) -> int:
        """See ``PrefixCache``: a chunk ends where a snapshot is due, and the next one waits until it is taken."""
        assert s.holding is not None
        progress = self._progress.get(s) or self._begin(s)
        if first in progress.edges and self._busy(s.holding.slot):
            return first
        return min((at for at in progress.edges if first < at < stop), default=stop)

    def adopt(self, hit: Hit, s: Sequence) -> None:
        """See ``PrefixCache``."""
        assert s.holding is not None and isinstance(hit.found, Found)
        road, nodes, blocks = hit.found.road, hit.found.nodes, list(hit.blocks)
        self.tree.pool.share_all(blocks)
        s.holding.extend(blocks)
        self.tree.touch(nodes)
        loaded = [node for node in nodes if node.loaded]
        for tier, count in (("store", len(loaded)), ("memory", len(nodes) - len(loaded))):
            if count:
                self.counters.tiers.add(count * self.plan.block_tokens, label=tier)
        for node in loaded:
            node.loaded = False
        self._adopted[s] = nodes
        if road.windows:
            node = nodes[road.start // self.plan.block_tokens - 1]
            self.windows.restore(node.windows, s.holding.slot, road.start)
        s.clock.adopt_prefix(road.floor, road.start, windows=road.windows, whole=road.whole,
                             log=nodes[-1].history)
        exact = road.floor - road.start >= self.plan.exact_rerun
        self.counters.hit(road, road.windows or exact)

    # ---- a running sequence -----------------------------------------------------------------------------------------
    def committed(self, s: Sequence) -> None:
        """See ``PrefixCache``."""
        size = self.plan.block_tokens
        progress = self._progress.get(s) or self._begin(s)
        full = s.clock.n // size
        if full > progress.settled and not progress.closed:
            first = progress.settled
            part = s.ids_in(first * size, full * size)
            progress.chain.append(first, part, self._image_digests(s))
            ids = id_bytes(part)
            while progress.settled < full and not progress.closed:
                self._settle(s, progress, ids, first)
        s.clock.pub = max(s.clock.pub, full)
        if self.link is not None:
            self.link.poll()
        if self.windows.units:
            self._keep_windows(s, progress)

    def _begin(self, s: Sequence) -> Progress:
        """A sequence that got memory: after a hit, cold, forked or resumed."""
        clock, plan = s.clock, self.plan
        option = s.request.params.replay
        replay, exact = replay_of(plan, option), must_be_exact(plan, option)
        history = tuple(r for r in clock.replays if inexact(plan, r))
        own = [r for r in clock.replays if r.axis == STEP]
        first_edge = max((r.floor + inexact(plan, r) for r in own), default=0)
        edges = edges_to_keep(plan, clock.prompt_end, kept_rows(plan, replay, exact))
        edges = tuple(sorted({*edges, *(r.floor for r in own if not inexact(plan, r))}))
        known = s.known_ids()[: clock.n]
        nodes = self._adopted.pop(s, ())
        progress = Progress(self._chain(s, known), history,
                            tuple(at for at in edges if at >= first_edge) if self.windows.units else (), first_edge,
                            settled=len(nodes), last=nodes[-1] if nodes else None)
        adopted = clock.h // plan.block_tokens
        if progress.settled < adopted:  # by who it was forked from, or before its memory went to the host
            ids = id_bytes(known)
            while progress.settled < adopted and not progress.closed:
                self._settle(s, progress, ids)
        self._progress[s] = progress
        return progress

    def _settle(self, s: Sequence, p: Progress, known: bytes, first: int = 0) -> None:
        """Publish the next full block, or find that an equal one is there. ``known``: ids from block ``first`` on."""
        assert s.holding is not None
        size, number = self.plan.block_tokens, p.settled
        if number and (p.last is None or not p.last.alive):
            p.closed = True
            return
        key, block, history = p.chain[number], int(s.holding.blocks[number]), p.history_of(number, size)
        node, ids = self.tree.find(key), ids_of(known, number - first, size)
        if node is not None and node.ids == ids and not history and not node.exact:
            self.counters.replaced.add()
            self.tree.remove(node)
            node = None
        if node is None:
            node = Node(key, number, ids, block, p.last, history)
            self.tree.insert(node)
            self.counters.published.add(label="exact" if node.exact else "replayed")
            self.counters.blocks.set(len(self.tree))
            if self.link is not None:
                parent = p.chain.salt if p.last is None else stored_key(p.last.key, p.last.history)
                self.link.store(node, parent, s.request.params.cache_class)
        elif node.history != history or node.ids != ids:
            p.closed = True
            return
        elif node.block != block:
            self.tree.pool.share(node.block)
            p.pins.append(node.block)
        p.last = node
        p.settled += 1

    # ---- windows ----------------------------------------------------------------------------------------------
    def _keep_windows(self, s: Sequence, p: Progress) -> None:
        """A snapshot at the edge of a block where the rings still hold the rows in front of it."""
        assert s.holding is not None
        clock, size = s.clock, self.plan.block_tokens
        decoding = clock.row >= clock.prompt_end
        at = clock.row // size * size if decoding else clock.row
        if at % size or at < max(1, p.first_edge) or p.settled < at // size:
            return
        if clock.w - at > self.windows.slack or not (decoding or (at in p.edges and not self._busy(s.holding.slot))):
            return
        node = p.last
        while node is not None and self._end(node) > at:  # rows in front of a hit that run again
            node = node.parent
        if node is None or not node.alive or self._end(node) != at:
            return
        whole = node.exact and self._kept_all(clock, at)
        if node.windows != NO_WINDOWS and self.windows.whole(node.windows) >= whole:
            self.windows.touch(node.windows)
            return
        self._forget_windows(node)
        node.windows, lost = self.windows.take(node, s.holding.slot, at, whole)
        if lost is not None:
            lost.windows = NO_WINDOWS
        self.counters.snapshots.add()
        if self.window_link is not None and at <= clock.prompt_end:
            self.window_link.store(node, s.request.params.cache_class)
        if at > clock.prompt_end:
            p.ends.append(node)
            if len(p.ends) > _ENDS:
                self._forget_windows(p.ends.popleft())

    def _kept_all(self, clock: Clock, at: int) -> bool:
        """Whether the windows of kept rows in front of ``at`` are those of a run that keeps every row: it did, or it
        began so far in front that nothing of that is left."""
        start = clock.start_kept
        return start == 0 or at - self.windows.kept_reach - start >= self.plan.exact_keep

    def _end(self, node: Node) -> int:
        return (node.number + 1) * self.plan.block_tokens

    def _forget_windows(self, node: Node) -> None:
        if node.windows != NO_WINDOWS:
            self.windows.give_back(node.windows)
            node.windows = NO_WINDOWS

    def _dropped(self, node: Node) -> None:
        self._forget_windows(node)
        self.counters.blocks.set(len(self.tree))

    # ---- memory ----------------------------------------------------------------------------------------------
    def released(self, s: Sequence) -> None:
        """See ``PrefixCache``."""
        self._adopted.pop(s, None)
        progress = self._progress.pop(s, None)
        if progress is None:
            return
        for block in progress.pins:
            self.tree.pool.give_back(block)
        if self.window_link is not None:
            for end in progress.ends:
                if end.alive:
                    self.window_link.store(end, s.request.params.cache_class)
        nodes, node = list[Node](), progress.last
        while node is not None and node.alive:
            nodes.append(node)
            node = node.parent
        self.tree.touch(nodes[::-1])

    @property
    def evictable(self) -> int:
        """See ``PrefixCache``."""
        return self.tree.evictable

    def evict(self, need: int) -> int:
        """See ``PrefixCache``."""
        if self.link is not None:
            self.link.poll()
        freed = self.tree.evict(need)
        self.counters.evicted.add(freed)
        return freed

    def held(self) -> Iterable[int]:
        """See ``PrefixCache``."""
        yield from self.tree.held()
        for progress in self._progress.values():
            yield from progress.pins
        if self.link is not None:
            yield from self.link.held()

    def uses(self) -> list[Use]:
        """See ``PrefixCache``: the window snapshots."""
        pool = self.windows
        share = pool.held / max(1, pool.units)
        return [Use("snapshots", "host", round(pool.bytes * share), share)]

    def close(self) -> None:
        """See ``PrefixCache``."""
        if self.window_link is not None:
            self.window_link.close()
        if self.link is not None:
            self.link.close()
        elif self.tier is not None:
            self.tier.close()

    def clear(self) -> None:
        """Forget every block that no sequence hangs on."""
        for node in list(self.tree):
            if node.alive and node.number == 0:
                self.tree.remove(node)

    def check(self) -> None:
        """The cache's own books; InternalError when they are wrong."""
        self.windows.check()


def inexact(plan: EnginePlan, r: Replayed) -> bool:
    """Whether a replay in front of a hit makes entries differ from those of a cold run."""
    return r.axis == STEP and r.start > 0 and r.floor - r.start < plan.exact_rerun


def replays_of(clock: Clock) -> History:
    """The inexact replays in a clock's log."""
    return tuple(r for r in clock.replays if inexact(clock.plan, r))
