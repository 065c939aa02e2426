"""Decoding with caches, in lockstep: every sequence of a batch stands at the same position."""

from __future__ import annotations

import torch
from torch import Tensor

from . import kernels
from .attention import Attention, Shared, stored_cache
from .layers import Mode, collapse
from .model import Backbone, Output, start_streams


class Decoder:
    """The caches of one batch: window keys of every layer, latents and indexer keys of every cache owner."""

    def __init__(self, backbone: Backbone, batch: int, length: int, mode: Mode):
        self.backbone, self.mode = backbone, mode
        shape, device = backbone.shape, backbone.embed.device

        def rows(count: int, size: int) -> Tensor:
            return torch.zeros(batch, count, size, dtype=mode.dtype, device=device)

        owners = {layer: length // shape.compress_ratios[layer] for layer in shape.kv_source_layer_ids}
        self.windows = [rows(length, shape.head_dim) for _ in range(shape.num_hidden_layers)]
        self.latents = {layer: rows(count, shape.head_dim) for layer, count in owners.items()}
        self.index_keys = {layer: rows(count, shape.index_head_dim) for layer, count in owners.items()}
        self.pending: dict[int, Tensor] = {}  # rows of which a later row completes the latent

    @torch.no_grad()
    def step(self, ids: Tensor) -> Output:
        """Output of the last row of ids [B, t + 1]; rows 0..t-1 have been given before, in order."""
        backbone, mode, position = self.backbone, self.mode, ids.shape[1] - 1
        shape, shared = backbone.shape, Shared(first=position)
        h, read = start_streams(backbone.embedding(ids[:, -1], mode), shape.hc_mult)
        features = []
        for i, block in enumerate(backbone.blocks()):
            engram = backbone.engram_of(i)
            if engram is not None:
                grams = engram.rows(ids[:, -shape.engram_max_ngram_size :])[:, -1]
                h = engram.add(h, grams, mode)
            if i in shape.dspark_target_layer_ids:
                features.append(h.float().mean(-2).to(h.dtype))

            def attend(x: Tensor, attn: Attention = block.attn) -> Tensor:
                return self._attend(attn, x[:, None], shared, position)[:, 0]

            h, read = block(h, read, attend, mode)
        hidden = backbone.norm(collapse(h, read), mode)
        return Output(hidden[:, None], torch.cat(features, -1)[:, None], [])

    def _attend(self, attn: Attention, x: Tensor, shared: Shared, position: int) -> Tensor:
        shape, mode, layer = attn.shape, self.mode, attn.layer
        turn = attn.turn(torch.tensor([position], device=x.device))
        qr, q = attn.queries(x, turn, mode)
        self.windows[layer][:, position] = attn.window_keys(x, turn, mode)[:, 0]
        seen = self.windows[layer][:, max(0, position + 1 - shape.sliding_window) : position + 1]
        allowed = torch.ones(*x.shape[:2], seen.shape[1], dtype=torch.bool, device=x.device)
        if attn.ratio:
            if attn.compressor is not None:
                self._write(attn, x, position)
            owner, visible = shape.source(shape.kv_source_layer_ids, layer), (position + 1) // attn.ratio
            if attn.indexer is not None:
                shared.index_keys[owner] = self.index_keys[owner][:, :visible]
                attn.select(x, qr, turn, shared, mode)
            latents = self.latents[owner][:, :visible]
            selected = shared.selected
            if selected is None:
                selected = torch.ones(*x.shape[:2], visible, dtype=torch.bool, device=x.device)
            seen, allowed = torch.cat((seen, latents), 1), torch.cat((allowed, selected), -1)
        return attn.output(kernels.attend_dense(q, seen, allowed, attn.attn_sink), turn, mode)

    def _write(self, attn: Attention, x: Tensor, position: int) -> None:
        """The latent that row ``position`` completes, if it completes one."""
        assert attn.compressor is not None and attn.indexer is not None
        group = torch.cat((self.pending.pop(attn.layer), x), 1) if attn.layer in self.pending else x
        if group.shape[1] < attn.ratio:
            self.pending[attn.layer] = group
            return
        at = position // attn.ratio
        turn = attn.turn(torch.tensor([at * attn.ratio], device=x.device))
        latent = attn.compressor(group, self.mode)
        self.index_keys[attn.layer][:, at] = attn.indexer.keys(latent, turn, self.mode)[:, 0]
        self.latents[attn.layer][:, at] = stored_cache(latent, turn, self.mode)[:, 0]


@torch.no_grad()
def continue_prompts(
    backbone: Backbone,
    ids: Tensor,
    prompts: Tensor,
    temperatures: Tensor,
    mode: Mode,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Output]:
    """Keep the first ``prompts`` [B] tokens of each row of ids [B, T] and replace the others by the model's own.

    ``temperatures`` [B] are those of the choice: 0 takes the most probable token.  Returns the tokens and the
    output of every row.
    """
    ids = ids.clone()
    decoder = Decoder(backbone, len(ids), ids.shape[1], mode)
    shape = backbone.shape
    hidden = torch.empty(*ids.shape, shape.hidden_size, dtype=mode.dtype, device=ids.device)
    width = len(shape.dspark_target_layer_ids) * shape.hidden_size
    features = torch.empty(*ids.shape, width, dtype=mode.dtype, device=ids.device)
    for position in range(ids.shape[1]):
        out = decoder.step(ids[:, : position + 1])
        hidden[:, position], features[:, position] = out.hidden[:, 0], out.features[:, 0]
        if position + 1 < ids.shape[1]:
            token = choose(backbone.logits(out.hidden[:, 0], mode), temperatures, generator)
            ids[:, position + 1] = torch.where(position + 1 < prompts, ids[:, position + 1], token)
    return ids, Output(hidden, features, [])


def choose(logits: Tensor, temperatures: Tensor, generator: torch.Generator | None) -> Tensor:
    """Tokens [B] by logits [B, V]: a sample of softmax(logits / temperature), by Gumbel noise; greedy at 0."""
    if generator is None:
        return logits.argmax(-1)
    noise = -torch.empty_like(logits).exponential_(generator=generator).clamp(min=1e-20).log()
    return (logits + temperatures[:, None] * noise).argmax(-1)
