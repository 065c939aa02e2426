"""Looks at every weight once before it is served: finite numbers, integers inside their range.

The scan also brings the weights into memory, in file order, with a progress bar; large lookup tables are left on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.dsl.params import ParamDecl
from deepinfer.errors import ArtifactError
from deepinfer.runtime.checkpoint.mapping import Weights

DEPTHS = ("weights", "plain", "off")
_PIECE = 4 << 20  # bytes looked at together: a working array of this size stays in the caches
SMALL_TABLES = 1 << 30  # bytes of all lookup tables together up to which they are looked at as well
# dtype -> (unsigned type of an element, mask that drops the sign, largest magnitude that is a finite number)
_FLOATS: dict[str, tuple[Any, int, int]] = {
    "F32": (np.uint32, 0x7FFFFFFF, 0x7F7FFFFF), "BF16": (np.uint16, 0x7FFF, 0x7F7F),
    "F8_E4M3": (np.uint8, 0x7F, 0x7E), "F8_E8M0": (np.uint8, 0xFF, 0xFE)}


def has_non_finite(data: NDArray[np.uint8], dtype: str) -> bool:
    """Whether the raw bytes of a tensor hold a NaN or an infinity. Formats without (FP4 pairs, integers): False."""
    if dtype not in _FLOATS:
        return False
    kind, mask, largest = _FLOATS[dtype]
    scratch = np.empty(_PIECE // np.dtype(kind).itemsize, kind)
    for start in range(0, len(data), _PIECE):
        piece = data[start : start + _PIECE].view(kind)
        magnitude = np.bitwise_and(piece, kind(mask), out=scratch[: len(piece)])
        if magnitude.size and magnitude.max() > largest:
            return True
    return False


def scan(weights: Weights, *, depth: str = "weights", threads: int = 1,
         advance: Callable[[int], None] = lambda _: None) -> None:
    """Raises ArtifactError that names the first tensor with a number that is not finite or an integer out of range.

    ``depth``: ``weights`` everything; ``plain`` leaves out FP8 and FP4 codes (their scales are looked at); ``off``
    checks integers only, which kernels index by. Lookup tables count as long as they are small, see
    ``tables_left_out``. ``advance`` is told the bytes done.
    """
    def look(work: tuple[ParamDecl, str, str]) -> int:
        p, name, dtype = work
        data = weights.bytes_of(name)
        if p.below:
            _check_range(name, data.view(np.int64), p.below)
        elif has_non_finite(data, dtype):
            found = "a NaN or an infinity" if dtype in ("F32", "BF16") else "a NaN"
            raise ArtifactError(f"the tensor holds {found}", where=name,
                                next_step="fetch the file again; a checkpoint with such numbers is not served")
        return len(data)

    pool = ThreadPoolExecutor(threads)
    try:
        for done in pool.map(look, _tensors(weights, depth)):
            advance(done)
    finally:
        pool.shutdown(cancel_futures=True)


def scan_bytes(weights: Weights, depth: str = "weights") -> int:
    """Bytes that ``scan`` will look at."""
    return sum(len(weights.bytes_of(name)) for _, name, _ in _tensors(weights, depth))


def tables_left_out(weights: Weights) -> int:
    """Bytes of lookup tables that the scan leaves on disk: all of them when they exceed ``SMALL_TABLES``, else 0."""
    size = sum(len(weights.bytes_of(name)) for p in weights.params if p.table and not p.derive
               for name in (*p.names, *p.scale_names))
    return size if size > SMALL_TABLES else 0


def _tensors(weights: Weights, depth: str) -> Iterator[tuple[ParamDecl, str, str]]:
    without_tables = tables_left_out(weights) > 0
    for p in weights.params:
        if p.derive or (depth == "off" and not p.below) or (p.table and without_tables):
            continue
        names = list(p.scale_names)
        if depth == "weights" or not p.dtype.is_block:
            names += p.names
        for name in names:
            # A scale that its writer called bytes is an exponent all the same.
            yield p, name, "F8_E8M0" if name in p.scale_names else weights.dtype_of(name)


def _check_range(name: str, values: NDArray[np.int64], below: int) -> None:
    if values.size and (values.min() < 0 or values.max() >= below):
        found = values.min() if values.min() < 0 else values.max()
        raise ArtifactError("the tensor holds an integer out of range", where=name, found=int(found),
                            allowed=f"0..{below - 1}", next_step="fetch the file again")
