"""Number formats of a V4.1 checkpoint and its caches: rounding with a straight-through gradient, and packing.

Every ``round_*`` function returns the value that the stored form stands for, in the input's dtype; its gradient is
the identity.  Scales are powers of two (E8M0) except in the main cache, which has E4M3 scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

E4M3_MAX, E2M1_MAX = 448.0, 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP, MAIN_GROUP = 32, 16
# Multiplied in float32, so that these stand for their float32 images.
_INVERSE_448 = 0.002232142857142857
_INVERSE_6 = 0.16666666666666666


def power_of_two_above(x: Tensor) -> Tensor:
    """The smallest power of two >= x, for normal positive float32 x, from its bits."""
    bits = x.float().contiguous().view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    exponent = exponent + ((bits & 0x7FFFFF) != 0).int()
    return (exponent << 23).view(torch.float32)


def e4m3(x: Tensor) -> Tensor:
    """float32 x rounded to E4M3, as float32."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def e2m1(x: Tensor) -> Tensor:
    """float32 x in [-6, 6] rounded to E2M1, as float32; ties go to the even code."""
    magnitude = x.abs().clamp(max=E2M1_MAX)
    # The spacing of E2M1 is 0.5 below 2, 1 below 4 and 2 above; an even multiple has an even code.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / step) * step, x)


def _grouped(x: Tensor, size: int) -> Tensor:
    result: Tensor = x.float().unflatten(-1, (-1, size))
    return result


def e8m0_scale(v: Tensor, floor: float, inverse: float, dims: int | tuple[int, ...] = -1) -> Tensor:
    """Power-of-two scale of each group of v (the dims are the group's), at least that of ``floor``."""
    return power_of_two_above(v.abs().amax(dims, keepdim=True).clamp(min=floor) * inverse)


def _fp8_groups(x: Tensor) -> Tensor:
    v = _grouped(x, GROUP)
    scale = e8m0_scale(v, 1e-4, _INVERSE_448)
    return (e4m3(v / scale) * scale).flatten(-2).to(x.dtype)


def _fp4_groups(x: Tensor) -> Tensor:
    v = _grouped(x, GROUP)
    scale = e8m0_scale(v, E2M1_MAX * 2.0**-126, _INVERSE_6)
    return (e2m1(v / scale) * scale).flatten(-2).to(x.dtype)


def _fp4_main_cache(x: Tensor) -> Tensor:
    v = _grouped(x, MAIN_GROUP)
    scale = e4m3(v.abs().amax(-1, keepdim=True).clamp(min=E2M1_MAX * 2.0**-9) / E2M1_MAX)
    return (e2m1((v / scale).clamp(-E2M1_MAX, E2M1_MAX)) * scale).flatten(-2).to(x.dtype)


def _blocks(w: Tensor) -> Tensor:
    """[o, i] as [o/32, 32, i/32, 32]; both sizes are multiples of 32."""
    result: Tensor = w.float().unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
    return result


def _fp8_blocks(w: Tensor) -> Tensor:
    v = _blocks(w)
    scale = e8m0_scale(v, 1e-30, _INVERSE_448, (1, 3))
    return (e4m3(v / scale) * scale).flatten(2).flatten(0, 1).to(w.dtype)


class _StraightThrough(torch.autograd.Function):
    """Applies a rounding function forward and passes the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def straight_through(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """function(x) with the gradient of x."""
    result: Tensor = _StraightThrough.apply(x, function)  # type: ignore[no-untyped-call]
    return result


ROUNDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8_groups": _fp8_groups,
    "fp4_groups": _fp4_groups,
    "fp4_main_cache": _fp4_main_cache,
    "fp8_blocks": _fp8_blocks,
    "bf16": lambda w: w.to(torch.bfloat16).to(w.dtype),
}


def rounded(x: Tensor, kind: str) -> Tensor:
    """x on the grid of a stored form: fp8_groups (activations, window keys, Engram rows), fp4_groups (indexer,
    experts), fp4_main_cache, fp8_blocks (matrices) or bf16; straight-through gradient."""
    return straight_through(x, ROUNDERS[kind])


def pack_fp8_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    """[o, i] -> E4M3 [o, i] and E8M0 [o/32, i/32]."""
    v = _blocks(w)
    scale = e8m0_scale(v, 1e-30, _INVERSE_448, (1, 3))
    codes = (v / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(2).flatten(0, 1).contiguous(), scale[:, 0, :, 0].to(torch.float8_e8m0fnu)


def pack_fp8_rows(w: Tensor) -> tuple[Tensor, Tensor]:
    """Engram table [rows, columns] -> E4M3 of the same shape and E8M0 [rows, columns/32]."""
    v = _grouped(w, GROUP)
    scale = e8m0_scale(v, 1e-4, _INVERSE_448)
    codes = (v / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(1).contiguous(), scale[..., 0].to(torch.float8_e8m0fnu)


def pack_fp4_rows(w: Tensor) -> tuple[Tensor, Tensor]:
    """Expert matrix [o, i] -> two codes a byte I8 [o, i/2], even feature in the low half, and E8M0 [o, i/32]."""
    v = _grouped(w, GROUP)
    scale = e8m0_scale(v, E2M1_MAX * 2.0**-126, _INVERSE_6)
    value = e2m1(v / scale)
    table = torch.tensor(E2M1_VALUES, device=w.device)
    codes = torch.searchsorted(table, value.abs().contiguous()).to(torch.uint8)
    codes = (codes | (torch.signbit(value).to(torch.uint8) << 3)).flatten(1)
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).view(torch.int8), scale[..., 0].to(torch.float8_e8m0fnu)


def unpack(weight: Tensor, scale: Tensor) -> Tensor:
    """float32 values of a packed matrix, whichever of the three packings made it."""
    powers = scale.float()
    if weight.dtype == torch.int8:
        codes = torch.stack([weight.view(torch.uint8) & 15, weight.view(torch.uint8) >> 4], -1).flatten(1)
        values = torch.tensor(E2M1_VALUES)[(codes & 7).long()]
        values = torch.where(codes >= 8, -values, values)
    else:
        values = weight.float()
    down, across = values.shape[0] // powers.shape[0], values.shape[1] // powers.shape[1]
    return values * powers.repeat_interleave(down, 0).repeat_interleave(across, 1)
