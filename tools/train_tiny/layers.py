"""Pieces of the network without state: linear layers, norms, RoPE, residual streams, experts, Engram."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .formats import GROUP, ROUNDERS, rounded, straight_through
from .shape import Shape

Function = TypeVar("Function", bound=Callable[..., Any])
_COMPILED: dict[str, Callable[..., Any]] = {}
_compile_enabled = False


def enable_compile(enabled: bool) -> None:
    """Let :func:`fused` functions run through torch.compile (on a GPU) or as written."""
    global _compile_enabled
    _compile_enabled = enabled
    if enabled:
        torch._dynamo.config.automatic_dynamic_shapes = False
        torch._dynamo.config.recompile_limit = 64


def fused(*symbolic: tuple[int, int]) -> Callable[[Function], Function]:
    """Mark a function of tensors as one that torch.compile may fuse.

    ``symbolic`` lists (argument, axis) of sizes that change between calls; all other sizes get a kernel each.
    """

    def wrap(function: Function) -> Function:
        def call(*args: Any) -> Any:
            if not _compile_enabled:
                return function(*args)
            if function.__qualname__ not in _COMPILED:
                _COMPILED[function.__qualname__] = torch.compile(function)
            for argument, axis in symbolic:
                torch._dynamo.maybe_mark_dynamic(args[argument], axis)
            return _COMPILED[function.__qualname__](*args)

        return call  # type: ignore[return-value]

    return wrap


@dataclass(frozen=True)
class Mode:
    """How a forward pass computes: working dtype, which roundings happen, whether the indexer selects."""

    dtype: torch.dtype = torch.float32
    quantised: bool = False  # weights, activations and caches on their stored grids
    frozen: bool = False  # the weights lie on their grids already, see checkpoint.frozen
    sparse: bool = True  # attend to the selected latents; else to every visible one
    exact_ties: bool = False  # equal index scores select the lower position
    kernel: str = "dense"  # or "flex"


class Linear(nn.Module):
    """``weight`` [out, in] without bias.  ``storage`` is its checkpoint form: fp8, fp4, bf16 or f32."""

    def __init__(self, outputs: int, inputs: int, storage: str, gain: float = 1.0):
        super().__init__()
        self.storage = storage
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * gain / math.sqrt(inputs))

    def matrix(self, mode: Mode) -> Tensor:
        kind = {"fp8": "fp8_blocks", "fp4": "fp4_groups", "bf16": "bf16"}.get(self.storage)
        return stored(self.weight, kind, mode)

    def forward(self, x: Tensor, mode: Mode) -> Tensor:
        return F.linear(activation(x, mode) if self.storage in ("fp8", "fp4") else x, self.matrix(mode))


def stored(weight: Tensor, kind: str | None, mode: Mode) -> Tensor:
    """A parameter in the working dtype, on the grid of its checkpoint form when the mode quantises."""
    if kind is not None and mode.quantised and not mode.frozen:
        weight = rounded(weight, kind)
    return weight.to(mode.dtype)


def activation(x: Tensor, mode: Mode) -> Tensor:
    """The MXFP8 input of an FP8 or FP4 matrix, or an MXFP8 window key."""
    return straight_through(x, _fp8_values) if mode.quantised else x


def _fp8_values(x: Tensor) -> Tensor:
    # Seen as a list of groups, so that one kernel serves all widths.
    return _round_groups(x.reshape(-1, GROUP)).view(x.shape)


@fused((0, 0))
def _round_groups(x: Tensor) -> Tensor:
    return ROUNDERS["fp8_groups"](x)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, mode: Mode) -> Tensor:
        return rms_norm(x.flatten(0, -2), stored(self.weight, "bf16", mode), self.eps).view(x.shape)


@fused((0, 0))
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    return (weight.float() * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


def rope_frequencies(shape: Shape, yarn: bool) -> Tensor:
    """Angles a position, float32 [rope/2]; the YaRN ones serve ratio-1 and ratio-2 layers."""
    size = shape.qk_rope_head_dim
    base = shape.compress_rope_theta if yarn else shape.rope_theta
    plain = 1.0 / (base ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    if not yarn:
        return plain

    def pair_of(turns: float) -> float:
        return size * math.log(shape.rope_original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_of(shape.rope_beta_fast)), 0)
    high = min(math.ceil(pair_of(shape.rope_beta_slow)), size - 1)
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / shape.rope_factor * ramp + plain * (1 - ramp)


def angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [n, rope/2] of the float32 product of position and frequency."""
    turn = positions.float()[:, None] * frequencies
    return turn.cos(), turn.sin()


@fused((0, 0), (0, -2), (1, -2), (2, -2))
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn adjacent pairs of the last features.  x is [..., n, d]; cos and sin are [n, rope/2]."""
    size = 2 * cos.shape[-1]
    head, tail = x[..., :-size], x[..., -size:].float().unflatten(-1, (-1, 2))
    a, b = tail[..., 0], tail[..., 1]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((head, turned.to(x.dtype)), -1)


# Residual streams -----------------------------------------------------------------------------------------------


class StreamMixer(nn.Module):
    """The coefficients of one sub-layer's hyper-connection (``hc_*_fn``, ``hc_*_base``, ``hc_*_scale``)."""

    def __init__(self, shape: Shape):
        super().__init__()
        n = shape.hc_mult
        base = torch.zeros(n * (n + 2))
        # Streams start as copies of one embedding: different write strengths make them part.
        base[:n] = math.log(1 / n / (1 - 1 / n)) + 0.5 * torch.randn(n)
        base[n : 2 * n] = 0.5 * torch.randn(n)
        base[2 * n :] = 3.0 * torch.eye(n).flatten()
        self.fn = nn.Parameter(torch.randn(n * (n + 2), n * shape.hidden_size) * 0.02)
        self.base = nn.Parameter(base)
        self.scale = nn.Parameter(torch.full((3,), 0.1))
        self.settings = (shape.hc_sinkhorn_iters, shape.hc_eps, shape.rms_norm_eps)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return stream_coefficients(h, self.fn, self.base, self.scale, *self.settings)


@fused((0, 0))
def stream_coefficients(
    h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iterations: int, hc_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """h [N, n, d] -> how to read [N, n], how to write [N, n] and how to mix [N, old, new], float32."""
    n = h.shape[-2]
    flat = h.flatten(-2).float()
    m = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    pre = torch.sigmoid(m[..., :n] * scale[0] + base[:n]) + hc_eps
    post = 2 * torch.sigmoid(m[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    mix = (m[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    mix = torch.softmax(mix, -1) + hc_eps
    mix = mix / (mix.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + hc_eps)
        mix = mix / (mix.sum(-2, keepdim=True) + hc_eps)
    return pre, post, mix


@fused((0, 0), (1, 0))
def collapse(h: Tensor, pre: Tensor) -> Tensor:
    """Σ_k pre_k · h_k."""
    return (pre[..., None] * h).sum(-2).to(h.dtype)


@fused((0, 0), (1, 0), (2, 0), (3, 0))
def spread(y: Tensor, h: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """New stream k = post_k · y + Σ_j mix_jk · h_j."""
    old = sum(mix[..., j, :, None] * h[..., j, None, :] for j in range(h.shape[-2]))
    return (post[..., None] * y[..., None, :] + old).to(h.dtype)


# Mixture of experts ---------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Routed experts, one shared expert and the router with its balance bias."""

    def __init__(self, shape: Shape, experts: int, chosen: int):
        super().__init__()
        d, width = shape.hidden_size, shape.moe_intermediate_size
        self.chosen, self.limit, self.route_scale = chosen, shape.swiglu_limit, shape.routed_scaling_factor
        self.gate = nn.Parameter(torch.randn(experts, d) / math.sqrt(d))
        self.w1 = nn.Parameter(torch.randn(experts, width, d) / math.sqrt(d))
        self.w3 = nn.Parameter(torch.randn(experts, width, d) / math.sqrt(d))
        self.w2 = nn.Parameter(torch.randn(experts, d, width) * 0.1 / math.sqrt(width))
        self.shared_w1 = Linear(width, d, "fp8")
        self.shared_w3 = Linear(width, d, "fp8")
        self.shared_w2 = Linear(d, width, "fp8", gain=0.1)
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts))
        self.bias: Tensor
        self.load: Tensor

    def forward(self, x: Tensor, mode: Mode) -> Tensor:
        gates = route(x, stored(self.gate, "bf16", mode), self.bias, self.chosen, self.route_scale)
        if self.training:
            self.load += (gates.detach() > 0).sum(0)
        up = [stored(w, "fp4_groups", mode).flatten(0, 1) for w in (self.w1, self.w3)]
        down = stored(self.w2, "fp4_groups", mode).transpose(0, 1).flatten(1)
        x = activation(x, mode)
        a = F.linear(x, torch.cat((up[0], self.shared_w1.matrix(mode))))
        b = F.linear(x, torch.cat((up[1], self.shared_w3.matrix(mode))))
        t = activation(gated(a, b, gates, self.limit), mode)
        return F.linear(t, torch.cat((down, self.shared_w2.matrix(mode)), 1))

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Move each expert's bias against its load of the last step."""
        self.bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


@fused((0, 0))
def route(x: Tensor, gate: Tensor, bias: Tensor, chosen: int, route_scale: float) -> Tensor:
    """Weights of all experts [N, E], float32: zero for those that are not picked."""
    z = F.linear(x.float(), gate.float())
    u = torch.sqrt(z.clamp(min=0) + torch.log1p(torch.exp(-z.abs())))
    picked = torch.topk(u.detach() + bias, chosen, dim=-1).indices
    u = u * torch.zeros_like(u).scatter(-1, picked, 1.0)
    if chosen > 1:
        u = u / (u.sum(-1, keepdim=True) + 1e-20)
    return u * route_scale


@fused((0, 0), (1, 0), (2, 0))
def gated(a: Tensor, b: Tensor, gates: Tensor, limit: float) -> Tensor:
    """Routing weight · silu(a) · b for every expert, and for the shared one after them with weight 1."""
    width = a.shape[-1] // (gates.shape[-1] + 1)
    a = a.float().clamp(max=limit)
    t = F.silu(a) * b.float().clamp(-limit, limit)
    weight = F.pad(gates, (0, 1), value=1.0).repeat_interleave(width, -1)
    return (weight * t).to(b.dtype)
