"""What an engine is made of: the compiler's results, and the manifest and text files that follow from them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import deepinfer
from deepinfer.backends.base import ALL, Binary, Roof
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.codegen.lower import Plan
from deepinfer.codegen.package.explanation import explanation
from deepinfer.codegen.package.interface import Interface, Value
from deepinfer.codegen.plan.cache_plan import cache_plan
from deepinfer.codegen.plan.launch import Commit
from deepinfer.codegen.plan.memory_plan import footprint
from deepinfer.dsl.graph import Graph
from deepinfer.dsl.model import EngineOptions, Model
from deepinfer.errors import InternalError
from deepinfer.runtime.checkpoint import Checkpoint
from deepinfer.runtime.native.build import runner_abi
from deepinfer.runtime.plan import engine_plan

_PLAIN = ("f32", "bf16", "i64", "i32", "bool")


@dataclass(frozen=True)
class EngineContents:
    """Input of ``write_engine``. ``checkpoint``: what was compiled for; its folder and path leave no trace. ``costs``:
    cost tables, once a target has them; ``roofs``: machines that the report predicts for."""

    plan: Plan
    binary: Binary
    checkpoint: Checkpoint
    costs: Mapping[str, Any] | None = None
    roofs: tuple[Roof, ...] = ()

    def manifest(self, runner_compiler: str) -> dict[str, Any]:
        """Everything of the manifest but the list of files."""
        plan, model, lowered = self.plan, self.plan.model, self.plan.lowered
        cache = cache_plan(model, plan.narrowing["step"])
        hub = self.checkpoint.name if self.checkpoint.revision else None
        return {
            "version": deepinfer.__version__, "runner_abi": runner_abi(), "target": plan.target,
            "machine": platform.machine(), "command": _command(model, plan.target, hub, self.binary.isa),
            "compiled": self.binary.compiled, "isa": self.binary.isa,
            "instruction_sets": list(self.binary.instruction_sets),
            "compilers": {**self.binary.compilers, "runner": runner_compiler},
            "model": _model(model, plan.graphs) | {"hub_id": hub, "revision": self.checkpoint.revision},
            "options": model.options.as_dict(),
            "plan": engine_plan(model, plan.graphs, cache, target=plan.target, limits=lowered.table.limits).as_dict(),
            "interface": self.interface().as_dict(),
            "kernels": [{"symbol": source.symbol, "family": spec.family, "title": spec.title, "digest": spec.digest(),
                         "source": f"src/{source.symbol}{source.suffix}"}
                        for spec, source in zip(lowered.specs, lowered.sources, strict=True)],
            "footprint": footprint(model, cache, lowered.table, self.checkpoint.headers or None).as_dict(),
            "rows": "every row count from 1 to its limit runs the same kernels: an axis is cut into tiles of rows, "
                    "the last tile may be partial",
            "costs": self.costs,
        }

    def interface(self) -> Interface:
        """How the runner is called."""
        lowered = self.plan.lowered
        return Interface(tuple(lowered.params), tuple(lowered.table.pins),
                         {name: _outputs(g) for name, g in self.plan.graphs.items()})

    def sources(self) -> dict[str, str]:
        """File name -> text of each generated source, headed by what it is."""
        scopes = self._scopes()
        out = {}
        for i, (spec, source) in enumerate(zip(self.plan.lowered.specs, self.plan.lowered.sources, strict=True)):
            out[f"{source.symbol}{source.suffix}"] = _head(spec, scopes.get(i, []), source.suffix) + source.text
        return out

    def explanation(self) -> dict[str, Any]:
        """The content of ``explain.json``."""
        return explanation(self.plan, self.roofs)

    def _scopes(self) -> dict[int, list[str]]:
        scopes: dict[int, list[str]] = {}
        for entry in self.plan.lowered.table.entries.values():
            for step in entry.launches:
                if not isinstance(step, Commit):
                    scopes.setdefault(step.kernel, []).append(step.scope or "-")
        return scopes


def _model(model: Model, graphs: Mapping[str, Graph]) -> dict[str, Any]:
    return {
        "name": model.name, "spec": model.spec, "config": model.config.raw,
        "unread_keys": model.config.ignored, "hub_ids": list(model.hub_ids),
        "graphs": {name: g.digest() for name, g in graphs.items()},
        "derive": {name: _place(f) for name, f in model.derive.items()},
        "ignored": [{"pattern": i.pattern, "reason": i.reason} for i in model.ignored],
    }


def _place(function: Callable[..., Any]) -> str:
    """``module:name`` of a spec's function, which the loader calls."""
    if "<" in function.__qualname__ or "." in function.__qualname__:
        raise InternalError("a function that makes a parameter has to be a top-level one of its module",
                            function.__qualname__)
    return f"{function.__module__}:{function.__name__}"


def _outputs(graph: Graph) -> dict[str, Value]:
    out = {}
    for name, node in graph.outputs.items():
        if node.type.dtype.name not in _PLAIN:
            raise InternalError(f"the output {name} of {graph.name} has no plain dtype: {node.type}")
        if node.op == "keep":
            raise InternalError(f"the output {name} of {graph.name} is a view of a wider axis")
        out[name] = Value(str(node.type.rows), node.type.static_dims, node.type.dtype.name)
    return out


def _command(model: Model, target: str, hub: str | None, isa: str) -> str:
    """How to compile this again; ``{out}`` stands for the engine's folder."""
    chosen, usual = asdict(model.options), asdict(EngineOptions())
    options = [f"--{k.replace('_', '-')} {v}" for k, v in chosen.items() if v != usual[k]]
    options += [f"--isa {isa}"] * (isa != ALL)
    words = ["deepinfer-compile", f"--target {target}", f"--model {hub or 'CHECKPOINT'}", "--out {out}", *options]
    return " ".join(words)


def _head(spec: KernelSpec, scopes: list[str], suffix: str) -> str:
    """What a source alone cannot say (target and spec are in its own head): the region, and where it is used."""
    places = ", ".join(scopes[:4]) + (f" and {len(scopes) - 4} more" if len(scopes) > 4 else "")
    nodes = " ".join(dict.fromkeys(n.op for n in spec.region))
    mark = "#" if suffix == ".py" else "//"
    return f"{mark} region: {nodes or 'none recorded'}\n{mark} launched for: {places or 'nothing'}\n"
