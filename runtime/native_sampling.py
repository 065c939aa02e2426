"""Sampling options as compiled kernels read them: DiSampling of runtime/native/abi.h, and the lists it points to."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import RequestError
from deepinfer.runtime.executor import SAMPLING, SequenceStart

_LISTS = ("allowed", "bias_ids", "bias", "ends", "bad", "bad_first")
_COUNTS = ("num_allowed", "num_bias", "num_ends", "num_bad")
RECORD = np.dtype([*((name, SAMPLING[name]) for name in SAMPLING.names or ()), *((name, "u8") for name in _LISTS),
                   *((name, "i8") for name in _COUNTS)], align=True)


class NativeSampling:
    """The options of one sequence. Valid as long as the object lives.

    ``record``: [1] of RECORD. ``longest_bad``: ids of the longest sequence that is never completed.
    """

    def __init__(self, start: SequenceStart, vocab: int) -> None:
        p = start.params
        bias = sorted((p.logit_bias or {}).items())
        self._lists: dict[str, NDArray[Any]] = {
            "bias_ids": np.array([i for i, _ in bias], np.int64), "bias": np.array([b for _, b in bias], np.float64),
            "ends": np.array([i for i in start.ends if 0 <= i < vocab], np.int64),
            "bad": np.array([i for word in start.bad for i in word], np.int64),
            "bad_first": np.cumsum([0, *map(len, start.bad)], dtype=np.int64)}
        if p.allowed_token_ids is not None:
            self._lists["allowed"] = np.unique(np.asarray(p.allowed_token_ids, np.int64))
        for name in ("allowed", "bias_ids", "bad"):
            ids = self._lists.get(name)
            if ids is not None and len(ids) and not 0 <= ids.min() <= ids.max() < vocab:
                raise RequestError("token id out of range", where=name, found=int(ids.max()), allowed=f"0..{vocab - 1}")
        self.longest_bad = max(map(len, start.bad), default=0)
        self.record = np.zeros(1, RECORD)
        numbers = start.record()
        for name in SAMPLING.names or ():
            self.record[name] = numbers[name]
        for name, ids in self._lists.items():
            self.record[name] = ids.ctypes.data
        for name, of in zip(_COUNTS, ("allowed", "bias_ids", "ends", "bad_first"), strict=True):
            self.record[name] = len(self._lists.get(of, ()))
        self.record["num_bad"] -= 1

    @property
    def penalised(self) -> bool:
        """Whether token counts are needed."""
        r = self.record[0]
        return bool(r["repetition"] != 1 or r["frequency"] or r["presence"])
