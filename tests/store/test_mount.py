"""A store on a mount as 3FS gives one through FUSE, by its path: what is asked of it, and what happens when it goes.

The mount is a stand-in: a folder where the calls that such a mount refuses are refused.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store.recording import Op, Recording
from store.scenario import Life
from store.witness_store import LAYOUT, PATIENCE, Chain, Clocks, open_store

from deepinfer.runtime.store import Status, Store
from deepinfer.runtime.store.files import Files
from deepinfer.runtime.store.lease import Writer
from deepinfer.runtime.store.points import Point


class Mount:
    """A folder where direct I/O, reserving space and punching holes are refused. ``refused``: what was asked for."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.refused = folder, list[str]()
        folder.mkdir()
        self._open, self._reserve = os.open, os.posix_fallocate
        monkeypatch.setattr(os, "open", self.open)
        monkeypatch.setattr(os, "posix_fallocate", self.reserve)
        monkeypatch.setattr("deepinfer.runtime.store.files._fallocate", self.punch)

    def open(self, path: Any, flags: int, *given: Any, **named: Any) -> int:
        if flags & os.O_DIRECT and Path(path).is_relative_to(self.folder):
            self.refused.append("direct")
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return self._open(path, flags, *given, **named)

    def reserve(self, fd: int, offset: int, size: int) -> None:
        if not Path(os.readlink(f"/proc/self/fd/{fd}")).is_relative_to(self.folder):
            return self._reserve(fd, offset, size)
        self.refused.append("reserve")
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    def punch(self, fd: int, mode: int, offset: int, size: int) -> None:
        self.refused.append("punch")


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mount:
    return Mount(tmp_path / "mount", monkeypatch)


@pytest.mark.parametrize("backend", ["auto", "threads"])
def test_two_hosts_share_a_mount_without_direct_io_reservation_or_holes(
        tmp_path: Path, mount: Mount, caplog: pytest.LogCaptureFixture, backend: str) -> None:
    given = {"shared": mount.folder / "store", "backend": backend, "threads": 2, "background": True, "native": True}
    caplog.set_level(logging.INFO, "deepinfer")
    store, chain = open_store(tmp_path, **given), Chain(1, 11)
    assert store.ready(PATIENCE) and store.mover.name in ("threads", "io_uring") and store.native is not None
    assert backend == "threads" or any("store_backend" in r.message and "not_usrbio=" in r.message and
                                       "hf3fs_fuse" in r.message for r in caplog.records), "nothing says why not"
    assert chain.publish(store) == [Status.OK] * 11 and chain.fetch(store) == [Status.OK] * 11
    store.close()
    assert set(mount.refused) == {"direct", "reserve", "punch"}
    sealed = sorted(mount.folder.rglob("*.seg"))
    assert len(sealed) == 3 and not list(mount.folder.rglob("*.open"))
    assert all(path.stat().st_size == store.catalog.layout.capacity(store.settings.segment_bytes) * LAYOUT.stride
               + 3 * 4096 for path in sealed), "files have their whole size although nothing could be reserved"
    other = open_store(tmp_path, index=tmp_path / "index of another host",
                       writer=Writer("b" * 12, "another host", "boot", 1, 1), **given)
    assert other.ready(PATIENCE) and chain.fetch(other) == [Status.OK] * 11
    other.close()


def mappings(folder: Path) -> dict[str, str]:
    """Permissions of what this process has mapped of files in a folder, by path."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return {line[5]: line[1] for line in lines if len(line) == 6 and line[5].startswith(str(folder))}


def test_nothing_of_a_mount_is_mapped_and_the_index_only_for_reading(tmp_path: Path, mount: Mount) -> None:
    store = open_store(tmp_path, shared=mount.folder / "store", backend="threads", threads=2, background=True,
                       native=True)
    chain = Chain(1, 9)
    assert store.ready(PATIENCE) and chain.publish(store) == [Status.OK] * 9
    assert chain.fetch(store) == [Status.OK] * 9
    found = mappings(tmp_path)
    store.close()
    assert not [path for path in found if path.startswith(str(mount.folder))]
    writable = {Path(path).name for path, modes in found.items() if "w" in modes}
    assert {Path(path).name for path in found} == {"data.mdb", "lock.mdb"}
    assert writable == {"lock.mdb"}, "LMDB's table of readers holds nothing that is served; all else is mapped to read"


def test_names_are_changed_within_a_folder_and_only_of_what_is_synced(tmp_path: Path) -> None:
    """What the store needs of rename and fsync, on the whole life of scenario.py: a mount that keeps these keeps it."""
    files = Recording(tmp_path)
    assert Life(tmp_path, files).run()
    ops = files.ops
    renamed = [i for i, op in enumerate(ops) if op.kind == "rename" and under(op, tmp_path / "store")]
    sealed = [i for i in renamed if str(ops[i].target).endswith(".seg")]
    assert sealed
    for i in renamed:
        assert ops[i].path is not None and ops[i].target is not None and ops[i].path.parent == ops[i].target.parent
    for i in sealed:
        path, target = ops[i].path, ops[i].target
        assert path is not None and target is not None
        inode = next(op.inode for op in reversed(ops[:i]) if op.kind == "create" and op.path is not None
                     and op.path.stem[:28] == path.stem[:28] and op.path.suffix != ".log")
        written = last(ops[:i], lambda op, inode=inode: op.kind in ("write", "punch") and op.inode == inode)
        synced = last(ops[:i], lambda op, inode=inode: op.kind == "sync" and op.inode == inode)
        assert written < synced < i, f"{target.name} got its name before its bytes were synced"
        after = [op for op in ops[i + 1 :] if op.kind in ("sync_folder", "unlink") and (
            op.path == target.parent or (op.path is not None and op.path.parent == target.parent))]
        assert after and after[0].kind == "sync_folder", "something was unlinked before the name was durable"


def under(op: Op, folder: Path) -> bool:
    return op.path is not None and op.path.is_relative_to(folder)


def last(ops: list[Op], which: Callable[[Op], bool]) -> int:
    return max((i for i, op in enumerate(ops) if which(op)), default=-1)


class Client(Files):
    """The process behind a FUSE mount. ``dead``: calls fail as they do when it has ended; ``asked`` and ``answers``:
    it is asked for names, and answers when it may."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.dead = folder, False
        self.asked, self.answers = threading.Event(), threading.Event()
        self.answers.set()

    def _ask(self) -> None:
        if self.dead:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(self.folder))

    def open(self, path: Path, **given: Any) -> int:
        if path.is_relative_to(self.folder):
            self._ask()
        return super().open(path, **given)

    def read(self, fd: int, buffers: Any, offset: int) -> int:
        self._ask()
        return super().read(fd, buffers, offset)

    def write(self, fd: int, buffers: Any, offset: int, point: Point) -> int:
        self._ask()
        return super().write(fd, buffers, offset, point)

    def sync(self, fd: int, point: Point) -> None:
        self._ask()
        super().sync(fd, point)

    def rename(self, source: Path, target: Path, point: Point) -> None:
        self._ask()
        super().rename(source, target, point)

    def unlink(self, path: Path, point: Point) -> None:
        self._ask()
        super().unlink(path, point)

    def names(self, path: Path) -> list[str]:
        if path.is_relative_to(self.folder):
            self.asked.set()
            self.answers.wait(2 * PATIENCE)
            self._ask()
        return super().names(path)

    def stat(self, path: Path) -> os.stat_result:
        self._ask()
        return super().stat(path)


def test_a_mount_whose_client_died_means_cold_prefills_and_one_warning_each(tmp_path: Path,
                                                                            caplog: pytest.LogCaptureFixture) -> None:
    clocks, client = Clocks(), Client(tmp_path / "mount")
    client.folder.mkdir()
    store = open_store(tmp_path, shared=client.folder / "store", files=client, clocks=clocks, retry_seconds=0.0)
    chain, more = Chain(1, 6), Chain(2, 6)
    assert chain.publish(store) == [Status.OK] * 6 and chain.fetch(store) == [Status.OK] * 6
    client.dead = True
    with caplog.at_level(logging.WARNING, "deepinfer"):
        for _ in range(3):
            assert not {Status.OK, Status.PENDING} & set(chain.fetch(store))
            assert set(more.publish(store)) <= {Status.IO_ERROR, Status.FULL}
            store.upkeep.tick()
            store.upkeep.everything()
    told = [r.message for r in caplog.records if "store_degraded" in r.message]
    assert all("not connected" in message for message in told)
    assert sorted(message.split("what=")[1].split()[0] for message in told) == ["publishing", "reading"], told
    client.dead = False
    store.upkeep.tick()
    assert store.lookup(chain.keys) == 6 and chain.fetch(store) == [Status.OK] * 6
    assert more.publish(store) == [Status.OK] * 6
    store.close()


def test_lookups_and_closing_do_not_wait_for_a_mount_that_gives_no_names(tmp_path: Path,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.runtime.store.store._PATIENCE", 0.2)
    client = Client(tmp_path / "mount")
    client.folder.mkdir()
    store: Store = open_store(tmp_path, shared=client.folder / "store", files=client, backend="threads", threads=2,
                              background=True, tick_seconds=0.001)
    chain = Chain(1, 6)
    assert store.ready(PATIENCE) and chain.publish(store) == [Status.OK] * 6
    client.answers.clear()
    client.asked.clear()
    assert client.asked.wait(PATIENCE), "the store looks at its folder again"
    assert store.lookup(chain.keys) == 6 and chain.fetch(store) == [Status.OK] * 6
    store.close()
    assert not client.answers.is_set(), "closing came back while the mount was silent"
    client.answers.set()
