"""Prefill of a V4.1-shaped stack written plainly in torch: what a reader of the model's code would write first.

Weights are random bf16 (nothing is unpacked while it runs), matrix products are F.linear, attention is
scaled_dot_product_attention over window and picked entries with a mask, experts run one after the other on the rows
that picked them. Every kind of work of the model is there with its real sizes; values mean nothing. All rows of the
upper part of the stack are computed, as the engine does in a prompt whose rows are all kept.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

BF16 = torch.bfloat16


def weight(*dims: int) -> Tensor:
    return (torch.randn(*dims) * 0.02).to(BF16)


def norm(x: Tensor) -> Tensor:
    out: Tensor = functional.rms_norm(x, x.shape[-1:])
    return out


class Experts:
    """Routed experts and the shared one."""

    def __init__(self, hidden: int, inner: int, count: int, k: int) -> None:
        self.k = k
        self.router = torch.randn(count, hidden) * 0.02
        self.gate, self.up = weight(count, inner, hidden), weight(count, inner, hidden)
        self.down = weight(count, hidden, inner)
        self.shared = (weight(inner, hidden), weight(inner, hidden), weight(hidden, inner))

    @staticmethod
    def expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return functional.linear(functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down)

    def __call__(self, x: Tensor) -> Tensor:
        scores = functional.softplus(functional.linear(x.float(), self.router)).sqrt()
        weights, picks = scores.topk(self.k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True) * 1.5
        out = self.expert(x, *self.shared).float()
        for e in range(len(self.gate)):
            row, slot = torch.where(picks == e)
            if len(row):
                y = self.expert(x[row], self.gate[e], self.up[e], self.down[e])
                out.index_add_(0, row, y.float() * weights[row, slot, None])
        return out.to(BF16)


class Mixing:
    """Hyper-connections: streams to one input and back, mixing made doubly stochastic."""

    def __init__(self, streams: int, hidden: int, iterations: int) -> None:
        self.streams, self.iterations = streams, iterations
        self.weight = torch.randn(streams * streams + 2 * streams, streams * hidden) * 0.02

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x f32 [rows, streams, hidden] -> input bf16 [rows, hidden], mix [rows, streams, streams], back."""
        n, flat = self.streams, x.flatten(1)
        c = functional.linear(flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6), self.weight)
        before, back, mix = c[:, :n].sigmoid(), c[:, n:2 * n].sigmoid() * 2, c[:, 2 * n:].reshape(-1, n, n).exp()
        for _ in range(self.iterations):
            mix = mix / (mix.sum(-1, keepdim=True) + 1e-6)
            mix = mix / (mix.sum(-2, keepdim=True) + 1e-6)
        return torch.einsum("rn,rnh->rh", before, x).to(BF16), mix, back

    @staticmethod
    def after(x: Tensor, y: Tensor, mix: Tensor, back: Tensor) -> Tensor:
        return torch.einsum("rnm,rmh->rnh", mix, x) + back[..., None] * y.float()[:, None]


class Attention:
    """Window keys, and entries picked by an index where the layer has any."""

    def __init__(self, c: dict[str, Any], layer: int) -> None:
        hidden, self.heads, self.dim = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
        self.window, self.ratio, self.top = c["sliding_window"], c["compress_ratios"][layer], c["index_topk"]
        self.index_heads, self.index_dim = c["index_n_heads"], c["index_head_dim"]
        self.groups = c["o_groups"]
        self.q_a, self.kv = weight(c["q_lora_rank"], hidden), weight(self.dim, hidden)
        self.q_b = weight(self.heads * self.dim, c["q_lora_rank"])
        self.o_a = weight(self.groups, c["o_lora_rank"], self.heads * self.dim // self.groups)
        self.o_b = weight(hidden, self.groups * c["o_lora_rank"])
        self.makes_entries = layer in c["kv_source_layer_ids"]
        self.picks = layer in c["index_source_layer_ids"]
        if self.makes_entries:
            self.compress = weight(2 * self.dim, hidden)
            self.index_key = weight(self.index_dim, hidden)
        if self.picks:
            self.index_q = weight(self.index_heads * self.index_dim, c["q_lora_rank"])
            self.index_w = weight(self.index_heads, hidden)

    def pick(self, x: Tensor, q: Tensor, keys: Tensor) -> Tensor:
        """Mask [rows, entries] of the best entries of each row."""
        rows, entries = len(x), len(keys)
        iq = functional.linear(q, self.index_q).reshape(rows, self.index_heads, self.index_dim)
        scores = torch.zeros(rows, entries)
        w = functional.linear(x, self.index_w).float()
        for h in range(self.index_heads):
            scores += functional.linear(iq[:, h], keys).float().relu() * w[:, h, None]
        seen = torch.arange(entries)[None] < (torch.arange(rows)[:, None] + 1) // self.ratio
        scores.masked_fill_(~seen, -torch.inf)
        mask = torch.zeros(rows, entries, dtype=torch.bool)
        mask.scatter_(1, scores.topk(min(self.top, entries), dim=-1).indices, True)
        return mask & seen

    def __call__(self, x: Tensor, shared: dict[str, Tensor]) -> Tensor:
        rows = len(x)
        q_low = norm(functional.linear(x, self.q_a))
        q = norm(functional.linear(q_low, self.q_b).reshape(rows, self.heads, self.dim))
        keys = norm(functional.linear(x, self.kv))
        at = torch.arange(rows)
        mask = (at[None] <= at[:, None]) & (at[None] > at[:, None] - self.window)
        if self.ratio:
            if self.makes_entries:
                value, gate = functional.linear(x, self.compress).chunk(2, dim=-1)
                n = rows // self.ratio * self.ratio
                part = gate[:n].reshape(-1, self.ratio, self.dim).float().softmax(1)
                shared["entries"] = norm((value[:n].reshape(-1, self.ratio, self.dim) * part).sum(1).to(BF16))
                shared["index"] = norm(functional.linear(x[:n:self.ratio], self.index_key))
            if self.picks:
                shared["mask"] = self.pick(x, q_low, shared["index"])
            keys, mask = torch.cat((keys, shared["entries"])), torch.cat((mask, shared["mask"]), 1)
        y = functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys[None, None].expand(1, self.heads, -1, -1),
            keys[None, None].expand(1, self.heads, -1, -1), attn_mask=mask[None, None])
        y = y[0].transpose(0, 1).reshape(rows, self.groups, -1)
        low = torch.cat([functional.linear(y[:, g], self.o_a[g]) for g in range(self.groups)], -1)
        out: Tensor = functional.linear(low, self.o_b)
        return out


class PlainTorch:
    """``config``: the text config of a checkpoint."""

    def __init__(self, config: dict[str, Any], threads: int) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(threads)
        c = config
        self.hidden, self.streams, self.vocabulary = c["hidden_size"], c["hc_mult"], c["vocab_size"]
        self.embed, self.head = weight(self.vocabulary, self.hidden), weight(self.vocabulary, self.hidden)
        self.layers = [(Mixing(self.streams, self.hidden, c["hc_sinkhorn_iters"]), Attention(c, i),
                        Mixing(self.streams, self.hidden, c["hc_sinkhorn_iters"]),
                        Experts(self.hidden, c["moe_intermediate_size"], c["n_routed_experts"],
                                c["num_experts_per_tok"])) for i in range(c["num_hidden_layers"])]
        # A look-up layer: rows of tables, projected and gated.
        width = (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"] * c["engram_head_dim"]
        self.engram = {i: (weight(4096, width), weight(self.streams * self.hidden, width), weight(self.hidden, width))
                       for i in c["engram_layer_ids"]}

    @torch.inference_mode()
    def prefill(self, tokens: int) -> float:
        """Seconds for the logits of the last of so many tokens."""
        ids = torch.randint(0, self.vocabulary, (tokens,))
        start = time.perf_counter()
        x = self.embed[ids].float()[:, None].repeat(1, self.streams, 1)
        shared: dict[str, Tensor] = {}
        for i, (first, attention, second, experts) in enumerate(self.layers):
            if i in self.engram:
                table, key, value = self.engram[i]
                e = table[ids % len(table)]
                gate = (functional.linear(e, key).float().reshape_as(x) * x).mean(-1, keepdim=True).sigmoid()
                x = x + gate * functional.linear(e, value).float()[:, None]
            h, mix, back = first(x)
            x = first.after(x, attention(norm(h), shared), mix, back)
            h, mix, back = second(x)
            x = second.after(x, experts(norm(h)), mix, back)
        functional.linear(norm(x[-1:].mean(1).to(BF16)), self.head)
        return time.perf_counter() - start
