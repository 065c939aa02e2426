"""One life of a store that passes every numbered crash point, told step by step so that a disk can fail in any."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from store.recording import Killed, Op, Recording
from store.witness_store import DAY, Chain, Clocks, open_store

from deepinfer.runtime.store import Flags, Status, Store
from deepinfer.runtime.store.index import Index
from deepinfer.runtime.store.lease import Writer
from deepinfer.runtime.store.segment import parse_name

DEAD = Writer("dddddddddddd", "host", "boot", 1, 1)
MINE = Writer("aaaaaaaaaaaa", "host", "boot", 1, 1)


class Cast(NamedTuple):
    """Chains by what happens to them. Everything a reopened store serves must be one of these blocks."""

    first: Chain
    orphan: Chain
    replayed: Chain
    hurt: Chain
    ending: Chain
    late: Chain


BLOCKS = (6, 3, 4, 4, 4, 2)  # of the chains
CHAINS = Cast(*(Chain(seed, blocks) for seed, blocks in enumerate(BLOCKS, 1)))


class Life:
    """Runs the scenario in ``folder`` through ``files``; ``clocks`` at the end is where a reopened store goes on."""

    def __init__(self, folder: Path, files: Recording, cast: Cast = CHAINS) -> None:
        self.folder, self.files, self.cast, self.clocks = folder, files, cast, Clocks()
        self.store: Store | None = None
        files.wall = lambda: self.clocks.wall

    def run(self) -> bool:
        """Whether it came to its end; False: the process was killed."""
        try:
            for step in (self.orphan, self.fill, self.adopt, self.replace, self.compact, self.hurt, self.end,
                         self.close):
                step()
        except Killed:
            return False
        return True

    # ---- steps ----------------------------------------------------------------------------------------------------
    def orphan(self) -> None:
        """Another writer dies with an open segment."""
        other = self._open(DEAD)
        with self._killable(other):
            self._publish(other, self.cast.orphan)
            other.writers.sync(now=True)
            self.files.note("synced", None)
        vanished(other)

    def fill(self) -> None:
        """Ours fills a segment and half of the next."""
        self.store = self._open(MINE)
        self._publish(self.store, self.cast.first)
        self.store.writers.sync(now=True)
        self.files.note("synced", None)

    def adopt(self) -> None:
        self.clocks.forward(2 * 3600)
        self._try(self._store.upkeep.beat)
        self._try(self._store.upkeep.adopt)
        self.files.note("synced", None)

    def replace(self) -> None:
        """A segment of replayed blocks whose blocks are written again, exactly."""
        self._store.writers.rotate(everything=True)
        self._publish(self._store, self.cast.replayed, flags=Flags.REPLAYED)
        self._store.writers.rotate(everything=True)
        self._publish(self._store, self.cast.replayed, which=[0, 1, 2])

    def compact(self) -> None:
        """What is left of the segment moves; the segment goes."""
        self._store.writers.sync(now=True)
        self.files.note("synced", None)
        compaction = self._store.upkeep.compaction
        self._try(partial(compaction.plan, now_due=True))
        for _ in range(3):
            self._try(partial(compaction.work, 1.0))
        self._try(self._store.upkeep.unlink_dead)

    def hurt(self) -> None:
        """A record rots on the disk: its segment is set aside."""
        store, hurt = self._store, self.cast.hurt
        store.writers.rotate(everything=True)
        self._publish(store, hurt)
        store.writers.rotate(everything=True)
        hint = store.index.get(hurt.key(1))
        segment = None if hint is None else store.catalog.by_number.get(int(hint["number"]))
        self.files.note("gone", [hurt.key(i) for i in range(hurt.blocks)])
        if segment is not None and segment.block is not None and segment.path.exists():
            self.files.rot(segment.path, segment.block.offset(1) + 1000)
        hurt.fetch(store)

    def end(self) -> None:
        """A class runs out while somebody reads."""
        store, ending = self._store, self.cast.ending
        self._publish(store, ending, cls="agent")
        store.writers.rotate(everything=True)
        with contextlib.suppress(OSError):
            for segment in list(store.catalog.by_stem.values()):
                store.catalog.acquire(segment)  # a reader that has everything open
        self.files.note("gone", [ending.key(i) for i in range(ending.blocks)])
        self.clocks.forward(4 * DAY)
        store.upkeep.everything()
        self._try(partial(store.upkeep.unlink_dead, everything=True))
        self._publish(store, self.cast.late)

    def close(self) -> None:
        self._store.close()
        self.store = None

    @staticmethod
    def _try(act: Callable[[], object]) -> None:
        """As the store's own thread does it."""
        with contextlib.suppress(OSError):
            act()

    # ---- parts ----------------------------------------------------------------------------------------------------
    @property
    def _store(self) -> Store:
        assert self.store is not None
        return self.store

    def _open(self, writer: Writer) -> Store:
        layout = self.cast.first.layout
        try:
            return open_store(self.folder, layout=layout, clocks=self.clocks, files=self.files, writer=writer,
                              bad_after=1, retry_seconds=0.0, segment_bytes=4 * layout.stride + 4 * 4096,
                              arena_bytes=8 * layout.stride)
        except Killed:  # nobody holds the store, but this process, which lives, would count as a user of its index
            for index in gc.get_objects():
                if isinstance(index, Index) and index.folder.is_relative_to(self.folder):
                    index.abandon()
            raise

    def _publish(self, store: Store, chain: Chain, which: Sequence[int] | None = None, flags: Flags = Flags.NONE,
                 cls: str = "chat") -> None:
        for i in range(chain.blocks) if which is None else which:
            if chain.publish(store, [i], flags, cls) == [Status.OK]:
                self.files.note("stored", chain.key(i))
                ended = chain.fetch(store, i, i + 1)
                assert ended in ([Status.OK], [Status.IO_ERROR]), ended

    @contextlib.contextmanager
    def _killable(self, store: Store) -> Iterator[None]:
        try:
            yield
        except Killed:
            vanished(store)
            raise

    def vanish(self) -> None:
        """The process is gone: nothing is written any more."""
        if self.store is not None:
            vanished(self.store)


def vanished(store: Store) -> None:
    for s in [*store.writers.current.values(), *store.writers.sealing]:
        store.files.close(s.fd)
        store.files.close(s.log_fd)
    store.catalog.drop_all()
    store.index.abandon()
    store._arena.close()


def promised(ops: Sequence[Op], synced_only: bool) -> set[bytes]:
    """Keys that a store must still serve after these operations, or after those of them that were synced."""
    stored: set[bytes] = set()
    synced: set[bytes] = set()
    for op in ops:
        if op.kind == "note":
            what, data = op.data
            if what == "stored":
                stored.add(data)
            elif what == "synced":
                synced = set(stored)
            elif what == "gone":
                stored -= set(data)
                synced -= set(data)
    return synced if synced_only else stored


def names_of(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if parse_name(p.name) is not None)


