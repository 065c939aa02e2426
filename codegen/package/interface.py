"""What a caller of the native runner must know of an engine, all of it from the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deepinfer.dsl.params import ParamDecl
from deepinfer.dsl.types import DType


@dataclass(frozen=True)
class Value:
    """An output: row axis as printed (``T_wanted``, ``S``), dims of one row, and dtype as it lies in memory. The rows
    of an output by sequence lie in memory one after the other, whatever axis wrote them."""

    rows: str
    dims: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Interface:
    """``params``, ``pins`` (name, entries per row) in the order of the launch table; ``outputs``: entry -> name ->
    value."""

    params: tuple[ParamDecl, ...]
    pins: tuple[tuple[str, int], ...]
    outputs: Mapping[str, Mapping[str, Value]]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        return {"params": [asdict(p) | {"dtype": str(p.dtype)} for p in self.params],
                "pins": [list(p) for p in self.pins],
                "outputs": {e: {n: asdict(v) for n, v in values.items()} for e, values in self.outputs.items()}}

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> Interface:
        """What ``as_dict`` wrote."""
        params = tuple(ParamDecl(**{**p, "shape": tuple(p["shape"]), "dtype": DType.parse(p["dtype"])})
                       for p in raw["params"])
        outputs = {entry: {name: Value(**{**v, "dims": tuple(v["dims"])}) for name, v in values.items()}
                   for entry, values in raw["outputs"].items()}
        return Interface(params, tuple((name, k) for name, k in raw["pins"]), outputs)
