"""What a store counts. Names begin with ``deepinfer:store_``; docs/store.md lists them."""

from __future__ import annotations

import threading

from deepinfer.runtime.metrics import Counter as PlainCounter
from deepinfer.runtime.metrics import Gauge, Histogram

_LATENCY = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 30.0)


_LOCK = threading.Lock()


class Counter(PlainCounter):
    """One that several threads raise."""

    def add(self, amount: float = 1, label: str = "") -> None:
        with _LOCK:
            super().add(amount, label)


class StoreMetrics:
    """Counters of one store in this process. Times are seconds; values kept apart by one label."""

    def __init__(self) -> None:
        self.lookups = Counter("deepinfer:store_lookup_blocks_total", "Blocks looked up", label="result")
        self.fetched = Counter("deepinfer:store_fetched_blocks_total", "Blocks read, by how they ended",
                               label="status")
        self.published = Counter("deepinfer:store_published_blocks_total", "Blocks to be stored, by how they ended",
                                 label="status")
        self.read_bytes = Counter("deepinfer:store_read_bytes_total", "Bytes read from the store")
        self.written_bytes = Counter("deepinfer:store_written_bytes_total", "Bytes written to the store")
        self.damaged = Counter("deepinfer:store_damaged_records_total", "Records that did not prove themselves")
        self.evicted = Counter("deepinfer:store_evicted_segments_total", "Segments removed", label="why")
        self.carried = Counter("deepinfer:store_carried_records_total", "Records that compaction copied")
        self.adopted = Counter("deepinfer:store_adopted_segments_total", "Segments of dead writers that were sealed")
        self.faults = Counter("deepinfer:store_faults_total", "Failures of the folder that were survived",
                              label="what")
        self.usage = Gauge("deepinfer:store_bytes", "Bytes that the store's segments take on their disk")
        self.segments = Gauge("deepinfer:store_segments", "Segments known")
        self.fetch_seconds = Histogram("deepinfer:store_fetch_seconds", "Fetch of one ticket, queue to end", _LATENCY)
        self.publish_seconds = Histogram("deepinfer:store_publish_seconds", "Publish of one block, queue to end",
                                         _LATENCY)
        self.lookup_seconds = Histogram("deepinfer:store_lookup_seconds", "One lookup", _LATENCY)

    def text(self) -> str:
        """All metrics in the Prometheus text format."""
        return "\n".join([*(line for metric in vars(self).values() for line in metric.text()), ""])
