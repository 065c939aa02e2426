"""Small records of what was found out about an engine on a machine, one JSON file for each identity."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def record_file(folder: Path, identity: Mapping[str, str]) -> Path:
    """Where the record of an identity lies."""
    key = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()
    return folder / f"{key}.json"


def write_record(file: Path, record: Mapping[str, Any]) -> None:
    """Whole or not at all: written beside, synced, renamed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as f:
        json.dump(dict(record), f, indent=1, sort_keys=True)
        f.flush()
        os.fsync(f.fileno())
    aside.replace(file)


def machine_identity() -> str:
    """Kind and instruction set of the processor."""
    flags = ""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                flags = " ".join(sorted(line.split(":", 1)[1].split()))
                break
    except OSError:
        pass
    return f"{platform.machine()} {hashlib.sha256(flags.encode()).hexdigest()[:16]}"
