"""Drafts whose acceptance is a parameter: a scripted drafter, a simulator of steps, and an executor for the real loop.

Draft j of a block is right with a probability that is drawn for it from a profile and stated as its confidence, so
that confidences are calibrated. What a sequence's blocks are like changes slowly, as texts do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from null_executor import NullExecutor, null_plan
from numpy.typing import NDArray

from deepinfer.runtime.executor import DECODE, StepPlan, StepResult, share_drafts
from deepinfer.runtime.speculation.cost import CostCurve, curve_of
from deepinfer.runtime.speculation.interface import DraftPolicy, Observed

CURVES = Path(__file__).parent / "bench" / "cost_curves.json"
BLOCK = 5
BATCHES = (1, 4, 16, 64, 256)


@dataclass(frozen=True)
class Profile:
    """``means``: of the probability that draft j is right if those before it are. ``spread``: of its logit; ``memory``:
    correlation from block to block."""

    name: str
    means: tuple[float, ...]
    spread: float
    memory: float = 0.6


PROFILES = (Profile("chat", (0.75, 0.68, 0.64, 0.61, 0.58), 1.6), Profile("code", (0.93, 0.91, 0.89, 0.87, 0.86), 1.2),
            Profile("hopeless", (0.06, 0.05, 0.05, 0.05, 0.05), 0.5))


def curves() -> dict[str, CostCurve]:
    """The committed cost curves by name."""
    found = {name: curve_of(entry) for name, entry in json.loads(CURVES.read_text())["curves"].items()}
    return {name: curve for name, curve in found.items() if curve is not None}


class ScriptedDrafter:
    """Blocks for ``slots`` sequences of one profile, or of several by turns."""

    def __init__(self, profiles: tuple[Profile, ...], slots: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        which = [profiles[i % len(profiles)] for i in range(slots)]
        means = np.array([p.means for p in which])
        self._logit = np.log(means / (1 - means))
        self._spread = np.array([[p.spread] for p in which])
        self._memory = np.array([[p.memory] for p in which])
        self._state = self.rng.standard_normal((slots, 1))

    def confidences(self) -> NDArray[np.float32]:
        """[slots, m] of the next blocks."""
        fresh = self.rng.standard_normal(self._state.shape)
        self._state = self._memory * self._state + np.sqrt(1 - self._memory**2) * fresh
        noise = 0.6 * self._state + 0.8 * self.rng.standard_normal(self._logit.shape)
        out: NDArray[np.float32] = (1 / (1 + np.exp(-(self._logit + self._spread * noise)))).astype(np.float32)
        return out

    def right(self, confidence: NDArray[np.float32]) -> NDArray[np.bool_]:
        """[slots, m]: whether draft j and all before it are right."""
        out: NDArray[np.bool_] = np.cumprod(self.rng.random(confidence.shape) < confidence, axis=1).astype(bool)
        return out


@dataclass
class Outcome:
    tokens: int
    seconds: float
    drafts: int
    accepted: int

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def simulate(policy: DraftPolicy, curve: CostCurve, profiles: tuple[Profile, ...], sequences: int, *, steps: int = 1500,
             seed: int = 1, answer: int = 500, skip: int = 100) -> Outcome:
    """Steps of ``sequences`` that decode; one that has ``answer`` tokens is followed by another. The first ``skip``
    steps are not counted."""
    drafter = ScriptedDrafter(profiles, sequences, seed)
    slots, emitted = np.arange(sequences), drafter.rng.integers(0, answer, sequences)
    drafted, confidence = np.zeros(sequences, np.int32), np.full((sequences, BLOCK), np.nan, np.float32)
    out = Outcome(0, 0.0, 0, 0)
    for slot in slots.tolist():
        policy.opened(slot)
    for step in range(steps + skip):
        most = np.minimum(policy.most(slots), BLOCK)
        wanted = policy.wanted(slots)
        budget = policy.budget(most, sequences)
        verified = share_drafts(confidence, np.minimum(most, drafted), budget)
        right = drafter.right(np.nan_to_num(confidence)) & (np.arange(BLOCK) < verified[:, None])
        accepted = right.sum(axis=1).astype(np.int32)
        seconds = float(curve.step(sequences + int(verified.sum()))) + curve.draft(int(wanted.sum()))
        drafted = np.where(wanted, BLOCK, 0).astype(np.int32)
        confidence = np.where(wanted[:, None], drafter.confidences(), np.nan).astype(np.float32)
        policy.observe(Observed(slots, verified, accepted, confidence, drafted, sequences + int(verified.sum()), 0,
                                seconds))
        emitted += accepted + 1
        for slot in np.flatnonzero(emitted >= answer).tolist():
            emitted[slot], drafted[slot] = 0, 0
            policy.opened(slot)
        if step >= skip:
            out.tokens += sequences + int(accepted.sum())
            out.seconds += seconds
            out.drafts += int(verified.sum())
            out.accepted += int(accepted.sum())
    return out


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


class ScriptedExecutor(NullExecutor):
    """Steps of the real loop on virtual time, with drafts from a profile and times from a cost curve.

    Tokens are hashes of position and key, so that no policy changes them; whether a draft is right is drawn.
    """

    def __init__(self, plan: Any, curve: CostCurve, profiles: tuple[Profile, ...], seed: int = 1) -> None:
        self.clock = Clock()
        super().__init__(plan, lambda decode, prompt: float(curve.step(decode + prompt)), now=self.clock)
        self.curve = curve
        self._drafter = ScriptedDrafter(profiles, plan.limits["seq"], seed)
        self._confidence = np.full((plan.limits["seq"], plan.draft_tokens), np.nan, np.float32)
        self.decoded, self.verified, self.accepted = 0, 0, 0

    def sleep(self, seconds: float) -> None:
        self.clock.time += max(0.0, seconds)

    def _run(self, step: StepPlan, out: StepResult) -> float:
        rows, k, m = step.sequences, step.count, self.plan.draft_tokens
        slots, decode = rows["slot"], rows["kind"] == DECODE
        most = np.where(decode, np.minimum(rows["rows"] - 1, self.drafts[slots]), 0).astype(np.int32)
        out.verified[:k] = share_drafts(self._confidence[slots], most, step.budget)
        right = self._drafter.right(np.nan_to_num(self._confidence))[slots]
        out.accepted[:k] = (right & (np.arange(m) < out.verified[:k, None])).sum(axis=1)
        start = np.where(decode, self.n[slots], rows["c"] + rows["rows"] - 1)
        places = (start[:, None] + 1 + np.arange(m + 1)).astype(np.uint64)
        mixed = (self.key[slots][:, None] + places) * np.uint64(0x9E3779B97F4A7C15)
        out.tokens[:k] = 3 + (mixed >> np.uint64(20)).astype(np.int64) % (self.plan.vocab_size - 3)
        draws, asked = rows["draws"] == 1, rows["want_draft"] == 1
        out.count[:k] = np.where(draws, out.accepted[:k] + 1, 0)
        self.n[slots] = np.where(decode, start + out.accepted[:k] + 1, start + 1)
        out.n[:k] = self.n[slots]
        fresh = self._drafter.confidences()[slots]
        self.drafts[slots] = out.drafted[:k] = np.where(draws & asked, m, 0)
        self._confidence[slots] = out.confidence[:k] = np.where((draws & asked)[:, None], fresh, np.nan)
        self.decoded += int(out.count[:k][decode].sum())
        self.verified += int(out.verified[:k].sum())
        self.accepted += int(out.accepted[:k].sum())
        seconds = self.cost(int(decode.sum()) + int(out.verified[:k].sum()), step.ids)
        return seconds + self.curve.draft(int((draws & asked).sum()))


def scripted_plan(sequences: int, lag: int) -> Any:
    return null_plan(seqs=sequences, drafts=BLOCK, lag=lag, max_len=4096, step=max(512, sequences * (BLOCK + 1)))
