"""An engine of V4.1-Flash at the released widths, cut to the layers that one H200 holds: steps, layers, gaps, memory.

    deepinfer-compile --target sm90 --model tests/golden/configs/DeepSeek-V4.1-Flash --layers 5 \\
        --max-num-seqs 64 --max-num-batched-tokens 4096 --max-model-len 16384 --out flash5    # without a GPU
    python tests/bench/bench_h200_engine.py run flash5 OUT.json    # on the device, with torch
    python tests/bench/bench_h200_engine.py table OUT.json         # for docs/performance.md

Weights are random, lookup tables zeros. Every sequence has a context of 8,192 tokens, all of them the same one. Times
are the device's own record of a step as it is served (CUPTI, through torch), so what lies between two kernels is seen
as well; a layer's time is the sum of its kernels.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

os.environ["DEEPINFER_ACCELERATOR"] = "nvidia"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deepinfer.codegen.package import EnginePackage, load_engine
from deepinfer.dsl.params import ParamDecl, StoredTensor
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.device_memory import Placement
from deepinfer.runtime.native_engine import NativeEngine, Runner

CONTEXT, CHUNK = 8192, 4096
CASES = {"1 decode": (1, 1), "64 decodes": (64, 1), f"prompt of {CHUNK}": (1, CHUNK)}  # sequences, rows of each
_REPEATS, _RECORDED = 30, 5
_COMMIT, _AHEAD = "di_commit", 4  # kernels of other launches that may stand before a launch's
_LEAST = 64 << 20  # bytes of a repeated pattern


class RandomWeights:
    """Stands for a checkpoint: every tensor is the beginning of one area of random values of its kind."""

    def __init__(self, params: tuple[ParamDecl, ...]) -> None:
        self.params = params
        self._areas: dict[str, np.ndarray[Any, Any]] = {}

    def _tensors(self, p: ParamDecl) -> tuple[StoredTensor, StoredTensor | None]:
        return p.stored(), p.stored_scale() if p.dtype.is_block else None

    def _address(self, p: ParamDecl, tensor: StoredTensor | None) -> int:
        if tensor is None:
            return 0
        kind = "zeros" if p.table or tensor.dtype == "I64" else tensor.dtype
        if kind not in self._areas:
            sizes = (t.nbytes for q in self.params for t in self._tensors(q)
                     if t is not None and (kind == "zeros" or not q.table))
            self._areas[kind] = _area(kind, max(sizes))
        return int(self._areas[kind].ctypes.data)

    def addresses(self) -> Iterator[list[tuple[int, int]]]:
        for p in self.params:
            data, scale = self._tensors(p)
            yield [(self._address(p, data), self._address(p, scale))] * max(1, p.stack)

    def sizes(self) -> Iterator[list[tuple[int, int]]]:
        for p in self.params:
            data, scale = self._tensors(p)
            yield [(data.nbytes, scale.nbytes if scale else 0)] * max(1, p.stack)


def _area(kind: str, size: int) -> np.ndarray[Any, Any]:
    if kind == "zeros":
        return np.zeros(size, np.uint8)
    rng = np.random.default_rng(7)
    if kind == "F8_E8M0":
        some = rng.integers(112, 117, _LEAST, np.uint8)
    elif kind == "BF16":
        some = (rng.standard_normal(_LEAST // 2, np.float32) * 0.03).view(np.uint16)[1::2].copy().view(np.uint8)
    elif kind == "F32":
        some = (rng.standard_normal(_LEAST // 4, np.float32) * 0.03).view(np.uint8)
    else:
        some = rng.integers(0, 256, _LEAST, np.uint8)
        some[(some & 0x7F) == 0x7F] = 0x31
    return np.resize(some, size)


class Steps:
    """Steps of an engine on one shared context."""

    def __init__(self, package: EnginePackage, native: NativeEngine) -> None:
        self.package, self.native, self.batch = package, native, Batch(package.plan)
        self.ids = np.random.default_rng(5).integers(3, package.plan.vocab_size, CONTEXT + CHUNK)
        self.table = np.arange(-(-(CONTEXT + CHUNK) // package.plan.block_tokens) + 1, dtype=np.int32)
        for c in range(0, CONTEXT, CHUNK):
            self.fill(1, CHUNK, c)
            self.run()

    def fill(self, count: int, rows: int, c: int = CONTEXT) -> None:
        self.batch.clear()
        for slot in range(count):
            ids = np.roll(self.ids, 17 * slot)[c : c + rows]
            self.batch.add(ids, slot=slot, c=c, blocks=self.table, wanted=1, before=self.ids[c - 8 : c] if c else ())

    def run(self) -> None:
        self.native.run("step", self.batch)

    def wall(self) -> float:
        """Microseconds of a step, host included: median."""
        times = []
        for _ in range(_REPEATS):
            begun = time.perf_counter()
            self.run()
            times.append((time.perf_counter() - begun) * 1e6)
        return statistics.median(times[5:])

    def recorded(self) -> list[list[dict[str, Any]]]:
        """The device's record of some steps: for each its kernels and copies, in order."""
        import torch

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
            for _ in range(_RECORDED):
                self.run()
        with tempfile.TemporaryDirectory() as folder:
            p.export_chrome_trace(str(Path(folder) / "trace.json"))
            events = json.loads((Path(folder) / "trace.json").read_text())["traceEvents"]
        found = sorted((e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")),
                       key=lambda e: e["ts"])
        kernels = [i for i, e in enumerate(found) if e["cat"] == "kernel"]
        share = len(kernels) // _RECORDED
        starts = [kernels[n * share] for n in range(_RECORDED)] + [len(found)]
        return [found[a:z] for a, z in pairwise(starts)]


def by_scope(package: EnginePackage, kernels: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Kernels of one step by layer and part, with their microseconds. Stages of a launch have its symbol's name;
    commits of states stand in another order in a prompt, and are summed up."""
    explain = json.loads((package.path / "explain.json").read_text())
    symbols = [k["symbol"] for k in explain["kernels"]]
    commits = [k for k in kernels if k["name"].startswith(_COMMIT)]
    kernels = [k for k in kernels if not k["name"].startswith(_COMMIT)]
    out: dict[str, dict[str, Any]] = {}
    at = 0
    for launch in (x for x in explain["entries"]["step"]["launches"] if "kernel" in x):
        symbol = symbols[launch["kernel"]]
        at = next((n for n in range(at, min(at + _AHEAD, len(kernels))) if kernels[n]["name"].startswith(symbol)), at)
        first = at
        while at < len(kernels) and kernels[at]["name"].startswith(symbol) and (
                at == first or kernels[at]["name"] != kernels[first]["name"]):
            at += 1
        _count(out, ".".join(launch["scope"].split(".")[:2]), f"{launch['scope']} {symbol[3:].rsplit('_', 1)[0]}",
               kernels[first:at], 1)
    _count(out, "commits", "commits", commits, len(commits))
    return out


def _count(out: dict[str, dict[str, Any]], scope: str, part: str, kernels: list[dict[str, Any]], launches: int) -> None:
    layer = out.setdefault(scope, {"launches": 0, "kernels": 0, "us": 0.0, "parts": {}})
    us = sum(k["dur"] for k in kernels)
    layer["launches"] += launches
    layer["kernels"] += len(kernels)
    layer["us"] = round(layer["us"] + us, 2)
    layer["parts"][part] = round(layer["parts"].get(part, 0.0) + us, 2)


def case(package: EnginePackage, steps: Steps, count: int, rows: int) -> dict[str, Any]:
    steps.fill(count, rows)
    for _ in range(3):
        steps.run()
    out: dict[str, Any] = {"wall us": round(steps.wall(), 1)}
    whole, gaps, record = [], [], []
    for step in steps.recorded():
        kernels = [e for e in step if e["cat"] == "kernel"]
        span = kernels[-1]["ts"] + kernels[-1]["dur"] - kernels[0]["ts"]
        between = sum(max(0.0, b["ts"] - a["ts"] - a["dur"]) for a, b in pairwise(kernels))
        whole.append(span)
        gaps.append(between / span)
        record.append(kernels)
    middle = sorted(range(len(whole)), key=whole.__getitem__)[len(whole) // 2]
    out |= {"device us": round(whole[middle], 1), "gaps": round(gaps[middle], 4), "kernels": len(record[middle]),
            "layers": by_scope(package, record[middle])}
    return out


def run(engine: Path, out: Path) -> None:
    package = load_engine(engine)
    probe = Runner(package.lib)
    before = probe.device()
    assert before is not None
    result: dict[str, Any] = {"device": before.name, "layers": package.manifest["options"]["layers"], "cases": {}}
    weights = RandomWeights(package.interface.params)
    begun = time.perf_counter()
    native = NativeEngine(package.lib, package.interface, slots=package.plan.max_num_seqs, blocks=256)
    native.bind(weights)
    after = probe.device()
    assert after is not None
    planned, taken = native.memory.on_device + Placement(weights).end, before.free - after.free
    result |= {"load seconds": round(time.perf_counter() - begun, 1), "planned bytes": planned, "taken bytes": taken}
    steps = Steps(package, native)
    for name, (count, rows) in CASES.items():
        result["cases"][name] = case(package, steps, count, rows)
        print(name, {k: v for k, v in result["cases"][name].items() if k != "layers"}, flush=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    native.close()
    probe.close()


def table(file: Path) -> None:
    """Layers by case, as Markdown."""
    result = json.loads(file.read_text(encoding="utf-8"))
    cases = result["cases"]
    print("| microseconds |", " | ".join(cases), "|\n|" + "---|" * (len(cases) + 1))
    for layer in next(iter(cases.values()))["layers"]:
        cells = [f"{c['layers'][layer]['us']:,.0f} ({c['layers'][layer]['launches']} launches, "
                 f"{c['layers'][layer]['kernels']} kernels)" for c in cases.values()]
        print(f"| {layer} |", " | ".join(cells), "|")
    print("| step on the device |", " | ".join(f"{c['device us']:,.0f}" for c in cases.values()), "|")
    print("| of it between kernels |", " | ".join(f"{c['gaps']:.1%}" for c in cases.values()), "|")
    print("| step as the host sees it |", " | ".join(f"{c['wall us']:,.0f}" for c in cases.values()), "|")


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"run": run, "table": table}
    commands[sys.argv[1]](*map(Path, sys.argv[2:]))
