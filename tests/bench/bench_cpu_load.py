"""How long an engine takes to start: with packed weights, from the checkpoint itself, beside a plain read of the file.

    python tests/bench/bench_cpu_load.py [--threads 2] [--rounds 5] [--cold] [--json FILE]

packs the weights of the mid config (2.2 GB) for its engine, both kept in the cache folder for the next run, and starts
it by turns. `ms` are medians of the rounds: `packed` and `checkpoint` are the whole of a start (table, memory, weights
looked at or their sums compared, bound), `read` reads the packed file into one buffer of 16 MB. Everything lies in the
page cache, or, with --cold, nothing does: each turn drops its files first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.bench_cpu_engine import drop_small_pages
from bench.bench_cpu_threads import engine

import deepinfer
from deepinfer.codegen.package.pack import pack_weights
from deepinfer.runtime.checkpoint import open_checkpoint
from deepinfer.runtime.checkpoint.packed import FOLDER

BUFFER = 16 << 20


def start(made: Path, weights: Path, threads: int) -> None:
    deepinfer.load_engine(made).start(weights, slots=1, blocks=8, threads=threads, progress=False).close()


def read(weights: Path) -> None:
    buffer = bytearray(BUFFER)
    for file in weights.glob("*.safetensors"):
        with file.open("rb", buffering=0) as f:
            while f.readinto(buffer):
                pass


def main() -> None:
    parser = argparse.ArgumentParser(description="Starts of an engine, with packed weights and without.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="files are dropped from the page cache before each turn")
    parser.add_argument("--json", type=Path, help="also writes all results to a file")
    given = parser.parse_args()
    made, checkpoint = engine(mid=True)
    packed = made / FOLDER
    if not packed.is_dir():
        pack_weights(deepinfer.load_engine(made), open_checkpoint(checkpoint), progress=False)
    turns: dict[str, tuple[Path, Callable[[], None]]] = {
        "packed": (packed, lambda: start(made, packed, given.threads)),
        "checkpoint": (checkpoint, lambda: start(made, checkpoint, given.threads)),
        "read": (packed, lambda: read(packed))}
    ms: dict[str, list[float]] = {name: [] for name in turns}
    for n in range(given.rounds + 1):
        for name, (folder, run) in turns.items():
            if given.cold:
                drop_small_pages(folder)
            began = time.perf_counter()
            run()
            if n:  # the first round brings files and code into memory
                ms[name].append(1e3 * (time.perf_counter() - began))
    size = sum(f.stat().st_size for f in packed.glob("*.safetensors"))
    result = {"GB": round(size / 1e9, 2), "cold": given.cold, "rounds": given.rounds,
              "ms": {name: round(statistics.median(values), 1) for name, values in ms.items()},
              "best_ms": {name: round(min(values), 1) for name, values in ms.items()}}
    print(json.dumps(result))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
