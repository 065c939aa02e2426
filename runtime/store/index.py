"""Where records lie: an LMDB map from key to hint, one for each host and namespace, rebuilt from the logs at will.

Several processes of a host share it: readers take no lock, writers one that survives their death. Nothing is synced
and nothing is written through the map. Only an index that its last user closed is used again; its stamp, the xxh3 of
the file, says so. Any error of LMDB moves everybody to a new generation beside the old one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import xxhash
from numpy.typing import NDArray

from deepinfer.runtime import events
from deepinfer.runtime.prefix.chain import KEY_BYTES, KEYS
from deepinfer.runtime.store.files import FILE_MODE, Files, write_aside
from deepinfer.runtime.store.layout import aligned
from deepinfer.runtime.store.points import Point
from deepinfer.runtime.store.tier import Flags

HINT = np.dtype([("number", "<u4"), ("slot", "<u4"), ("head", "<u8"), ("used", "<u4"), ("flags", "u1"), ("spare", "V3"),
                 ("sum", "<u8")])
Hints = NDArray[np.void]
Alive = Callable[[NDArray[np.uint32]], NDArray[np.bool_]]
TOUCHED = 0x80  # in the flags of a hint: used late in its life
RECORD_COST = 320  # bytes of the map that a record takes at most, half-filled pages included
_SEGMENT = struct.Struct("<IQ")  # number, bytes of the log that are in
_HINT, _WORDS = struct.Struct("<IIQIB3xQ"), struct.Struct("<QQ")
_MIX, _SPREAD, _MASK = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, (1 << 64) - 1
_NEXT = b"\0next"
_BATCH = 128
_CHUNK = 1 << 20


Keys = Sequence[bytes] | bytes  # of 16 bytes each; bytes: joined


def joined(keys: Keys) -> bytes:
    return keys if isinstance(keys, bytes) else b"".join(keys)


def hint_sums(keys: Keys, hints: Hints) -> NDArray[np.uint64]:
    """[n] checks of hints with their keys: a value under another key is none."""
    k = np.frombuffer(joined(keys), dtype=np.uint64).reshape(-1, 2)
    x: NDArray[np.uint64] = k[:, 0] * np.uint64(_MIX) ^ k[:, 1]
    for field in ("number", "slot", "head", "used", "flags"):
        x = (x ^ hints[field].astype(np.uint64)) * np.uint64(_SPREAD)
        x ^= x >> np.uint64(32)
    return x


def hints_of(keys: Keys, number: int, slots: Any, heads: Any, used: Any, flags: Any) -> Hints:
    """Values for ``keys``: records of segment ``number``."""
    keys = joined(keys)
    hints = np.zeros(len(keys) // KEY_BYTES, dtype=HINT)
    hints["number"], hints["slot"], hints["head"], hints["used"], hints["flags"] = number, slots, heads, used, flags
    hints["sum"] = hint_sums(keys, hints)
    return hints


class Index:
    """See the module. ``folder`` lies on a local disk; every method survives LMDB's errors (``broken`` turns true).

    Without a folder it knows nothing and keeps nothing.
    """

    def __init__(self, folder: Path | None, map_size: int, files: Files | None = None) -> None:
        self.folder, self.map_size, self.files = folder or Path(os.devnull), map_size, files or Files()
        self.rebuilt = False  # whether it began empty
        self.broken = False
        self._lock = threading.Lock()
        self._generation = Path()
        self._users = -1
        self._env: lmdb.Environment | None = None
        if folder is not None:
            self.files.make_folder(folder)
            self._open()

    # ---- opening and closing --------------------------------------------------------------------------------------
    def _open(self) -> None:
        with self._gate():
            self._generation, newest = self._newest()
            alone = self._alone(self._generation)
            if newest and not (alone and not self._clean()) and not (self._generation / "bad").exists():
                self.rebuilt = False
            else:
                self._generation = self.folder / f"g{self._number(self._generation) + 1:06d}"
                self.files.make_folder(self._generation)
                self.rebuilt = True
            try:
                self._begin()
            except lmdb.Error as failure:
                events.warn("store_index_rebuilt", folder=self.folder, reason=failure)
                self._generation = self.folder / f"g{self._number(self._generation) + 1:06d}"
                self.files.make_folder(self._generation)
                self.rebuilt = True
                self._begin()
            self._forget_old()

    def _begin(self) -> None:
        self._users = os.open(self._generation / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        fcntl.flock(self._users, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            self.files.unlink(self._generation / "stamp", Point.STAMP)
        env = lmdb.open(str(self._generation), map_size=self.map_size, max_dbs=2, max_readers=1024, sync=False,
                        metasync=False, writemap=False, mode=FILE_MODE, readahead=False)
        env.reader_check()
        self._keys, self._segments = env.open_db(b"keys"), env.open_db(b"segments")
        self._env, self.broken = env, False

    def _newest(self) -> tuple[Path, bool]:
        found = sorted(name for name in self.files.names(self.folder) if name.startswith("g") and name[1:].isdigit())
        return (self.folder / found[-1], True) if found else (self.folder / "g000000", False)

    @staticmethod
    def _number(generation: Path) -> int:
        return int(generation.name[1:])

    @staticmethod
    def _alone(generation: Path) -> bool:
        """Whether no process uses a generation."""
        try:
            fd = os.open(generation / "users", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            return False
        finally:
            os.close(fd)

    def _clean(self) -> bool:
        """Whether the last user closed the newest generation, and the file is what it closed."""
        try:
            stamp = (self._generation / "stamp").read_text()
            return stamp == self._file_sum()
        except OSError:
            return False

    def _file_sum(self) -> str:
        state = xxhash.xxh3_64()
        with (self._generation / "data.mdb").open("rb") as file:
            while data := file.read(_CHUNK):
                state.update(data)
        return str(state.hexdigest())

    def _forget_old(self) -> None:
        for name in self.files.names(self.folder):
            older = name.startswith("g") and name[1:].isdigit() and name < self._generation.name
            if older and self._alone(self.folder / name):
                for file in self.files.names(self.folder / name):
                    with contextlib.suppress(OSError):
                        os.unlink(self.folder / name / file)
                with contextlib.suppress(OSError):
                    os.rmdir(self.folder / name)

    @contextlib.contextmanager
    def _gate(self) -> Iterator[None]:
        fd = os.open(self.folder / "gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def close(self) -> None:
        """Leave it; the last one out stamps it clean."""
        if self._env is None:
            return
        with self._lock, self._gate():
            env, self._env = self._env, None
            sound = not self.broken and not (self._generation / "bad").exists()
            if sound:
                with contextlib.suppress(lmdb.Error):
                    env.sync(True)
            env.close()
            os.close(self._users)
            if sound and self._alone(self._generation):
                with contextlib.suppress(OSError):
                    write_aside(self.files, self._generation / "stamp", self._file_sum().encode(), Point.STAMP)

    def abandon(self) -> None:
        """Leave it as a process that is killed does: unstamped."""
        env, self._env = self._env, None
        if env is not None:
            env.close()
            os.close(self._users)

    def renew(self) -> bool:
        """Move to a new generation when this one is broken, here or for another process. Returns whether it did."""
        if self._env is None or not (self.broken or (self._generation / "bad").exists()):
            return False
        with self._lock:
            with contextlib.suppress(OSError):
                (self._generation / "bad").touch(FILE_MODE)
            os.close(self._users)
            self._env = None  # closes when the last transaction of another thread lets go of it
            self._open()
        return True

    @contextlib.contextmanager
    def _transaction(self, write: bool = False) -> Iterator[Any]:
        """A transaction; an error of LMDB in it marks the index broken and goes no further."""
        env = self._env
        if env is None or self.broken:
            yield None
            return
        try:
            with env.begin(write=write) as txn:
                yield txn
        except lmdb.Error as failure:
            if not self.broken:
                events.warn("store_index_broken", folder=self.folder, reason=failure)
            if isinstance(failure, lmdb.MapFullError):
                self.map_size *= 2
            self.broken = True

    # ---- records --------------------------------------------------------------------------------------------------
    def leading(self, keys: Sequence[bytes]) -> Hints:
        """Sound hints of the leading keys that have one."""
        values: list[bytes] = []
        with self._transaction() as txn:
            if txn is not None:
                cursor = txn.cursor(self._keys)
                for first in range(0, len(keys), _BATCH):
                    part = keys[first : first + _BATCH]
                    found = cursor.getmulti(part)
                    # Keys that are absent are left out: what stands at its own place is leading.
                    whole = next((i for i, (key, _) in enumerate(found) if key != part[i]), len(found))
                    values += [value for _, value in found[:whole]]
                    if whole < len(part):
                        break
        hints = np.frombuffer(b"".join(values), dtype=HINT)
        sound = hint_sums(keys[: len(hints)], hints) == hints["sum"]
        return hints if sound.all() else hints[: int(np.argmin(sound))]

    def get(self, key: bytes) -> np.void | None:
        """The sound hint of a key."""
        return self.find([key])[0]

    def find(self, keys: Sequence[bytes]) -> list[np.void | None]:
        """The sound hints of any keys, in one transaction."""
        values: list[bytes | None] = [None] * len(keys)
        with self._transaction() as txn:
            if txn is not None:
                values = [txn.get(key, db=self._keys) for key in keys]
        return [_sound(key, value) for key, value in zip(keys, values, strict=True)]

    def put(self, keys: Keys, hints: Hints, alive: Alive,
            consumed: Sequence[tuple[str, int, int]]) -> int:
        """Insert hints: where there is none, where the one there is of a dead segment or damaged, and exact ones over
        replayed ones. Returns how many went in.

        ``consumed``: (stem, number, bytes of the log that are in now) of the segments they are of; the same
        transaction.
        """
        added = 0
        with self._transaction(write=True) as txn:
            if txn is not None:
                added = self._put(txn, keys, hints, alive)
                for stem, number, size in consumed:
                    txn.put(stem.encode(), _SEGMENT.pack(number, size), db=self._segments)
        return added

    def _put(self, txn: Any, keys: Keys, hints: Hints, alive: Alive) -> int:
        raw = joined(keys)
        words = np.frombuffer(raw, dtype=">u8").reshape(-1, 2)
        order = np.lexsort((words[:, 1], words[:, 0]))  # neighbours share pages of the tree
        names, values = np.frombuffer(raw, dtype=KEYS)[order].tobytes(), hints[order].tobytes()
        items = list(zip(_pieces(names, KEY_BYTES), _pieces(values, HINT.itemsize), strict=True))
        cursor = txn.cursor(self._keys)
        consumed, added = cursor.putmulti(items, overwrite=False)
        if added == consumed:
            return int(added)
        for key, value in items:
            there = cursor.get(key)
            if there == value:
                continue
            old, new = _sound(key, there), np.frombuffer(value, dtype=HINT)[0]
            better = old is None or not alive(old["number"].reshape(1))[0] or (
                old["flags"] & Flags.REPLAYED and not new["flags"] & Flags.REPLAYED)
            if better:
                cursor.put(key, value)
                added += 1
        return int(added)

    def replace(self, key: bytes, old: np.void, new: Hints | None) -> bool:
        """Compare and set: ``new`` ([1], or None: delete) where the hint is still ``old``."""
        done = False
        with self._transaction(write=True) as txn:
            if txn is not None and txn.get(key, db=self._keys) == old.tobytes():
                done = bool(txn.delete(key, db=self._keys) if new is None else
                            txn.put(key, new.tobytes(), db=self._keys))
        return done

    def sweep(self, after: bytes, most: int) -> tuple[int, bytes]:
        """Delete hints of segments that were forgotten, among up to ``most`` keys after ``after``; (deleted, where to
        go on). What is forgotten is seen in the same transaction: another process may have begun a segment just now.
        """
        deleted, last = 0, b""
        with self._transaction(write=True) as txn:
            if txn is not None:
                keys, values = self._page(txn, after, most)
                if keys:
                    known = [_SEGMENT.unpack(v)[0] for k, v in txn.cursor(self._segments).iternext() if k != _NEXT]
                    hints = np.frombuffer(b"".join(values), dtype=HINT)
                    for i in np.nonzero(~np.isin(hints["number"], known))[0].tolist():
                        deleted += txn.delete(keys[i], db=self._keys)
                    last = keys[-1] if len(keys) == most else b""
        return deleted, last

    def scan(self, most: int = 8192) -> Iterator[tuple[list[bytes], Hints]]:
        """All keys with their hints, in pieces; each piece is one short read transaction."""
        last = b""
        while True:
            keys: list[bytes] = []
            values: list[bytes] = []
            with self._transaction() as txn:
                if txn is not None:
                    keys, values = self._page(txn, last, most)
            if not keys:
                return
            yield keys, np.frombuffer(b"".join(values), dtype=HINT)
            last = keys[-1]

    def _page(self, txn: Any, after: bytes, most: int) -> tuple[list[bytes], list[bytes]]:
        cursor = txn.cursor(self._keys)
        keys: list[bytes] = []
        values: list[bytes] = []
        if not cursor.set_range(after):
            return keys, values
        for key, value in cursor.iternext():
            if key != after:
                keys.append(key)
                values.append(value)
                if len(keys) == most:
                    break
        return keys, values

    # ---- segments -------------------------------------------------------------------------------------------------
    def segments(self) -> dict[str, tuple[int, int]]:
        """(number, log bytes that are in) of all segments ever seen, by stem."""
        found = {}
        with self._transaction() as txn:
            if txn is not None:
                for stem, value in txn.cursor(self._segments).iternext():
                    if stem != _NEXT:
                        found[stem.decode()] = _SEGMENT.unpack(value)
        return found

    def number(self, stem: str) -> int:
        """The number that stands for a segment; given on first sight. 0 when the index is broken."""
        with self._transaction(write=True) as txn:
            if txn is not None:
                value = txn.get(stem.encode(), db=self._segments)
                if value is not None:
                    return int(_SEGMENT.unpack(value)[0])
                number = int.from_bytes(txn.get(_NEXT, b"\1", db=self._segments), "little")
                txn.put(_NEXT, (number + 1).to_bytes(4, "little"), db=self._segments)
                txn.put(stem.encode(), _SEGMENT.pack(number, 0), db=self._segments)
                return number
        return 0

    def consume(self, stem: str, number: int, size: int) -> None:
        """Note that ``size`` bytes of a segment's log are in the index."""
        with self._transaction(write=True) as txn:
            if txn is not None:
                txn.put(stem.encode(), _SEGMENT.pack(number, size), db=self._segments)

    def forget(self, stem: str) -> None:
        """Drop a segment that is gone; its number is not given again."""
        with self._transaction(write=True) as txn:
            if txn is not None:
                txn.delete(stem.encode(), db=self._segments)

    @property
    def off(self) -> bool:
        """Whether it knows and keeps nothing at the moment."""
        return self._env is None or self.broken

    @property
    def records(self) -> int:
        with self._transaction() as txn:
            if txn is not None:
                return int(txn.stat(self._keys)["entries"])
        return 0


def _pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def map_size_for(quota: int, stride: int) -> int:
    """Bytes of the map for all records that a quota holds, twice over; 16 MiB to 16 TiB, from where on it grows with
    what is in it: addresses are limited."""
    return aligned(min(max(1 << 24, 2 * RECORD_COST * (quota // stride)), 1 << 44))


def _sound(key: bytes, value: bytes | None) -> np.void | None:
    if value is None or len(value) != HINT.itemsize:
        return None
    hint = np.frombuffer(value, dtype=HINT)[0]
    return hint if _sum_of(key, value) == hint["sum"] else None


def _sum_of(key: bytes, value: bytes) -> int:
    """``hint_sums`` of one, in plain numbers: a tenth of the time."""
    low, high = _WORDS.unpack(key)
    x: int = (low * _MIX ^ high) & _MASK
    for field in _HINT.unpack(value)[:5]:
        x = (x ^ field) * _SPREAD & _MASK
        x ^= x >> 32
    return x
