"""Blocks whose bytes follow from their ids, a small store for them, and the check that what is served is theirs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deepinfer.runtime.prefix.chain import chain_keys, digest
from deepinfer.runtime.store import Flags, Layout, Status, Store, StoreSettings
from deepinfer.runtime.store.files import Files
from deepinfer.runtime.store.lease import Writer
from deepinfer.runtime.store.native import LIBRARY
from deepinfer.runtime.store.native.build import build_store
from deepinfer.runtime.store.native.library import NativeRecords, NativeRing

BLOCK = 16
ROOT = bytes(range(16))
LAYOUT = Layout(b"weights+numerics", BLOCK, (("fine", 2500), ("pooled", 1300), ("index", 300)))
V41_LAYOUT = Layout(b"weights+numerics", 128, tuple((f"s{i}", size) for i in range(4) for size in (24_192, 4_288)))
NOW = 1_800_000_000.0  # of stores with a clock of their own
DAY = 86_400.0
PATIENCE = 120.0  # seconds for something that has to happen; a machine under load is slow


class Clocks:
    """Wall and monotonic clocks that a test moves."""

    def __init__(self, wall: float = NOW) -> None:
        self.wall, self.up = wall, 1000.0

    def forward(self, seconds: float) -> None:
        self.wall += seconds
        self.up += seconds


def settings(folder: Path, shared: Path | None = None, **given: Any) -> StoreSettings:
    """Four records a segment, everything in the calls, no background. ``shared``: the store's folder itself."""
    usual = StoreSettings(shared or folder / "store", quota=64 << 20, segment_bytes=4 * LAYOUT.stride + 4 * 4096,
                          backend="inline", threads=1, arena_bytes=1 << 16, index=folder / "index", background=False,
                          timeout=PATIENCE, grace_seconds=0.0)
    return replace(usual, **given)


def open_store(folder: Path, *, layout: Layout = LAYOUT, clocks: Clocks | None = None, files: Files | None = None,
               writer: Writer | None = None, native: bool = False, **given: Any) -> Store:
    """``native``: with the native part that engines carry."""
    clocks = clocks or Clocks()
    library = build_store().files[LIBRARY] if native else None
    return Store(settings(folder, **given), layout, library=library, files=files, wall=lambda: clocks.wall,
                 monotonic=lambda: clocks.up, writer=writer)


def ring_of(native: NativeRecords | None) -> NativeRing:
    """An io_uring; the test is skipped where the machine gives none."""
    assert native is not None
    try:
        return native.open_ring(8)
    except OSError as refusal:
        pytest.skip(f"no io_uring here: {refusal.strerror}")


class Chain:
    """A sequence of ``blocks`` blocks: its ids, keys and payloads, all from one seed.

    A replayed block's payload is another than the exact one's, as in an engine.
    """

    def __init__(self, seed: int, blocks: int, layout: Layout = LAYOUT, prefix: Chain | None = None,
                 root: bytes = ROOT) -> None:
        self.layout, self.root, self.blocks = layout, root, blocks
        rng = np.random.default_rng(seed)
        self.ids: NDArray[np.int64] = rng.integers(0, 129_280, blocks * layout.block_tokens)
        if prefix is not None:
            self.ids[: len(prefix.ids)] = prefix.ids
        self.keys = chain_keys(root, self.ids, layout.block_tokens)

    def key(self, i: int) -> bytes:
        return bytes(self.keys[i].tobytes())

    def parent(self, i: int) -> bytes:
        return self.key(i - 1) if i else self.root

    def block_ids(self, i: int) -> NDArray[np.int64]:
        return self.ids[i * self.layout.block_tokens : (i + 1) * self.layout.block_tokens]

    def payload(self, i: int, flags: Flags = Flags.NONE) -> NDArray[np.uint8]:
        seed = digest(self.key(i), self.block_ids(i).tobytes(), bytes([flags]))
        return np.random.default_rng(list(seed)).integers(0, 256, self.layout.payload_bytes, dtype=np.uint8)

    def publish(self, store: Store, which: Sequence[int] | None = None, flags: Flags = Flags.NONE,
                cls: str = "chat") -> list[Status]:
        """Statuses of blocks (all of them) that were given to the store, after they ended."""
        ended = []
        for i in range(self.blocks) if which is None else which:
            payload = self.payload(i, flags)
            parts = np.split(payload, np.cumsum([size for _, size in self.layout.sections])[:-1])
            ticket = store.publish(self.key(i), self.parent(i), i, self.block_ids(i), parts, flags=flags, cls=cls)
            ended.append(ticket)
        until = time.monotonic() + PATIENCE
        while not all(t.done for t in ended) and time.monotonic() < until:
            time.sleep(0.001)
        return [t.statuses[0] for t in ended]

    def fetch(self, store: Store, first: int = 0, stop: int | None = None, exact: bool = False) -> list[Status]:
        """Statuses of blocks; every block that is OK has exactly the bytes of its ids, every other one is untouched."""
        stop = self.blocks if stop is None else stop
        width = self.layout.block_tokens
        into = np.full((stop - first, self.layout.payload_bytes), 0xEE, dtype=np.uint8)
        ticket = store.fetch(self.keys[first:stop], self.ids[first * width : stop * width], [[row] for row in into],
                             exact=exact)
        statuses = list(store.poll(ticket, time.monotonic() + PATIENCE))
        for i, (status, row, flags) in enumerate(zip(statuses, into, ticket.flags, strict=True)):
            if status is Status.OK:
                assert np.array_equal(row, self.payload(first + i, flags)), f"block {first + i} is another block's"
            else:
                assert (row == 0xEE).all(), f"block {first + i} is {status} and was written to"
        return statuses

    def served(self, store: Store) -> set[bytes]:
        """Keys of blocks that the store serves, each asked for by itself."""
        return {self.key(i) for i in range(self.blocks) if self.fetch(store, i, i + 1) == [Status.OK]}


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True
