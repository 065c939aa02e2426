"""Muon for matrices and AdamW for everything else, under one learning-rate schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Names of matrices that are tables or classifiers, not maps between hidden states.
_NOT_MUON = ("embed", "head", "markov", "gate", "hc_", "confidence", "weights_proj")
_QUINTIC = (3.4445, -4.7750, 2.0315)


@torch.no_grad()
def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrices to g [..., r, c], by Newton-Schulz iterations (in bfloat16 on a GPU)."""
    a, b, c = _QUINTIC
    x = g.bfloat16() if g.is_cuda else g.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(g.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum whose update of every matrix is orthogonalised; equal shapes are handled together.

    The update's size matches AdamW's (0.2 root mean square), so both share a learning rate.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.05):
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for same in by_shape.values():
                self._step_together(same, group)

    def _step_together(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        grads: list[Tensor] = [p.grad for p in params if p.grad is not None]
        moments = [self.state[p]["momentum"] for p in params]
        torch._foreach_lerp_(moments, grads, 1 - group["momentum"])
        ahead = torch._foreach_lerp(grads, moments, group["momentum"])
        updates = orthogonal(torch.stack(tuple(ahead)))
        size = 0.2 * max(params[0].shape[-2:]) ** 0.5
        torch._foreach_mul_(params, 1 - group["lr"] * group["decay"])
        torch._foreach_add_(params, list((updates * size).unbind(0)), alpha=-group["lr"])


def make_optimizers(module: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon over hidden matrices (each expert apart), AdamW over the rest of the parameters that learn."""
    matrices, vectors = [], []
    for name, p in module.named_parameters():
        if p.requires_grad:
            is_map = p.dim() >= 2 and min(p.shape[-2:]) > 8 and not any(part in name for part in _NOT_MUON)
            (matrices if is_map else vectors).append(p)
    fused = vectors[0].is_cuda
    adam = torch.optim.AdamW(vectors, lr=lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=fused)
    return [Muon(matrices, lr), adam]


def set_rate(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
