"""``manifest.json``: what an engine is, and how a reader tells a whole and fitting one from anything else.

Nothing in it depends on the folder, the time or the machine's paths: equal inputs give equal bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer.codegen.cache import file_digest
from deepinfer.errors import ArtifactError

NAME, KIND = "manifest.json", "deepinfer-engine"
FORMAT = 1
READS = (1, 1)  # oldest and newest format that this version loads
_TABLE_HEAD = b"deepinfer-launch "
_COMMAND = "deepinfer-compile --model CHECKPOINT --out {out}, with the options that it was compiled with"
_DIGEST, _FILES = "digest", "files"
EXPLANATION = "explain.json"
# of an engine's folder
_ENTRIES = {NAME, "__init__.py", "__pycache__", EXPLANATION, "lib", "licenses", "report.html", "src", "weights"}


def seal(content: Mapping[str, Any], folder: Path) -> bytes:
    """The manifest's text: ``content``, sha256 and length of every other file of ``folder``, and its own digest."""
    files = {str(p.relative_to(folder)): {"sha256": file_digest(p), "bytes": p.stat().st_size}
             for p in sorted(folder.rglob("*")) if p.is_file() and p.name != NAME}
    whole = {"kind": KIND, "format": FORMAT, **content, _FILES: files}
    return _text({**whole, _DIGEST: _digest(whole)})


def is_engine(folder: Path) -> bool:
    """Whether a folder is an engine of some format, whole or not: also one whose manifest is damaged or gone."""
    return _says_engine(folder) or _bears_mark(folder)


def is_replaceable(folder: Path) -> bool:
    """Whether a compile may replace a folder: an engine, and where only its remains say so, nothing but an engine's."""
    if _says_engine(folder):
        return True
    with contextlib.suppress(OSError):
        return {p.name for p in folder.iterdir()} <= _ENTRIES and _bears_mark(folder)
    return False


def _says_engine(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / NAME).read_bytes())["kind"] == KIND)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _bears_mark(folder: Path) -> bool:
    """Whether what is left of a damaged engine tells it from a foreign folder."""
    with contextlib.suppress(OSError):
        if f'"kind": "{KIND}"'.encode() in (folder / NAME).read_bytes():
            return True
    with contextlib.suppress(OSError), (folder / "lib" / "launch.txt").open("rb") as table:
        return table.read(len(_TABLE_HEAD)) == _TABLE_HEAD
    return False


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an engine whose files are all whole.

    Raises ArtifactError for a folder that is no engine, a format outside ``READS`` (with the version that wrote it and
    the command that rebuilds it), and a missing or damaged file by name.
    """
    if not folder.is_dir():
        raise ArtifactError("there is no such engine folder", where=str(folder),
                            next_step="check the path, or compile the engine")
    if not (folder / NAME).is_file():
        if is_engine(folder):
            raise _damaged(folder, NAME, "no file", {})
        raise ArtifactError("the folder is no engine", where=str(folder), found=f"no {NAME}",
                            next_step="give a folder that deepinfer-compile wrote")
    manifest = _read_json(folder)
    _check_format(manifest, folder)
    whole = {k: v for k, v in manifest.items() if k != _DIGEST}
    if manifest.get(_DIGEST) != _digest(whole):
        raise _damaged(folder, NAME, "another content than was written", manifest)
    for name, entry in manifest[_FILES].items():
        _check_file(folder, name, entry, manifest)
    return manifest


def rebuild_command(manifest: Mapping[str, Any], folder: Path) -> str:
    """The command that compiles this engine again."""
    return str(manifest.get("command", _COMMAND)).replace("{out}", str(folder))


def _read_json(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / NAME).read_bytes())
    except ValueError as error:
        if not is_engine(folder):
            raise ArtifactError("the folder is no engine", where=str(folder), found=f"a {NAME} that is no JSON",
                                next_step="give a folder that deepinfer-compile wrote") from None
        raise _damaged(folder, NAME, f"no JSON ({error})", {}) from None
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        if is_engine(folder):
            raise _damaged(folder, NAME, "another content than was written", {})
        raise ArtifactError("the folder is no engine", where=str(folder), found=f"another program's {NAME}",
                            next_step="give a folder that deepinfer-compile wrote")
    return manifest


def _check_format(manifest: Mapping[str, Any], folder: Path) -> None:
    written = manifest.get("format")
    if isinstance(written, int) and READS[0] <= written <= READS[1]:
        return
    newer = isinstance(written, int) and written > READS[1]
    readable = str(READS[0]) if READS[0] == READS[1] else f"{READS[0]}..{READS[1]}"
    upgrade = "upgrade deepinfer-aot, or " if newer else ""
    raise ArtifactError(f"the engine has {'a newer' if newer else 'an older'} format than this version reads",
                        where=str(folder), allowed=f"format {readable}",
                        found=f"format {written}, written by version {manifest.get('version', 'unknown')}",
                        next_step=f"{upgrade}compile again: {rebuild_command(manifest, folder)}")


def _check_file(folder: Path, name: str, entry: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    file = folder / name
    if not file.is_file():
        raise _damaged(folder, name, "no file", manifest)
    size = file.stat().st_size
    if size != entry["bytes"]:
        raise _damaged(folder, name, f"{size} bytes for {entry['bytes']}", manifest)
    if file_digest(file) != entry["sha256"]:
        raise _damaged(folder, name, "another content than was written", manifest)


def _damaged(folder: Path, name: str, found: str, manifest: Mapping[str, Any]) -> ArtifactError:
    return ArtifactError("the engine is damaged", where=str(folder / name), found=found,
                         next_step=f"compile again: {rebuild_command(manifest, folder)}")


def _digest(whole: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(whole)).hexdigest()


def _text(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()
