"""What a caller of the native runner must know of an engine, all of it from the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Value:
    """An output: row axis as printed (``T_wanted``, ``S``), dims of one row, and dtype as it lies in memory."""

    rows: str
    dims: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Parameter:
    """One parameter of the launch table, in its order. ``stack``: tensors of it (0: a single one); ``scaled``: a scale
    tensor lies beside each; ``derive``: ``module:function`` that makes the values at load time."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stack: int = 0
    scaled: bool = False
    derive: str = ""


@dataclass(frozen=True)
class Interface:
    """``limits``: most rows of ``step``, ``kept``, ``wanted``, ``seq``. ``pins``: (name, entries per row) in table
    order. ``outputs``: entry -> name -> value."""

    limits: Mapping[str, int]
    block_tokens: int
    lookback: int
    params: tuple[Parameter, ...]
    pins: tuple[tuple[str, int], ...]
    outputs: Mapping[str, Mapping[str, Value]]

    @staticmethod
    def of(data: Mapping[str, Any]) -> Interface:
        """From the manifest's ``interface`` object."""
        params = tuple(Parameter(**{**p, "shape": tuple(p["shape"])}) for p in data["params"])
        outputs = {entry: {name: Value(**{**v, "dims": tuple(v["dims"])}) for name, v in values.items()}
                   for entry, values in data["outputs"].items()}
        return Interface(dict(data["limits"]), data["block_tokens"], data["lookback"], params,
                         tuple((name, k) for name, k in data["pins"]), outputs)
