"""Threads that read through an io_uring each: a thread keeps several records under way and proves one while the others
come. Containers often forbid it: opening says so, and plain threads do the work.

Records are written with pwritev, and what is read into a caller's own memory with preadv, as in threads.py.
"""

from __future__ import annotations

import errno

from deepinfer.runtime.store.backends.threads import ThreadMover
from deepinfer.runtime.store.bulk import Way
from deepinfer.runtime.store.native.library import NativeRecords
from deepinfer.runtime.store.settings import URING

_DEPTH = 8  # records under way in a thread


class UringMover(ThreadMover):
    """``settings.threads`` threads with a ring each. Raises OSError where one cannot be had."""

    name = URING
    slots_each = _DEPTH

    def _open(self, native: NativeRecords | None, threads: int, most: int) -> list[Way]:
        if native is None:
            raise OSError(errno.ENOSYS, "no native part, which holds the ring")
        rings: list[Way] = []
        try:
            for _ in range(min(threads, most)):
                rings.append(native.open_ring(_DEPTH))
        except OSError:
            for ring in rings:
                if ring is not None:
                    ring.close()
            raise
        return rings
