"""Muon for matrices and AdamW for everything else, under one learning-rate schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Names of matrices that are tables or classifiers, not maps between hidden states.
_NOT_MUON = ("embed", "head", "markov", "gate", "hc_", "confidence", "weights_proj")
_TABLES = ("embed", "head", "markov")
# AdamW's learning rates as shares of Muon's.
TABLE_SHARE, OTHER_SHARE = 0.5, 0.15
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
    result: Tensor = (x.mT if tall else x).to(g.dtype)
    return result


class Muon(torch.optim.Optimizer):
    """Momentum whose update of every matrix is orthogonalised; equal shapes are handled together.

    The update's size is 0.2 root mean square, near that of AdamW's.  ``lr`` is a tensor, so that a captured step
    reads the current rate.
    """

    def __init__(self, params: Iterable[Tensor], lr: Tensor, momentum: float = 0.95, decay: float = 0.05):
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
        torch._foreach_sub_(params, list((updates * (group["lr"] * size)).unbind(0)))


def make_optimizers(module: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon over hidden matrices (each expert apart), AdamW over tables and, slower, over all other parameters."""
    matrices: list[Tensor] = []
    tables: list[Tensor] = []
    others: list[Tensor] = []
    for name, p in module.named_parameters():
        if not p.requires_grad:
            continue
        is_matrix = p.dim() >= 2 and min(p.shape[-2:]) > 8
        if is_matrix and not any(part in name for part in _NOT_MUON):
            matrices.append(p)
        else:
            (tables if any(part in name for part in _TABLES) else others).append(p)
    device = tables[0].device
    muon_rate = torch.tensor(lr, device=device)
    groups = [
        {"params": params, "lr": torch.tensor(lr * share, device=device), "share": share}
        for params, share in ((tables, TABLE_SHARE), (others, OTHER_SHARE))
    ]
    adam = torch.optim.AdamW(
        groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, capturable=device.type == "cuda"
    )
    return [Muon(matrices, muon_rate), adam]


def set_rate(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"].fill_(lr * group.get("share", 1.0))
