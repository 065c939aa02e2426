"""What works of the folder at the moment. Nothing here raises; everything is said once a minute at most."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path

from deepinfer.runtime import events
from deepinfer.runtime.store.metrics import StoreMetrics

WARN_SECONDS = 60.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
READING, PUBLISHING = "reading", "publishing"


def is_full(failure: OSError) -> bool:
    return failure.errno in _FULL


class Health:
    """Switches reading or publishing off for a while after the folder failed at it."""

    def __init__(self, folder: Path, retry: float, metrics: StoreMetrics,
                 monotonic: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._retry, self._metrics, self._monotonic = folder, retry, metrics, monotonic
        self._off = {READING: 0.0, PUBLISHING: 0.0}
        self._warned: dict[str, float] = {}
        self._lock = threading.Lock()

    def works(self, what: str) -> bool:
        """Whether ``reading`` or ``publishing`` is to be tried."""
        return self._monotonic() >= self._off[what]

    def failed(self, what: str, failure: object, off: bool = True) -> None:
        """Note a failure; ``off``: leave it for ``retry`` seconds."""
        now = self._monotonic()
        with self._lock:
            if off:
                self._off[what] = now + self._retry
            self._metrics.faults.add(label=what)
            topic = f"{what} {type(failure).__name__} {getattr(failure, 'errno', '')}"
            if now - self._warned.get(topic, -WARN_SECONDS) < WARN_SECONDS:
                return
            self._warned[topic] = now
        reason = failure.strerror or failure if isinstance(failure, OSError) else failure
        events.warn("store_degraded", what=what, folder=self._folder, reason=reason, off=off,
                    effect="requests run cold" if what == READING else "nothing is stored")

    def recovered(self, what: str) -> None:
        """It works again."""
        self._off[what] = 0.0
