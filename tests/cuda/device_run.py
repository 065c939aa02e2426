"""Runs a bundle of device_bundle.py on the GPU of this machine: results against those of the interpreter, products at
real sizes against float64, bits across variants, and times. Needs numpy and torch.

    python tests/cuda/device_run.py BUNDLE RESULT.json [SECONDS]
"""

from __future__ import annotations

import ctypes
import json
import lzma
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "backends" / "cuda_sm100"))
from device_products import SIZES, Product, products
from driver import Driver, blocks_of, variant_for

_FLUSH = 192 << 20


def bound(driver: Driver, values: list[Any], kept: list[int], parameters: list[Any]) -> list[Any]:
    """ctypes values; arrays are uploaded, equal ones once."""
    out, places = [], dict[int, int]()
    for (_, kind, _), v in zip(parameters, values, strict=True):
        if isinstance(v, np.ndarray):
            if id(v) not in places:
                places[id(v)] = driver.upload(v)
                kept.append(places[id(v)])
            out.append(ctypes.c_uint64(places[id(v)]))
        else:
            out.append(ctypes.c_int64(v) if kind == "i64" else ctypes.c_int32(v))
    return out


def run_variant(driver: Driver, blob: bytes, variant: dict[str, Any], rows: int, values: list[Any]) -> None:
    for stage in variant["stages"]:
        blocks = blocks_of(stage["grid"], rows)
        if blocks:
            driver.launch(driver.function(blob, stage), blocks, stage, values)


def difference(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference relative to the largest value; for bytes and integers the share that differs."""
    if got.dtype == np.uint16:
        got, want = ((x.astype(np.uint32) << 16).view(np.float32) for x in (got, want))
    if got.dtype != np.float32:
        return float((got != want).mean())
    if (np.isnan(got) != np.isnan(want)).any():
        return float("inf")
    finite = np.isfinite(want)
    if (got[~finite & ~np.isnan(want)] != want[~finite & ~np.isnan(want)]).any():
        return float("inf")
    error = np.abs(got[finite].astype(np.float64) - want[finite])
    return float(error.max(initial=0) / max(1e-30, np.abs(want[finite]).max(initial=0)))


def check_case(driver: Driver, blob: bytes, kernel: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """Every variant on poisoned outputs."""
    worst: dict[str, float] = {}
    for variant in kernel["variants"]:
        kept: list[int] = []
        values = bound(driver, case["values"], kept, kernel["parameters"])
        run_variant(driver, blob, variant, case["rows"], values)
        driver.synchronize()
        for i, want in case["after"].items():
            got = driver.download(values[i].value, want)
            name = f"{kernel['parameters'][i][0]}:{want.dtype}"
            worst[name] = max(worst.get(name, 0.0), difference(got, want))
        for at in kept:
            driver.free(at)
    return {"symbol": case["symbol"], "family": case["family"], "scene": case["scene"], "rows": case["rows"],
            "errors": worst}


def check_product(driver: Driver, blob: bytes, p: Product, rows: int) -> dict[str, Any]:
    """A product at its real size against float64, and all variants bit by bit."""
    values, kept, outputs = p.arguments(driver, rows)
    wanted, first, equal = p.reference(rows), None, True
    errors = []
    for variant in p.kernel["variants"]:
        for at, like in outputs.values():
            driver("cuMemsetD8_v2", ctypes.c_uint64(at), 0x7B, ctypes.c_size_t(like.nbytes))
        run_variant(driver, blob, variant, rows, values)
        driver.synchronize()
        got = {i: driver.download(at, like) for i, (at, like) in outputs.items()}
        errors.append(max(p.error(got[i], wanted[i]) for i in got))
        if first is None:
            first = got
        equal = equal and all(np.array_equal(got[i], first[i]) for i in got)
    for at in kept:
        driver.free(at)
    return {"symbol": p.symbol, "rows": rows, "errors": errors, "variants_bit_equal": equal}


def time_product(driver: Driver, blob: bytes, p: Product, rows: int, flush: int) -> dict[str, Any]:
    """Cold weights: a graph of launches on copies of the weights, the cache flushed before each replay."""
    copies = max(1, min(8, int(400e6 // p.weight_bytes)))
    sets = [p.arguments(driver, rows) for _ in range(copies)]
    variant = variant_for(p.kernel, rows)

    def work() -> None:
        for values, _, _ in sets:
            run_variant(driver, blob, variant, rows, values)

    work()
    driver.synchronize()
    graph = driver.capture(work)
    us = driver.timed(graph, (flush, _FLUSH), 9) / copies
    for _, kept, _ in sets:
        for at in kept:
            driver.free(at)
    return {"symbol": p.symbol, "rows": rows, "us": round(us, 2), "TB/s": round(p.bytes(rows) / us / 1e6, 3),
            "TFLOP/s": round(p.flops(rows) / us / 1e6, 1), "copies": copies}


def main(bundle: str, out: str, seconds: str = "200") -> None:
    stop = time.monotonic() + float(seconds)
    found = pickle.loads(lzma.decompress(Path(bundle).read_bytes()))
    blob, table = found["blob"], json.loads(found["table"])["kernels"]
    driver = Driver()
    flush = driver.alloc(_FLUSH)
    result: dict[str, Any] = {"cases": [], "products": [], "times": [], "failed": []}

    def attempt(kind: str, what: str, work: Any) -> None:
        if time.monotonic() > stop:
            result["failed"].append(f"{kind} {what}: no time left")
            return
        try:
            result[kind].append(work())
        except Exception as error:
            result["failed"].append(f"{kind} {what}: {type(error).__name__}: {error}")
            print("FAILED", kind, what, error, flush=True)
            if "cu" in str(error)[:3]:
                raise

    try:
        for case in found["cases"]:
            attempt("cases", case["symbol"], lambda c=case: check_case(driver, blob, table[c["symbol"]], c))
        made = products(found["wide"], table)
        for p in made:
            attempt("products", p.symbol, lambda p=p: check_product(driver, blob, p, 7))
        for n in SIZES:
            for p in made:
                if n in p.sizes:
                    attempt("times", f"{p.symbol} {n}", lambda p=p, n=n: time_product(driver, blob, p, n, flush))
    finally:
        Path(out).write_text(json.dumps(result, indent=1), encoding="utf-8")
        report(result)


def report(result: dict[str, Any]) -> None:
    bad = [c for c in result["cases"] if any(not e <= 1e-5 for e in c["errors"].values())]
    print(f"{len(result['cases'])} cases, {len(bad)} beyond 1e-5, {len(result['failed'])} failed")
    for c in bad:
        print("  ", c["scene"], c["symbol"], {k: f"{v:.1e}" for k, v in c["errors"].items() if not v <= 1e-5})
    for p in result["products"]:
        print("product", p["symbol"][:44], p["rows"], [f"{e:.1e}" for e in p["errors"]], p["variants_bit_equal"])
    for t in result["times"]:
        speed = f"{t['us']:9.1f} us {t['TB/s']:6.2f} TB/s {t['TFLOP/s']:7.1f} TFLOP/s"
        print(f"{t['symbol'][:44]:44} M {t['rows']:5} {speed}")
    for f in result["failed"]:
        print("failed:", f)


if __name__ == "__main__":
    main(*sys.argv[1:])
