"""An engine folder as an installable wheel, by the binary distribution format: a zip with RECORD, nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import zipfile
from pathlib import Path

from deepinfer.codegen.cache import sync
from deepinfer.codegen.package.manifest import NAME
from deepinfer.runtime.checkpoint.packed import FOLDER

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date of a zip: equal engines make equal wheels
_FILE_MODE = 0o100644 << 16


def write_wheel(engine: Path, folder: Path) -> Path:
    """Write ``<name>-<version>-py3-none-<platform>.whl`` of an engine into ``folder``; replaces an older one.

    The distribution is named for the engine; it requires the package that runs it. Packed weights stay out.
    """
    name, manifest = engine.name, json.loads((engine / NAME).read_bytes())
    version = str(manifest["version"])
    tag = f"py3-none-{_platform(manifest['machine'])}"
    info = f"{name}-{version}.dist-info"
    payload = {f"{name}/{p.relative_to(engine)}": p.read_bytes() for p in engine.rglob("*")
               if p.is_file() and not {"__pycache__", FOLDER} & set(p.relative_to(engine).parts)}
    payload[f"{info}/METADATA"] = _metadata(name, version, manifest["model"]["name"], manifest["target"]).encode()
    payload[f"{info}/WHEEL"] = (f"Wheel-Version: 1.0\nGenerator: deepinfer-aot {version}\n"
                                f"Root-Is-Purelib: false\nTag: {tag}\n").encode()
    record = "".join(f"{path},sha256={_hash(data)},{len(data)}\n" for path, data in sorted(payload.items()))
    payload[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    wheel = folder / f"{name}-{version}-{tag}.whl"
    aside = wheel.with_name(f".{wheel.name}.making-{os.getpid()}")
    try:
        _write_zip(aside, payload, last=f"{info}/")
        sync(aside)
        os.replace(aside, wheel)
    finally:
        aside.unlink(missing_ok=True)
    sync(folder)
    return wheel


def _write_zip(file: Path, payload: dict[str, bytes], last: str) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as z:
        for path in sorted(payload, key=lambda p: (p.startswith(last), p)):
            entry = zipfile.ZipInfo(path, _EPOCH)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, _FILE_MODE
            z.writestr(entry, payload[path])


def _platform(machine: str) -> str:
    return f"{platform.system().lower()}_{machine}".replace("-", "_").replace(".", "_")


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode("ascii")


def _metadata(name: str, version: str, model: str, target: str) -> str:
    return (f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            f"Summary: {model} compiled ahead of time for {target}\n"
            f"Requires-Python: >=3.11\nRequires-Dist: deepinfer-aot>={version}\n")
