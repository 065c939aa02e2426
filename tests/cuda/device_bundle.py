"""Packs cubins with arguments and expected results into one file, for a machine that has a GPU and nothing else.

    python tests/cuda/device_bundle.py sm90 BUNDLE

Regions of golden cases: arguments, and what the same kernels made of them in Triton's interpreter. Kernels at the sizes
of a real config: their specs only; tests/cuda/device_run.py makes inputs where it runs.
"""

from __future__ import annotations

import lzma
import os
import pickle
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from cpu.regions import regions_of
from cuda.arguments import arguments
from cuda.interpreted import run_arguments, source_of
from golden.cases import load_case

from deepinfer.backends.cuda_sm100.target import built
from deepinfer.backends.cuda_sm100.toolchain import compile_sources
from deepinfer.codegen.kernels.spec import KernelSpec

SCENES = [("v41_c_quant", 141, 6, "step", "wide"), ("v41_c_quant", 141, 6, "step", "bf16"),
          ("v41_c_quant", 130, 5, "draft", "wide"), ("v4_mtp", 20, 9, "step", "wide")]


def scene(case: str, prompt: int, rows: int, entry: str, profile: str) -> tuple[list[dict[str, Any]], list[KernelSpec]]:
    """Arguments and results of every distinct kernel of an entry."""
    runner, kernels = regions_of(load_case(case), prompt, rows, entry, options={"profile": profile}, caps=built("sm90"))
    cases, specs, seen = [], [], set()
    for k in kernels:
        if k.spec.digest() in seen:
            continue
        seen.add(k.spec.digest())
        operands = [runner.operand(op, b) for op, b in zip(k.spec.operands, k.bindings, strict=True)]
        source = source_of(k.spec)
        made = arguments(k.spec, source, runner.c_step, operands, k.rows)
        before = [v.copy() if isinstance(v, np.ndarray) else v for v in made.values]
        run_arguments(k.spec, made)
        after = {i: v for i, v in enumerate(made.values)
                 if isinstance(v, np.ndarray) and source.parameters[i].where[0] != "scratch"
                 and not np.array_equal(v, before[i])}
        cases.append({"symbol": k.spec.symbol, "family": k.spec.family, "rows": made.rows, "values": before,
                      "after": after, "scene": f"{case}-{entry}-{prompt}+{rows}-{profile}"})
        specs.append(k.spec)
    print(f"{case} {entry} {profile}: {len(cases)} kernels", flush=True)
    return cases, specs


def plain_spec(spec: KernelSpec) -> dict[str, Any]:
    """A spec as plain data."""
    return {"symbol": spec.symbol, "family": spec.family, "title": spec.title, "attrs": dict(spec.attrs),
            "operands": [{"role": o.role, "rows": o.rows, "dims": o.dims, "dtype": o.dtype, "write": o.write,
                          "detail": dict(o.detail)} for o in spec.operands],
            "slots": {name: [(o.op, o.args, o.dims, dict(o.attrs)) for o in p.ops] for name, p in spec.slots}}


def main(target: str, out: str, wide: str = "") -> None:
    """``wide``: a pickle of KernelSpecs of a real config."""
    cases: list[dict[str, Any]] = []
    specs: dict[str, KernelSpec] = {}
    for s in SCENES:
        made, kernels = scene(*s)
        cases += made
        specs |= {x.symbol: x for x in kernels}
    found = pickle.loads(Path(wide).read_bytes()) if wide else []
    large = {x.symbol: x for x in found if x.family in ("gemm", "grouped_gemm")}
    sources = [source_of(s) for s in {**specs, **large}.values()]
    binary = compile_sources(target, sources, jobs=2, progress=lambda s: print(s, flush=True))
    bundle = {"blob": binary.files["kernels.bin"].read_bytes(), "table": binary.files["kernels.json"].read_text(),
              "cases": cases, "wide": [plain_spec(s) for s in large.values()]}
    Path(out).write_bytes(lzma.compress(pickle.dumps(bundle), preset=1))
    print(f"{len(cases)} cases, {len(sources)} kernels, {Path(out).stat().st_size} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
