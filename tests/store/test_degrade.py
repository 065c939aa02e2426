"""A folder that is full, read-only, gone or does not answer: nothing raises, nothing waits, nothing wrong is served."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from store.witness_store import LAYOUT, PATIENCE, Chain, Clocks, open_store, wait_for

from deepinfer.runtime.store import Status
from deepinfer.runtime.store.files import Files
from deepinfer.runtime.store.health import WARN_SECONDS, Health
from deepinfer.runtime.store.metrics import StoreMetrics
from deepinfer.runtime.store.points import Point
from deepinfer.runtime.store.time_guard import TimeGuard


class FullDisk(Files):
    """No space for new segments beyond ``room``."""

    room = 0

    def allocate(self, fd: int, size: int, point: Point) -> None:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= 1
        super().allocate(fd, size, point)

    def unlink(self, path: Path, point: Point) -> None:
        self.room += path.suffix in (".dead", ".seg")
        super().unlink(path, point)


class ReadOnly(Files):
    """Nothing under ``folder`` can be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _refuse(self, path: Path) -> None:
        if path.is_relative_to(self.folder):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def open(self, path: Path, *, write: bool = False, create: bool = False, direct: bool = False,
             point: Point = Point.OTHER) -> int:
        if write or create:
            self._refuse(path)
        return super().open(path, write=write, create=create, direct=direct, point=point)

    def mkdir(self, path: Path, point: Point) -> None:
        self._refuse(path)
        super().mkdir(path, point)

    def rename(self, source: Path, target: Path, point: Point) -> None:
        self._refuse(source)
        super().rename(source, target, point)

    def unlink(self, path: Path, point: Point) -> None:
        self._refuse(path)
        super().unlink(path, point)


class Hanging(Files):
    """Reads wait while ``answers`` is not set. ``hanging``: how many do."""

    def __init__(self) -> None:
        self.answers, self.hanging = threading.Event(), 0
        self.answers.set()
        self._lock = threading.Lock()

    def _count(self, change: int) -> None:
        with self._lock:
            self.hanging += change

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._count(1)
        try:
            self.answers.wait(2 * PATIENCE)
            return super().read(fd, buffers, offset)
        finally:
            self._count(-1)


def test_a_full_disk_ends_publishing_and_not_serving(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = FullDisk()
    files.room = 1
    store, chain = open_store(tmp_path, files=files), Chain(1, 4)
    assert chain.publish(store) == [Status.OK] * 4
    pin = store.pin(chain.keys)
    with caplog.at_level(logging.WARNING, "deepinfer"):
        assert Chain(2, 6).publish(store) == [Status.FULL] * 6
    assert chain.fetch(store) == [Status.OK] * 4
    assert len([r for r in caplog.records if "store_degraded" in r.message]) == 1
    pin.release()
    store.close()


def test_a_full_disk_gives_up_what_ends_first(tmp_path: Path) -> None:
    files = FullDisk()
    files.room = 2
    store = open_store(tmp_path, files=files)
    old, mid, new = Chain(1, 4), Chain(2, 4), Chain(3, 4)
    for chain, cls in ((old, "agent"), (mid, "chat"), (new, "chat")):
        assert chain.publish(store, cls=cls) == [Status.OK] * 4
    assert [store.lookup(c.keys) for c in (old, mid, new)] == [0, 4, 4]
    store.close()


def test_a_read_only_folder_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chain, store = Chain(1, 6), open_store(tmp_path)
    chain.publish(store)
    store.close()
    with caplog.at_level(logging.WARNING, "deepinfer"):
        store = open_store(tmp_path, files=ReadOnly(tmp_path / "store"))
        assert chain.fetch(store) == [Status.OK] * 6
        assert set(Chain(2, 6).publish(store)) <= {Status.IO_ERROR, Status.FULL}
        for _ in range(5):
            store.upkeep.tick()
            store.upkeep.everything()
        assert chain.fetch(store) == [Status.OK] * 6
        store.close()
    told = [r.message for r in caplog.records if "store_degraded" in r.message]
    assert len(told) == 1 and "Read-only file system" in told[0], told


def test_a_folder_that_is_missing_or_goes_away_means_misses_until_it_is_back(tmp_path: Path) -> None:
    place = tmp_path / "mount" / "store"
    store, chain = open_store(tmp_path, shared=place, retry_seconds=0.0), Chain(1, 6)
    assert store.lookup(chain.keys) == 0 and chain.fetch(store) == [Status.MISS] * 6
    assert set(chain.publish(store)) <= {Status.IO_ERROR, Status.FULL}
    assert not place.parent.exists(), "the place of an absent mount was filled in"
    place.parent.mkdir()
    store.upkeep.tick()
    assert chain.publish(store) == [Status.OK] * 6
    away = place.parent.rename(tmp_path / "away")
    store.upkeep.tick()
    assert store.lookup(chain.keys) == 0 and chain.fetch(store) == [Status.MISS] * 6
    store.upkeep.everything()
    away.rename(place.parent)
    store.upkeep.tick()
    assert store.lookup(chain.keys) == 6 and chain.fetch(store) == [Status.OK] * 6
    store.close()


def test_a_mount_that_does_not_answer_costs_one_deadline_and_no_wrong_byte(tmp_path: Path) -> None:
    files, clocks = Hanging(), Clocks()
    store = open_store(tmp_path, clocks=clocks, files=files, backend="threads", threads=2, background=True, timeout=0.2,
                       retry_seconds=0.5)
    store.ready(PATIENCE)
    chain = Chain(1, 6)
    assert chain.publish(store) == [Status.OK] * 6
    files.answers.clear()
    into = np.full((6, LAYOUT.payload_bytes), 7, dtype=np.uint8)
    tickets = [store.fetch(chain.keys, chain.ids, [[row] for row in into]) for _ in range(2)]
    assert set(store.poll(tickets[0], time.monotonic() + 0.1)) == {Status.CANCELLED}
    time.sleep(0.3)
    assert set(store.poll(tickets[1])) == {Status.CANCELLED}, "a poll without a deadline keeps to the timeout"
    late = store.fetch(chain.keys, chain.ids, [[row] for row in into])
    time.sleep(0.3)
    store.poll(late)
    assert store.lookup(chain.keys) == 0, "reading is left alone after two timeouts"
    assert files.hanging > 0, "nothing waited for the mount"
    files.answers.set()

    def served() -> bool:
        clocks.forward(store.settings.retry_seconds)  # a slow machine may be late twice again
        return chain.fetch(store) == [Status.OK] * 6

    assert wait_for(served) and store.lookup(chain.keys) == 6
    assert wait_for(lambda: not files.hanging)
    store.close()
    assert (into == 7).all(), "a late answer wrote into memory that was given up"


def test_closing_does_not_wait_for_a_mount_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.runtime.store.store._PATIENCE", 0.2)
    files = Hanging()
    store = open_store(tmp_path, files=files, backend="threads", threads=1, background=True)
    store.ready(PATIENCE)
    chain = Chain(1, 4)
    chain.publish(store)
    files.answers.clear()
    into = np.zeros((4, LAYOUT.payload_bytes), dtype=np.uint8)
    ticket = store.fetch(chain.keys, chain.ids, [[row] for row in into])
    assert wait_for(lambda: files.hanging > 0)
    store.close()
    assert files.hanging > 0, "closing has waited for the mount"
    assert set(ticket.statuses) == {Status.CANCELLED}
    files.answers.set()
    assert wait_for(lambda: not files.hanging)
    time.sleep(0.2)  # for what a reader would do behind its read: later it would only make the test weaker
    assert not into.any(), "a late answer wrote into memory that may be gone"


def test_a_record_that_rots_is_damaged_once_and_then_a_miss(tmp_path: Path) -> None:
    """20 places of a record: header, ids, every section. The first request sees damage, the second none."""
    chain = Chain(1, 2)
    for at in np.linspace(0, LAYOUT.record_bytes - 1, 20).astype(int).tolist():
        folder = tmp_path / str(at)
        folder.mkdir()
        store = open_store(folder)
        chain.publish(store)
        store.writers.rotate(everything=True)
        (path,) = folder.rglob("*.seg")
        with path.open("r+b") as file:
            file.seek(4096 + LAYOUT.stride + at)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 4]))
        store.catalog.drop_all()
        store.upkeep.see()
        assert chain.fetch(store) == [Status.OK, Status.DAMAGED], at
        assert store.lookup(chain.keys) == 1
        assert chain.fetch(store) == [Status.OK, Status.MISS]
        assert store.metrics().damaged.value == 1
        assert chain.publish(store, [1]) == [Status.OK] and chain.fetch(store) == [Status.OK] * 2
        store.close()


def test_a_segment_that_is_cut_short_loses_what_is_cut(tmp_path: Path) -> None:
    store, chain = open_store(tmp_path), Chain(1, 4)
    chain.publish(store)
    store.writers.rotate(everything=True)
    (path,) = tmp_path.rglob("*.seg")
    os.truncate(path, 4096 + 2 * LAYOUT.stride + 300)
    assert chain.fetch(store) == [Status.OK, Status.OK, Status.DAMAGED, Status.DAMAGED]
    store.close()


def test_a_segment_with_much_damage_is_set_aside(tmp_path: Path) -> None:
    store = open_store(tmp_path, bad_after=3)
    chain = Chain(1, 4)
    chain.publish(store)
    store.writers.rotate(everything=True)
    (path,) = tmp_path.rglob("*.seg")
    with path.open("r+b") as file:
        for slot in range(3):
            file.seek(4096 + slot * LAYOUT.stride + 2000)
            file.write(b"rotten")
    assert [chain.fetch(store, i, i + 1)[0] for i in range(3)] == [Status.DAMAGED] * 3
    assert not list(tmp_path.rglob("*.seg")) and len(list(tmp_path.rglob("*.bad"))) == 1
    assert chain.fetch(store, 3, 4) == [Status.MISS]
    store.close()


# ---- warnings and clocks --------------------------------------------------------------------------------------------
def test_the_same_trouble_is_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = [1000.0]
    health = Health(Path("/store"), 60.0, StoreMetrics(), lambda: clock[0])
    with caplog.at_level(logging.WARNING, "deepinfer"):
        for _ in range(100):
            clock[0] += WARN_SECONDS / 40
            health.failed("publishing", OSError(errno.ENOSPC, "No space left on device"))
    assert len(caplog.records) == 3
    assert "what=publishing" in caplog.records[0].message and "No space left" in caplog.records[0].message


def guard_of(folder: Path, clocks: Clocks) -> TimeGuard:
    return TimeGuard(folder / "clock", Files(), lambda: clocks.wall, lambda: clocks.up)


def test_store_time_never_runs_backwards_nor_faster_than_the_machine_is_up(tmp_path: Path) -> None:
    clocks = Clocks()
    guard = guard_of(tmp_path, clocks)
    began = guard.now()
    clocks.wall -= 10 * 86_400
    assert guard.now() == began
    clocks.wall += 400 * 86_400
    clocks.up += 3600
    assert guard.now() == began + 3600
    guard.save()
    clocks.wall = began - 86_400
    assert guard_of(tmp_path, clocks).now() == began + 3600, "a restart with a clock that lost its time"


def test_a_clock_that_is_ahead_at_the_start_expires_a_tenth_in_the_first_hour(tmp_path: Path) -> None:
    clocks = Clocks()
    store = open_store(tmp_path, clocks=clocks)
    for seed in range(20):
        Chain(seed, 4).publish(store)
    store.close()
    clocks.forward(365 * 86_400)
    store = open_store(tmp_path, clocks=clocks)
    for _ in range(5):
        store.upkeep.everything()
    assert len(list(tmp_path.rglob("*.seg"))) == 18
    clocks.up += 3600
    store.upkeep.everything()
    assert not list(tmp_path.rglob("*.seg"))
    store.close()


