"""Compiles candidates into one file, on a machine that needs no device."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from deepinfer.backends.cuda_sm100.schedule import MANY, Schedule, Tile
from deepinfer.backends.cuda_sm100.source import CudaSource, Stage, Variant
from deepinfer.backends.cuda_sm100.target import ARCHS
from deepinfer.backends.cuda_sm100.toolchain import Toolchain, placed
from deepinfer.backends.cuda_sm100.tune.candidates import Candidate, candidates
from deepinfer.backends.cuda_sm100.tune.database import TUNED
from deepinfer.codegen.cache import Entry
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.errors import ToolchainError

# Rows that a tile is measured at, by the most rows (or pairs of an expert) it is for.
_DENSE = {16: (1, 8), 64: (64,), 256: (256,), MANY: (64, 256, 4096), 0: (1024, 4096)}
_EXPERTS = {2: (1, 8, 64), 6: (256,), 16: (1024,), 64: (4096,), 0: (8192,)}
_SKEWED = (64, 1024, 4096)


def emit(spec: KernelSpec, schedule: Schedule | None) -> CudaSource:
    source: CudaSource = import_module(f"deepinfer.backends.cuda_sm100.families.{spec.family}").emit(spec, schedule)
    return source


class Bundle:
    """Cubins, and what measure.py needs to launch them: kernels with choices, and cases: rows, skew, choices."""

    def __init__(self, target: str) -> None:
        self.target, self.blob, self.places = target, bytearray(), dict[str, tuple[int, int]]()
        self.kernels: dict[str, Any] = {}

    def add(self, spec: KernelSpec, schedule: Schedule, tile: Tile, source: CudaSource,
            stages: Sequence[tuple[Stage, Entry]], cases: Iterable[tuple[int, bool]]) -> None:
        kernel = self.kernels.setdefault(spec.symbol, _kernel(spec))
        number = len(kernel["choices"])
        made = [{"grid": s.grid.as_json(), **placed(e, self.blob, self.places)} for s, e in stages]
        kernel["choices"].append({"schedule": schedule.as_json(), "tile": asdict(tile), "scratch": list(source.scratch),
                                  "parameters": [p.as_json() for p in source.parameters], "stages": made})
        for rows, skew in cases:
            case = next((x for x in kernel["cases"] if x[:2] == [rows, skew]), None)
            if case is None:
                kernel["cases"].append(case := [rows, skew, []])
            case[2].append(number)

    def write(self, out: Path) -> int:
        """Number of choices in the file."""
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
            z.writestr("cubins.bin", bytes(self.blob))
            z.writestr("choices.json", json.dumps({"target": self.target, "kernels": self.kernels}))
        return sum(len(k["choices"]) for k in self.kernels.values())


def _kernel(spec: KernelSpec) -> dict[str, Any]:
    grouped = spec.family == "grouped_gemm"
    return {"operands": [{"role": o.role, "dims": list(o.dims), "dtype": o.dtype, "write": o.write}
                         for o in spec.operands],
            "slots": spec.operands[spec.get("experts")].dims[-1] if grouped else 1,
            "experts": spec.operands[spec.get("weights")[0]].dims[0] if grouped else 0,
            "choices": [], "cases": []}


def prepare(target: str, specs: Iterable[KernelSpec], out: Path, *, jobs: int = 0,
            progress: Callable[[str, int], None] = lambda what, total: None) -> int:
    """Writes the candidates of all contractions among ``specs``; returns how many. One that does not compile, or keeps
    registers in memory, is left out."""
    work = [(s, c) for s in {x.symbol: x for x in specs if x.family in TUNED}.values() for c in candidates(s)]
    bundle, jobs = Bundle(target), jobs or os.cpu_count() or 1
    with Toolchain(ARCHS[target], jobs) as tools, ThreadPoolExecutor(jobs) as pool:
        def compiled(item: tuple[KernelSpec, Candidate]) -> tuple[CudaSource, list[tuple[Stage, Entry]]] | None:
            spec, c = item
            source = emit(spec, c.schedule)
            try:
                return source, [(s, tools.stage(source, s)) for s in variant_of(source, c.schedule, c.tile).stages]
            except (ToolchainError, StopIteration):
                return None
            finally:
                progress(spec.symbol, len(work))

        for (spec, c), made in zip(work, pool.map(compiled, work), strict=True):
            if made is not None:
                bundle.add(spec, c.schedule, c.tile, *made, cases_of(spec, c.tile))
    return bundle.write(out)


def variant_of(source: CudaSource, schedule: Schedule, tile: Tile) -> Variant:
    """The variant that a tile became. A family may leave out the first tiles, or put variants before them."""
    return next(v for v, t in zip(reversed(source.variants), reversed(schedule.tiles), strict=False) if t == tile)


def cases_of(spec: KernelSpec, tile: Tile) -> list[tuple[int, bool]]:
    """(rows, skewed routing) that a tile is measured at."""
    grouped = spec.family == "grouped_gemm"
    return [(rows, skew) for rows in (_EXPERTS if grouped else _DENSE)[tile.rows]
            for skew in ((False, True) if grouped and rows in _SKEWED else (False,))]
