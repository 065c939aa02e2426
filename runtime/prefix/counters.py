"""What the prefix cache counts beside the tokens of ``Metrics``: how hits came about, and what is kept."""

from __future__ import annotations

from deepinfer.runtime.metrics import Counter, Gauge, Metrics
from deepinfer.runtime.prefix.road import Road


class PrefixCounters:
    """Tokens unless a name says otherwise."""

    def __init__(self) -> None:
        self.tiers = Counter("deepinfer:prefix_hit_tokens_total", "Prompt tokens found, by tier", label="tier")
        self.how = Counter("deepinfer:prefix_hits_total", "Requests with a hit, by what filled their windows: a "
                           "snapshot, rows that ran again exactly, or bounded replay", label="windows")
        self.published = Counter("deepinfer:prefix_published_blocks_total", "Blocks that became known", label="lineage")
        self.replaced = Counter("deepinfer:prefix_replaced_blocks_total", "Replayed blocks that gave way to exact ones")
        self.unstored = Counter("deepinfer:prefix_unstored_blocks_total", "Blocks not stored, because too many waited")
        self.evicted = Counter("deepinfer:prefix_evicted_blocks_total", "Blocks given up for room")
        self.snapshots = Counter("deepinfer:prefix_window_snapshots_total", "Window snapshots taken")
        self.blocks = Gauge("deepinfer:prefix_blocks", "Blocks that the cache knows")

    def show(self, metrics: Metrics) -> None:
        """Become part of an engine's metrics."""
        for name, metric in vars(self).items():
            setattr(metrics, f"prefix_{name}", metric)

    def hit(self, road: Road, exact: bool) -> None:
        """A request adopts a prefix."""
        self.how.add(label="snapshot" if road.windows else "exact" if exact else "replay")
