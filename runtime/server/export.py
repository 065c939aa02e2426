"""`/metrics`: the engine's counters and the front end's own, under vLLM's names, each with a `model_name`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from deepinfer.runtime.server.wire import Hello, Snapshot, Times
from deepinfer.runtime.server.wire import Metric as EngineMetric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TOKENS = tuple(float(2**i) for i in range(21))
_SECONDS = (0.01, 0.05, 0.1, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
_MODEL = "model_name"

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, which no dashboard reads


class ServerMetrics:
    """Everything that `/metrics` shows.

    ``snapshot``: gives the engine's latest values. They begin anew when an engine starts again, as counters may.
    ``hello``: what the engine said of itself.
    """

    def __init__(self, model: str, snapshot: Callable[[], Snapshot | None], restarts: Callable[[], int],
                 hello: Callable[[], Hello | None]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(model, snapshot, restarts, hello))
        registry = self._registry

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            made = Histogram(name, text, [_MODEL], buckets=tuple(buckets), registry=registry)
            return made.labels(model)

        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a finished request", _TOKENS)
        self._generated = histogram("vllm:request_generation_tokens", "Tokens of a finished answer", _TOKENS)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "First row to first token", _SECONDS)
        self._decode = histogram("vllm:request_decode_time_seconds", "First to last token", _SECONDS)
        self._inference = histogram("vllm:request_inference_time_seconds", "First row to last token", _SECONDS)
        self._per_token = histogram("vllm:request_time_per_output_token_seconds", "First to last token, divided by "
                                    "the tokens behind the first", _TOKEN_SECONDS)
        self._model = model
        self._answers = Counter("deepinfer:http_responses", "Responses by route and status",
                                [_MODEL, "route", "status"], registry=registry)
        self._refused = Counter("deepinfer:requests_refused", "Requests turned away before the engine saw them",
                                [_MODEL, "reason"], registry=registry)
        self._cut = Counter("deepinfer:answers_cut", "Answers that ended because their reader went or was too slow",
                            [_MODEL, "reason"], registry=registry)

    def finished(self, prompt_tokens: int, tokens: int, times: Times | None) -> None:
        """Count a request that the engine has finished."""
        self._prompt.observe(prompt_tokens)
        self._generated.observe(tokens)
        if times is None or times.prefill is None:
            return
        self._prefill.observe(times.prefill)
        if times.decode is not None:
            self._decode.observe(times.decode)
            self._inference.observe(times.prefill + times.decode)
            if tokens > 1:
                self._per_token.observe(times.decode / (tokens - 1))

    def answered(self, route: str, status: int) -> None:
        """Count a response; ``route`` is one of ours, never what a client made up."""
        self._answers.labels(self._model, route, str(status)).inc()

    def refused(self, reason: str) -> None:
        """Count a request that was turned away: queue_full, unavailable, draining, unauthorized."""
        self._refused.labels(self._model, reason).inc()

    def cut(self, reason: str) -> None:
        """Count an answer without a reader."""
        self._cut.labels(self._model, reason).inc()

    async def text(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return self.render()

    def render(self) -> bytes:
        """The same at once."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, model: str, snapshot: Callable[[], Snapshot | None], restarts: Callable[[], int],
                 hello: Callable[[], Hello | None]) -> None:
        self._model, self._snapshot, self._restarts, self._hello = model, snapshot, restarts, hello

    def collect(self) -> Iterator[Metric]:
        restarts = CounterMetricFamily("deepinfer:engine_restarts", "Engine processes started after the first",
                                       labels=[_MODEL])
        restarts.add_metric([self._model], self._restarts())
        yield restarts
        if (hello := self._hello()) is not None:
            info = GaugeMetricFamily("deepinfer:artifact_info", "1, with what the engine is", labels=[
                _MODEL, "artifact", "hash", "target", "fingerprint", "max_model_len", "sequences",
                "blocks", "block_tokens"])
            info.add_metric([self._model, hello.model, hello.digest, hello.target, hello.fingerprint, *map(str, (
                hello.max_model_len, hello.slots, hello.blocks, hello.block_tokens))], 1)
            yield info
        snapshot = self._snapshot()
        for metric in snapshot.metrics if snapshot is not None else ():
            yield self._family(metric)

    def _family(self, metric: EngineMetric) -> Metric:
        labels = [_MODEL, *metric.label.split(",")] if metric.label else [_MODEL]
        if metric.kind == "histogram":
            family = HistogramMetricFamily(metric.name, metric.help, labels=labels)
            seen, buckets = 0, []
            for bound, count in zip([*metric.bounds, float("inf")], metric.counts, strict=True):
                seen += count
                buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(seen)))
            family.add_metric([self._model], buckets, metric.total)
            return family
        kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
        plain = kind(metric.name, metric.help, labels=labels)
        for value, number in metric.values.items():
            plain.add_metric([self._model, *value.split(",")] if metric.label else [self._model], number)
        return plain
