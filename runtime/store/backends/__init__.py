"""What moves records between a folder and memory. ``open_mover`` takes the first that works here, and says which."""

from __future__ import annotations

from deepinfer.runtime import events
from deepinfer.runtime.store.arena import Arena
from deepinfer.runtime.store.backends.mover import Mover
from deepinfer.runtime.store.backends.threads import InlineMover, ThreadMover
from deepinfer.runtime.store.backends.uring import UringMover
from deepinfer.runtime.store.backends.usrbio import UsrbioMover, usrbio_refusal
from deepinfer.runtime.store.native.library import NativeRecords
from deepinfer.runtime.store.reader import Reader
from deepinfer.runtime.store.settings import AUTO, INLINE, THREADS, URING, USRBIO, StoreSettings

_BEFORE_THREADS = {AUTO: (USRBIO, URING), THREADS: ()}  # others: what they name


def open_mover(settings: StoreSettings, arena: Arena, reader: Reader, native: NativeRecords | None) -> Mover:
    """The backend of the settings where it works, else threads; an event says which and why. A cache is no reason not
    to serve: nothing is raised."""
    if settings.backend == INLINE:
        return InlineMover(arena, reader)
    refused: dict[str, str] = {}
    mover: Mover | None = None
    for name in _BEFORE_THREADS.get(settings.backend, (settings.backend,)):
        mover, refusal = _tried(name, settings, arena, reader, native)
        if mover is not None:
            break
        refused[name] = refusal
    mover = mover or ThreadMover(settings, arena, reader, native)
    events.info("store_backend", backend=mover.name, **{f"not_{name}": why for name, why in refused.items()})
    if settings.backend in refused:
        events.warn("store_backend_refused", backend=settings.backend, reason=refused[settings.backend],
                    instead=mover.name)
    return mover


def _tried(name: str, settings: StoreSettings, arena: Arena, reader: Reader,
           native: NativeRecords | None) -> tuple[Mover | None, str]:
    """The backend, or None and why it cannot be had."""
    if name == USRBIO:
        refusal = usrbio_refusal(settings.folder)
        return (None, refusal) if refusal else (UsrbioMover(settings, arena, reader), "")
    try:
        return UringMover(settings, arena, reader, native), ""
    except OSError as failure:
        return None, failure.strerror or "no io_uring"
