"""The CPU engine on the mid config, each figure beside its floor, measured in one run.

    python tests/bench/bench_cpu_engine.py --threads 2 [--sections decode,host,prefill,context] [--json FILE]

makes a random checkpoint of the config in the official formats (2.2 GB) and two engines, kept in the cache folder for
the next run. Sections, each less than three minutes on an idle machine with two processors:

decode   steps of 1, 2, 4 and 8 sequences. The floor is max(bytes touched / read bandwidth, multiply-adds / peak):
         every dense weight once, of each expert stack the distinct experts of the step (the picks are pinned, so they
         are counted, not estimated), and the cache entries that attention reads. `outside` is what the engine's
         call takes outside its kernels.
host     what a step of one request takes outside the engine's call, in the plain and in the overlapped loop by
         turns. `us_exposed`: a step's time less that of the plain loop's call, so what the sequence waits for.
prefill  prompts of 512 and 4,096 tokens in steps of 512, beside the same layers in plain torch (bf16 F.linear and
         scaled_dot_product_attention, see plain_torch.py), and the contractions' multiply-adds a second beside
         torch's own bf16 matrix product. `replay`: the same prompts as the model was trained to read them, with
         the upper layers run for the last window of rows only (bounded replay).
context  one token at 1k, 16k and 64k tokens of context by turns, over caches of random entries: what grows, by kernel
         family.

Read bandwidth: a plain loop over 512 MiB in huge pages on the same threads. Peak: torch's bf16 product of 2048 x 2048
matrices. Times are wall time, the median of the steps; `best` is the fastest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.machine import matmul_rate, read_bandwidth

import deepinfer
from deepinfer.codegen import compile_engine
from deepinfer.codegen.cache import cache_root
from deepinfer.codegen.plan.launch import Launch
from deepinfer.codegen.plan.table import Lowered
from deepinfer.dsl import EngineOptions
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.tools.make_checkpoint.make import make_checkpoint

CONFIGS = Path(__file__).with_name("configs")
STEP_ROWS, SLOTS = 512, 8
CONTEXT_TURNS = 60
LOOP_TURNS = 4  # of each loop, the first of which does not count
_WARM = 12  # steps of all sequences before decoding is timed: together they pick every expert
SECTIONS = ("decode", "host", "prefill", "context")


class Work:
    """What the launches of a step have to read and to multiply, from the launch table alone."""

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.launches = lowered.table.entries["step"].launches

    def params(self, launch: Launch) -> list[Any]:
        found = [self.lowered.params[i] for i in sorted({a.index for a in launch.args if a.kind == "p"})]
        return [p for p in found if not p.table]

    def family(self, launch: Any) -> str:
        return self.lowered.specs[launch.kernel].family if isinstance(launch, Launch) else "commit"

    @staticmethod
    def tensor_bytes(p: Any) -> int:
        """Bytes of one tensor of a parameter, scales included."""
        total = int(p.dtype.data_bytes(int(np.prod(p.shape))))
        if p.dtype.is_block:
            rows, columns = p.dtype.block
            total += -(-p.shape[0] // rows) * -(-p.shape[1] // columns)
        return total

    def weight_bytes(self, distinct: Sequence[float]) -> float:
        """Bytes of the matrices of a step that uses so many experts of each expert layer, in the order of the layers.
        Vectors of norms and the few rows of look-ups are not counted."""
        dense: dict[str, int] = {}
        routed, layer = 0.0, -1
        for x in self.launches:
            if self.family(x) not in ("gemm", "grouped_gemm"):
                continue
            stacks = [p for p in self.params(x) if p.stack]
            layer += self.family(x) == "grouped_gemm" and len(stacks) > 1  # the gate's and the up projection's
            routed += sum(self.tensor_bytes(p) * distinct[layer] for p in stacks)
            dense |= {p.name: self.tensor_bytes(p) for p in self.params(x) if not p.stack}
        return sum(dense.values()) + routed

    def multiply_adds(self, rows: dict[str, int], slots: int) -> int:
        """Of all contractions with weights for so many rows of each axis."""
        total = 0
        for x in self.launches:
            if isinstance(x, Launch) and self.family(x) in ("gemm", "grouped_gemm"):
                times = rows.get(x.axis, 0) * (slots if self.family(x) == "grouped_gemm" else 1)
                total += times * sum(int(np.prod(p.shape)) for p in self.params(x))
        return total

    def cache_bytes(self, context: int) -> int:
        """Entries that the attention and the index of one token read at most."""
        total = 0
        for x in self.launches:
            spec = self.lowered.specs[x.kernel] if isinstance(x, Launch) else None
            if spec is None or spec.family not in ("attend", "score_select"):
                continue
            if spec.family == "score_select":
                op = spec.operands[spec.get("keys")]
                total += context // spec.get("ratio") * op.type.row_bytes(op.size)
                continue
            for _, width, keys, values, picked in spec.get("sources"):
                count = min(width, context) if picked < 0 else spec.operands[picked].size
                for i in {keys, values} - {-1}:
                    op = spec.operands[i]
                    total += min(count, context) * op.type.row_bytes(op.size)
        return total


class Bench:
    """An engine with random sequences in its slots and pinned experts."""

    def __init__(self, engine: Path, checkpoint: Path, slots: int, length: int, threads: int,
                 check: str = "weights") -> None:
        self.package = deepinfer.load_engine(engine)
        per = -(-length // self.package.plan.block_tokens)
        self.blocks = slots * per
        self.running = self.package.start(checkpoint, slots=slots, blocks=self.blocks, threads=threads, check=check)
        self.batch = Batch(self.package.plan)
        self.tables = [np.arange(i * per, (i + 1) * per, dtype=np.int32) for i in range(slots)]
        self.rng = np.random.default_rng(1)
        self.history = [self.rng.integers(3, 200, length) for _ in range(slots)]
        self.native = self.running
        self.inside = 0.0  # seconds of the last native call, without what Python does around it
        call = self.native._runner.call

        def timed(function: str, *given: Any, **named: Any) -> None:
            start = time.perf_counter()
            call(function, *given, **named)
            if function == "di_run":
                self.inside = time.perf_counter() - start
        self.native._runner.call = timed  # type: ignore[method-assign]
        self.pinned = [(n, k) for n, k in self.native.interface.pins if n.startswith("experts.")]

    def pins(self, rows: int, experts: int) -> dict[str, NDArray[np.int32]]:
        """Random experts of each row and layer."""
        return {name: np.stack([self.rng.permutation(experts)[:k] for _ in range(rows)]).astype(np.int32)
                for name, k in self.pinned}

    def step(self, rows: Sequence[tuple[int, int, int]], pins: dict[str, NDArray[np.int32]] | None = None,
             kept_from: int = 0) -> float:
        """Seconds of one step; ``rows``: (slot, first position, count); ``kept_from``: position of the first row that
        is on the kept axis."""
        self.batch.clear()
        for slot, c, n in rows:
            ids, kept = self.history[slot], min(n, max(0, c + n - kept_from))
            self.batch.add(ids[c:c + n], slot=slot, c=c, blocks=self.tables[slot], kept=kept, wanted=min(1, kept),
                           start_kept=kept_from, before=ids[max(0, c - 64):c])
        start = time.perf_counter()
        self.native.run("step", self.batch, pins)
        return time.perf_counter() - start

    def profiled(self, count: int, one: Callable[[int], float]) -> tuple[list[float], NDArray[np.float64], float]:
        """Seconds of each of ``count`` runs, the median microseconds of each launch, and the median microseconds of a
        native call outside its launches."""
        self.native.profile(True)
        runs, launches, inside = [], [], []
        for i in range(count):
            runs.append(one(i))
            inside.append(self.inside)
            launches.append(self.native.profile(True))
        self.native.profile(False)
        outside = np.array(inside) * 1e6 - np.sum(launches, axis=1)
        return runs, np.median(np.array(launches), axis=0), float(np.median(outside))

    def fill_caches(self, work: Work) -> None:
        """Random entries everywhere: codes and scales of moderate size in every format."""
        for state in work.lowered.table.states:
            for unit in range(self.blocks if state.kind == "paged" else len(self.tables)):
                raw = self.native.state(state.name, unit)
                raw[:] = self.rng.integers(0x30, 0x50, len(raw), dtype=np.uint8)


class LoopClock:
    """Seconds of whole steps of one sequence in an engine's loop, and of the engine's calls in them where the loop
    waits for each."""

    def __init__(self, llm: deepinfer.LLM) -> None:
        self.llm, self.steps, self.calls = llm, list[float](), list[float]()
        executor = llm.core.executor
        run = executor._run  # type: ignore[attr-defined]

        def timed(*given: Any) -> Any:
            start = time.perf_counter()
            out = run(*given)
            self.calls.append(time.perf_counter() - start)
            return out

        executor._run = timed  # type: ignore[attr-defined]

    def answer(self, tokens: int, keep: bool) -> None:
        """An answer of so many tokens; ``keep``: its times count."""
        core, before = self.llm.core, len(self.calls)
        request = core.make("host", list(range(3, 67)),
                            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
        core.add(request)
        spent = []
        while not request.finished:
            start = time.perf_counter()
            core.step()
            spent.append(time.perf_counter() - start)
        # Without the prompt, and the steps that fill or drain an overlapped loop.
        self.steps += spent[3:-3] if keep else []
        self.calls[before:] = self.calls[before + 3:-3] if keep else []


class Run:
    """One run of the benchmark: floors, sections, and what they found."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.results = given, list[dict[str, Any]]()
        folder = cache_root() / "bench"
        self.folder, self.checkpoint = folder, folder / f"{given.config}_checkpoint"
        if not (self.checkpoint / "config.json").is_file():
            make_checkpoint(CONFIGS / f"{given.config}.json", self.checkpoint, seed=0)
        self.config = json.loads((self.checkpoint / "config.json").read_text())["text_config"]
        drop_small_pages(self.checkpoint)
        self.bandwidth, self.peak = read_bandwidth(given.threads), matmul_rate(given.threads)
        self.show("machine", processors=os.cpu_count(), load=round(os.getloadavg()[0], 2), threads=given.threads,
                  read_GB_s=round(self.bandwidth / 1e9, 1), torch_matmul_GMAC_s=round(self.peak / 1e9, 1))

    def show(self, section: str, **values: Any) -> None:
        self.results.append({"section": section, **values})
        print(json.dumps(self.results[-1]), flush=True)

    def engine(self, name: str, length: int, host_lag: int = 0) -> tuple[Path, Work]:
        options = EngineOptions(max_num_seqs=SLOTS, max_num_batched_tokens=STEP_ROWS, max_model_len=length,
                                host_lag=host_lag)
        out = self.folder / f"{self.given.config}_{name}"
        compiled = compile_engine(model=str(self.checkpoint), out=out, target="cpu", options=options, isa="host")
        return out, Work(compiled.plan.lowered)

    def decode(self) -> None:
        context, steps = self.given.context, self.given.steps
        engine, work = self.engine("engine", 4096)
        bench = Bench(engine, self.checkpoint, SLOTS, context + _WARM + 4 * (steps + 8), self.given.threads)
        bench.fill_caches(work)
        bench.step([(0, 0, STEP_ROWS)])
        experts, k = self.config["n_routed_experts"], self.config["num_experts_per_tok"]
        for i in range(_WARM):  # pages are mapped when they are first read, those of an expert when it is first picked
            bench.step([(slot, context + i, 1) for slot in range(SLOTS)], bench.pins(SLOTS, experts))
        at = context + _WARM
        for size in (1, 2, 4, 8):
            pins = [bench.pins(size, experts) for _ in range(steps)]
            bench.step([(slot, at, 1) for slot in range(size)], pins[0])

            def one(i: int, size: int = size, first: int = at + 1, pins: list[Any] = pins) -> float:
                return bench.step([(slot, first + i, 1) for slot in range(size)], pins[i])

            times, launches, outside = bench.profiled(steps, one)
            at += steps + 2
            distinct = [statistics.mean(len(np.unique(p[name])) for p in pins) for name, _ in bench.pinned]
            touched = work.weight_bytes(distinct) + size * work.cache_bytes(context)
            adds = work.multiply_adds({"T": size, "T_kept": size, "T_wanted": size, "S": size}, k)
            floor = max(touched / self.bandwidth, adds / self.peak)
            median = statistics.median(times)
            self.show("decode", batch=size, ms_step=round(median * 1e3, 2), best_ms=round(min(times) * 1e3, 2),
                      floor_ms=round(floor * 1e3, 2), share_of_floor=round(floor / median, 3),
                      share_of_floor_best=round(floor / min(times), 3), tokens_s=round(size / median, 1),
                      MB_touched=round(touched / 1e6, 1), distinct_experts=round(statistics.mean(distinct), 1),
                      outside_us=round(outside), ms_by_family=by_family(work, launches))

    def host(self) -> None:
        """What a step of one request takes outside the engine's call: planning, memory, results, stops, counters. In
        the plain loop all of it is waited for, in the overlapped one what does not pass beside the next step."""
        made, _ = self.engine("engine_lag", 4096, host_lag=1)
        loops = {loop: LoopClock(deepinfer.LLM(str(made), str(self.checkpoint), max_num_seqs=1, progress=False,
                                               num_speculative_tokens=0, threads=self.given.threads, loop=loop))
                 for loop in ("plain", "overlapped")}
        for turn in range(LOOP_TURNS):
            for clock in loops.values():
                clock.answer(4 * self.given.steps, keep=turn > 0)
        call = statistics.median(loops["plain"].calls)
        for loop, clock in loops.items():
            median = statistics.median(clock.steps)
            self.show("host", loop=loop, steps=len(clock.steps), ms_step=round(1e3 * median, 3),
                      ms_call_plain=round(1e3 * call, 3), us_exposed=round(1e6 * (median - call)))
            clock.llm.close()

    def prefill(self) -> None:
        from bench.plain_torch import PlainTorch

        engine, work = self.engine("engine", 4096)
        bench = Bench(engine, self.checkpoint, 1, 4096, self.given.threads)
        rival = PlainTorch(self.config, self.given.threads)
        k, window = self.config["num_experts_per_tok"], self.config["sliding_window"]
        for tokens in (512, 4096):
            bench.native.profile(True)
            ours, families = 0.0, np.zeros(len(work.launches))
            best = replayed = float("inf")
            for _ in range(2 if tokens > 512 else 3):
                ours, launches = 0.0, np.zeros(len(work.launches))
                for c in range(0, tokens, STEP_ROWS):
                    ours += bench.step([(0, c, STEP_ROWS)])
                    launches += bench.native.profile(True)
                if ours < best:
                    best, families = ours, launches
                replayed = min(replayed, sum(bench.step([(0, c, STEP_ROWS)], kept_from=tokens - window)
                                             for c in range(0, tokens, STEP_ROWS)))
            bench.native.profile(False)
            theirs = min(rival.prefill(tokens) for _ in range(1 if tokens > 512 else 2))
            rows = {"T": tokens, "T_kept": tokens, "T_wanted": tokens // STEP_ROWS}
            spent = by_family(work, families)
            adds = work.multiply_adds(rows, k)
            rate = adds / (spent["gemm"] + spent["grouped_gemm"]) * 1e3
            self.show("prefill", tokens=tokens, seconds=round(best, 3), tokens_s=round(tokens / best),
                      floor_seconds=round(adds / self.peak, 3), torch_seconds=round(theirs, 3),
                      times_torch=round(theirs / best, 2), replay_seconds=round(replayed, 3),
                      replay_times_torch=round(theirs / replayed, 2), gemm_GMAC_s=round(rate / 1e9, 1),
                      gemm_of_torch_matmul=round(rate / self.peak, 3), ms_by_family=spent)

    def context(self) -> None:
        longest = 65536
        engine, work = self.engine("engine_long", longest + 256)
        bench = Bench(engine, self.checkpoint, 1, longest + 128, self.given.threads)
        bench.fill_caches(work)
        bench.step([(0, 0, STEP_ROWS)])
        pins = bench.pins(1, self.config["n_routed_experts"])
        contexts = (1024, 16384, 65536)
        times: dict[int, list[float]] = {c: [] for c in contexts}
        launches: dict[int, list[NDArray[np.float64]]] = {c: [] for c in contexts}
        for i in range(CONTEXT_TURNS + 1):  # by turns, so that a busy moment of the machine meets all of them
            for at in contexts:
                found, spent, _ = bench.profiled(1, lambda _, at=at, i=i: bench.step([(0, at + i, 1)], pins))
                if i:
                    times[at] += found
                    launches[at].append(spent)
        base: dict[str, float] = {}
        for at in contexts:
            families = by_family(work, np.median(np.array(launches[at]), axis=0))
            base = base or families
            more = work.cache_bytes(at) - work.cache_bytes(contexts[0])
            quarter, median = np.percentile(times[at], (25, 50))
            self.show("context", tokens=at, steps=CONTEXT_TURNS, ms_step=round(float(median) * 1e3, 2),
                      ms_step_quarter=round(float(quarter) * 1e3, 2), more_index_MB=round(more / 1e6, 2),
                      more_floor_ms=round(more / self.bandwidth * 1e3, 3),
                      growth_ms={f: round(families[f] - base[f], 3) for f in families}, ms_by_family=families)


def by_family(work: Work, launches: NDArray[np.float64]) -> dict[str, float]:
    """Milliseconds by kernel family."""
    total: dict[str, float] = defaultdict(float)
    for x, us in zip(work.launches, launches, strict=True):
        total[work.family(x)] += us / 1e3
    return {f: round(ms, 3) for f, ms in sorted(total.items())}


def drop_small_pages(folder: Path) -> None:
    """Lets the next mapping read the weights into huge pages: what a download left in the cache lies in small ones."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the CPU engine beside its floors.")
    parser.add_argument("--config", default="mid", help="a name in tests/bench/configs (default: mid)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024, help="tokens before the decoded ones (default: 1024)")
    parser.add_argument("--steps", type=int, default=20, help="decode steps of each kind (default: 20)")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="a list (default: all)")
    parser.add_argument("--json", type=Path, help="also writes all results to a file")
    given = parser.parse_args()
    run = Run(given)
    for section in given.sections.split(","):
        if section not in SECTIONS:
            parser.error(f"no section {section}; there are {', '.join(SECTIONS)}")
        getattr(run, section)()
    if given.json:
        given.json.write_text(json.dumps(run.results, indent=1))


if __name__ == "__main__":
    main()
