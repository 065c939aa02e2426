"""What moves records between a folder and memory. ``open_mover`` takes the first that works here, and says which."""

from __future__ import annotations

from deepinfer.runtime import events
from deepinfer.runtime.store.arena import Arena
from deepinfer.runtime.store.backends.mover import Mover
from deepinfer.runtime.store.backends.threads import InlineMover, ThreadMover
from deepinfer.runtime.store.backends.uring import UringMover, uring_refusal
from deepinfer.runtime.store.backends.usrbio import UsrbioMover, usrbio_refusal
from deepinfer.runtime.store.reader import Reader
from deepinfer.runtime.store.settings import AUTO, INLINE, THREADS, URING, USRBIO, StoreSettings


def open_mover(settings: StoreSettings, arena: Arena, reader: Reader) -> Mover:
    """The backend of the settings where it works, else threads; an event says which and why. A cache is no reason not
    to serve: nothing is raised."""
    if settings.backend == INLINE:
        return InlineMover(arena, reader)
    wanted = (USRBIO, THREADS) if settings.backend == AUTO else (settings.backend, THREADS)
    refused = {}
    for name in wanted:
        refusal = _refusal(name, settings)
        if not refusal:
            break
        refused[name] = refusal
    events.info("store_backend", backend=name, **{f"not_{other}": why for other, why in refused.items()})
    if settings.backend in refused:
        events.warn("store_backend_refused", backend=settings.backend, reason=refused[settings.backend], instead=name)
    makers: dict[str, type[UringMover | UsrbioMover | ThreadMover]] = {
        URING: UringMover, USRBIO: UsrbioMover, THREADS: ThreadMover}
    return makers[name](settings, arena, reader)


def _refusal(name: str, settings: StoreSettings) -> str:
    if name == URING:
        return uring_refusal()
    return usrbio_refusal(settings.folder) if name == USRBIO else ""
