"""The golden cases: tiny checkpoints in the released formats, and what a reference computes for them.

README.md beside this file says where they come from and what each tensor means.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.codegen.passes.narrow import narrow_model
from deepinfer.codegen.passes.numerics import drop_rounding
from deepinfer.dsl import Config, EngineOptions, Program, StoredTensor, trace
from deepinfer.dsl.interpreter import Interpreter, ReferenceSession, derived_values
from deepinfer.model_specs.registry import build_model

torch.set_num_threads(1)  # the cases are so small that threads wait longer than they work

FOLDER = Path(__file__).with_name("cases")
V41 = ("v41_a_f32", "v41_b_bf16", "v41_c_quant")
V4 = ("v4_case_a", "v4_case_b", "v4_case_d")
QUANTILES = {"median": 0.5, "quantile99": 0.99, "largest": 1.0}


@dataclass(frozen=True, eq=False)
class Case:
    """One case. ``formats``: the options under which its main ``logits`` were computed."""

    name: str
    folder: Path
    config: dict[str, Any]
    formats: dict[str, str]

    @cached_property
    def golden(self) -> dict[str, Tensor]:
        """Expected tensors by name; bit masks unpacked, lookup as in the README."""
        stored = load_file(self.folder / "golden.safetensors")
        for name in [k for k in stored if k.startswith("index_sel.") or k == "cand_blocks"]:
            stored[name] = unpacked(stored[name])
        return stored

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        return load_file(self.folder / "model.safetensors")

    @cached_property
    def headers(self) -> dict[str, StoredTensor]:
        with safe_open(self.folder / "model.safetensors", framework="numpy") as f:
            held = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118 (not a mapping)
            return {name: StoredTensor(s.get_dtype(), tuple(s.get_shape())) for name, s in held.items()}

    @property
    def ids(self) -> list[int]:
        """Token ids of the prompt."""
        return self.golden["ids" if "ids" in self.golden else "input_ids"].tolist()

    @lru_cache(maxsize=4)  # noqa: B019 (cases live as long as the tests)
    def program(self, **options: Any) -> Program:
        """The traced model under the case's formats, with ``options`` laid over them."""
        return trace(build_model(Config(self.config), EngineOptions(**(self.formats | options)), self.headers))

    @lru_cache(maxsize=4)  # noqa: B019
    def interpreter(self, dtype: torch.dtype = torch.float32, narrowed: bool = False, **options: Any) -> Interpreter:
        """The reference interpreter of the case; profile ``wide`` unless ``options`` say otherwise. ``narrowed``: of
        the graphs on the rows that liveness wants."""
        program = self.program(**({"profile": "wide"} | options))
        graphs = dict(program.graphs)
        if program.model.options.profile == "wide":
            graphs = {k: drop_rounding(g) for k, g in graphs.items()}
        if narrowed:
            graphs = {k: narrow_model(program.model, g)[0] for k, g in graphs.items()}
        return Interpreter(graphs, self.weights, dtype, derived_values(program, self.folder))

    @cached_property
    def pins(self) -> dict[str, Tensor]:
        """Every selection of the prompt as ``topk`` nodes name them: [S, k] i64, -1 where fewer are chosen."""
        out: dict[str, Tensor] = {}
        for n in self.program(profile="wide").graphs["step"].of("topk"):
            name, k = n.attrs["pin"], n.attrs["k"]
            kind, layer = name.split(".")
            if kind == "experts":
                out[name] = self.golden[name].long()
            elif kind == "candidates":
                out[name] = as_indices(self.golden["cand_blocks"], k)
            elif f"index_ids.{layer}" in self.golden:
                out[name] = self.golden[f"index_ids.{layer}"].long()
            else:
                out[name] = as_indices(self.golden[name], k)
        return out

    def session(self, dtype: torch.dtype = torch.float32, narrowed: bool = False, **options: Any) -> ReferenceSession:
        """A new sequence of ``interpreter(dtype, narrowed, **options)``."""
        program = self.program(**({"profile": "wide"} | options))
        return ReferenceSession(self.interpreter(dtype, narrowed, **options), program.model)


@cache
def load_case(name: str) -> Case:
    """A case by folder name. The ``oracle`` object of a config, which no checkpoint has, becomes options."""
    folder = FOLDER / name
    config = json.loads((folder / "config.json").read_text())
    oracle = config.pop("oracle", {})
    formats = {option: "spec" if oracle.get(key, False) else "f32"
               for option, key in (("cache_format", "kv_quant"), ("act_format", "act_quant"))}
    return Case(name, folder, config, formats)


def unpacked(bits: Tensor) -> Tensor:
    """[rows, bytes] u8 -> [rows, 8 * bytes] bool, lowest bit first."""
    return (bits.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)).bitwise_and(1).bool().flatten(-2)


def row_errors(found: Tensor, expected: Tensor) -> Tensor:
    """[rows]: largest difference in each row, f64."""
    return (found.double() - expected.double()).abs().flatten(1).amax(-1)


def same_argmax(found: Tensor, expected: Tensor) -> float:
    """Part of the rows whose largest entry is at the same place."""
    return float((found.argmax(-1) == expected.argmax(-1)).double().mean())


def as_mask(picked: Tensor, width: int) -> Tensor:
    """[rows, k] indices with -1 for none -> [rows, width] bool."""
    mask = torch.zeros(len(picked), width + 1, dtype=torch.bool)
    mask.scatter_(1, torch.where(picked < 0, width, picked.long()), True)
    return mask[:, :width]


def as_indices(mask: Tensor, k: int) -> Tensor:
    """[rows, width] bool -> [rows, k] the set indices in rising order, then -1."""
    place = torch.where(mask, torch.arange(mask.shape[1]), mask.shape[1]).sort(-1).values[:, :k]
    return torch.nn.functional.pad(torch.where(place < mask.shape[1], place, -1), (0, k - place.shape[1]), value=-1)


def stream_errors(found: Tensor, expected: Tensor) -> Tensor:
    """[rows]: error of the streams of each row, relative to their size (root of the sum of squares)."""
    difference = (found.double() - expected.double()).flatten(1).norm(dim=-1)
    return difference / expected.double().flatten(1).norm(dim=-1)
