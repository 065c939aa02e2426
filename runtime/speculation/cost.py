"""What a step costs by its rows, and a block of drafts by its sequences, and where that is kept."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer.runtime import events
from deepinfer.runtime.records import record_file, write_record

_FORM = 1  # of the record


@dataclass(frozen=True)
class CostCurve:
    """Seconds at measured sizes, rising; between two of them the line that joins them, beyond the last one on.

    A staircase has a point on both sides of each edge. ``rows`` and ``step_seconds``: of a step; ``sequences`` and
    ``draft_seconds``: of one block of drafts for each of so many sequences.
    """

    rows: tuple[int, ...]
    step_seconds: tuple[float, ...]
    sequences: tuple[int, ...]
    draft_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        for sizes, seconds in ((self.rows, self.step_seconds), (self.sequences, self.draft_seconds)):
            if not sizes or len(sizes) != len(seconds) or any(b <= a for a, b in pairwise(sizes)):
                raise ValueError("sizes of a cost curve rise, each with its seconds")
            if not all(math.isfinite(s) and s >= 0 for s in seconds):
                raise ValueError("seconds of a cost curve are finite and not negative")

    def step(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Seconds of steps of so many rows."""
        return _at(rows, self.rows, self.step_seconds)

    def draft(self, sequences: int) -> float:
        """Seconds of a block for each of so many sequences."""
        return float(_at(sequences, self.sequences, self.draft_seconds)) if sequences else 0.0

    def record(self) -> dict[str, Any]:
        return {"form": _FORM, "rows": list(self.rows), "step_seconds": list(self.step_seconds),
                "sequences": list(self.sequences), "draft_seconds": list(self.draft_seconds)}


def _at(x: ArrayLike, sizes: tuple[int, ...], seconds: tuple[float, ...]) -> NDArray[np.float64]:
    at = np.asarray(x, np.float64)
    out = np.interp(at, sizes, seconds)
    if len(sizes) > 1:
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        out = out + np.maximum(0.0, at - sizes[-1]) * slope
    return np.asarray(out, np.float64)


def curve_of(record: object) -> CostCurve | None:
    """The curve of a record; None for anything else."""
    if not isinstance(record, dict) or record.get("form") != _FORM:
        return None
    try:
        rows, step, sequences, draft = (record[name] for name in ("rows", "step_seconds", "sequences", "draft_seconds"))
        return CostCurve(tuple(map(int, rows)), tuple(map(float, step)), tuple(map(int, sequences)),
                         tuple(map(float, draft)))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def rising(seconds: list[float]) -> tuple[float, ...]:
    """Measured times without what makes a smaller step look dearer than a larger one. Noise only adds: it is the
    smaller one's time that is wrong."""
    return tuple(float(x) for x in np.minimum.accumulate(seconds[::-1])[::-1])


@dataclass(frozen=True)
class CostRecord:
    """Where a curve, and what drafts were worth, is kept from one start to the next.

    ``folder``: of all records; None: nothing is kept. ``identity``: engine and machine, whatever decides the times.
    """

    folder: Path | None
    identity: Mapping[str, str]

    @property
    def file(self) -> Path | None:
        return None if self.folder is None else record_file(self.folder, self.identity)

    def read(self) -> tuple[CostCurve | None, object]:
        """The curve, None where there is none or it cannot be read, and what was kept of acceptance."""
        if self.file is None:
            return None, None
        try:
            found = json.loads(self.file.read_text(encoding="utf-8"))
            return curve_of(found.get("curve")), found.get("acceptance")
        except (OSError, ValueError, AttributeError, RecursionError):
            return None, None

    def write(self, curve: CostCurve, acceptance: object = None) -> None:
        """Instead of what was kept before; where that fails it is said, and the engine goes on."""
        if self.file is None:
            return
        try:
            write_record(self.file, {"curve": curve.record(), "acceptance": acceptance, **self.identity})
        except OSError as error:
            events.warn("costs_not_kept", file=self.file, reason=error)


def kept_curve(record: CostRecord, measure: Callable[[], CostCurve]) -> CostCurve:
    """The recorded curve, else a new one, which is recorded."""
    curve, _ = record.read()
    if curve is None:
        curve = measure()
        events.info("costs_measured", rows=curve.rows[-1], step_seconds=curve.step_seconds[-1],
                    draft_seconds=curve.draft_seconds[-1], file=record.file)
        record.write(curve)
    return curve
