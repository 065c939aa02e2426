"""What a machine can do at most: the floors of the benchmarks."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from deepinfer.machine import cxx_compiler

_READ_LOOP = """
#include <stdint.h>
typedef uint64_t V __attribute__((vector_size(64), aligned(8)));
extern "C" uint64_t read_all(const V* p, int64_t n) {
    V a = {}, b = {}, c = {}, d = {};
    for (int64_t i = 0; i + 4 <= n; i += 4) { a ^= p[i]; b ^= p[i + 1]; c ^= p[i + 2]; d ^= p[i + 3]; }
    a ^= b ^ c ^ d;
    return a[0] ^ a[3] ^ a[7];
}
"""


def timed(threads: int, rounds: int, work: Callable[[int], object],
          clock: Callable[[], float] = time.perf_counter) -> float:
    """Best over the rounds of the slowest thread's seconds. ``clock``: time.thread_time leaves out what other work on
    the machine takes."""
    best = float("inf")
    for _ in range(rounds):
        spent = [0.0] * threads

        def one(t: int, spent: list[float] = spent) -> None:
            start = clock()
            work(t)
            spent[t] = clock() - start

        pool = [threading.Thread(target=one, args=(t,)) for t in range(1, threads)]
        for p in pool:
            p.start()
        one(0)
        for p in pool:
            p.join()
        best = min(best, max(spent))
    return best


def read_bandwidth(threads: int, rounds: int = 7, megabytes: int = 512,
                   clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes a second of a loop over memory that no cache holds, in huge pages."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "read.cpp"), Path(folder, "read.so")
        source.write_text(_READ_LOOP)
        flags = ["-O3", "-shared", "-fPIC", "-Wno-psabi"]
        subprocess.run([cxx_compiler(), *flags, str(source), "-o", str(library)], check=True)
        read = ctypes.CDLL(str(library)).read_all
        read.restype = ctypes.c_uint64
        room = mmap.mmap(-1, megabytes << 20)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            room.madvise(mmap.MADV_HUGEPAGE)
        data = np.frombuffer(room, np.uint8)
        data[:] = 1
        share = len(data) // threads // 64
        return len(data) / timed(threads, rounds, lambda t: read(
            ctypes.c_void_p(data.ctypes.data + 64 * share * t), ctypes.c_int64(share)), clock)


def matmul_rate(threads: int, size: int = 2048, rounds: int = 5) -> float:
    """Multiply-adds a second of torch's bf16 matrix product."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    a, b = (torch.randn(size, size, dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    torch.set_num_threads(before)
    return size**3 / best
