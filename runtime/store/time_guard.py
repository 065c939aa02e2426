"""Store time: wall time that never runs backwards, never faster than the machine is up, and survives a restart.

Expiry hangs on it and correctness does not. A clock that jumps ahead while the store runs is followed at the pace of
the monotonic clock; one that is ahead at the start may expire a tenth of the segments in the first hour.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from deepinfer.runtime.store.files import Files, write_aside
from deepinfer.runtime.store.points import Point
from deepinfer.runtime.store.settings import HOUR

FIRST_SHARE = 0.1  # of the segments, expired in the first hour


class TimeGuard:
    """``file`` holds the latest store time between runs. Clocks are arguments for the tests."""

    def __init__(self, file: Path, files: Files, wall: Callable[[], float] = time.time,
                 monotonic: Callable[[], float] = time.monotonic) -> None:
        self._file, self._files, self._wall, self._monotonic = file, files, wall, monotonic
        self._lock = threading.Lock()
        self._started = self._seen = monotonic()
        self._now = max(self._stored(), wall())

    def now(self) -> float:
        """Seconds."""
        with self._lock:
            monotonic = self._monotonic()
            self._now = max(self._now, min(self._wall(), self._now + monotonic - self._seen))
            self._seen = monotonic
            return self._now

    @property
    def up(self) -> float:
        """Seconds of the monotonic clock."""
        return self._monotonic()

    @property
    def hour(self) -> int:
        return int(self.now() // HOUR)

    def may_expire(self, segments: int, expired: int) -> int:
        """How many more of ``segments`` may expire now, after ``expired`` did since the start."""
        if self._monotonic() - self._started >= HOUR:
            return segments
        return max(0, max(1, int((segments + expired) * FIRST_SHARE)) - expired)

    def save(self) -> None:
        """Remember the time for the next start."""
        with contextlib.suppress(OSError):
            write_aside(self._files, self._file, f"{self.now():.0f}\n".encode(), Point.OTHER)

    def _stored(self) -> float:
        try:
            return float(self._file.read_text())
        except (OSError, ValueError):
            return 0.0
