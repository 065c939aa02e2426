"""The text backbone: embedding, blocks with shifted hyper-connections, head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import Attention, Shared
from .engram import Engram
from .layers import Experts, Mode, RMSNorm, StreamMixer, collapse, fused, spread, stored
from .shape import Shape


class Block(nn.Module):
    """Attention and experts around the residual streams; each reads with the coefficients of its predecessor."""

    def __init__(self, shape: Shape, layer: int):
        super().__init__()
        is_draft = layer >= shape.num_hidden_layers
        experts = shape.dspark_n_routed_experts if is_draft else shape.n_routed_experts
        chosen = shape.dspark_num_experts_per_tok if is_draft else shape.num_experts_per_tok
        self.attn_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.ffn_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hc_attn, self.hc_ffn = StreamMixer(shape), StreamMixer(shape)
        self.attn = Attention(shape, layer)
        self.ffn = Experts(shape, experts, chosen)

    def forward(
        self, h: Tensor, read: Tensor, attend: Callable[[Tensor], Tensor], mode: Mode
    ) -> tuple[Tensor, Tensor]:
        """h [N, n, d], read [N, n] -> the streams and the coefficients with which the next sub-layer reads them."""
        attn_read, attn_write, attn_mix = self.hc_attn(h)
        y = attend(self.attn_norm(collapse(h, read), mode))
        h = spread(y, h, attn_write, attn_mix)
        ffn_read, ffn_write, ffn_mix = self.hc_ffn(h)
        y = self.ffn(self.ffn_norm(collapse(h, attn_read), mode), mode)
        return spread(y, h, ffn_write, ffn_mix), ffn_read


def start_streams(embedded: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Copies of the embeddings [N, d], read from the first alone: [N, count, d] and [N, count]."""
    h = embedded[:, None].expand(-1, count, -1).contiguous()
    read = torch.zeros(len(embedded), count, device=embedded.device)
    read[:, 0] = 1
    return h, read


@dataclass
class Output:
    """``hidden`` [B, T, d] is normalised, ready for the head; ``features`` [B, T, targets · d] feed the drafts."""

    hidden: Tensor
    features: Tensor
    index_losses: list[Tensor]


class Backbone(nn.Module):
    def __init__(self, shape: Shape, classes: Tensor):
        super().__init__()
        self.shape, self.classes = shape, classes
        self.embed = nn.Parameter(torch.randn(shape.vocab_size, shape.hidden_size) * 0.5)
        self.head = nn.Parameter(torch.randn(shape.vocab_size, shape.hidden_size) * shape.hidden_size**-0.5 * 0.5)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Block(shape, layer) for layer in range(shape.num_hidden_layers))
        self.engram = nn.ModuleDict({str(i): Engram(shape, i, classes) for i in shape.engram_layer_ids})

    def blocks(self) -> list[Block]:
        return [block for block in self.layers if isinstance(block, Block)]

    def engram_of(self, layer: int) -> Engram | None:
        found = dict(self.engram.items()).get(str(layer))
        return found if isinstance(found, Engram) else None

    def embedding(self, ids: Tensor, mode: Mode) -> Tensor:
        return F.embedding(ids, stored(self.embed, "bf16", mode))

    def forward(
        self, ids: Tensor, mode: Mode, segment_start: Tensor | None = None, index_rows: Tensor | None = None
    ) -> Output:
        """ids [B, T], the sequences from their first token on; the rest as in :class:`Shared`."""
        shape = self.shape
        shared = Shared(segment_start, index_rows)
        h, read = start_streams(self.embedding(ids.flatten(), mode), shape.hc_mult)
        features = []
        for i, block in enumerate(self.blocks()):
            engram = self.engram_of(i)
            if engram is not None:
                h = engram(h, ids, mode)
            if i in shape.dspark_target_layer_ids:
                features.append(h.float().mean(-2).to(h.dtype))

            def attend(x: Tensor, attn: Attention = block.attn) -> Tensor:
                y: Tensor = attn(x.view(*ids.shape, -1), shared, mode)
                return y.flatten(0, 1)

            h, read = block(h, read, attend, mode)
        hidden = self.norm(collapse(h, read), mode).view(*ids.shape, -1)
        return Output(hidden, torch.cat(features, -1).view(*ids.shape, -1), shared.index_losses)

    def logits(self, hidden: Tensor, mode: Mode) -> Tensor:
        """float32 logits of normalised states."""
        return F.linear(hidden, stored(self.head, "bf16", mode)).float()

    def loss(self, hidden: Tensor, targets: Tensor, mode: Mode) -> Tensor:
        """Negative log-likelihood of targets [B, T], in nats, from normalised states [B, T, d]."""
        head = stored(self.head, "bf16", mode)
        return cross_entropy(hidden.flatten(0, 1), head, targets.flatten()).view(targets.shape)


@fused((0, 0), (2, 0))
def cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood [N] of targets [N]."""
    return F.cross_entropy(F.linear(hidden, head).float(), targets, reduction="none")
