"""Threads beside busy neighbours: a step on several threads against the same step on one.

    python tests/bench/bench_cpu_threads.py [--threads 2] [--mid] [--json FILE]

opens two engines of one model in this process, with one thread and with several, and takes blocks of steps of one
sequence by turns, alone and beside 1, 2, .. processes that do nothing but count. `ratio` is the time of all steps on
several threads over that on one, the means of one run: neighbours take processors away for whole slices of the
system's scheduler, which medians would not see. `median` and `p99` are of single steps, milliseconds. The model is the
one of the project (steps of half a millisecond); with --mid the mid config of bench_cpu_engine.py (15 ms).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.bench_cpu_engine import CONFIGS, SLOTS, STEP_ROWS, Bench

from deepinfer.codegen import compile_engine
from deepinfer.codegen.cache import cache_root
from deepinfer.dsl import EngineOptions
from deepinfer.tools.make_checkpoint.make import make_checkpoint

MODEL = Path(__file__).resolve().parents[2] / "assets" / "tiny"
LENGTH, BLOCKS = 1024, 12


def count_for_ever() -> None:
    while True:
        pass


def engine(mid: bool) -> tuple[Path, Path]:
    """An engine and its checkpoint."""
    folder = cache_root() / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "mid_checkpoint" if mid else MODEL
    if not (model / "config.json").is_file():
        make_checkpoint(CONFIGS / "mid.json", model, seed=0)
    options = (EngineOptions(max_num_seqs=SLOTS, max_num_batched_tokens=STEP_ROWS, max_model_len=4096) if mid else
               EngineOptions(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=LENGTH))
    out = folder / ("mid_engine" if mid else "threads_engine")
    compile_engine(model=str(model), out=out, target="cpu", options=options, isa="host")
    return out, model


def steps(bench: Bench, count: int) -> list[float]:
    """Milliseconds of so many steps of one token behind 64."""
    return [1e3 * bench.step([(0, 64 + i, 1)]) for i in range(count)]


def beside(benches: dict[int, Bench], count: int) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {n: [] for n in benches}
    for _ in range(BLOCKS):
        for n, bench in benches.items():
            steps(bench, 2)
            found[n] += steps(bench, count)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Several threads against one, alone and beside busy processes.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--neighbours", default="0,1,2", help="busy processes, a list (default: 0,1,2)")
    parser.add_argument("--mid", action="store_true", help="the mid config instead of the project's model")
    parser.add_argument("--json", type=Path, help="also writes all results to a file")
    given = parser.parse_args()
    made, checkpoint = engine(given.mid)
    benches = {n: Bench(made, checkpoint, 1, LENGTH, n) for n in (1, given.threads)}
    for bench in benches.values():
        bench.step([(0, 0, 64)])
        steps(bench, 20)
    results: list[dict[str, Any]] = []
    for neighbours in map(int, given.neighbours.split(",")):
        busy = [multiprocessing.get_context("spawn").Process(target=count_for_ever, daemon=True)
                for _ in range(neighbours)]
        for process in busy:
            process.start()
        time.sleep(1 if busy else 0)
        found = beside(benches, 12 if given.mid else 150)
        for process in busy:
            process.kill()
            process.join()
        row: dict[str, Any] = {"neighbours": neighbours}
        for n, ms in found.items():
            row[f"{n}_threads"] = {"mean": round(float(np.mean(ms)), 3), "median": round(float(np.median(ms)), 3),
                                   "p99": round(float(np.percentile(ms, 99)), 3)}
        row["ratio"] = round(float(np.mean(found[given.threads]) / np.mean(found[1])), 3)
        results.append(row)
        print(json.dumps(row), flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
