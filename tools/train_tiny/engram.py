"""Engram: hashed n-gram tables whose rows are added to the residual streams through a gate."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor, nn

from .layers import Linear, Mode, fused, stored
from .shape import Shape


def token_classes(tokenizer: Tokenizer) -> list[int]:
    """Class of every token id: ids whose normalised text is equal share one, numbered by first appearance."""
    private = "\ue000"  # stands for a lone space while the others are stripped
    steps = [normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    steps += [normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex(r"^ $"), private)]
    steps += [normalizers.Strip(), normalizers.Replace(private, " ")]
    normalise = normalizers.Sequence(steps)
    classes: dict[str, int] = {}
    found = []
    for i in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([i], skip_special_tokens=False)
        spelling = tokenizer.id_to_token(i) or ""
        key = spelling if "\ufffd" in text else (normalise.normalize_str(text) or text)
        found.append(classes.setdefault(key, len(classes)))
    return found


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % factor for factor in range(2, math.isqrt(n) + 1))


def table_primes(shape: Shape) -> dict[int, list[int]]:
    """Moduli of each Engram layer's columns: per n-gram size, per head, the next prime not used before."""
    used: set[int] = set()
    primes: dict[int, list[int]] = {}
    for layer in shape.engram_layer_ids:
        row = []
        for _ in range(shape.engram_max_ngram_size - 1):
            candidate = shape.engram_vocab_size
            for _ in range(shape.engram_n_heads):
                while not _is_prime(candidate) or candidate in used:
                    candidate += 1
                used.add(candidate)
                row.append(candidate)
        primes[layer] = row
    return primes


def multipliers(shape: Shape, layer: int) -> list[int]:
    """Odd hash factors, one a look-back distance."""
    bound = max(1, (2**63 - 1) // shape.engram_compressed_vocab_size // 2)
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=shape.engram_max_ngram_size, dtype=np.int64)
    return [2 * int(value) + 1 for value in drawn]


def load_classes(path: Path) -> Tensor:
    """Token classes of a tokenizer.json, int64 [vocab]."""
    return torch.tensor(token_classes(Tokenizer.from_file(str(path))))


class Engram(nn.Module):
    """The tables, projection and gate of one layer."""

    def __init__(self, shape: Shape, layer: int, classes: Tensor):
        super().__init__()
        d, n = shape.hidden_size, shape.hc_mult
        primes = table_primes(shape)[layer]
        columns = len(primes)
        self.pad_class = int(classes[shape.engram_pad_token_id])
        self.heads, self.eps = shape.engram_n_heads, shape.rms_norm_eps
        self.embed = nn.Parameter(torch.randn(sum(primes), shape.engram_head_dim) * 0.3)
        self.wkv = Linear((n + 1) * d, columns * shape.engram_head_dim, "fp8")
        self.q_weight = nn.Parameter(torch.ones(n, d))
        self.k_weight = nn.Parameter(torch.ones(n, d))
        constants = {
            "classes": classes,
            "primes": torch.tensor(primes),
            "offsets": torch.tensor([0, *primes[:-1]]).cumsum(0),
            "factors": torch.tensor(multipliers(shape, layer)),
        }
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)
        self.classes: Tensor
        self.primes: Tensor
        self.offsets: Tensor
        self.factors: Tensor

    def rows(self, ids: Tensor) -> Tensor:
        """Table rows [batch, T, columns] of token ids [batch, T]; what lies before the start counts as padding."""
        classes = self.classes[ids]
        mixed = classes * self.factors[0]
        columns = []
        for back in range(1, self.factors.numel()):
            earlier = torch.full_like(classes, self.pad_class)
            earlier[:, back:] = classes[:, : classes.shape[1] - back]
            mixed = mixed ^ (earlier * self.factors[back])
            first = (back - 1) * self.heads
            columns.append(mixed[..., None] % self.primes[first : first + self.heads])
        return torch.cat(columns, -1) + self.offsets

    def forward(self, h: Tensor, ids: Tensor, mode: Mode) -> Tensor:
        """h [B · T, n, d] with the n-grams of ids [B, T] added."""
        return self.add(h, self.rows(ids).flatten(0, 1), mode)

    def add(self, h: Tensor, rows: Tensor, mode: Mode) -> Tensor:
        """h [N, n, d] with the table rows [N, columns] added."""
        table = stored(self.embed, "fp8_groups", mode)
        kv = self.wkv(table[rows].flatten(-2), mode)
        weight = stored(self.q_weight, "bf16", mode).float() * stored(self.k_weight, "bf16", mode).float()
        return inject(h, kv, weight, self.eps)


@fused((0, 0), (1, 0))
def inject(h: Tensor, kv: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add the gated value to each stream.  h [N, n, d], kv [N, (n + 1) d], weight [n, d]."""
    n, d = h.shape[-2:]
    key, value = kv[..., : n * d].unflatten(-1, (n, d)).float(), kv[..., n * d :].float()
    stream = h.float()
    scale = torch.rsqrt(stream.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    score = (stream * weight * key).sum(-1) * scale * d**-0.5
    gate = torch.sigmoid(torch.copysign(score.abs().clamp(min=1e-6).sqrt(), score))
    return (stream + gate[..., None] * value[..., None, :]).to(h.dtype)
