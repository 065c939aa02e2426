"""Counters, gauges and histograms under the names that dashboards made for vLLM read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 240.0)
_SHORT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_DEPTHS = tuple(range(9))
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass
class Counter:
    """Only rises. ``label``: name of what values are kept apart by, if anything; several names, and values of them in
    that order, have commas between."""

    name: str
    help: str
    label: str = ""
    values: dict[str, float] = field(default_factory=dict)

    def add(self, amount: float = 1, label: str = "") -> None:
        self.values[label] = self.values.get(label, 0) + amount

    @property
    def value(self) -> float:
        return sum(self.values.values())

    def text(self, kind: str = "counter") -> list[str]:
        shown = self.values if self.values or self.label else {"": 0.0}
        return [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} {kind}",
                *(f"{self.name}{self._labels(k)} {v:g}" for k, v in shown.items())]

    def _labels(self, value: str) -> str:
        pairs = zip(self.label.split(","), value.split(","), strict=True) if self.label else ()
        found = ",".join(f'{name}="{part}"' for name, part in pairs)
        return f"{{{found}}}" if found else ""


class Gauge(Counter):
    """The latest value."""

    def set(self, value: float, label: str = "") -> None:
        self.values[label] = value

    def text(self, kind: str = "gauge") -> list[str]:
        return super().text(kind)


@dataclass
class Histogram:
    """Counts of values at or below each bound, with their number and sum."""

    name: str
    help: str
    bounds: Sequence[float] = _SECONDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)
        self._bounds = np.array(self.bounds, np.float64)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def observe_all(self, values: NDArray[np.float64], times: NDArray[np.int64]) -> None:
        """Each of ``values`` [k] ``times`` [k] times."""
        found = np.bincount(np.searchsorted(self._bounds, values), times, len(self.counts))
        for place in np.flatnonzero(found).tolist():
            self.counts[place] += int(found[place])
        self.total += float(values @ times)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def text(self) -> list[str]:
        out = [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} histogram"]
        seen = 0
        for bound, count in zip([*self.bounds, float("inf")], self.counts, strict=True):
            seen += count
            out.append(f'{self.name}_bucket{{le="{"+Inf" if bound == float("inf") else f"{bound:g}"}"}} {seen}')
        return [*out, f"{self.name}_count {seen}", f"{self.name}_sum {self.total:g}"]


class Metrics:
    """Everything an engine counts. Times are seconds."""

    def __init__(self) -> None:
        self.running = Gauge("vllm:num_requests_running", "Requests with a slot")
        self.waiting = Gauge("vllm:num_requests_waiting", "Requests in the queue, preempted ones among them")
        self.cache_usage = Gauge("vllm:kv_cache_usage_perc", "Part of the cache blocks that is held, 0 to 1")
        self.cache_used = Gauge("deepinfer:kv_cache_used_ratio", "Part of a cache's units that is held, 0 to 1",
                                label="group")
        self.cache_bytes = Gauge("deepinfer:kv_cache_bytes", "Bytes of the units that are held: blocks (pages), rings "
                                 "of running sequences (windows), window snapshots and preempted sequences",
                                 label="group,tier")
        self.preemptions = Counter("vllm:num_preemptions_total", "Sequences that gave up their memory for others")
        self.spilled = Counter("deepinfer:preemptions_spilled_total", "Preemptions that moved the memory to the host")
        self.restarted = Counter("deepinfer:preemptions_restarted_total", "Preemptions whose rows ran again")
        self.recomputed = Counter("deepinfer:recomputed_tokens_total",
                                  "Rows that ran again because a preempted sequence had given them up")
        self.inexact = Counter("deepinfer:preemptions_inexact_total",
                               "Preemptions after which rows ran behind another replay log")
        self.prefix_queries = Counter("vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache")
        self.prefix_hits = Counter("vllm:prefix_cache_hits_total", "Tokens whose cache entries were adopted")
        self.replayed_rows = Counter("deepinfer:replayed_rows_total", "Rows run again in front of a hit")
        self.drafts = Counter("vllm:spec_decode_num_drafts_total", "Verifies with at least one draft")
        self.draft_tokens = Counter("vllm:spec_decode_num_draft_tokens_total", "Drafts verified")
        self.accepted_tokens = Counter("vllm:spec_decode_num_accepted_tokens_total", "Drafts accepted")
        self.proposed_at = Counter("deepinfer:spec_decode_num_draft_tokens_per_pos_total",
                                   "Drafts verified, by position", label="position")
        self.accepted_at = Counter("vllm:spec_decode_num_accepted_tokens_per_pos_total",
                                   "Drafts accepted, by position", label="position")
        self.depth = Histogram("deepinfer:spec_decode_depth", "Drafts chosen for a verify of one sequence", _DEPTHS)
        self.held_up = Counter("deepinfer:constrained_rows_held_up_total",
                               "Rows that waited a step for the tokens that their grammar needs")
        self.prompt_tokens = Counter("vllm:prompt_tokens_total", "Prompt rows computed")
        self.generation_tokens = Counter("vllm:generation_tokens_total", "Tokens chosen")
        self.success = Counter("vllm:request_success_total", "Requests ended", label="finished_reason")
        self.iteration_tokens = Histogram("vllm:iteration_tokens_total", "Rows of a step", _TOKENS)
        self.first_token = Histogram("vllm:time_to_first_token_seconds", "Arrival to first token")
        self.inter_token = Histogram("vllm:inter_token_latency_seconds", "Between two tokens of an answer")
        self.end_to_end = Histogram("vllm:e2e_request_latency_seconds", "Arrival to end")
        self.queued = Histogram("vllm:request_queue_time_seconds", "Arrival to first row")
        self.steps = Counter("deepinfer:steps_total", "Steps run")
        self.host_seconds = Histogram("deepinfer:step_cpu_seconds", "Of a step, what the host took to plan it and to "
                                      "read its results", _SHORT_SECONDS)
        self.engine_seconds = Histogram("deepinfer:step_device_seconds", "Of a step, what the engine took to run it",
                                        _SHORT_SECONDS)
        self.compiles = Counter("deepinfer:kernel_compiles_total", "Kernels compiled while serving")

    def clear(self) -> None:
        """Forget everything, as at the start."""
        for metric in vars(self).values():
            if isinstance(metric, Histogram):
                metric.counts, metric.total = [0] * len(metric.counts), 0.0
            else:
                metric.values.clear()

    def text(self) -> str:
        """All metrics in the Prometheus text format."""
        lines = [line for metric in vars(self).values() for line in metric.text()]
        return "\n".join([*lines, ""])
