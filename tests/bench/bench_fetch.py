"""Lookup tables that are not in memory: steps with and without asking for their rows ahead.

    python tests/bench/bench_fetch.py --threads 2 [--json FILE]

makes a checkpoint of the mid config with 1 GB of n-gram tables (kept in the cache folder for the next run) and two
engines, one compiled without `fetches`. Each trial drops the file from the page cache, starts an engine, and runs a
prompt that brings everything but the tables' other rows into memory; then a prompt of 512 new tokens and steps of one
new token are timed, whose rows lie on the disk. `warm` is the same once more, when the rows are there: what asking
costs where it is not needed. Beside it stands what the disk takes for the same number of random reads, one after the
other and 64 at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
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
TABLES = {"engram_vocab_size": 1_000_000, "engram_num_embeddings": [8_000_530, 8_001_376]}


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


def engine(folder: Path, model: Path, fetches: bool) -> Path:
    backend.CAPABILITIES = replace(backend.CAPABILITIES, fetches=fetches)  # type: ignore[attr-defined]
    out = folder / f"tables_{'fetching' if fetches else 'waiting'}"
    options = EngineOptions(max_num_seqs=1, max_num_batched_tokens=ROWS, max_model_len=4 * ROWS)
    compile_engine(model=str(model), out=out, target="cpu", options=options, isa="host")
    return out


def trial(made: Path, model: Path, threads: int, seed: int) -> dict[str, float]:
    """Milliseconds of a prompt and of one token's step, first with rows on the disk, then with rows in memory. Runs in
    a process of its own: pages that somebody has mapped stay in the page cache."""
    drop_small_pages(model)
    bench = Bench(made, model, 1, 4 * ROWS, threads)
    bench.history[0][:] = 5
    bench.step([(0, 0, ROWS)])
    bench.step([(0, 0, ROWS)], bench.pins(ROWS, 64))  # every expert
    found = {}
    for when in ("cold", "warm"):
        bench.history[0][:] = np.random.default_rng(seed).integers(3, 16000, 4 * ROWS)
        found[f"prompt_{when}"] = 1e3 * bench.step([(0, 0, ROWS)])
        at = [ROWS + 4 * i for i in range(STEPS)]
        found[f"token_{when}"] = 1e3 * statistics.median(bench.step([(0, c, 1)]) for c in at)
    bench.running.close()
    return found


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
    engines = {fetches: engine(folder, model, fetches) for fetches in (True, False)}
    results: list[dict[str, Any]] = [{"disk": disk(model)}]
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for n in range(given.trials):
            for fetches in (True, False):
                found[fetches].append(pool.apply(trial, (engines[fetches], model, given.threads, n)))
    for fetches, runs in found.items():
        median = {key: round(statistics.median(r[key] for r in runs), 2) for key in runs[0]}
        results.append({"asked_ahead": fetches, "ms": median})
    for r in results:
        print(json.dumps(r), flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
