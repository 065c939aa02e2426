"""Random traffic on the whole runtime over a witness executor, and the invariants of the clock table.

    python tests/soak_runtime.py --budget 1000000 --out tests/soak_runtime.json

An operation is one transition of one sequence (rows sent, rows ran, verified, accepted, drafted), an arrival, an abort
or a fault. Arrivals repeat and continue earlier texts, so that they hit the prefix cache with and without windows, fork
into several answers, are aborted at any point; sequences are spilled, dropped and brought back; a tier loses and
damages blocks; rows are broken; the engine itself breaks down. The plain and the overlapped loop take turns, with and
without drafts.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from dict_tier import DictTier
from witness import need
from witness_executor import VOCABULARY, EngineFault, WitnessExecutor, soak_plan, tokens_of

from deepinfer.runtime.clock import KEPT
from deepinfer.runtime.engine_core import EngineCore
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.prefix.cache import MemoryCache
from deepinfer.runtime.prefix.road import must_be_exact
from deepinfer.runtime.prefix.roots import Roots
from deepinfer.runtime.prefix.tree import Node
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.sequence import Request
from deepinfer.runtime.store.tier import Status

ROOTS = Roots((b"weights", b"numerics", b"plan"))
SHAPES = tuple((lag, drafts, block, snapshots, spill) for lag in (0, 1) for drafts in (0, 5)
               for block, snapshots, spill in ((16, 24, 1 << 30), (8, 3, 6_000), (32, 0, 1 << 14)))


@dataclass
class Soak:
    """One engine and its traffic. ``mutant``: changes to the executor (``shorter``, ``row_slots``)."""

    seed: int
    lag: int = 0
    drafts: int = 0
    block: int = 16
    snapshots: int = 24
    spill: int = 1 << 30
    mutant: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.plan: EnginePlan = soak_plan(block=self.block, drafts=self.drafts, lag=self.lag)
        blocks = self.plan.blocks_per_sequence * self.rng.choice((2, 4, 8))
        self.tier = DictTier(self.plan, self.rng.choice((0, 3)), self.status)
        self.cache = MemoryCache(self.plan, snapshots=self.snapshots, roots=ROOTS, tier=self.tier)
        self.executor = WitnessExecutor(self.plan, self.plan.max_num_seqs, blocks, self.seed, **self.mutant)
        self.core = EngineCore(self.plan, self.executor, slots=self.plan.max_num_seqs, blocks=blocks, seed=self.seed,
                               spill_bytes=self.spill, lag=self.lag, executor=self.executor, prefix=self.cache)
        self.executor.memory = self.core.memory
        self.texts: list[list[int]] = [self.words(40) for _ in range(3)]
        self.open: list[Request] = []
        self.events: Counter[str] = Counter()
        self.faulty = False

    @property
    def operations(self) -> int:
        return self.executor.operations + self.events["arrival"] + self.events["abort"] + self.events["fault"]

    def status(self) -> Status:
        return self.rng.choice((Status.OK,) * 30 + (Status.DAMAGED, Status.MISS, Status.IO_ERROR))

    def words(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    # ---- traffic ----------------------------------------------------------------------------------------------------
    def run(self, operations: int) -> None:
        """So many operations, then everything ends and the books have to be even."""
        turn = 0
        while self.operations < operations:
            self.happen()
            self.step()
            turn += 1
            if turn % 16 == 0:
                self.check()
        while self.step():
            pass
        self.check()
        self.cache.clear()
        self.core.close()
        self.core.memory.check()
        need(self.core.memory.blocks.free == self.core.memory.blocks.size, "I10: blocks are left over")

    def happen(self) -> None:
        """What comes from outside before a step."""
        rng = self.rng
        if len(self.open) < 2 * self.plan.max_num_seqs and (not self.open or rng.random() < 0.25):
            self.arrive()
        what = rng.random()
        if self.open and what < 0.01:
            self.core.abort(rng.choice(self.open).request_id)
            self.events["abort"] += 1
        elif what < 0.012:
            self.executor.broken.add(rng.randrange(self.plan.max_num_seqs))
            self.events["fault"] += 1
        elif what < 0.0125:
            self.executor.fault = True
            self.events["fault"] += 1

    def arrive(self) -> None:
        rng, plan = self.rng, self.plan
        text = rng.choice(self.texts)
        prompt = [*text[: rng.choice((len(text), len(text), rng.randrange(1, len(text) + 1)))],
                  *self.words(rng.choice((0, 1, 7, 9, 30)))][: plan.max_model_len - 2]
        prompt = prompt or self.words(1)
        n = rng.choice((1,) * 9 + (2, 3))
        p = SamplingParams(
            n=n, temperature=0 if n == 1 else 1.0, seed=rng.randrange(1 << 30), max_tokens=rng.choice((1, 8, 30, 60)),
            ignore_eos=True, replay=rng.choice(("off", "exact", plan.window, plan.window, plan.window + 3)),
            stop_token_ids=rng.choice(([], [], [5])), cache_salt=rng.choice((None, None, None, "other")),
            cache_class=rng.choice((None, "agent")))
        request = self.core.make(f"r{self.events['arrival']}", prompt, p, priority=rng.choice((0, 0, -1, 1)))
        self.core.add(request)
        self.open.append(request)
        self.events["arrival"] += 1

    def step(self) -> bool:
        try:
            more = self.core.step()
        except EngineFault:
            more = True
            self.cache.clear()  # nobody knows what the step wrote
        for request in [r for r in self.open if r.finished]:
            self.open.remove(request)
            self.finished(request)
        return more

    def finished(self, r: Request) -> None:
        """The answers are those of ids, seed and replay log."""
        for s in r.sequences:
            reason = s.output.finish_reason
            self.events[f"ended by {reason}"] += 1
            if s.inexact or not s.output.token_ids:
                continue
            start = max((x.start for x in s.clock.log if x.axis == KEPT), default=0)
            if must_be_exact(self.plan, r.params.replay):
                start = 0  # a cold run that keeps all rows
            ids = np.array(r.prompt_ids + s.output.token_ids)
            expected = tokens_of(ids, len(r.prompt_ids), start, self.plan.window, s.key & ((1 << 63) - 1))
            need(expected.tolist() == s.output.token_ids, f"I18: answer of {r.request_id}")
        best = r.sequences[0]
        if best.output.token_ids:
            self.texts.append((r.prompt_ids + best.output.token_ids)[:130])
            self.texts = self.texts[-8:]

    # ---- books ------------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """The clock table, the pool, and what the cache says of its blocks."""
        self.core.memory.check()
        self.cache.check()
        c, plan, table = self.core.table.clocks, self.plan, self.core.table
        used = np.flatnonzero(table.state > 0)
        n, w, h, row, verifying, pub = (x[used] for x in (c.n, c.w, c.h, c.row, c.verifying, c.pub))
        live = c.finished[used] == 0
        flying = table.inflight[used]
        need((h % plan.block_tokens == 0).all() and (h <= plan.block_tokens * pub).all(), "I1: floor and blocks")
        need(((plan.block_tokens * pub <= n) & (n <= w))[live].all(), "I1, I11: published rows are committed")
        need((verifying[live] <= (self.lag + 1) * (plan.draft_tokens + 1)).all(), "I1: rows in flight")
        need((flying <= self.lag + 1).all(), "steps in flight")
        quiet = live & (flying == 0)
        need((np.maximum(row, h) == n)[quiet].all(), "I1: rows without a step in flight")
        for node in self.rng.sample(list(self.cache.tree), min(6, len(self.cache.tree))):
            self.check_node(node)

    def check_node(self, node: Node) -> None:
        """A block in the cache: its rows lie where they should and are as exact as it says."""
        size = self.plan.block_tokens
        found = self.executor.data["fine"][node.block]
        need(np.array_equal(found["pos"], np.arange(size) + node.number * size), "I11: rows of a published block")
        need(not node.exact or found["exact"].all(), "I12: a block is called exact and is not")
        need(node.parent is None or (node.parent.alive and node.history[: len(node.parent.history)]
                                     == node.parent.history), "I12: history")

    def told(self) -> dict[str, float]:
        """Counts of what happened."""
        m, k = self.core.metrics, self.cache.counters
        out = {f"hits: {name}": count for name, count in k.how.values.items()}
        out |= {f"tokens found in {name}": count for name, count in k.tiers.values.items()}
        out |= {f"blocks published: {name}": count for name, count in k.published.values.items()}
        out |= {"spilled": m.spilled.value, "dropped": m.restarted.value, "replaced": k.replaced.value,
                "evicted": k.evicted.value, "snapshots": k.snapshots.value, "steps": m.steps.value}
        return out | dict(self.events)


def one_engine(seed: int, operations: int) -> Counter[str]:
    """An engine of the shape that the seed stands for."""
    logging.disable(logging.WARNING)
    run = Soak(seed, *SHAPES[seed % len(SHAPES)])
    run.run(operations)
    return Counter({"operations": run.operations, "engines": 1}) + Counter({k: int(v) for k, v in run.told().items()})


def soak(budget: int, seed: int = 0, each: int = 10_000, workers: int = 1) -> dict[str, Any]:
    """Engines of all shapes in turn, ``each`` operations long, ``budget`` in all; ``workers``: processes."""
    began, counts = time.monotonic(), Counter[str]()
    seeds = range(seed, seed - (-budget // each))
    sizes = [min(each, budget - i * each) for i in range(len(seeds))]
    if workers == 1:
        for found in map(one_engine, seeds, sizes):
            counts.update(found)
    else:
        with ProcessPoolExecutor(workers) as pool:
            for found in pool.map(one_engine, seeds, sizes):
                counts.update(found)
    return {"seconds": round(time.monotonic() - began, 1), "processes": workers, "first_seed": seed,
            **dict(sorted(counts.items()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=1_000_000, help="operations (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default %(default)s)")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    text = json.dumps(soak(options.budget, options.seed, workers=options.workers), indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
