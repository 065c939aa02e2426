"""``describe``: what a model or an engine needs, without weights, without compiling, without taking any memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from deepinfer.accelerator import backend_of, built_targets, resolve_target
from deepinfer.codegen.compile import describe_model, load_backend
from deepinfer.codegen.lower import lower, row_limits
from deepinfer.codegen.package.manifest import is_engine, read_manifest, rebuild_command
from deepinfer.codegen.passes.narrow import narrow_model
from deepinfer.codegen.plan.cache_plan import cache_plan
from deepinfer.codegen.plan.memory_plan import Footprint, MemoryPlan, footprint
from deepinfer.dsl.model import EngineOptions, trace
from deepinfer.errors import ArtifactError, PlanError, SpecError
from deepinfer.runtime.checkpoint import open_checkpoint
from deepinfer.runtime.native.build import HOST
from deepinfer.runtime.placement import processors

PLANNED = ("max_num_seqs", "max_model_len")  # what may be asked of an engine that exists


@dataclass(frozen=True)
class Description:
    """``source``: what was described, an engine or a config; ``options``: those of the engine, made or to be made;
    ``memory``: for the sequences asked about, with ``threads`` threads."""

    source: str
    model: str
    target: str
    options: Mapping[str, Any]
    footprint: Footprint
    memory: MemoryPlan
    threads: int

    def as_json(self) -> str:
        """Everything, with the sums that the tables of ``deepinfer info`` show."""
        sizes, cache = self.footprint.sizes, self.footprint.cache
        sums = {
            "tensors": sizes.tensors, "disk_bytes": sizes.disk_bytes, "table_bytes": sizes.table_bytes,
            "ignored_bytes": sizes.ignored_bytes, "weight_bytes": sizes.weight_bytes,
            "bytes_per_token": float(cache.bytes_per_token), "block_bytes": cache.block_bytes,
            "page_bytes": cache.page_bytes, "resume_bytes": cache.resume_bytes, "slot_bytes": cache.slot_bytes,
            "total_bytes": self.memory.total}
        whole = {"source": self.source, "model": self.model, "target": self.target, "options": dict(self.options),
                 "threads": self.threads, "sums": sums, "memory": asdict(self.memory), **self.footprint.as_dict()}
        return json.dumps(whole, indent=2)


def describe(subject: str, *, target: str | None = None, options: Mapping[str, Any] | None = None) -> Description:
    """An engine folder, or a model as it would be compiled: a folder with config.json, that file, or a hub id.

    ``target``: None takes an engine's own, or for a model the one that compiling would take. ``options``: fields of
    EngineOptions that differ from an engine's own or from the defaults; an engine that exists takes those in
    ``PLANNED``
    alone, up to what it was compiled for. Raises SpecError, PlanError, ArtifactError.
    """
    chosen = dict(options or {})
    folder = Path(subject).expanduser()
    return _engine(folder, target, chosen) if is_engine(folder) else _model(subject, target, chosen)


def _engine(folder: Path, target: str | None, chosen: dict[str, Any]) -> Description:
    manifest = read_manifest(folder)
    if target not in (None, manifest["target"]):
        raise ArtifactError("the engine was compiled for another target", where=str(folder), found=manifest["target"],
                            allowed=target, next_step="leave --target out, or describe the model instead")
    try:
        known = {f.name for f in fields(EngineOptions)}
        made = EngineOptions(**{k: v for k, v in manifest["options"].items() if k in known})
        found = Footprint.from_dict(manifest["footprint"], str(folder))
        name = str(manifest["model"]["name"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError("the engine's manifest lacks something", where=str(folder), found=error,
                            next_step=f"compile again: {rebuild_command(manifest, folder)}") from None
    for key, value in chosen.items():
        if key not in PLANNED:
            raise SpecError(f"{key} of an engine is what it was compiled with", where=str(folder),
                            found=f"{key}={value}", allowed=f"{key}={getattr(made, key)}",
                            next_step="leave the option out, or describe the model instead")
        if value > getattr(made, key):
            raise PlanError(f"the engine was compiled for a smaller {key}", where=str(folder), found=value,
                            allowed=f"<= {getattr(made, key)}",
                            next_step=f"compile again with a larger {key}, or describe the model instead")
    return _described(str(folder), name, manifest["target"], replace(made, **chosen), found)


def _model(subject: str, target: str | None, chosen: dict[str, Any]) -> Description:
    target = resolve_target(target, need_built=False).target
    options = EngineOptions(**chosen)
    checkpoint = open_checkpoint(subject)
    model = describe_model(checkpoint, options)
    table = None
    if target in built_targets():
        plan = lower(model, load_backend(target), target)
        narrowing, table = plan.narrowing["step"], plan.lowered.table
    else:
        narrowing = narrow_model(model, trace(model).graphs["step"])[1]
        row_limits(model)
    found = footprint(model, cache_plan(model, narrowing), table, checkpoint.headers or None)
    return _described(subject, model.name, target, options, found)


def _described(source: str, model: str, target: str, options: EngineOptions, found: Footprint) -> Description:
    threads = processors()
    memory = found.memory(options.max_num_seqs, options.max_model_len, threads,
                          on_device=backend_of(target).runner != HOST)
    return Description(source, model, target, options.as_dict(), found, memory, threads)
