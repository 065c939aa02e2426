"""Compiles candidates into one file, on a machine that needs no device."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from deepinfer.backends.cuda_sm100.schedule import MANY
from deepinfer.backends.cuda_sm100.source import CudaSource
from deepinfer.backends.cuda_sm100.target import ARCHS
from deepinfer.backends.cuda_sm100.toolchain import Toolchain, placed
from deepinfer.backends.cuda_sm100.tune.candidates import Candidate, candidates
from deepinfer.backends.cuda_sm100.tune.database import TUNED
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.errors import ToolchainError

# Rows that a tile is measured at, by the most rows (or pairs of an expert) it is for.
_DENSE = {16: (1, 8), 64: (64,), 256: (256,), MANY: (64, 256, 4096), 0: (1024, 4096)}
_EXPERTS = {2: (1, 8, 64), 16: (256, 1024), 64: (4096,), 0: (8192,)}
_SKEWED = (64, 1024, 4096)


def emit(c: Candidate, spec: KernelSpec) -> CudaSource:
    source: CudaSource = import_module(f"deepinfer.backends.cuda_sm100.families.{spec.family}").emit(spec, c.schedule)
    return source


def prepare(target: str, specs: Iterable[KernelSpec], out: Path, *, jobs: int = 0,
            progress: Callable[[str, int], None] = lambda what, total: None) -> int:
    """Writes the candidates of all contractions among ``specs``; returns how many. One that does not compile, or keeps
    registers in memory, is left out."""
    chosen = {s.symbol: s for s in specs if s.family in TUNED}
    work = [(s, c) for s in chosen.values() for c in candidates(s)]
    blob, places, kernels = bytearray(), dict[str, tuple[int, int]](), {s: _kernel(chosen[s]) for s in chosen}
    jobs = jobs or os.cpu_count() or 1
    with Toolchain(ARCHS[target], jobs) as tools, ThreadPoolExecutor(jobs) as pool:
        def compiled(item: tuple[KernelSpec, Candidate]) -> tuple[CudaSource, list[Any]] | None:
            spec, c = item
            source = emit(c, spec)
            try:
                variant = next(v for v, t in zip(source.variants, c.schedule.tiles, strict=False) if t == c.tile)
                stages = [(s, tools.stage(source, s)) for s in variant.stages]
            except (ToolchainError, StopIteration):
                return None
            finally:
                progress(spec.symbol, len(work))
            return source, stages

        for (spec, c), made in zip(work, pool.map(compiled, work), strict=True):
            if made is not None:
                source, stages = made
                _add(kernels[spec.symbol], spec, c, source,
                     [{"grid": s.grid.as_json(), **placed(e, blob, places)} for s, e in stages])
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("cubins.bin", bytes(blob))
        z.writestr("choices.json", json.dumps({"target": target, "kernels": kernels}))
    return sum(len(k["choices"]) for k in kernels.values())


def _kernel(spec: KernelSpec) -> dict[str, Any]:
    grouped = spec.family == "grouped_gemm"
    return {"operands": [{"role": o.role, "dims": list(o.dims), "dtype": o.dtype, "write": o.write}
                         for o in spec.operands],
            "slots": spec.operands[spec.get("experts")].dims[-1] if grouped else 1,
            "experts": spec.operands[spec.get("weights")[0]].dims[0] if grouped else 0,
            "parameters": [], "choices": [], "cases": []}


def _add(kernel: dict[str, Any], spec: KernelSpec, c: Candidate, source: CudaSource, stages: list[Any]) -> None:
    if not kernel["parameters"]:
        kernel["parameters"] = [p.as_json() for p in source.parameters]
    number = len(kernel["choices"])
    kernel["choices"].append({"schedule": c.schedule.as_json(), "tile": asdict(c.tile), "scratch": list(source.scratch),
                              "parameters": [p.as_json() for p in source.parameters], "stages": stages})
    grouped = spec.family == "grouped_gemm"
    for rows in (_EXPERTS if grouped else _DENSE)[c.tile.rows]:
        for skew in (False, True) if grouped and rows in _SKEWED else (False,):
            case = next((x for x in kernel["cases"] if x[:2] == [rows, skew]), None)
            if case is None:
                kernel["cases"].append(case := [rows, skew, []])
            case[2].append(number)
