"""Random tensors as stored bytes, piece by piece.

Sixteen random bits choose one of 65,536 equally likely values of a normal distribution; a table holds them as they
are stored, so that making a tensor is one look-up per element in any format. Quantised blocks get codes whose
deviation fills the format's range, and power-of-two scales around the one that gives the wanted deviation.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.dsl.params import StoredTensor
from deepinfer.tools.make_checkpoint.laws import Law

PIECE = 1 << 22  # elements made at once
_DRAWS = 1 << 16
_E4M3_DEVIATION = 100.0  # the largest of 1,024 values is then near 320 of 448
_E2M1_DEVIATION = 2.0  # the largest of 32 values is then near 4 of 6
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


def tensor_bytes(tensor: StoredTensor, law: Law, seed: int, name: str, below: int = 0) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a tensor in order. They depend on seed, name, dtype, shape and law only.

    ``below``: integers are drawn from 0 .. below - 1, different ones within a row (0: from all of 0 .. 99).
    """
    bits = _bits(seed, name)
    if tensor.dtype == "I64":
        yield from _integers(tensor.shape, below or 100, bits)
        return
    table = _table(tensor.dtype, law)
    left = math.prod(tensor.shape)
    while left:
        count = min(left, PIECE)
        draws = bits.random_raw(-(-count // 4)).view(np.uint16)[:count]
        yield table[draws].view(np.uint8)
        left -= count


def scale_bytes(tensor: StoredTensor, law: Law, codes: str, seed: int, name: str) -> Iterator[NDArray[np.uint8]]:
    """Exponents of the block scales of codes of dtype ``codes``: the two powers of two around the one that gives the
    law's deviation, mixed to its logarithm."""
    deviation = _E4M3_DEVIATION if codes == "F8_E4M3" else _E2M1_DEVIATION
    bits, ideal = _bits(seed, name), math.log2(law.deviation / deviation)
    left = math.prod(tensor.shape)
    while left:
        count = min(left, PIECE)
        even = (bits.random_raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        yield (np.floor(ideal + even) + _EXPONENT_BIAS).astype(np.uint8)
        left -= count


def _bits(seed: int, name: str) -> np.random.PCG64:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return np.random.PCG64(np.random.SeedSequence(int.from_bytes(digest, "little")))


@lru_cache(maxsize=1)
def _quantiles() -> NDArray[np.float64]:
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / _DRAWS) for i in range(_DRAWS)])


@lru_cache(maxsize=64)
def _table(dtype: str, law: Law) -> NDArray[Any]:
    """Stored form of each draw."""
    z = _quantiles()
    if dtype == "F8_E4M3":
        return _nearest(z * _E4M3_DEVIATION, e4m3_values())
    if dtype == "I8":
        even, odd = np.arange(_DRAWS) & 0xFF, np.arange(_DRAWS) >> 8
        coarse = np.array([NormalDist().inv_cdf((i + 0.5) / 256) for i in range(256)]) * _E2M1_DEVIATION
        codes = _nearest(coarse, np.array(_E2M1))
        nibbles = ((codes & 0x80) >> 4) | (codes & 0x7F)
        return np.asarray(nibbles[even] | (nibbles[odd] << 4), np.uint8)
    values = (law.mean + law.deviation * z).astype(np.float32)
    if dtype == "F32":
        return values
    if dtype == "BF16":
        return bf16_bits(values)
    raise NotImplementedError(f"random values stored as {dtype}")


def bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even, as bits."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@lru_cache(maxsize=1)
def e4m3_values() -> NDArray[np.float64]:
    """Values of the non-negative codes 0 .. 126 (127 is NaN)."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))


def _nearest(x: NDArray[np.float64], magnitudes: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Code of the nearest magnitude, sign in bit 7; no draw lies on a boundary."""
    code = np.searchsorted((magnitudes[1:] + magnitudes[:-1]) / 2, np.abs(x))
    return (code | np.where(x < 0, 0x80, 0)).astype(np.uint8)


def _integers(shape: tuple[int, ...], below: int, bits: np.random.PCG64) -> Iterator[NDArray[np.uint8]]:
    rows, k = math.prod(shape[:-1]), shape[-1]
    if k > below:
        raise ValueError(f"no {k} different integers below {below}")
    draw, at_once = np.random.Generator(bits), max(1, PIECE // below)
    for start in range(0, rows, at_once):
        order = draw.random((min(at_once, rows - start), below)).argsort(axis=1)[:, :k]
        yield np.ascontiguousarray(order, np.int64).view(np.uint8).reshape(-1)
