"""The one content-addressed cache: everything a compiler made, under the hash of everything that made it.

An entry is a folder ``<root>/<first two hex digits>/<digest>`` with the files, ``key.json`` (what the digest
is the hash of, readable) and ``sums.json`` (sha256 of each file). Entries are written beside their place,
synced and renamed, so a reader meets a whole entry or none; two writers of one entry are harmless. A damaged
entry counts as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from deepinfer.disk import no_room, of_the_machine, room_in

VARIABLE = "DEEPINFER_CACHE_DIR"
_ELSEWHERE = f"name another cache folder with {VARIABLE}"
ADVICE = f"free space there, or {_ELSEWHERE}"
_KEY, _SUMS, _ASIDE = "key.json", "sums.json", ".making-"
_ABANDONED_SECONDS = 24 * 3600  # no compile takes a day: an older unfinished entry is a crash's


@dataclass(frozen=True)
class Entry:
    """A cached result. ``files``: name -> path inside the entry; ``hit``: whether it was there already."""

    digest: str
    folder: Path
    files: dict[str, Path]
    hit: bool


def cache_root() -> Path:
    """``DEEPINFER_CACHE_DIR``, else ``deepinfer-aot`` in the user's cache folder."""
    named = os.environ.get(VARIABLE, "")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "deepinfer-aot"


def digest_of(key: Mapping[str, Any]) -> str:
    """sha256 of the key as canonical JSON. A key holds text, hashes and versions, never a local path."""
    return hashlib.sha256(_canonical(key)).hexdigest()


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


class Cache:
    """Content-addressed store of build results.

    ``fetch(key, make)`` returns the entry of ``key``; on a miss ``make(folder)`` writes its files into an
    empty folder (top level only). An exception of ``make`` leaves nothing behind. ``made``: what this process made so
    far, in all caches.
    """

    made: ClassVar[int] = 0

    def __init__(self, root: Path | None = None) -> None:
        self.root = root if root is not None else cache_root()

    def lookup(self, key: Mapping[str, Any]) -> Entry | None:
        """The whole and undamaged entry of ``key``, or None."""
        digest = digest_of(key)
        folder = self._place(digest)
        try:
            if (folder / _KEY).read_bytes() != _canonical(key):
                return None
            sums: dict[str, str] = json.loads((folder / _SUMS).read_bytes())
            files = {name: folder / name for name in sums}
            if any(file_digest(files[name]) != total for name, total in sums.items()):
                return None
        except (OSError, ValueError):
            return None
        return Entry(digest, folder, files, hit=True)

    def fetch(self, key: Mapping[str, Any], make: Callable[[Path], None]) -> Entry:
        """The entry of ``key``, made by ``make`` when it is absent or damaged.

        Raises PlanError, which names the cache's folder, when there is no room for it, ArtifactError when that folder
        cannot be made.
        """
        found = self.lookup(key)
        if found is not None:
            return found
        digest = digest_of(key)
        place = self._place(digest)
        with room_in(self.root, ADVICE):
            return self._make(digest, place, key, make)

    def _make(self, digest: str, place: Path, key: Mapping[str, Any], make: Callable[[Path], None]) -> Entry:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            if no_room(failure, self.root, ADVICE) is None:
                raise of_the_machine(failure, _ELSEWHERE) or failure from None
            raise
        self._sweep(place.parent)
        aside = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=place.parent))
        try:
            make(aside)
            names = sorted(p.name for p in aside.iterdir())
            sums = {name: file_digest(aside / name) for name in names}
            (aside / _KEY).write_bytes(_canonical(key))
            (aside / _SUMS).write_bytes(_canonical(sums))
            for name in (*names, _KEY, _SUMS):
                sync(aside / name)
            self._publish(aside, place, key)
            Cache.made += 1
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return Entry(digest, place, {name: place / name for name in names}, hit=False)

    def _place(self, digest: str) -> Path:
        return self.root / digest[:2] / digest

    def _publish(self, aside: Path, place: Path, key: Mapping[str, Any]) -> None:
        aside.chmod(0o755)  # mkdtemp made it private
        try:
            os.rename(aside, place)
        except OSError:
            if self.lookup(key) is not None:
                return  # another process published the same entry first
            damaged = aside.with_name(aside.name + ".damaged")
            os.rename(place, damaged)
            os.rename(aside, place)
            shutil.rmtree(damaged, ignore_errors=True)
        sync(place.parent)

    @staticmethod
    def _sweep(folder: Path) -> None:
        for left in folder.glob(_ASIDE + "*"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _canonical(value: Any) -> bytes:
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True) + "\n").encode()
