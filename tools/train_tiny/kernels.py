"""Attention over a sliding window and compressed latents in one softmax with a sink: a plain and a GPU form."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

_FLEX: dict[str, Any] = {}
BLOCK = 128


def window_mask(rows: int, window: int, segment_start: Tensor | None, device: torch.device) -> Tensor:
    """bool [1 or batch, rows, rows]: the last ``window`` keys, none before the row's segment."""
    i = torch.arange(rows, device=device)
    seen = (i[None] <= i[:, None]) & (i[None] > i[:, None] - window)
    if segment_start is None:
        return seen[None]
    return seen & (i >= segment_start[..., None])


def causal_latents(rows: int, latents: int, ratio: int, device: torch.device, first: int = 0) -> Tensor:
    """bool [rows, latents] of rows at positions first, first + 1, ...: latent j is complete, and so visible, from
    position (j + 1) · ratio − 1."""
    row = torch.arange(first, first + rows, device=device)
    return torch.arange(latents, device=device)[None] < ((row + 1) // ratio)[:, None]


def attend_dense(q: Tensor, keys: Tensor, allowed: Tensor, sink: Tensor) -> Tensor:
    """q [B, T, H, D], keys = values [B, S, D], allowed [B, T, S], sink [H] -> [B, T, H, D]."""
    scores = torch.einsum("bthd,bsd->bths", q, keys).float() * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~allowed[:, :, None], float("-inf"))
    top = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    weight = (scores - top).exp()
    total = weight.sum(-1, keepdim=True) + (sink.float()[:, None] - top).exp()
    return torch.einsum("bths,bsd->bthd", (weight / total).to(keys.dtype), keys)


def _block_lists(rows: int, latents: int, ratio: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each block of rows, how many key blocks it may touch and which: two window blocks, visible latents."""
    row_blocks = rows // BLOCK
    lists = []
    for block in range(row_blocks):
        last_visible = ((block + 1) * BLOCK) // ratio if ratio else 0
        window = [block - 1, block] if block else [block]
        lists.append(window + [row_blocks + j for j in range(-(-last_visible // BLOCK))])
    width = row_blocks + latents // BLOCK
    counts = torch.tensor([len(entry) for entry in lists], dtype=torch.int32, device=device)
    table = torch.zeros(row_blocks, width, dtype=torch.int32)
    for block, entry in enumerate(lists):
        rest = [j for j in range(width) if j not in entry]
        table[block] = torch.tensor(entry + rest, dtype=torch.int32)
    return counts[None, None], table.to(device)[None, None]


def attend_flex(
    q: Tensor,
    keys: Tensor,
    rows: int,
    window: int,
    ratio: int,
    selected: Tensor | None,
    segment_start: Tensor | None,
    sink: Tensor,
) -> Tensor:
    """The same by torch's FlexAttention.  keys are [B, rows + latents, D]; ``selected`` is [B, rows, latents] or
    None for every visible latent.  rows and latents are multiples of 128, window is at most 128."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    if not _FLEX:
        _FLEX["flex"] = torch.compile(flex_attention, dynamic=False) if q.is_cuda else flex_attention
    latents = keys.shape[1] - rows

    def in_window(b: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = (j <= i) & (j > i - window)
        return near if segment_start is None else near & (j >= segment_start[b, i])

    def mask(b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if latents == 0:
            return in_window(b, i, j)
        at = torch.clamp(j - rows, min=0)
        visible = at < (i + 1) // ratio if selected is None else selected[b, i, at]
        return torch.where(j < rows, in_window(b, i, j), visible)

    key = f"{rows} {latents} {ratio} {q.device}"
    if key not in _FLEX:
        counts, table = _block_lists(rows, latents, ratio, q.device)
        sizes = (rows, rows + latents)
        _FLEX[key] = BlockMask.from_kv_blocks(
            counts, table, None, None, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=mask, seq_lengths=sizes
        )
    block_mask = copy.copy(_FLEX[key])
    block_mask.mask_mod = mask
    shared = keys[:, None]
    out, log_total = _FLEX["flex"](
        q.transpose(1, 2), shared, shared, block_mask=block_mask, enable_gqa=True, return_lse=True
    )
    kept = torch.sigmoid(log_total - sink.float()[:, None])
    result: Tensor = (out * kept[..., None]).to(q.dtype).transpose(1, 2)
    return result
