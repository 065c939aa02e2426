"""Packs kernels that are no contractions, at the sizes of a real config, for device_kernels.py. Needs no GPU.

    python tests/cuda/kernels_bundle.py CONFIG BUNDLE [TARGET [JOBS]]

One kernel of each kind is taken: attention over a window and picked entries, selection among all entries and within
listed blocks, the widest kernel whose rows are made in parts, and the selection of experts.
"""

from __future__ import annotations

import json
import lzma
import pickle
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import os

os.environ["TRITON_INTERPRET"] = "1"
import torch
from cpu.regions import encode_record
from cuda.device_bundle import plain_spec

from deepinfer.backends.cuda_sm100.backend import backend
from deepinfer.backends.cuda_sm100.toolchain import compile_sources
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.codegen.lower import lower
from deepinfer.dsl import Config, EngineOptions
from deepinfer.model_specs.registry import build_model

RECORDS = 4096


def kind_of(spec: KernelSpec) -> str:
    """What a kernel is measured as, "" for none."""
    ops = [o.op for _, p in spec.slots for o in p.ops]
    if spec.family == "attend" and any(s[0] == "selected" for s in spec.get("sources")) and spec.rows == "T":
        return "attend"
    if spec.family == "score_select" and spec.rows == "T":
        (first, *rest) = (dict(s) for s in spec.get("selections"))
        return "" if rest else "select_within" if first["within"] >= 0 else "select"
    if spec.family == "rowwise" and spec.rows == "T":
        return "parts" if "contract" in ops and "gather" not in ops else "router" if "topk" in ops else ""
    return ""


def records(spec: KernelSpec) -> dict[int, Any]:
    """Records of random rows for each state."""
    generator = torch.Generator().manual_seed(1)
    return {i: encode_record(torch.randn(RECORDS, o.type.features, generator=generator), o.type)
            for i, o in enumerate(spec.operands) if o.role == "state"}


def main(config: str, out: str, target: str = "sm90", jobs: str = "2") -> None:
    plan = lower(build_model(Config.load(Path(config)), EngineOptions()), backend(target), target)
    found: dict[str, KernelSpec] = {}
    for spec in plan.lowered.specs:
        if kind := kind_of(spec):
            found.setdefault(kind, spec)
    sources = [backend(target).emit(s) for s in found.values()]
    binary = compile_sources(target, sources, jobs=int(jobs), progress=lambda s: print(s, flush=True))
    bundle = {"blob": binary.files["kernels.bin"].read_bytes(), "kernels": {
        kind: {"spec": plain_spec(s), "records": records(s), "table": json.loads(
            binary.files["kernels.json"].read_text())["kernels"][s.symbol]} for kind, s in found.items()}}
    Path(out).write_bytes(lzma.compress(pickle.dumps(bundle), preset=1))
    print(f"{', '.join(found)}: {Path(out).stat().st_size} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
