"""A folder that is written beside its place; the next writer removes what a killed one left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_TAKEN_SECONDS = 60  # until a folder that was just made is surely locked by its owner


@contextlib.contextmanager
def aside_of(name: str, parent: Path) -> Iterator[Path]:
    """An empty folder in ``parent`` for what is to become ``name`` there; gone afterwards unless it was renamed.

    Its owner holds a lock on it as long as it lives, so that folders of other writers are told from leftovers.
    """
    remove_leftovers(name, parent)
    aside = Path(tempfile.mkdtemp(prefix=_prefix(name), dir=parent))
    lock = os.open(aside, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        aside.chmod(0o755)
        yield aside
    finally:
        os.close(lock)
        shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(name: str, parent: Path) -> None:
    """Removes what killed writers of ``name`` left. Folders of living ones, or where locks cannot be had, stay."""
    for left in parent.glob(f"{_prefix(name)}*"):
        if not left.name.endswith(".old"):  # those are exchanged at this moment
            _remove_unheld(left)


def _prefix(name: str) -> str:
    return f".{name}.making-"


def _remove_unheld(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if time.time() - folder.stat().st_mtime < _TAKEN_SECONDS:
            return
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
