"""Open-loop load on a server of the OpenAI kind: requests arrive when they arrive, whether or not others are done."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx2 as httpx
import numpy as np

from deepinfer.errors import RequestError

_LONGEST_ANSWER_SECONDS = 3600.0
QUANTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent.

    Attributes:
        url: of the server, without `/v1`. ``model``: a served name. ``key``: API key.
        rate: arrivals a second, with exponential gaps; infinity sends all at once. ``requests``: how many.
        input_tokens, output_tokens: of each; the prompt's ids are random, the answer ignores its end token.
        slo_ttft, slo_tpot: seconds that a request may take to count as good.
    """

    url: str
    model: str
    vocab_size: int
    requests: int = 100
    rate: float = math.inf
    input_tokens: int = 128
    output_tokens: int = 64
    seed: int = 0
    key: str | None = field(default=None, repr=False)
    slo_ttft: float | None = None
    slo_tpot: float | None = None


@dataclass
class Timing:
    """One request, in seconds from the start of the load; `due` is when it had to be sent."""

    due: float
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token; waiting for a connection counts."""
        return None if self.first is None else self.first - self.due

    @property
    def tpot(self) -> float | None:
        """Mean seconds between tokens after the first."""
        if self.first is None or self.last is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)


async def model_card(url: str, key: str | None, name: str | None) -> dict[str, Any]:
    """The card of a served model, the first one without a name.

    Raises:
        RequestError: no such server or model.
    """
    try:
        async with httpx.AsyncClient(headers=_headers(key), timeout=30) as client:
            answer = await client.get(f"{url}/v1/models")
            answer.raise_for_status()
            cards: list[dict[str, Any]] = answer.json()["data"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise RequestError("the server does not list its models", where=url, found=f"{type(error).__name__}: {error}",
                           next_step="check --url and DEEPINFER_API_KEY") from None
    for card in cards:
        if name in (None, card["id"]):
            return card
    raise RequestError("the server does not have this model", where="--model", found=name,
                       allowed=[c["id"] for c in cards])


async def apply_load(load: Load, on_done: Callable[[Timing], None]) -> list[Timing]:
    """Send every request at its time and measure; ``on_done`` is called as each ends."""
    random = np.random.default_rng(load.seed)
    gaps = random.exponential(1 / load.rate, load.requests) if math.isfinite(load.rate) else np.zeros(load.requests)
    prompts = random.integers(0, load.vocab_size, (load.requests, load.input_tokens))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(_LONGEST_ANSWER_SECONDS, connect=60)
    async with httpx.AsyncClient(base_url=load.url, headers=_headers(load.key), limits=limits,
                                 timeout=timeout) as client:
        start = time.monotonic()

        async def one(due: float, prompt: Sequence[int]) -> Timing:
            await asyncio.sleep(max(0.0, start + due - time.monotonic()))
            timing = Timing(due)
            try:
                await _send(client, load, prompt, timing, start)
            except httpx.HTTPError as error:
                timing.error = f"{type(error).__name__}: {error}"
            on_done(timing)
            return timing

        pairs = zip(np.cumsum(gaps).tolist(), prompts.tolist(), strict=True)
        return list(await asyncio.gather(*(one(due, prompt) for due, prompt in pairs)))


async def _send(client: httpx.AsyncClient, load: Load, prompt: Sequence[int], timing: Timing, start: float) -> None:
    body = {"model": load.model, "prompt": list(prompt), "max_tokens": load.output_tokens, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            timing.error = f"status {answer.status_code}: {(await answer.aread()).decode('utf-8', 'replace')[:200]}"
            return
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event, now = json.loads(line[6:]), time.monotonic() - start
            if "error" in event:
                timing.error = str(event["error"].get("message"))
                return
            if event.get("usage"):
                timing.tokens = event["usage"]["completion_tokens"]
            if event.get("choices"):
                if timing.last is not None:
                    timing.gaps.append(now - timing.last)
                timing.first = now if timing.first is None else timing.first
                timing.last = now


def summary(load: Load, timings: Sequence[Timing]) -> dict[str, Any]:
    """What was measured, in seconds, tokens and requests; the key is left out."""
    done = [t for t in timings if t.error is None and t.last is not None]
    seconds = max((t.last or 0.0 for t in done), default=0.0) - min((t.due for t in timings), default=0.0)
    good = [t for t in done if _within(t.ttft, load.slo_ttft) and _within(t.tpot, load.slo_tpot)]
    tokens = sum(t.tokens for t in done)
    settings = {k: v for k, v in asdict(load).items() if k != "key" and v != math.inf}
    per_second = 1 / seconds if seconds > 0 else 0.0
    return {
        "load": settings, "completed": len(done), "failed": len(timings) - len(done),
        "errors": sorted({t.error for t in timings if t.error is not None})[:5], "seconds": seconds,
        "requests_per_s": len(done) * per_second, "output_tokens_per_s": tokens * per_second,
        "total_tokens_per_s": (tokens + load.input_tokens * len(done)) * per_second,
        "goodput_requests_per_s": len(good) * per_second,
        "ttft": quantiles([t.ttft for t in done if t.ttft is not None]),
        "tpot": quantiles([t.tpot for t in done if t.tpot is not None]),
        "itl": quantiles([gap for t in done for gap in t.gaps]),
        "e2e": quantiles([t.last - t.due for t in done if t.last is not None]),
    }


def _within(value: float | None, limit: float | None) -> bool:
    return limit is None or (value is not None and value <= limit)


def quantiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    found = {f"p{q}": float(np.percentile(values, q)) for q in QUANTILES}
    return {"mean": float(np.mean(values)), **found}


def _headers(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
