"""The first steps of an engine process as a file for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepinfer.runtime import events
from deepinfer.runtime.backend import Engine, Outputs
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.trace_file import lane_names, write_trace

_LANES = ("loop", "engine", "requests")


class StepTrace:
    """Collects spans until ``steps`` steps have run, then writes ``file``.

    Lanes: what the loop does (messages, the whole step, sending), the engine's own part of a step with its rows and
    sequences, and each request from arrival to its end.
    """

    def __init__(self, steps: int, file: Path) -> None:
        self._left, self._file = steps, file
        self._zero = time.monotonic()
        self._events: list[dict[str, Any]] = lane_names(_LANES)

    @property
    def active(self) -> bool:
        """Whether spans are still collected."""
        return self._left > 0

    @contextmanager
    def span(self, lane: str, name: str, **shown: object) -> Iterator[None]:
        """Time what happens inside."""
        began = time.monotonic()
        try:
            yield
        finally:
            if self.active:
                self._add({"ph": "X", "tid": _LANES.index(lane), "name": name, "ts": self._us(began),
                           "dur": self._us(time.monotonic()) - self._us(began), "args": shown})

    def request(self, key: int, begins: bool, **shown: object) -> None:
        """A request arrives or ends."""
        if self.active:
            self._add({"ph": "b" if begins else "e", "cat": "request", "id": key, "tid": _LANES.index("requests"),
                       "name": f"request {key}", "ts": self._us(time.monotonic()), "args": shown})

    def stepped(self) -> None:
        """A step is over; the last one writes the file."""
        if not self.active:
            return
        self._left -= 1
        if not self._left:
            self.write()

    def write(self) -> None:
        """Write what there is, whole or not at all."""
        self._left = 0
        write_trace(self._file, self._events)
        events.info("profile_written", file=self._file, spans=len(self._events))

    def _us(self, moment: float) -> float:
        return (moment - self._zero) * 1e6

    def _add(self, event: dict[str, Any]) -> None:
        self._events.append({"pid": 1, **event})


class TracedEngine:
    """An engine whose runs are spans."""

    def __init__(self, engine: Engine, trace: StepTrace) -> None:
        self._engine, self._trace = engine, trace

    @property
    def checkpoint(self) -> Path | None:
        return self._engine.checkpoint

    def run(self, entry: str, batch: Batch, pins: Mapping[str, Any] | None = None) -> Outputs:
        rows = int(batch.sequences[: batch.count]["rows"].sum())
        with self._trace.span("engine", entry, rows=rows, sequences=batch.count):
            return self._engine.run(entry, batch, pins)

    def state(self, name: str, unit: int) -> Any:
        return self._engine.state(name, unit)

    def close(self) -> None:
        self._engine.close()
