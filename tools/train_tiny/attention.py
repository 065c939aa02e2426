"""Attention of one layer: window keys, compressed latents, the indexer that selects among them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import kernels
from .formats import rounded
from .layers import Linear, Mode, RMSNorm, activation, angles, fused, rope_frequencies, rotate
from .shape import Shape


@dataclass
class Shared:
    """What layers of one forward pass hand on: caches by owner, the last selection, the candidates, losses."""

    segment_start: Tensor | None = None  # [B, T]: in decoder layers no window key before it is seen
    index_rows: Tensor | None = None  # query rows on which the indexer's loss is computed
    latents: dict[int, Tensor] = field(default_factory=dict)
    index_keys: dict[int, Tensor] = field(default_factory=dict)
    selected: Tensor | None = None
    candidates: Tensor | None = None
    index_losses: list[Tensor] = field(default_factory=list)
    first: int = 0  # position of the first row


class Compressor(nn.Module):
    """Latents of a cache owner: one a token (ratio 1) or one a pair, mixed by a softmax over the two."""

    def __init__(self, shape: Shape, ratio: int):
        super().__init__()
        self.ratio = ratio
        self.wkv = Linear(shape.head_dim, shape.hidden_size, "bf16")
        self.wgate = Linear(shape.head_dim, shape.hidden_size, "bf16") if ratio > 1 else None
        self.norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def forward(self, x: Tensor, mode: Mode) -> Tensor:
        """x [B, T, d] -> [B, T // ratio, head_dim], before RoPE."""
        result: Tensor
        if self.wgate is None:
            result = self.norm(self.wkv(x, mode), mode)
            return result
        full = x[:, : x.shape[1] // self.ratio * self.ratio]
        values = self.wkv(full, mode).unflatten(1, (-1, self.ratio)).float()
        weight = self.wgate(full, mode).unflatten(1, (-1, self.ratio)).float().softmax(2)
        result = self.norm((values * weight).sum(2).to(x.dtype), mode)
        return result


class Indexer(nn.Module):
    """Scores of latents for each row.  Only its owner of keys has ``wk`` and ``k_norm``."""

    def __init__(self, shape: Shape, owns_keys: bool):
        super().__init__()
        self.heads, self.size = shape.index_n_heads, shape.index_head_dim
        self.wq_b = Linear(self.heads * self.size, shape.q_lora_rank, "fp8")
        self.weights_proj = Linear(self.heads, shape.hidden_size, "bf16")
        self.wk = Linear(self.size, shape.head_dim, "bf16") if owns_keys else None
        self.k_norm = RMSNorm(self.size, shape.rms_norm_eps) if owns_keys else None

    def keys(self, latents: Tensor, turn: tuple[Tensor, Tensor], mode: Mode) -> Tensor:
        assert self.wk is not None and self.k_norm is not None
        k = rotate(self.k_norm(self.wk(latents, mode), mode), *turn)
        return _cache(k, "fp4_groups", mode)

    def scores(self, x: Tensor, qr: Tensor, keys: Tensor, turn: tuple[Tensor, Tensor], mode: Mode) -> Tensor:
        """[B, rows, latents], float32; turn belongs to the rows."""
        q = self.wq_b(qr, mode).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        q = _cache(rotate(q, *turn), "fp4_groups", mode)
        weight = self.weights_proj(x, mode).float() * (self.size**-0.5 * self.heads**-0.5)
        return weigh_scores(q, keys, weight)


@fused((0, 0), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1))
def weigh_scores(q: Tensor, keys: Tensor, weight: Tensor) -> Tensor:
    """Σ_h relu(q_h · k) · w_h.  q [B, h, R, i], keys [B, S, i], weight [B, R, h]."""
    total = None
    for head in range(q.shape[1]):
        part = F.relu((q[:, head] @ keys.transpose(1, 2)).float()) * weight[..., head, None]
        total = part if total is None else total + part
    assert total is not None
    return total


def _cache(x: Tensor, kind: str, mode: Mode) -> Tensor:
    return rounded(x, kind) if mode.quantised else x


def stored_cache(latents: Tensor, turn: tuple[Tensor, Tensor], mode: Mode) -> Tensor:
    """Main-cache entries of latents [B, S, D] at the positions of ``turn``."""
    return _cache(rotate(latents, *turn), "fp4_main_cache", mode)


def largest(scores: Tensor, count: int, mode: Mode) -> Tensor:
    """bool mask of the ``count`` largest finite entries of the last axis."""
    if mode.exact_ties:
        picked = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]
    else:
        picked = scores.topk(count, -1, sorted=False).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, picked, True)
    return chosen & (scores > float("-inf"))


class Attention(nn.Module):
    """One layer's attention.  ``layer`` counts through backbone and draft layers."""

    def __init__(self, shape: Shape, layer: int):
        super().__init__()
        self.shape, self.layer, self.ratio = shape, layer, shape.compress_ratios[layer]
        d, heads, size = shape.hidden_size, shape.num_attention_heads, shape.head_dim
        self.wq_a = Linear(shape.q_lora_rank, d, "fp8")
        self.q_norm = RMSNorm(shape.q_lora_rank, shape.rms_norm_eps)
        self.wq_b = Linear(heads * size, shape.q_lora_rank, "fp8")
        self.wkv = Linear(size, d, "fp8")
        self.kv_norm = RMSNorm(size, shape.rms_norm_eps)
        self.wo_a = Linear(shape.o_groups * shape.o_lora_rank, heads // shape.o_groups * size, "fp8")
        self.wo_b = Linear(d, shape.o_groups * shape.o_lora_rank, "fp8", gain=0.2)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        owns_cache = self.ratio > 0 and layer in shape.kv_source_layer_ids
        selects = self.ratio > 0 and layer in shape.index_source_layer_ids
        self.compressor = Compressor(shape, self.ratio) if owns_cache else None
        self.indexer = Indexer(shape, owns_cache) if selects else None
        self.register_buffer("frequencies", rope_frequencies(shape, self.ratio > 0), persistent=False)
        self.frequencies: Tensor

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return angles(positions, self.frequencies)

    def queries(self, x: Tensor, turn: tuple[Tensor, Tensor], mode: Mode) -> tuple[Tensor, Tensor]:
        """(qr [B, T, q_lora_rank], q [B, T, H, D] with RoPE)."""
        qr = self.q_norm(self.wq_a(x, mode), mode)
        q = self.wq_b(qr, mode).unflatten(-1, (self.shape.num_attention_heads, -1)).transpose(1, 2)
        return qr, rotate(q, *turn).transpose(1, 2)

    def window_keys(self, x: Tensor, turn: tuple[Tensor, Tensor], mode: Mode) -> Tensor:
        return activation(rotate(self.kv_norm(self.wkv(x, mode), mode), *turn), mode)

    def output(self, o: Tensor, turn: tuple[Tensor, Tensor], mode: Mode) -> Tensor:
        """Turn back and project: o [B, T, H, D] -> [B, T, d].  The grouped matrix takes an unrounded input."""
        o = rotate(o.transpose(1, 2), turn[0], -turn[1]).transpose(1, 2)
        groups = self.shape.o_groups
        o = o.flatten(-2).unflatten(-1, (groups, -1))
        matrix = self.wo_a.matrix(mode).unflatten(0, (groups, -1))
        result: Tensor = self.wo_b(torch.einsum("btgi,goi->btgo", o, matrix).flatten(-2), mode)
        return result

    def write_cache(self, x: Tensor, shared: Shared, mode: Mode) -> None:
        assert self.compressor is not None and self.indexer is not None
        latents = self.compressor(x, mode)
        turn = self.turn(torch.arange(latents.shape[1], device=x.device) * self.ratio)
        # The indexer learns from its own loss alone.
        shared.index_keys[self.layer] = self.indexer.keys(latents.detach(), turn, mode)
        shared.latents[self.layer] = stored_cache(latents, turn, mode)

    @torch.no_grad()
    def select(self, x: Tensor, qr: Tensor, turn: tuple[Tensor, Tensor], shared: Shared, mode: Mode) -> None:
        """Set ``shared.selected``, or None when every visible latent is selected; the owner sets the candidates."""
        assert self.indexer is not None
        shape = self.shape
        keys = shared.index_keys[shape.source(shape.kv_source_layer_ids, self.layer)]
        rows, latents = x.shape[1], keys.shape[1]
        if not mode.sparse or latents <= shape.index_topk:
            shared.selected = shared.candidates = None
            return
        visible = kernels.causal_latents(rows, latents, self.ratio, x.device, shared.first)
        scores = self.indexer.scores(x, qr, keys, turn, mode).masked_fill(~visible, float("-inf"))
        if self.layer == shape.candidate_source_layer_id:
            shared.candidates = self.candidates(scores, shared.first, mode)
        elif self.layer > shape.candidate_source_layer_id and shared.candidates is not None:
            scores = scores.masked_fill(~shared.candidates, float("-inf"))
        shared.selected = largest(scores, shape.index_topk, mode)

    def candidates(self, scores: Tensor, first: int, mode: Mode) -> Tensor | None:
        """Positions [B, T, latents] in the best blocks; the block of the newest visible position always counts."""
        size, count = self.shape.candidate_block_size, self.shape.candidate_topk_blocks
        rows, latents = scores.shape[1:]
        blocks = -(-latents // size)
        if blocks <= count:
            return None
        best = F.pad(scores, (0, blocks * size - latents), value=float("-inf")).unflatten(-1, (-1, size)).amax(-1)
        last = (torch.arange(first, first + rows, device=scores.device) + 1) // self.ratio - 1
        newest = torch.div(last, size, rounding_mode="floor")
        is_newest = torch.arange(blocks, device=scores.device) == newest[:, None]
        kept = largest(best.masked_fill(is_newest, float("inf")), count, mode)
        return kept.repeat_interleave(size, -1)[..., :latents]

    def index_loss(self, x: Tensor, qr: Tensor, q: Tensor, rows: Tensor, shared: Shared, mode: Mode) -> Tensor:
        """KL from the heads' mean attention over visible latents to the indexer's softmax, on a few rows."""
        assert self.indexer is not None
        owner = self.shape.source(self.shape.kv_source_layer_ids, self.layer)
        latents, keys = shared.latents[owner].detach(), shared.index_keys[owner]
        visible = kernels.causal_latents(x.shape[1], keys.shape[1], self.ratio, x.device)[rows]
        scores = self.indexer.scores(x[:, rows].detach(), qr[:, rows].detach(), keys, self.turn(rows), mode)
        with torch.no_grad():
            s = torch.einsum("brhd,bsd->bhrs", q[:, rows], latents).float() * q.shape[-1] ** -0.5
            wanted = s.masked_fill(~visible, float("-inf")).softmax(-1).mean(1)
        given = scores.masked_fill(~visible, -1e9).log_softmax(-1)
        result: Tensor = (torch.special.xlogy(wanted, wanted) - wanted * given).sum(-1).mean()
        return result

    def forward(self, x: Tensor, shared: Shared, mode: Mode) -> Tensor:
        """x [B, T, d], the rows at positions 0..T-1 -> [B, T, d]."""
        shape, rows = self.shape, x.shape[1]
        turn = self.turn(torch.arange(rows, device=x.device))
        qr, q = self.queries(x, turn, mode)
        keys = self.window_keys(x, turn, mode)
        if self.ratio:
            if self.compressor is not None:
                self.write_cache(x, shared, mode)
            if self.indexer is not None:
                self.select(x, qr, turn, shared, mode)
                if shared.index_rows is not None:
                    shared.index_losses.append(self.index_loss(x, qr, q, shared.index_rows, shared, mode))
            keys = torch.cat((keys, shared.latents[shape.source(shape.kv_source_layer_ids, self.layer)]), 1)
        segment = shared.segment_start if self.layer >= shape.first_decoder_layer else None
        selected = shared.selected if self.ratio else None
        sink = self.attn_sink
        if mode.kernel == "flex":
            o = kernels.attend_flex(q, keys, rows, shape.sliding_window, self.ratio, selected, segment, sink)
        else:
            allowed = kernels.window_mask(rows, shape.sliding_window, segment, x.device).expand(x.shape[0], -1, -1)
            if self.ratio:
                if selected is None:
                    selected = kernels.causal_latents(rows, keys.shape[1] - rows, self.ratio, x.device)[None]
                allowed = torch.cat((allowed, selected.expand(x.shape[0], -1, -1)), -1)
            o = kernels.attend_dense(q, keys, allowed, sink)
        return self.output(o, turn, mode)
