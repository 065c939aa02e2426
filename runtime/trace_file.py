"""Trace files for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def lane_names(lanes: Sequence[str], pid: int = 1, process: str = "") -> list[dict[str, Any]]:
    """Events that name the lanes (thread ids 0, 1, ...) of a process, and the process."""
    named = [{"ph": "M", "pid": pid, "tid": i, "name": "thread_name", "args": {"name": n}} for i, n in enumerate(lanes)]
    return named + ([{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}}] if process else [])


def write_trace(file: Path, events: Sequence[Mapping[str, Any]]) -> None:
    """Write a trace whole or not at all; times of events in microseconds."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    aside.write_text(json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}), encoding="utf-8")
    aside.replace(file)
