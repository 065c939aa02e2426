"""What is trained when: the phases, their lengths, learning rates and roundings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """``steps`` optimiser steps on ``batch`` sequences of ``length`` tokens.

    ``replay`` is the share of sequences whose decoder layers see windows cut as a bounded replay cuts them.
    ``anchors`` > 0 trains the draft head, at that many random positions a sequence, and nothing else; its sequences
    come from a pool of that many, which the backbone has continued before (``pool.py``).
    """

    name: str
    steps: int
    length: int
    batch: int
    first_rate: float
    last_rate: float
    warm_up: int = 0
    quantised: bool = False
    sparse: bool = False
    replay: float = 0.0
    index_rows: int = 0
    anchors: int = 0
    pool: int = 0

    def rate(self, step: int) -> float:
        """Learning rate: linear warm-up, then linear from ``first_rate`` to ``last_rate``."""
        done = step / max(self.steps, 1)
        rate = self.first_rate + (self.last_rate - self.first_rate) * done
        return rate * min(1.0, (step + 1) / self.warm_up) if self.warm_up else rate


PEAK = 4e-3
PLAN: tuple[Phase, ...] = (
    Phase("short", 5500, 512, 128, PEAK, PEAK, warm_up=200, index_rows=16),
    Phase("final", 2000, 2048, 32, PEAK, 0.0, warm_up=20, quantised=True, sparse=True, replay=0.5, index_rows=64),
    Phase("draft", 8400, 384, 64, 4e-3, 0.0, warm_up=50, quantised=True, sparse=True, anchors=48, pool=16384),
)
# Seconds, on two cores; for the test and for trying a change.
SMOKE: tuple[Phase, ...] = (
    Phase("short", 6, 128, 2, PEAK, PEAK, warm_up=2, index_rows=8),
    Phase("final", 4, 256, 2, PEAK, 0.0, quantised=True, sparse=True, replay=0.5, index_rows=8),
    Phase("draft", 4, 128, 2, 3e-3, 0.0, quantised=True, sparse=True, anchors=8, pool=4),
)


def parse(text: str, plan: Sequence[Phase] = PLAN) -> tuple[Phase, ...]:
    """A plan with other step counts, from ``short=100,final=50``; phases that are not named keep theirs."""
    from dataclasses import replace

    steps = dict(part.split("=", 1) for part in text.split(",") if part)
    names = {phase.name for phase in plan}
    if unknown := sorted(set(steps) - names):
        raise ValueError(f"--steps: no phase is called {unknown[0]!r}; the phases are {', '.join(sorted(names))}.")
    return tuple(replace(p, steps=int(steps[p.name])) if p.name in steps else p for p in plan)
