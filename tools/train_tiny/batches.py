"""Random training batches out of the token streams."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Shares of the sequences of a batch: documentation, Python code, dialogues.
SHARES = {"prose": 0.42, "code": 0.46, "dialogue": 0.12}
# Share of documents' sequences that begin with a document; dialogues always begin with one.
AT_START = 0.3
SEGMENT_ROWS = 384


class Batches:
    """Draws sequences of T + 1 tokens from the streams in a folder."""

    def __init__(self, folder: Path, device: torch.device, seed: int):
        self.device = device
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.streams: dict[str, Tensor] = {}
        self.starts: dict[str, Tensor] = {}
        for name in SHARES:
            tokens = torch.from_numpy(np.load(folder / f"{name}.npy").astype(np.int32)).to(device)
            self.streams[name] = tokens
            self.starts[name] = (tokens == 0).nonzero()[:, 0]

    def fork(self, seed: int) -> Batches:
        """The same streams under a generator of their own."""
        other = copy.copy(self)
        other.generator = torch.Generator(device=self.device).manual_seed(seed)
        return other

    def _random(self, high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=self.generator, device=self.device)

    def _offsets(self, name: str, count: int, length: int) -> Tensor:
        limit = self.streams[name].numel() - length - 1
        anywhere = self._random(limit, count)
        starts = self.starts[name]
        at_start = starts[self._random(starts.numel(), count)].clamp(max=limit)
        share = 1.0 if name == "dialogue" else AT_START
        return torch.where(torch.rand(count, generator=self.generator, device=self.device) < share, at_start, anywhere)

    def draw(self, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """(ids, next ids), int64 [batch, length]."""
        counts = {name: int(batch * share) for name, share in SHARES.items()}
        counts["code"] += batch - sum(counts.values())
        rows = []
        for name, count in counts.items():
            at = self._offsets(name, count, length)[:, None] + torch.arange(length + 1, device=self.device)
            rows.append(self.streams[name][at])
        tokens = torch.cat(rows).long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def members(self, size: int, count: int) -> Tensor:
        """``count`` random numbers of sequences in a pool of ``size``."""
        return self._random(size, count)

    def rows(self, length: int, count: int) -> Tensor:
        """``count`` random rows, each of which sees a latent."""
        return 2 + self._random(length - 2, count)

    def segments(self, batch: int, length: int, share: float) -> Tensor:
        """First window key that each row of the decoder half may see, [batch, length]; ``share`` of them cut."""
        draw = torch.rand(batch, length, generator=self.generator, device=self.device) < 1 / SEGMENT_ROWS
        draw &= torch.rand(batch, 1, generator=self.generator, device=self.device) < share
        position = torch.arange(length, device=self.device)
        return torch.where(draw, position, 0).cummax(1).values

    def anchors(self, batch: int, length: int, count: int, block: int) -> Tensor:
        """Random positions [batch, count] at which a draft block of ``block`` rows has a next token for each row."""
        high = length - block
        return 1 + self._random(high - 1, batch * count).view(batch, count)
