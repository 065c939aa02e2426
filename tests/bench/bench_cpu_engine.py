"""Decoding and prefill of the CPU engine on the mid config, each beside its floor, measured in one run.

    python tests/bench/bench_cpu_engine.py --threads 2

makes a random checkpoint of the config in the official formats (2.2 GB) and an engine, both kept in the cache folder
for the next run. The floor of a decode step is the bytes it has to read (every dense weight once; of each expert stack
the picked experts, for several sequences their expected number of distinct ones) divided by the read bandwidth that
the same threads reach over 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import deepinfer
from deepinfer.codegen import compile_engine
from deepinfer.codegen.cache import cache_root
from deepinfer.codegen.plan.launch import Launch
from deepinfer.codegen.plan.table import Lowered
from deepinfer.dsl import EngineOptions
from deepinfer.runtime.batch import Batch
from deepinfer.tools.make_checkpoint.make import make_checkpoint

CONFIGS = Path(__file__).with_name("configs")


def read_bandwidth(threads: int) -> float:
    """Bytes per second at which ``threads`` threads sum 1 GiB; the best of five."""
    parts = np.array_split(np.ones(1 << 27, dtype=np.float64), threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(np.sum, parts))
            best = min(best, time.perf_counter() - start)
    return float((1 << 30) / best)


def decode_bytes(lowered: Lowered, experts: int) -> int:
    """Bytes of weights a step reads when it uses so many experts of each stack."""
    launches = [x for x in lowered.table.entries["step"].launches if isinstance(x, Launch)]
    total = 0
    for index in sorted({a.index for x in launches for a in x.args if a.kind == "p"}):
        p = lowered.params[index]
        if p.table:
            continue
        one = p.dtype.data_bytes(int(np.prod(p.shape)))
        if p.dtype.is_block:
            rows, cols = p.dtype.block
            one += -(-p.shape[0] // rows) * -(-p.shape[1] // cols)
        total += one * (experts if p.stack else 1)
    return total


class Bench:
    """An engine with random sequences in its slots."""

    def __init__(self, engine: Path, checkpoint: Path, slots: int, length: int, threads: int) -> None:
        self.package = deepinfer.load_engine(engine)
        per = -(-length // self.package.plan.block_tokens)
        self.running = self.package.start(checkpoint, slots=slots, blocks=slots * per, threads=threads)
        self.batch = Batch(self.package.plan)
        self.tables = [np.arange(i * per, (i + 1) * per, dtype=np.int32) for i in range(slots)]
        self.rng = np.random.default_rng(1)
        self.history = [self.rng.integers(3, 200, length) for _ in range(slots)]

    def step(self, rows: list[tuple[int, int, int]]) -> float:
        """Seconds of one step; ``rows``: (slot, first position, count)."""
        self.batch.clear()
        for slot, c, n in rows:
            ids = self.history[slot]
            self.batch.add(ids[c:c + n], slot=slot, c=c, blocks=self.tables[slot], wanted=1, before=ids[:c])
        start = time.perf_counter()
        self.running.run("step", self.batch)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the CPU engine beside its floor.")
    parser.add_argument("--config", default="mid", help="a name in tests/bench/configs (default: mid)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024, help="tokens before the decoded ones (default: 1024)")
    parser.add_argument("--steps", type=int, default=20, help="decode steps of each batch size (default: 20)")
    given = parser.parse_args()
    folder = cache_root() / "bench"
    checkpoint, engine = folder / f"{given.config}_checkpoint", folder / f"{given.config}_engine"
    if not (checkpoint / "config.json").is_file():
        make_checkpoint(CONFIGS / f"{given.config}.json", checkpoint, seed=0)
    options = EngineOptions(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=4096)
    compiled = compile_engine(model=str(checkpoint), out=engine, target="cpu", options=options)
    bench = Bench(engine, checkpoint, 8, given.context + given.steps + 8, given.threads)
    for slot in range(8):
        for c in range(0, given.context, 512):
            bench.step([(slot, c, min(512, given.context - c))])
    seconds = [bench.step([(0, c, 512)]) for c in (0, 512)]
    bandwidth = read_bandwidth(given.threads)
    print(json.dumps({"machine": platform.processor() or platform.machine(), "threads": given.threads,
                      "read_GB_s": round(bandwidth / 1e9, 1)}))
    print(json.dumps({"prefill_tokens_s": round(512 / min(seconds))}))
    lowered = compiled.plan.lowered
    for size in (1, 2, 4, 8):
        times = [bench.step([(slot, given.context + i, 1) for slot in range(size)]) for i in range(given.steps)]
        median = statistics.median(times)
        config = compiled.plan.model.config.raw["text_config"]
        count, k = config["n_routed_experts"], config["num_experts_per_tok"]
        distinct = round(count * (1 - (1 - k / count) ** size))
        touched = decode_bytes(lowered, distinct)
        print(json.dumps({"batch": size, "ms_step": round(median * 1e3, 2), "tokens_s": round(size / median, 1),
                          "MB_touched": round(touched / 1e6),
                          "share_of_floor": round(touched / bandwidth / median, 3)}))


if __name__ == "__main__":
    main()
