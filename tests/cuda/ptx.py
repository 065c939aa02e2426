"""Runs the inline PTX of kernels on arrays of 32-bit words: the few instructions that they use, one at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch

Words = np.ndarray


def run(text: str, arguments: Sequence[Words], outputs: int) -> list[Words]:
    """``text``: a block in braces; ``$0`` and on are its outputs, then its arguments (u32)."""
    known: dict[str, Words] = {f"${outputs + i}": a for i, a in enumerate(arguments)}
    shape = arguments[0].shape
    for line in text.strip().strip("{}").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        match = re.match(r"\s*([a-z0-9.]+)\s+(.+)$", line.strip())
        assert match is not None, line
        name, (target, *sources) = match[1], [x.strip() for x in match[2].split(",")]
        values = [known[x] if x in known else np.full(shape, int(x, 0), np.uint32) for x in sources]
        known[target] = _INSTRUCTIONS[name](*values)
    return [known[f"${i}"] for i in range(outputs)]


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros_like(a)
    for i in range(4):
        chosen = selector >> np.uint32(4 * i) & np.uint32(15)
        assert (chosen < 8).all(), "the mode that repeats signs is not known"
        byte = (both >> (chosen.astype(np.uint64) * np.uint64(8)) & np.uint64(255)).astype(np.uint32)
        out |= byte << np.uint32(8 * i)
    return out


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    out = np.zeros_like(a)
    for n in range(8):
        if int(table.flat[0]) >> n & 1:
            out |= (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
    return out


def _times(a: Words, b: Words) -> Words:
    x, y = (torch.from_numpy(np.ascontiguousarray(v).view(np.int16)).view(torch.bfloat16) for v in (a, b))
    return (x * y).view(torch.int16).numpy().view(np.uint32).reshape(a.shape)


_INSTRUCTIONS = {
    "prmt.b32": _prmt, "lop3.b32": _lop3, "and.b32": lambda a, b: a & b, "shr.u32": lambda a, b: a >> b,
    "mul.lo.u32": lambda a, b: a * b, "mul.rn.bf16x2": _times,
}
