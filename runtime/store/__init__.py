"""The prefix store: cache blocks on disk, crash-safe, shared by processes and hosts."""

from __future__ import annotations

from deepinfer.runtime.store.layout import Layout as Layout
from deepinfer.runtime.store.layout import layout_of as layout_of
from deepinfer.runtime.store.settings import StoreSettings as StoreSettings
from deepinfer.runtime.store.store import Store as Store
from deepinfer.runtime.store.tier import Flags as Flags
from deepinfer.runtime.store.tier import Status as Status
from deepinfer.runtime.store.tier import Ticket as Ticket
from deepinfer.runtime.store.tier import Tier as Tier
