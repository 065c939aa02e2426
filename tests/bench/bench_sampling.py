"""What a step of the loop costs beside the model: positions, draws and verification of a full batch.

    python tests/bench/bench_sampling.py [--sequences 256] [--vocab 129280] [--threads N] [--repeats 5]

The model is a kernel that leaves its logits as they are, so that a step is what the runner adds. Beside each figure
stands the floor: the time in which a kernel that only reads takes the same logits in, on the same threads. All rows of
the table are measured in turn, several times; the best of each counts.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.backends.base import HOST, Source
from deepinfer.backends.cpu.backend import BACKEND
from deepinfer.codegen.kernels.spec import KernelSpec, Operand
from deepinfer.codegen.package.interface import Interface, Value
from deepinfer.codegen.plan.sequence_state import SequenceState
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.executor import COUPLED, DECODE, GREEDY, NO_LOGPROBS, PREFILL, SequenceStart, StepPlan
from deepinfer.runtime.native.build import LIBRARY, build_runner
from deepinfer.runtime.native_engine import NativeEngine
from deepinfer.runtime.native_executor import NativeExecutor
from deepinfer.runtime.placement import processors
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.sampling_params import SamplingParams

NOTHING = 'extern "C" void DI_JOIN(di_nothing, DI_ISA)(const DiArgs*) {}\n'
READ = """DI_KERNEL(di_read) {
    enum { SIZE = %d };
    for (int64_t row = args->lo; row < args->hi; ++row) {
        const float* l = (const float*)args->p[0] + row * SIZE;
        DiV a[4] = {};
        for (int64_t i = 0; i + 64 <= SIZE; i += 64) {
            for (int k = 0; k < 4; ++k) a[k] += di_load(l + i + 16 * k);
        }
        ((int64_t*)args->p[1])[row] = (int64_t)di_sum(a[0] + a[1] + a[2] + a[3]);
    }
}
"""
DRAFTS = 3
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0}, "temperature 0.7": {"temperature": 0.7}, "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50}, "penalties": {"temperature": 0.7, "repetition_penalty": 1.1}}


def engine_folder(folder: Path, vocab: int, sequences: int) -> Path:
    """An engine whose step does nothing, with the compiled draw of its vocabulary."""
    operands = (Operand("value", "T", (vocab,), "f32"), Operand("value", "T", (), "i64", write=True))
    draw = BACKEND.emit(KernelSpec("draw", "T", operands, (("ahead", 0), ("logits", 0), ("out", 1)), (), title="draw"))
    head = '#include "di_base.h"\n'
    sources = [draw, Source("di_nothing", head + NOTHING, ".cpp", 1, 1, 0),
               Source("di_read", head + READ % vocab, ".cpp", 1, 1, 0)]
    binary = BACKEND.compile(sources, jobs=2, isa=HOST)
    rows = sequences * (DRAFTS + 1)
    logits = -(-rows * vocab * 4 // 64) * 64
    end = logits + rows * 8 * max(1, DRAFTS)
    both = [f"buffer 0 axis 2 row_bytes {vocab * 4} offset 0", f"buffer 1 axis 2 row_bytes 8 offset {logits}"]
    lines = ["deepinfer-launch 1", "block_tokens 128", "lookback 0", SequenceState(vocab, DRAFTS, 0, 0).text(),
             f"limit step {rows} kept {rows} wanted {rows} seq {sequences}", "kernel 0 di_nothing scratch 0",
             f"kernel 1 {draw.symbol} scratch {draw.scratch_bytes}", "kernel 2 di_read scratch 0",
             f"entry step arena {end}", *both, "launch 0 items 2 1 1 args b0 b1", "output logits 0",
             f"entry sample arena {end}", *both, "launch 1 items 2 1 1 args b0 b1", "output tokens 1",
             f"entry read arena {end}", *both, "launch 2 items 2 1 1 args b0 b1", "output sums 1",
             f"entry draft arena {end}", f"limit step {sequences * DRAFTS} kept {sequences * DRAFTS} "
             f"wanted {sequences * DRAFTS} seq {sequences}", f"buffer 0 axis 3 row_bytes {8 * DRAFTS} offset {logits}",
             "launch 0 items 3 1 1 args b0", "output tokens 0", "end", ""]
    (folder / "launch.txt").write_text("\n".join(lines))
    shutil.copy(binary.files["kernels.so"], folder / "kernels.so")
    shutil.copy(build_runner().files[LIBRARY], folder)
    return folder


class Bench:
    """``sequences`` slots behind a prompt of one token."""

    def __init__(self, folder: Path, vocab: int, sequences: int, threads: int) -> None:
        token = Value("T_wanted", (), "i64")
        outputs = {"step": {"logits": Value("T_wanted", (vocab,), "f32")}, "sample": {"tokens": token},
                   "read": {"sums": token}, "draft": {"tokens": Value("S", (DRAFTS,), "i64")}}
        rows = sequences * (DRAFTS + 1)
        self.plan = EnginePlan("bench", "cpu", vocab, 1 << 20, sequences,
                               {"step": rows, "kept": rows, "wanted": rows, "seq": sequences}, 128, 128, (),
                               entries=("step", "draft", "sample"), draft_tokens=DRAFTS)
        self.engine = NativeEngine(folder, Interface((), (), outputs), slots=sequences, blocks=0, threads=threads)
        self.executor = NativeExecutor(self.plan, self.engine)
        self.step, self.sequences = StepPlan(self.plan), sequences

    def begin(self, options: dict[str, Any]) -> None:
        params, prompt = SamplingParams(**options), np.array([1], np.int64)
        for slot in range(self.sequences):
            self.executor.begin(slot, SequenceStart(params, GREEDY if params.greedy else COUPLED, slot, prompt))
        self.run(PREFILL, 0)

    def run(self, kind: int, drafts: int) -> float:
        """Seconds of a step."""
        step, n = self.step, self.sequences
        step.clear()
        rows = step.rows[:n]
        rows[:] = np.zeros((), rows.dtype)
        rows["slot"], rows["kind"], rows["rows"] = np.arange(n), kind, 1 + drafts
        rows["draws"], rows["want_draft"] = 1, int(drafts > 0)
        rows["logprobs"] = rows["prompt_logprobs"] = NO_LOGPROBS
        if kind == PREFILL:
            rows["kept"] = rows["wanted"] = 1
            rows["first"] = np.arange(n)
            step.token_ids[:n], step.lookback[:n, 0] = 1, 1
            rows["want_draft"] = 1
        step.count = n
        began = time.perf_counter()
        self.executor.wait(self.executor.submit(step))
        return time.perf_counter() - began

    def read(self, rows: int) -> float:
        """Seconds in which the logits of so many rows are read."""
        batch = Batch(self.plan)
        for slot in range(self.sequences):
            batch.add([1] * (rows // self.sequences), slot=slot, c=0, blocks=np.zeros(0, np.int32),
                      wanted=rows // self.sequences)
        began = time.perf_counter()
        self.engine.run("read", batch)
        return time.perf_counter() - began

    def fill(self) -> None:
        """Logits of a spread that models have; every row is another one."""
        batch, rows = Batch(self.plan), DRAFTS + 1
        for slot in range(self.sequences):
            batch.add([1] * rows, slot=slot, c=0, blocks=np.zeros(0, np.int32), wanted=rows)
        logits = self.engine.run("step", batch)["logits"]
        base = (np.random.default_rng(1).normal(size=2 * logits.shape[1]) * 2.5).astype(np.float32)
        for i, row in enumerate(logits):
            row[:] = base[i * 64 % logits.shape[1] :][: len(row)]
            row[(i * 977) % len(row)] = 16.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=129_280)
    parser.add_argument("--threads", type=int, default=processors())
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as where:
        bench = Bench(engine_folder(Path(where), args.vocab, args.sequences), args.vocab, args.sequences, args.threads)
        bench.fill()
        print(f"{args.sequences} sequences, {args.vocab:,} tokens, {args.threads} threads; milliseconds a step")
        print(f"{'sampling':18} {'drafts':>6} {'rows':>6} {'step':>9} {'floor':>9} {'ratio':>6}")
        for drafts in (0, DRAFTS):
            rows = args.sequences * (1 + drafts)
            for name, options in KINDS.items():
                bench.begin(options)
                found = _best(args.repeats, lambda d=drafts: bench.run(DECODE, d), lambda r=rows: bench.read(r))
                print(f"{name:18} {drafts:6} {rows:6} {1e3 * found[0]:9.2f} {1e3 * found[1]:9.2f} "
                      f"{found[0] / found[1]:6.2f}", flush=True)
        bench.executor.close()


def _best(repeats: int, *what: Callable[[], float]) -> list[float]:
    """The best of each, measured in turn."""
    return [min(times) for times in zip(*([w() for w in what] for _ in range(repeats)), strict=True)]


if __name__ == "__main__":
    main()
