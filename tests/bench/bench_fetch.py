"""Lookup tables that are not in memory: steps with and without asking for their rows ahead.

    python tests/bench/bench_fetch.py --threads 2 [--json FILE]

makes a checkpoint of the mid config with 1 GB of n-gram tables (kept in the cache folder for the next run) and two
engines, one compiled without `fetches`. Each trial drops the file from the page cache, starts an engine without the
look at all weights, which at this size would read the tables too, and runs a prompt that brings everything but the
tables' other rows into memory; `tables_in_memory` says how much of them is there by then. Then a prompt of 512 new
tokens and steps of one new token are timed, whose rows lie on the disk. `warm` is the same once more, when the rows are
there: what asking costs where it is not known. `looked_through` starts the engine with the look at all weights, as
users do: it then knows that the tables lie in memory and does not ask. `lookups` are the launches that ask for rows or
read them, which other users of the machine disturb less than a whole step; `waits` counts reads of the disk that a
thread waited for. Beside it stands what the disk takes for the same number of random reads, one after the other and 64
at a time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.bench_cpu_engine import CONFIGS, Bench, drop_small_pages

from deepinfer.backends.cpu import backend
from deepinfer.codegen import compile_engine
from deepinfer.codegen.cache import cache_root
from deepinfer.dsl import EngineOptions
from deepinfer.tools.make_checkpoint.make import make_checkpoint

ROWS, STEPS, PAGE = 512, 16, 4096
# Tables of the first primes from a million on; the spec checks that the rows are their sums.
TABLES: dict[str, Any] = {"engram_vocab_size": 1_000_000, "engram_num_embeddings": [8_000_530, 8_001_376]}
ROWS_OF_TABLES = set(TABLES["engram_num_embeddings"])


def checkpoint(folder: Path) -> Path:
    """The mid config with larger tables."""
    out = folder / "tables_checkpoint"
    if not (out / "config.json").is_file():
        config = json.loads((CONFIGS / "mid.json").read_text())
        config["text_config"] |= TABLES
        source = folder / "tables.json"
        source.write_text(json.dumps(config))
        make_checkpoint(source, out, seed=0)
    return out


def engine(folder: Path, model: Path, fetches: bool) -> tuple[Path, list[int]]:
    """An engine and which of its launches look rows up or ask for them."""
    backend.CAPABILITIES = replace(backend.CAPABILITIES, fetches=fetches)  # type: ignore[attr-defined]
    out = folder / f"tables_{'fetching' if fetches else 'waiting'}"
    options = EngineOptions(max_num_seqs=1, max_num_batched_tokens=ROWS, max_model_len=4 * ROWS)
    lowered = compile_engine(model=str(model), out=out, target="cpu", options=options, isa="host").plan.lowered
    launches = lowered.table.entries["step"].launches
    tables = {i for i, p in enumerate(lowered.params) if p.table and not p.derive and max(p.shape) in ROWS_OF_TABLES}
    return out, [i for i, x in enumerate(launches) if any(a.kind == "p" and a.index in tables
                                                          for a in getattr(x, "args", ()))]


def trial(made: Path, lookups: list[int], model: Path, threads: int, seed: int, check: str) -> dict[str, float]:
    """Milliseconds of a prompt and of one token's step, first with rows on the disk, then with rows in memory. Runs in
    a process of its own: pages that somebody has mapped stay in the page cache."""
    drop_small_pages(model)
    bench = Bench(made, model, 1, 4 * ROWS, threads, check=check)
    bench.history[0][:] = 5
    bench.step([(0, 0, ROWS)])
    bench.step([(0, 0, ROWS)], bench.pins(ROWS, 64))  # every expert
    found = {"tables_in_memory": tables_in_memory(model)}
    for when in ("cold", "warm"):
        bench.history[0][:] = np.random.default_rng(seed).integers(3, 16000, 4 * ROWS)
        bench.native.profile(True)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        found[f"prompt_{when}"] = 1e3 * bench.step([(0, 0, ROWS)])
        found[f"prompt_{when}_lookups"] = 1e-3 * bench.native.profile(True)[lookups].sum()
        found[f"prompt_{when}_waits"] = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults
        tokens = [(1e3 * bench.step([(0, ROWS + 4 * i, 1)]), 1e-3 * bench.native.profile(True)[lookups].sum())
                  for i in range(STEPS)]
        found[f"token_{when}"], found[f"token_{when}_lookups"] = map(statistics.median, zip(*tokens, strict=True))
    bench.running.close()
    return found


def tables_in_memory(model: Path) -> float:
    """Part of the lookup tables that lies in the page cache."""
    there = total = 0
    for file, start, stop in large_tensors(model):
        with file.open("rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            first = start // PAGE * PAGE
            pages = np.zeros(-(-(stop - first) // PAGE), np.uint8)
            whole = np.frombuffer(mapped, np.uint8)
            ctypes.CDLL(None).mincore(ctypes.c_void_p(whole.ctypes.data + first), ctypes.c_size_t(stop - first),
                                      ctypes.c_void_p(pages.ctypes.data))
            del whole
        there, total = there + int((pages & 1).sum()), total + len(pages)
    return round(there / total, 4)


def large_tensors(model: Path) -> Iterator[tuple[Path, int, int]]:
    """File, first byte and the byte behind the last of each lookup table."""
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as f:
            size = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(size))
        for name, tensor in header.items():
            if tensor.get("shape", [0])[0] in ROWS_OF_TABLES and name.endswith("embed.weight"):
                first, stop = tensor["data_offsets"]
                yield file, 8 + size + first, 8 + size + stop


def disk(model: Path, count: int = 4096) -> dict[str, float]:
    """Microseconds of a random read of a page that is not in memory: one after the other, and 64 at a time."""
    drop_small_pages(model)
    file = max(model.glob("*.safetensors"), key=lambda f: f.stat().st_size)
    handle = os.open(file, os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
    at = np.random.default_rng(3).permutation(file.stat().st_size // PAGE)[: 2 * count] * PAGE
    start = time.perf_counter()
    for offset in at[:256].tolist():
        os.pread(handle, 64, offset)
    one = (time.perf_counter() - start) / 256
    with ThreadPoolExecutor(64) as pool:
        start = time.perf_counter()
        list(pool.map(lambda offset: os.pread(handle, 64, offset), at[count:].tolist()))
        many = (time.perf_counter() - start) / count
    os.close(handle)
    return {"one_after_the_other_us": round(one * 1e6, 1), "64_at_a_time_us": round(many * 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Lookups in tables on disk, asked for ahead and not.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also writes all results to a file")
    given = parser.parse_args()
    folder = cache_root() / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    model = checkpoint(folder)
    asks, waits = engine(folder, model, True), engine(folder, model, False)
    ways = {"asked_ahead": (asks, "off"), "not_asked": (waits, "off"), "looked_through": (asks, "weights")}
    results: list[dict[str, Any]] = [{"disk": disk(model)}]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for n in range(given.trials):
            for way, (made, check) in ways.items():
                found[way].append(pool.apply(trial, (*made, model, given.threads, n, check)))
    for way, runs in found.items():
        median = {key: round(statistics.median(r[key] for r in runs), 3) for key in runs[0]}
        results.append({"way": way, "tables_in_memory": median.pop("tables_in_memory"), "ms": median})
    for r in results:
        print(json.dumps(r), flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
