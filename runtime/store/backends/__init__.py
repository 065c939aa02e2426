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
from deepinfer.runtime.store.settings import AUTO, INLINE, THREADS, USRBIO, StoreSettings


def open_mover(settings: StoreSettings, arena: Arena, reader: Reader, native: NativeRecords | None) -> Mover:
    """The backend of the settings where it works, else threads; an event says which and why. A cache is no reason not
    to serve: nothing is raised."""
    if settings.backend == INLINE:
        return InlineMover(arena, reader)
    preferred = USRBIO if settings.backend == AUTO else settings.backend
    mover, refusal = None, ""
    if preferred != THREADS:
        mover, refusal = _preferred(preferred, settings, arena, reader, native)
    mover = mover or ThreadMover(settings, arena, reader, native)
    events.info("store_backend", backend=mover.name, **({f"not_{preferred}": refusal} if refusal else {}))
    if refusal and settings.backend != AUTO:
        events.warn("store_backend_refused", backend=settings.backend, reason=refusal, instead=mover.name)
    return mover


def _preferred(name: str, settings: StoreSettings, arena: Arena, reader: Reader,
               native: NativeRecords | None) -> tuple[Mover | None, str]:
    """The backend, or None and why it cannot be had."""
    if name == USRBIO:
        refusal = usrbio_refusal(settings.folder)
        return (None, refusal) if refusal else (UsrbioMover(settings, arena, reader), "")
    try:
        return UringMover(settings, arena, reader, native), ""
    except OSError as failure:
        return None, failure.strerror or "no io_uring"
