"""Contractions of the CPU backend, beside a plain loop that only reads the weights.

    python tests/bench/bench_cpu_gemm.py --rows 1,4,8,64 --threads 1

prints, for each weight format, instruction set and number of rows: time, bytes of weights a second, the same as a share
of the read loop (measured in the same run), and multiply-adds a second. Times are the processor time of the slowest
thread, best of the rounds, so that other work on the machine disturbs them less.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.machine import read_bandwidth, timed
from cpu.harness import DiArgs, Param, Step, build, held, load, rows_step, zeros
from cpu.test_kernels_gemm import gemm

from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.dsl.types import DType

FORMATS = ("mxfp8(32,32)", "mxfp4(1,32)", "bf16", "f32")


def weights(dtype: str, n: int, k: int) -> tuple[Param, int]:
    """Random codes and their bytes."""
    t, rng = DType.parse(dtype), np.random.default_rng(0)
    if not t.is_block:
        bits = {"f32": np.uint32, "bf16": np.uint16}[t.name]
        data = rng.integers(0x3C00, 0x3F00, (n, k)).astype(bits) << (16 if t.name == "f32" else 0)
        return Param(data), data.nbytes
    data = rng.integers(0, 120, (n, k * (4 if t.name == "mxfp4" else 8) // 8), dtype=np.uint8)
    scale = np.full((n // t.block[0], k // t.block[1]), 120, np.uint8)
    return Param(data, scale), data.nbytes + scale.nbytes


def seconds(spec: KernelSpec, step: Step, operands: list[object], isa: str, threads: int, rounds: int) -> float:
    built = build(spec)
    kernel = getattr(load(built.library, isa), built.source.symbol)
    keep: list[object] = []
    pointers = (ctypes.c_void_p * len(spec.operands))()
    for i, (op, x) in enumerate(zip(spec.operands, operands, strict=True)):
        if isinstance(x, Param):
            pointers[i] = x.pointer(keep)
        else:
            array = zeros(op, step.rows(op.rows)) if x is None else x
            assert isinstance(array, np.ndarray)
            keep.append(array)
            pointers[i] = array.ctypes.data
    items = -(-step.rows(spec.rows) // built.source.rows_per_item) * built.source.items_per_tile
    scratch = [np.zeros(built.source.scratch_bytes + 64, np.uint8) for _ in range(threads)]

    def work(t: int) -> None:
        at = scratch[t].ctypes.data + -scratch[t].ctypes.data % 64
        lo, hi = items * t // threads, items * (t + 1) // threads
        kernel(ctypes.byref(DiArgs(ctypes.addressof(step.c), ctypes.addressof(pointers), at, lo, hi, 0)))

    return timed(threads, rounds, work, time.thread_time)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of contractions on this machine.")
    parser.add_argument("--columns", type=int, default=16384, help="rows of the weight matrix (default: 16384)")
    parser.add_argument("--features", type=int, default=7168, help="columns of the weight matrix (default: 7168)")
    parser.add_argument("--rows", default="1,2,4,8,64", help="rows of a step, a list (default: 1,2,4,8,64)")
    parser.add_argument("--threads", type=int, default=1, help="threads (default: 1)")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each, the best counts (default: 7)")
    parser.add_argument("--isa", default="avx512_bf16", help="instruction sets, a list (default: avx512_bf16)")
    a = parser.parse_args()
    floor = read_bandwidth(a.threads, a.rounds, clock=time.thread_time)
    print(f"plain read loop, {a.threads} threads: {floor / 1e9:.1f} GB/s")
    print(f"{'format':14} {'isa':12} {'rows':>5} {'ms':>9} {'GB/s':>7} {'of read':>8} {'GMAC/s':>8}")
    for dtype in FORMATS:
        param, nbytes = weights(dtype, a.columns, a.features)
        spec = gemm([(a.columns, dtype)], a.features)
        for isa in a.isa.split(","):
            for m in map(int, a.rows.split(",")):
                x = held(np.random.default_rng(m).standard_normal((m, a.features)).astype(np.float32), "bf16")
                s = seconds(spec, rows_step(m), [param, x, None], isa, a.threads, a.rounds if m < 16 else 2)
                print(f"{dtype:14} {isa:12} {m:5} {s * 1e3:9.2f} {nbytes / s / 1e9:7.1f} {nbytes / s / floor:8.0%} "
                      f"{m * a.columns * a.features / s / 1e9:8.1f}", flush=True)


if __name__ == "__main__":
    main()
