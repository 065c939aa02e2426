"""Tiers of one engine: stores on a folder, or a Mooncake store's cluster."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from deepinfer.runtime.store.layout import Layout
from deepinfer.runtime.store.mooncake import MooncakeTier, open_client
from deepinfer.runtime.store.settings import MOONCAKE, StoreSettings
from deepinfer.runtime.store.store import Store

AnyTier = Store | MooncakeTier
_SECONDS = 2.0  # that starting waits for a store to say what it has


def opener(settings: StoreSettings, library: Path | None) -> Callable[[Layout], AnyTier]:
    """What opens a tier for records of a layout; tiers of Mooncake share a client. ``library``: as ``Store`` takes it.

    Raises ToolchainError, SpecError or PlanError where a client of Mooncake was asked for and cannot be had.
    """
    if settings.backend == MOONCAKE:
        return partial(MooncakeTier, settings, client=open_client())
    return partial(_open_store, settings, library)


def _open_store(settings: StoreSettings, library: Path | None, layout: Layout) -> Store:
    store = Store(settings, layout, library=library)
    store.ready(_SECONDS)
    return store
