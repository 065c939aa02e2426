"""An engine that computes nothing: a step takes the time that it is told to, tokens come from a hash.

Steps run one after the other on a clock of their own, as on a device: a step starts when it was submitted and the one
before it has ended. What the host does meanwhile does not slow it down.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime.executor import DECODE, SequenceStart, StepPlan, StepResult, share_drafts
from deepinfer.runtime.plan import PAGED, RING, EnginePlan, StatePlan


def null_plan(*, seqs: int = 256, step: int = 8192, block: int = 128, drafts: int = 0, lag: int = 1,
              vocab: int = 129_280, max_len: int = 1 << 20) -> EnginePlan:
    """Sizes of a large engine; its states have no bytes."""
    return EnginePlan(
        model="null", target="cpu", vocab_size=vocab, max_model_len=max_len, max_num_seqs=seqs,
        limits={"step": step, "kept": step, "wanted": max(step, seqs * (drafts + 1)), "seq": seqs}, block_tokens=block,
        window=128, states=(StatePlan("ring", RING, 128 + drafts + lag * (drafts + 1), 0, reach=128),
                            StatePlan("entries", PAGED, block, 0)),
        entries=("step", "draft") if drafts else ("step",), draft_tokens=drafts, host_lag=lag)


class NullEngine:
    """Memory without bytes."""

    checkpoint: Path | None = None

    def state(self, name: str, unit: int) -> NDArray[np.uint8]:
        return np.zeros(0, np.uint8)

    def run(self, entry: str, batch: Any, pins: Any = None) -> dict[str, Any]:
        raise NotImplementedError("the null executor runs no engine")

    def close(self) -> None:
        pass


class NullExecutor:
    """Args:
        cost: (decoding rows, prompt rows) -> seconds of a step.
        accept: probability that a draft is accepted if those before it are.

    ``ended`` and ``gaps``: when each step ended, and for how long the device had nothing to do before it.
    """

    def __init__(self, plan: EnginePlan, cost: Callable[[int, int], float], *, accept: float = 0.7,
                 now: Callable[[], float] = time.perf_counter) -> None:
        self.plan, self.cost, self.accept, self.now = plan, cost, accept, now
        slots = plan.limits["seq"]
        self.n = np.zeros(slots, np.int64)
        self.key = np.zeros(slots, np.uint64)
        self.drafts = np.zeros(slots, np.int32)
        self._results: dict[int, StepResult] = {}
        self._running: deque[tuple[int, float, StepResult]] = deque()
        self._free_at = 0.0
        self._tickets = 0
        self.ended: list[float] = []
        self.gaps: list[float] = []

    def begin(self, slot: int, start: SequenceStart) -> None:
        self.n[slot] = len(start.prompt) + len(start.output) - 1
        self.key[slot] = start.key
        self.drafts[slot] = 0

    def submit(self, step: StepPlan) -> int:
        result = self._results.setdefault(id(step), StepResult(self.plan))
        result.clear()
        submitted = self.now()
        began = max(submitted, self._free_at)
        if self.ended:
            self.gaps.append(began - self._free_at)
        result.seconds = self._run(step, result)
        self._free_at = began + result.seconds
        self.ended.append(self._free_at)
        self._tickets += 1
        self._running.append((self._tickets, self._free_at, result))
        return self._tickets

    def wait(self, ticket: int) -> StepResult:
        first, ends, result = self._running.popleft()
        assert first == ticket
        self.sleep(ends - self.now())
        return result

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)

    def state(self, name: str, unit: int) -> NDArray[np.uint8]:
        return np.zeros(0, np.uint8)

    def close(self) -> None:
        pass

    def _run(self, step: StepPlan, out: StepResult) -> float:
        """Outcome of a step; its seconds."""
        rows, k = step.sequences, step.count
        slots, decode = rows["slot"], rows["kind"] == DECODE
        m = self.plan.draft_tokens
        most = np.where(decode, np.minimum(rows["rows"] - 1, self.drafts[slots]), 0).astype(np.int32)
        out.verified[:k] = share_drafts(out.confidence[:k], most, step.budget) if m else 0
        start = np.where(decode, self.n[slots], rows["c"] + rows["rows"] - 1)
        places = start[:, None] + 1 + np.arange(m + 1)
        mixed = (self.key[slots][:, None] + places.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        chance = (mixed >> np.uint64(40)).astype(np.float64) / 2**24
        right = np.cumprod(chance[:, :m] < self.accept, axis=1) * (np.arange(m) < out.verified[:k, None])
        out.accepted[:k] = right.sum(axis=1)
        out.tokens[:k] = 3 + (mixed >> np.uint64(20)).astype(np.int64) % (self.plan.vocab_size - 3)
        draws = rows["draws"] == 1
        out.count[:k] = np.where(draws, out.accepted[:k] + 1, 0)
        self.n[slots] = np.where(decode, start + out.accepted[:k] + 1, start + 1)
        out.n[:k] = self.n[slots]
        self.drafts[slots] = np.where(draws & (rows["want_draft"] == 1), m, 0)
        out.drafted[:k] = self.drafts[slots]
        out.confidence[:k] = self.accept
        return self.cost(int(decode.sum()) + int(out.verified[:k].sum()), step.ids)


class VirtualClock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


class VirtualExecutor(NullExecutor):
    """On a clock on which only steps take time."""

    def sleep(self, seconds: float) -> None:
        assert isinstance(self.now, VirtualClock)
        self.now.time += max(0.0, seconds)
