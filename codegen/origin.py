"""Which checkpoint folder an engine was compiled from, as this machine remembers it.

An engine itself names no path, so that equal inputs give equal engines; a note in the cache does.
"""

from __future__ import annotations

import json
from pathlib import Path

from deepinfer.codegen.cache import cache_root
from deepinfer.codegen.package.manifest import read_manifest
from deepinfer.runtime.records import record_file, write_record


def remember(engine: Path, model: str) -> None:
    """Note that ``engine`` was compiled from the folder ``model``; a hub id is in the engine's manifest already."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        write_record(_file(engine), {"engine": str(engine.resolve()), "digest": read_manifest(engine)["digest"],
                                     "checkpoint": str(folder.resolve())})


def checkpoint_of(engine: Path) -> str | None:
    """The folder that ``engine`` was compiled from, if it is known, still there and the engine still the same."""
    try:
        found = json.loads(_file(engine).read_text(encoding="utf-8"))
        known, digest = Path(found["checkpoint"]), found["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(known) if known.is_dir() and digest == read_manifest(engine)["digest"] else None


def _file(engine: Path) -> Path:
    return record_file(cache_root() / "origins", {"engine": str(engine.resolve())})
