"""DSpark: the draft head and its training loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import kernels
from .attention import Attention
from .decode import choose
from .layers import Linear, Mode, RMSNorm, collapse, stored
from .model import Backbone, Block, Output, start_streams
from .shape import Shape

# Loss weights of cross entropy, total variation and confidence, and the decay of the weight of later positions.
LOSS_WEIGHTS = (0.1, 0.9, 1.0)
POSITION_DECAY = 4.0


class DraftHead(nn.Module):
    """Three window-only blocks over the backbone's features, a Markov head and a confidence head."""

    def __init__(self, shape: Shape):
        super().__init__()
        d, rank = shape.hidden_size, shape.dspark_markov_rank
        first = shape.num_hidden_layers
        self.shape = shape
        self.main_proj = Linear(d, d * len(shape.dspark_target_layer_ids), "fp8")
        self.main_norm = RMSNorm(d, shape.rms_norm_eps)
        self.blocks = nn.ModuleList(Block(shape, first + i) for i in range(shape.num_nextn_predict_layers))
        self.norm = RMSNorm(d, shape.rms_norm_eps)
        self.markov_embed = nn.Parameter(torch.randn(shape.vocab_size, rank) * 0.3)
        self.markov_head = nn.Parameter(torch.randn(shape.vocab_size, rank) * 0.02)
        self.confidence = Linear(1, d + rank, "bf16")

    def draft_blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def context_keys(self, features: Tensor, mode: Mode) -> list[Tensor]:
        """Keys [B, T, D] of every backbone position, one tensor a draft layer."""
        x = self.main_norm(self.main_proj(features, mode), mode)
        positions = torch.arange(features.shape[1], device=features.device)
        return [block.attn.window_keys(x, block.attn.turn(positions), mode) for block in self.draft_blocks()]

    def states(self, backbone: Backbone, context: list[Tensor], ids: Tensor, anchors: Tensor, mode: Mode) -> Tensor:
        """Collapsed states [B · A, block, d] of the draft blocks that start at positions ``anchors`` [B, A].

        The anchor of a block is token ids[anchor]; rows before it are context, at most one window of them.
        """
        shape, size = self.shape, self.shape.dspark_block_size
        tokens = torch.full((*anchors.shape, size), shape.dspark_noise_token_id, device=ids.device)
        tokens[..., 0] = ids.gather(1, anchors)
        h, read = start_streams(backbone.embedding(tokens.flatten(), mode), shape.hc_mult)
        positions = anchors.flatten()[:, None] + torch.arange(size, device=ids.device)
        back = torch.arange(-shape.sliding_window, 0, device=ids.device)
        at = anchors[..., None] + back
        allowed = torch.cat((at >= 0, torch.ones(*at.shape[:2], size, dtype=torch.bool, device=ids.device)), -1)
        allowed = allowed.flatten(0, 1)[:, None].expand(-1, size, -1)
        batch = torch.arange(len(ids), device=ids.device)[:, None, None]
        for block, keys in zip(self.draft_blocks(), context, strict=True):
            earlier = keys[batch, at.clamp(min=0)].flatten(0, 1)

            def attend(x: Tensor, attn: Attention = block.attn, earlier: Tensor = earlier) -> Tensor:
                x = x.unflatten(0, (-1, size))
                return _attend(attn, x, earlier, allowed, positions, mode).flatten(0, 1)

            h, read = block(h, read, attend, mode)
        x: Tensor = collapse(h, read)
        result: Tensor = x.unflatten(0, (-1, size))
        return result

    def base_logits(self, backbone: Backbone, x: Tensor, mode: Mode) -> Tensor:
        return backbone.logits(self.norm(x, mode), mode)

    def previous(self, tokens: Tensor, mode: Mode) -> Tensor:
        """Markov embedding of the token before each drafted one."""
        return F.embedding(tokens, stored(self.markov_embed, "bf16", mode))

    def markov_logits(self, previous: Tensor, mode: Mode) -> Tensor:
        return F.linear(previous, stored(self.markov_head, "bf16", mode)).float()

    def confidence_logits(self, x: Tensor, previous: Tensor, mode: Mode) -> Tensor:
        return F.linear(torch.cat((x, previous), -1).float(), self.confidence.matrix(mode).float())[..., 0]

    @torch.no_grad()
    def propose(
        self,
        backbone: Backbone,
        context: list[Tensor],
        ids: Tensor,
        anchors: Tensor,
        mode: Mode,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens, confidence logits, the tokens' chances), all [B, A, block], of drafts that are greedy, or sampled
        when there is a generator."""
        x = self.states(backbone, context, ids, anchors, mode)
        base = self.base_logits(backbone, x, mode)
        token = ids.gather(1, anchors).flatten()
        drawn: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        for j in range(x.shape[1]):
            previous = self.previous(token, mode)
            logits = base[:, j] + self.markov_logits(previous, mode)
            token = choose(logits, torch.ones_like(logits[:, 0]), generator)
            chance = logits.softmax(-1).gather(-1, token[:, None])[:, 0]
            sure = self.confidence_logits(x[:, j], previous, mode)
            for values, value in zip(drawn, (token, sure, chance), strict=True):
                values.append(value)
        tokens, confidences, chances = (torch.stack(values, -1).view(*anchors.shape, -1) for values in drawn)
        return tokens, confidences, chances


def _attend(attn: Attention, x: Tensor, earlier: Tensor, allowed: Tensor, positions: Tensor, mode: Mode) -> Tensor:
    """Every row of a draft block sees the context keys and all keys of its own block."""
    turn = attn.turn(positions.flatten())
    cos, sin = (part.view(*positions.shape, -1) for part in turn)
    by_head = (cos[:, None], sin[:, None])
    _, q = attn.queries(x, by_head, mode)
    keys = torch.cat((earlier, attn.window_keys(x, (cos, sin), mode)), 1)
    return attn.output(kernels.attend_dense(q, keys, allowed, attn.attn_sink), by_head, mode)


@dataclass
class DraftLoss:
    """``total`` is what is minimised; ``overlap`` is the mean chance that a sampled draft is accepted."""

    total: Tensor
    cross_entropy: Tensor
    overlap: Tensor
    confidence: Tensor


def draft_loss(
    head: DraftHead, backbone: Backbone, out: Output, ids: Tensor, anchors: Tensor, mode: Mode
) -> DraftLoss:
    """The published loss at ``anchors`` [B, A] of ids [B, T], of which ``out`` is the backbone's output, detached."""
    size = head.shape.dspark_block_size
    with torch.no_grad():
        at = (anchors[..., None] + torch.arange(size, device=ids.device)).flatten(1)
        batch = torch.arange(len(ids), device=ids.device)[:, None]
        target = backbone.logits(out.hidden[batch, at].view(-1, size, out.hidden.shape[-1]), mode)
        truth = ids[batch, at + 1].view(-1, size)
        before = ids[batch, at].view(-1, size)
    x = head.states(backbone, head.context_keys(out.features, mode), ids, anchors, mode)
    previous = head.previous(before, mode)
    logits = head.base_logits(backbone, x, mode) + head.markov_logits(previous, mode)
    confidence = head.confidence_logits(x, previous, mode)
    decay = torch.exp(-torch.arange(size, device=ids.device) / POSITION_DECAY)
    return DraftLoss(*_weigh(logits, target, truth, confidence, decay / decay.sum()))


def _weigh(
    logits: Tensor, target: Tensor, truth: Tensor, confidence: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    guess = logits.log_softmax(-1)
    distance = (guess.exp() - target.softmax(-1)).abs().sum(-1)
    entropy = -guess.gather(-1, truth[..., None])[..., 0]
    overlap = 1 - 0.5 * distance
    sure = F.binary_cross_entropy_with_logits(confidence, overlap.detach(), reduction="none")
    parts = [(part * weight).sum(-1).mean() for part in (entropy, distance, sure)]
    total = sum(share * part for share, part in zip(LOSS_WEIGHTS, parts, strict=True))
    return total, parts[0], overlap.mean(), parts[2]  # type: ignore[return-value]
