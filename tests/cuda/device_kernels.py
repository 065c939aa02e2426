"""Kernels that are no contractions on the GPU of this machine: bits across variants, and times beside public kernels.

    python tests/cuda/device_kernels.py BUNDLE RESULT.json [SECONDS] [--golden]

BUNDLE: of tests/cuda/kernels_bundle.py. Times are of graph replays with cold caches, as in device_run.py, of a kernel
and of each of its stages alone. ``--golden``
also compiles the kernels of golden models here and compares the bits of their variants. Needs numpy.
"""

from __future__ import annotations

import json
import lzma
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from device_arguments import Arguments, Shape
from device_run import run_variant

from deepinfer.backends.cuda_sm100.driver import Driver, variant_for

_FLUSH = 192 << 20
# kind -> shapes, with the time in us of the best public kernels on the same work, 0 without one
CASES: dict[str, list[tuple[Shape, float]]] = {
    "parts": [(Shape(n, 4096), bar) for n, bar in
              ((1, 17.9), (8, 18.7), (64, 19.7), (256, 25.2), (1024, 62.9), (4096, 223.0), (8192, 416.7))],
    "attend": [*((Shape(n, 65536), bar) for n, bar in ((1, 13.6), (8, 15.1), (16, 17.8), (64, 43.4), (128, 48.6),
                                                       (256, 87.6))),
               (Shape(1024, 65536, True), 187.8), (Shape(4096, 65536, True), 721.0)],
    "select": [*((Shape(1, 2 * e), bar) for e, bar in ((4096, 10.0), (16384, 14.8), (131072, 22.7), (1 << 20, 84.2))),
               *((Shape(64, 2 * e), bar) for e, bar in ((4096, 19.4), (16384, 51.0), (131072, 309.8))),
               (Shape(256, 32768, True), 0.0), (Shape(1024, 32768, True), 0.0)],
    "select_within": [(Shape(1, 131072), 0.0), (Shape(64, 131072), 0.0)],
    "router": [(Shape(n, 4096), bar) for n, bar in ((1, 6.1), (64, 6.9), (1024, 7.5), (4096, 12.3))],
}


def equal_variants(driver: Driver, blob: bytes, kernel: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """Outputs of every variant on the same poisoned buffers, bit by bit, with two poisons of the rest."""
    args = Arguments(driver, kernel["spec"], kernel["table"], kernel["records"], shape)
    first: dict[int, np.ndarray] = {}
    unequal: dict[str, float] = {}
    for v, variant in enumerate(kernel["table"]["variants"]):
        args.poison()
        run_variant(driver, blob, variant, shape.rows, args.values)
        got = args.results()
        first = first or got
        for i, x in got.items():
            share = float((x.view(np.uint8) != first[i].view(np.uint8)).mean())
            if share:
                unequal[f"variant {v} operand {i}"] = share
    finite = all(np.isfinite(x).all() for x in first.values() if x.dtype == np.float32)
    args.free()
    return {"symbol": kernel["spec"]["symbol"], "rows": shape.rows, "unequal": unequal, "finite": finite}


def timed(driver: Driver, blob: bytes, kind: str, kernel: dict[str, Any], shape: Shape, bar: float,
          flush: int) -> dict[str, Any]:
    copies = 4 if shape.rows <= 64 else 1
    sets = [Arguments(driver, kernel["spec"], kernel["table"], kernel["records"], shape, n) for n in range(copies)]
    variant = variant_for(kernel["table"], shape.rows)

    def measured(stages: list[dict[str, Any]]) -> float:
        def work() -> None:
            for s in sets:
                run_variant(driver, blob, {"stages": stages}, shape.rows, s.values)

        work()
        driver.synchronize()
        return round(driver.timed(driver.capture(work), (flush, _FLUSH), 11) / copies, 2)

    us, stages = measured(variant["stages"]), variant["stages"]
    apart = [measured([s]) for s in stages] if len(stages) > 1 else [us]
    for s in sets:
        s.free()
    return {"kind": kind, "symbol": kernel["spec"]["symbol"], "rows": shape.rows, "context": shape.context,
            "prefill": shape.prefill, "us": us, "bar_us": bar, "stages_us": apart}


def golden_kernels() -> tuple[bytes, list[dict[str, Any]]]:
    """Kernels with several variants of golden models, compiled here."""
    from cuda.device_bundle import plain_spec
    from cuda.kernels_bundle import records
    from golden.cases import load_case

    from deepinfer.backends.cuda_sm100.backend import backend
    from deepinfer.backends.cuda_sm100.toolchain import compile_sources
    from deepinfer.codegen.lower import lower
    from deepinfer.dsl import Config, EngineOptions
    from deepinfer.model_specs.registry import build_model

    found = {}
    for name in ("v41_b_bf16", "v41_c_quant", "v4_case_b"):
        case = load_case(name)
        sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 768, "max_model_len": 768}
        options = EngineOptions(**(case.formats | {"profile": "bf16"} | sizes))
        plan = lower(build_model(Config(case.config), options, case.headers), backend("sm90"), "sm90")
        found |= {s.symbol: s for s in plan.lowered.specs}
    sources = {symbol: backend("sm90").emit(s) for symbol, s in found.items()}
    wanted = [s for symbol, s in found.items() if len(sources[symbol].variants) > 1  # type: ignore[attr-defined]
              and not any(o.op in ("gather", "previous", "pool") for _, p in s.slots for o in p.ops)
              and not any(o.role == "const" for o in s.operands)]
    binary = compile_sources("sm90", [sources[s.symbol] for s in wanted], jobs=14)
    table = json.loads(binary.files["kernels.json"].read_text())["kernels"]
    return binary.files["kernels.bin"].read_bytes(), [
        {"spec": plain_spec(s), "table": table[s.symbol], "records": records(s)} for s in wanted]


def main(bundle: str, out: str, seconds: str = "120", golden: str = "") -> None:
    stop = time.monotonic() + float(seconds)
    found = pickle.loads(lzma.decompress(Path(bundle).read_bytes()))
    driver = Driver()
    flush = driver.alloc(_FLUSH)
    result: dict[str, Any] = {"variants": [], "times": [], "golden": [], "failed": []}

    def attempt(kind: str, what: str, work: Any) -> None:
        if time.monotonic() > stop:
            result["failed"].append(f"{kind} {what}: no time left")
            return
        try:
            result[kind].append(work())
            print(kind, what, result[kind][-1], flush=True)
        except Exception as error:
            result["failed"].append(f"{kind} {what}: {type(error).__name__}: {error}")
            print("FAILED", kind, what, error, flush=True)
            if str(error).startswith("cu"):
                raise

    try:
        for kind, k in found["kernels"].items():
            attempt("variants", kind, lambda k=k: equal_variants(driver, found["blob"], k, Shape(7, 20000)))
        for kind, cases in CASES.items():
            for shape, bar in cases if kind in found["kernels"] else []:
                attempt("times", f"{kind} {shape.rows}", lambda a=(kind, found["kernels"][kind], shape, bar): timed(
                    driver, found["blob"], *a, flush))
        if golden:
            blob, kernels = golden_kernels()
            for k in kernels:
                attempt("golden", k["spec"]["title"], lambda k=k: equal_variants(driver, blob, k, Shape(7, 300)))
    finally:
        Path(out).write_text(json.dumps(result, indent=1), encoding="utf-8")
        print("failed:", *result["failed"], sep="\n  ")
        print("unequal:", *(v for v in [*result["variants"], *result["golden"]] if v["unequal"]), sep="\n  ")


if __name__ == "__main__":
    main(*sys.argv[1:])
