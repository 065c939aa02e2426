"""Parameters as exact real values: checkpoint tensors decoded, expert stacks stacked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.dsl.graph import Node
from deepinfer.dsl.interpreter.formats import dequantised_weight
from deepinfer.dsl.model import Program
from deepinfer.dsl.params import ParamDecl
from deepinfer.dsl.types import Type
from deepinfer.errors import ArtifactError

_PLAIN = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "i64": torch.int64, "i32": torch.int32}


class Weights:
    """Values of ``param`` nodes.

    Args:
        tensors: checkpoint tensors by name, in the checkpoint's storage dtypes.
        derived: values of parameters that a spec makes at load time, by parameter name.
        dtype: compute dtype that float values are widened to (exact for every stored format in f64; in f32 for all
            but F64 tensors).
    """

    def __init__(self, tensors: Mapping[str, Tensor], derived: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._derived = derived
        self._dtype = dtype
        self._values: dict[str, Tensor] = {}

    def value(self, n: Node) -> Tensor:
        """Value of a ``param`` node, shaped as its type. ArtifactError names a tensor that is missing or differs."""
        key = f"{n.attrs['name']} {n.attrs['type']}"
        if key not in self._values:
            self._values[key] = self._load(n)
        return self._values[key]

    def _load(self, n: Node) -> Tensor:
        name, stack = n.attrs["name"], n.attrs.get("stack", 0)
        type_ = Type.parse(n.attrs["type"])
        shape = type_.static_dims[1:] if stack else type_.static_dims
        if n.attrs.get("derive"):
            if name not in self._derived:
                raise ArtifactError("a derived parameter was not given", where=name)
            return self._checked(name, self._derived[name], type_.static_dims).to(_PLAIN[type_.dtype.name])
        decl = ParamDecl(name, shape, type_.dtype, stack)
        scales = decl.scale_names or [""] * len(decl.names)
        parts = [self._one(decl, part, scale) for part, scale in zip(decl.names, scales, strict=True)]
        value = torch.stack(parts) if stack else parts[0]
        return value if type_.dtype.is_int else value.to(self._dtype)

    def _one(self, decl: ParamDecl, name: str, scale: str) -> Tensor:
        stored = self._tensor(name)
        if decl.dtype.is_block:
            values = dequantised_weight(stored, self._tensor(scale), decl.dtype)
            return self._checked(name, values, decl.shape)
        if stored.dtype != _PLAIN[decl.dtype.name]:
            raise ArtifactError("a checkpoint tensor has another dtype than the program", where=name,
                                found=stored.dtype, allowed=decl.dtype)
        return self._checked(name, stored, decl.shape)

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ArtifactError("the checkpoint lacks a tensor", where=name)
        return self._tensors[name]

    @staticmethod
    def _checked(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        if tuple(value.shape) != shape:
            raise ArtifactError("a tensor has another shape than the program", where=name, found=list(value.shape),
                                allowed=list(shape))
        return value


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the safetensors files of a checkpoint folder, by name."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ArtifactError("there are no safetensors files", where=str(folder))
    return {name: t for file in files for name, t in load_file(file).items()}


def derived_values(program: Program, folder: Path) -> dict[str, Tensor]:
    """Values of the parameters that the spec makes at load time, by parameter name."""
    model = program.model
    return {p.name: torch.as_tensor(model.derive[p.derive](folder, model.config))
            for p in model.params.declared.values() if p.derive}
