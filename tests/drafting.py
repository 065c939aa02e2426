"""A witness engine whose drafts are right with a given probability."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from witness import WitnessEngine

from deepinfer.runtime.plan import EnginePlan

PEAK = np.float32(1e6)  # of a draft's logit: no noise, penalty or temperature makes another one larger


class DraftingEngine(WitnessEngine):
    """Args:
        truths: prompts with their answers; a sequence that begins as one of them is drafted from it.
        right: probability that a draft is the token of the truth.
    """

    def __init__(self, plan: EnginePlan, slots: int, blocks: int, truths: Sequence[Sequence[int]] = (),
                 right: float = 0.7) -> None:
        super().__init__(plan, slots, blocks)
        self.truths, self.right = [list(t) for t in truths], right
        self.seen: dict[int, list[int]] = {}

    def _step(self, s: np.void, ids: NDArray[np.int64], look: NDArray[np.int64]) -> dict[str, Any]:
        slot, c = int(s["slot"]), int(s["c"])
        self.seen[slot] = self.seen.get(slot, [])[:c] + ids.tolist()
        return super()._step(s, ids, look)

    def _draft(self, s: np.void, ids: NDArray[np.int64]) -> dict[str, Any]:
        slot, c, m, vocab = int(s["slot"]), int(s["c"]), len(ids), self.plan.vocab_size
        out = super()._draft(s, ids)  # reads what a draft may read
        history = [*self.seen.get(slot, [])[:c], int(ids[0])]
        truth = next((t for t in self.truths if t[: c + 1] == history), [])
        rng = np.random.default_rng([c, slot])
        drafts = [truth[c + 1 + j] if c + 1 + j < len(truth) and rng.random() < self.right
                  else int(rng.integers(vocab)) for j in range(m)]
        logits = np.zeros((1, m, vocab), np.float32)
        logits[0, np.arange(m), drafts] = PEAK
        return out | {"tokens": np.array([drafts]), "draft_logits": logits,
                      "confidence": np.full((1, m), np.log(self.right / (1 - self.right)), np.float32)}
