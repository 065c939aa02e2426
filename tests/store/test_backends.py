"""What moves records: every backend behaves as the plain one. 3FS and Mooncake are stand-ins with their call shapes."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from store.mooncake_cluster import Cluster, install
from store.witness_store import LAYOUT, PATIENCE, Chain, open_store, ring_of, settings

from deepinfer.errors import DeepInferError
from deepinfer.runtime.store import Flags, Status
from deepinfer.runtime.store.layout import KIND_WINDOWS
from deepinfer.runtime.store.mooncake import CONFIG, MooncakeTier
from deepinfer.runtime.store.native.library import NativeRecords
from deepinfer.runtime.store.opening import opener
from deepinfer.runtime.store.ring import Ring, locate, open_arena


class Usrbio(ModuleType):
    """Stand-in for ``hf3fs_fuse.io`` with the calls of its Python wrapper and of the binding below it: memory that is
    registered by name and cut into slices, rings of one direction, descriptors that are known once, results that come
    with user data and perhaps fewer at a time than were asked for.
    """

    def __init__(self, mount: Path) -> None:
        super().__init__("hf3fs_fuse.io")
        self.mount, self.moved, self.at_once = mount, 0, 1 << 30
        self.registered: set[int] = set()
        self.failing = self.lost = False

    def extract_mount_point(self, path: str) -> str | None:
        return str(self.mount) if Path(path).is_relative_to(self.mount) else None

    def make_iovec(self, shm: Any, hf3fs_mount_point: str, block_size: int = 0, numa: int = -1) -> UsrbioMemory:
        assert (Path("/dev/shm") / shm.name).exists(), "memory is registered by its name"
        assert hf3fs_mount_point == str(self.mount) and len(shm.buf) == shm.size
        return UsrbioMemory(shm.buf)

    def make_ioring(self, hf3fs_mount_point: str, entries: int, for_read: bool = True, io_depth: int = 0,
                    priority: int | None = None, timeout: int | None = None, numa: int = -1,
                    flags: int = 0) -> UsrbioRing:
        assert flags == 2, "holes are errors"
        return UsrbioRing(self, entries, for_read)

    def register_fd(self, fd: int, flags: int = 0) -> None:
        if fd in self.registered:
            raise OSError(errno.EEXIST, "a descriptor is registered once")
        os.fstat(fd)
        self.registered.add(fd)

    def deregister_fd(self, fd: int) -> None:
        os.fstat(fd)  # before it is closed
        self.registered.remove(fd)


class UsrbioMemory:
    """Memory that slices of can be read into. ``base``: where it lies; slices start and end in it."""

    def __init__(self, buffer: Any) -> None:
        self.view = memoryview(buffer)

    def __getitem__(self, part: slice) -> UsrbioMemory:
        assert part.step is None
        return UsrbioMemory(self.view[part])


class UsrbioRing:
    def __init__(self, module: Usrbio, entries: int, for_read: bool) -> None:
        self.module, self.entries, self.for_read = module, entries, for_read
        self.prepared: list[tuple[UsrbioMemory, int, int, Any]] = []
        self.under_way: list[tuple[UsrbioMemory, int, int, Any]] = []

    def prepare(self, iov: UsrbioMemory, read: bool, fd: int, off: int, userdata: Any = None) -> UsrbioRing:
        assert type(iov) is UsrbioMemory and read == self.for_read and fd in self.module.registered
        assert len(self.prepared) + len(self.under_way) < self.entries
        self.prepared.append((iov, fd, off, userdata))
        return self

    def submit(self) -> UsrbioRing:
        self.under_way, self.prepared = self.under_way + self.prepared, []
        return self

    def wait(self, *, max_results: int = 0, min_results: int = 0, timeout: Any = None) -> list[Any]:
        assert min_results <= len(self.under_way), "would wait for ever"
        if self.module.lost:
            return []
        done = []
        count = min(max(min_results, max_results), self.module.at_once)
        now, self.under_way = self.under_way[:count], self.under_way[count:]
        for iov, fd, off, userdata in now:
            result = -errno.EIO
            if not self.module.failing:
                result = (os.preadv if self.for_read else os.pwritev)(fd, [iov.view], off)
            self.module.moved += 1
            done.append(SimpleNamespace(result=result, userdata=userdata))
        return done


@pytest.fixture
def usrbio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Usrbio:
    module = Usrbio(tmp_path)
    monkeypatch.setitem(sys.modules, "hf3fs_fuse", ModuleType("hf3fs_fuse"))
    monkeypatch.setitem(sys.modules, "hf3fs_fuse.io", module)
    return module


def test_on_a_3fs_mount_records_go_through_its_ring(tmp_path: Path, usrbio: Usrbio) -> None:
    store = open_store(tmp_path, backend="auto", threads=2, background=True)
    assert store.ready(PATIENCE) and store.mover.name == "usrbio"
    chain = Chain(1, 9)
    assert chain.publish(store) == [Status.OK] * 9 and chain.fetch(store) == [Status.OK] * 9
    assert usrbio.moved == 18 and not usrbio.registered
    usrbio.failing = True
    assert chain.fetch(store) == [Status.IO_ERROR] * 9
    usrbio.failing = False
    assert chain.fetch(store) == [Status.OK] * 9
    store.close()
    assert not usrbio.registered


def test_a_ring_of_3fs_may_bring_results_one_by_one_late_or_never(tmp_path: Path, usrbio: Usrbio) -> None:
    store = open_store(tmp_path, backend="auto", threads=2, background=True, retry_seconds=0.0)
    assert store.ready(PATIENCE) and store.mover.name == "usrbio"
    usrbio.at_once = 1
    chain = Chain(1, 9)
    assert chain.publish(store) == [Status.OK] * 9 and chain.fetch(store) == [Status.OK] * 9
    usrbio.lost = True
    assert chain.fetch(store, 0, 1) == [Status.IO_ERROR], "a read that never comes back ends"
    usrbio.lost = False
    assert chain.fetch(store) == [Status.OK] * 9, "the result of a read that was given up is another's"
    usrbio.lost = True
    for _ in range(len(store.mover._slots)):
        assert chain.fetch(store, 0, 1) == [Status.IO_ERROR]
    usrbio.lost = False
    assert chain.fetch(store, 0, 1) == [Status.IO_ERROR], "memory that a late answer may reach was used again"
    assert not usrbio.registered and all(not s.users for s in store.catalog.by_stem.values())
    store.close()


def test_off_a_3fs_mount_its_ring_is_not_used(tmp_path: Path, usrbio: Usrbio) -> None:
    usrbio.mount = tmp_path / "elsewhere"
    store = open_store(tmp_path, backend="auto", background=True)
    assert store.mover.name != "usrbio"
    store.close()


def forbidden(*_: Any) -> Any:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize(("native", "reason"), [(True, "not permitted"), (False, "no native part")])
def test_without_io_uring_threads_do_the_work_and_an_event_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                   caplog: pytest.LogCaptureFixture, native: bool,
                                                                   reason: str) -> None:
    monkeypatch.setattr(NativeRecords, "open_ring", forbidden)
    store = open_store(tmp_path, backend="io_uring", background=True, native=native)
    assert store.mover.name == "threads"
    assert any("store_backend_refused backend=io_uring" in r.message and reason in r.message
               and "instead=threads" in r.message for r in caplog.records)
    chain = Chain(1, 5)
    assert chain.publish(store) == [Status.OK] * 5 and chain.fetch(store) == [Status.OK] * 5
    store.close()


def test_io_uring_is_taken_where_it_may_be_opened_else_threads_without_a_warning(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        taken = open_store(tmp_path / "allowed", backend="auto", background=True, native=True)
        ring_of(taken.native).close()
        monkeypatch.setattr(NativeRecords, "open_ring", forbidden)
        refused = open_store(tmp_path / "forbidden", backend="auto", background=True, native=True)
    assert (taken.mover.name, refused.mover.name) == ("io_uring", "threads")
    assert any("backend=threads" in r.message and "not_io_uring" in r.message for r in caplog.records)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    taken.close()
    refused.close()


@pytest.mark.parametrize("backend", ["inline", "threads", "io_uring"])
@pytest.mark.parametrize("depth", [0, 2, -3])
def test_a_ring_reads_into_the_callers_slots(tmp_path: Path, backend: str, depth: int) -> None:
    store = open_store(tmp_path, backend=backend, threads=2, background=backend != "inline")
    store.ready(PATIENCE)
    chain = Chain(1, 8)
    chain.publish(store)
    other = Chain(1, 8)
    other.ids[5 * 16] += 1  # another block with the same key
    arena = open_arena(store, 8 * LAYOUT.stride)
    slots, ring = arena.take(8), Ring(store, arena, entries=8, io_depth=depth)
    locators = locate(store, chain.keys, other.ids)
    assert len(locators) == 8
    for slot, locator in zip(slots, locators, strict=True):
        ring.prep(slot, locator, ("tag", slot))
    with pytest.raises(Exception, match="ring is full"):
        ring.prep(slots[0], locators[0], None)
    assert ring.submit() == 8
    results: dict[Any, Status] = {}
    until = time.monotonic() + PATIENCE
    while len(results) < 8 and time.monotonic() < until:
        results.update(ring.poll(1, until))
    for i, slot in enumerate(slots):
        if i == 5:
            assert results["tag", slot] is Status.MISS
        else:
            assert results["tag", slot] is Status.OK
            payload = arena.view(slot)[LAYOUT.offsets[0] : LAYOUT.offsets[-1]]
            assert np.array_equal(np.frombuffer(payload, np.uint8), chain.payload(i))
    for locator in locators:
        locator.release()
    assert all(s.pins == 0 for s in store.catalog.by_stem.values())
    del payload
    store.close()
    arena.close()


# ---- Mooncake ----
def test_mooncake_holds_records_that_prove_themselves(tmp_path: Path) -> None:
    cluster = Cluster()
    tier = MooncakeTier(settings(tmp_path, threads=2), LAYOUT, cluster)
    chain = Chain(1, 6)
    assert tier.lookup(chain.keys) == 0
    assert chain.publish(tier, flags=Flags.REPLAYED) == [Status.OK] * 6  # type: ignore[arg-type]
    assert tier.lookup(chain.keys) == 6 and chain.fetch(tier) == [Status.OK] * 6  # type: ignore[arg-type]
    assert chain.fetch(tier, exact=True) == [Status.MISS] * 6  # type: ignore[arg-type]
    name = next(n for n in cluster.objects if n.endswith(chain.key(2).hex()))
    cluster.objects[name] = cluster.objects[name][:1000] + b"rot" + cluster.objects[name][1003:]
    assert chain.fetch(tier)[2] is Status.DAMAGED  # type: ignore[arg-type]
    assert tier.lookup(chain.keys) == 2, "a damaged record is removed"
    cluster.answers = False
    assert tier.lookup(chain.keys) == 0 and chain.fetch(tier) == [Status.MISS] * 6  # type: ignore[arg-type]
    assert Chain(2, 1).publish(tier) == [Status.IO_ERROR]  # type: ignore[arg-type]
    tier.close()
    assert not cluster.memory


def test_a_client_of_mooncake_that_raises_leaves_no_ticket_open(tmp_path: Path) -> None:
    cluster, chain = Cluster(), Chain(1, 2)
    tier = MooncakeTier(settings(tmp_path, threads=1), LAYOUT, cluster)
    assert chain.publish(tier) == [Status.OK] * 2  # type: ignore[arg-type]
    cluster.raises = True
    assert Chain(2, 1).publish(tier) == [Status.IO_ERROR]  # type: ignore[arg-type]
    assert chain.fetch(tier) == [Status.MISS] * 2  # type: ignore[arg-type]
    assert tier.lookup(chain.keys) == 0
    tier.close()


@pytest.fixture
def mooncake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return install(tmp_path, monkeypatch)


def test_tiers_of_mooncake_share_the_client_that_the_environment_describes(mooncake: Cluster, tmp_path: Path) -> None:
    opens = opener(settings(tmp_path, backend="mooncake"), None)
    assert mooncake.told == ("me", "P2PHANDSHAKE", 3200 << 20, 1 << 30, "rdma", "")
    blocks, windows = opens(LAYOUT), opens(replace(LAYOUT, kind=KIND_WINDOWS))
    chain = Chain(1, 3)
    assert chain.publish(blocks) == [Status.OK] * 3  # type: ignore[arg-type]
    assert blocks.lookup(chain.keys) == 3 and windows.lookup(chain.keys) == 0
    salt = blocks.tenant_salt("acme")
    assert windows.tenant_salt("acme") == salt != blocks.tenant_salt("other")
    assert {path.parent.name for path in (tmp_path / "store").rglob("*") if path.is_file()} == {"salts"}
    blocks.close()
    windows.close()


@pytest.mark.parametrize(("breaks", "says"), [
    (lambda cluster, config: setattr(cluster, "answers", False), "does not take this client; found code -1"),
    (lambda cluster, config: config.unlink(), "not a configuration"),
    (lambda cluster, config: config.write_text("[]"), "says too little"),
    (lambda cluster, config: config.write_text('{"local_hostname": "me"}'), "found no metadata_server, master_server"),
    (lambda cluster, config: config.write_text(config.read_text().replace('"me"', "5")), "incompatible function"),
    (lambda cluster, config: os.environ.pop(CONFIG), "found not set"),
    (lambda cluster, config: sys.modules.update({"mooncake.store": None}), "pip install mooncake-transfer-engine"),
], ids=["no answer", "no file", "a list", "half", "a number", "no variable", "no package"])
def test_a_cluster_of_mooncake_that_cannot_be_had_is_one_sentence(mooncake: Cluster, tmp_path: Path, says: str,
                                                                  breaks: Callable[..., object]) -> None:
    breaks(mooncake, tmp_path / "mooncake.json")
    with pytest.raises(DeepInferError, match=says):
        opener(settings(tmp_path, backend="mooncake"), None)
