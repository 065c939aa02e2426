"""What the draft head learns from: sequences that the frozen backbone has continued, with its outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .batches import Batches
from .decode import continue_prompts
from .layers import Mode
from .model import Backbone, Output

# Shares of sequences that are continued greedily and by sampling; the rest is text as it was written.
GREEDY, SAMPLED = 0.75, 0.15
LOWEST_TEMPERATURE = 0.3
SHORTEST_PROMPT, LONGEST_PROMPT = 1 / 6, 7 / 12  # of a sequence


@dataclass(frozen=True)
class Pool:
    """ids [N, T] and the backbone's output for each row."""

    ids: Tensor
    out: Output

    def pick(self, rows: Tensor) -> dict[str, Tensor]:
        return {"ids": self.ids[rows].long(), "hidden": self.out.hidden[rows], "features": self.out.features[rows]}


def make_pool(backbone: Backbone, batches: Batches, count: int, length: int, mode: Mode) -> Pool:
    """Prompts out of the training text, each continued to ``length`` tokens; ``backbone`` is frozen on its grid."""
    ids, _ = batches.draw(count, length)
    ids = ids[torch.randperm(count, generator=batches.generator, device=batches.device)]
    kind = torch.rand(count, generator=batches.generator, device=batches.device)
    span = torch.rand(count, generator=batches.generator, device=batches.device)
    prompts = ((SHORTEST_PROMPT + (LONGEST_PROMPT - SHORTEST_PROMPT) * span) * length).long()
    prompts = torch.where(kind < GREEDY + SAMPLED, prompts, length)
    heat = torch.rand(count, generator=batches.generator, device=batches.device)
    heat = LOWEST_TEMPERATURE + (1 - LOWEST_TEMPERATURE) * heat
    temperatures = torch.where(kind < GREEDY, 0.0, heat)
    made, out = continue_prompts(backbone, ids, prompts, temperatures, mode, batches.generator)
    return Pool(made.short(), out)
