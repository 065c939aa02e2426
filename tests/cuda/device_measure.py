"""Start, memory, recordings and a long context of engines on the GPU of this machine.

    python tests/cuda/device_measure.py RESULT.json ENGINES [POSITIONS]

ENGINES: the folder of tests/cuda/device_engines.py. POSITIONS: length of the long prompt; 0 leaves it out.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ["DEEPINFER_ACCELERATOR"] = "nvidia"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from compiled import checkpoint_of
from golden.cases import load_case
from rich.console import Console

from deepinfer import LLM
from deepinfer.accelerator import resolve_target
from deepinfer.codegen.compile import compile_engine
from deepinfer.codegen.package import load_engine
from deepinfer.dsl.model import EngineOptions
from deepinfer.runtime.checkpoint.bind import bind_weights
from deepinfer.runtime.device_memory import Placement
from deepinfer.runtime.native_engine import NativeEngine, Runner
from deepinfer.tools.make_checkpoint.make import make_checkpoint

CASE, PROFILE = "v41_c_quant", "bf16"
_STEPS = 200


def age() -> float:
    """Seconds since this process began."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Calls:
    """Seconds in the runner, by function."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        plain = Runner.call

        def call(runner: Runner, function: str, *arguments: Any, opened: bool = True) -> None:
            start = time.perf_counter()
            try:
                plain(runner, function, *arguments, opened=opened)
            finally:
                self.seconds[function] += time.perf_counter() - start

        Runner.call = call  # type: ignore[method-assign]


def start(engine: Path) -> dict[str, float]:
    """Seconds from the start of this process to the first token, and what they were spent on."""
    imported, calls = age(), Calls()
    begun = time.time()
    with LLM(engine, checkpoint_of(CASE), progress=False, num_speculative_tokens=0, schedule_drafts=False) as llm:
        loaded = time.time() - begun
        parts = dict(calls.seconds)
        with llm.session() as s:
            first = time.perf_counter()
            s.feed(load_case(CASE).ids[:64])
            step = time.perf_counter() - first
    seconds = {"imports": imported, "load": loaded, "of it driver and kernels": parts["di_open"],
               "of it memory": parts["di_allocate"], "of it weights": parts["di_copy"] + parts["di_room"],
               "of it recording launches": parts["di_warm"], "first step of 64 rows": step}
    return {name: round(s, 4) for name, s in seconds.items()}


def memory(engine: Path, blocks: int = 20000) -> dict[str, Any]:
    """What the device says it gave, beside the plan."""
    package = load_engine(engine)
    probe = Runner(package.lib)  # the driver's own memory, and that of the kernels, is not the plan's
    before = probe.device()
    running = package.start(checkpoint_of(CASE), slots=8, blocks=blocks, progress=False)
    after = probe.device()
    assert before is not None and after is not None
    model = package.manifest["model"]
    weights = Placement(bind_weights(package.checkpoint(checkpoint_of(CASE)), package.interface.params, model,
                                     depth="off", progress=False)).end
    planned, taken = running.memory.on_device + weights, before.free - after.free
    running.close()
    probe.close()
    return {"planned": planned, "taken": taken, "ratio": round(taken / planned, 4), "weights": weights}


def steps(engine: Path) -> dict[str, Any]:
    """Decode steps of 1 and 8 sequences: wall time as recorded, launches one by one, and whether both give the same
    bits."""
    out: dict[str, Any] = {}
    ids = load_case(CASE).ids
    with LLM(engine, checkpoint_of(CASE), progress=False, num_speculative_tokens=0, schedule_drafts=False) as llm:
        native: NativeEngine = llm.core.engine  # type: ignore[assignment]
        for count in (1, 8):
            sessions = [llm.session() for _ in range(count)]
            for s in sessions:
                s.feed(ids[:100])
            batch = _decode(llm, sessions, ids[100])
            recorded = np.array(native.run("step", batch)["logits"])
            begun = time.perf_counter()
            for _ in range(_STEPS):
                native.run("step", batch)
            wall = (time.perf_counter() - begun) / _STEPS
            native.profile(True)
            direct = np.array(native.run("step", batch)["logits"])
            native.run("step", batch)
            launches = native.profile(True)
            native.profile(False)
            out[str(count)] = {"us": round(wall * 1e6, 1), "launches": len(launches),
                               "us of launches one by one": round(float(launches.sum()), 1),
                               "equal bits": bool(np.array_equal(recorded, direct))}
            for s in sessions:
                s.close()
    return out


def _decode(llm: LLM, sessions: list[Any], token: int) -> Any:
    from deepinfer.runtime.clock import Part
    from deepinfer.runtime.engine_core import fill
    from deepinfer.runtime.sequence import TokenIds

    llm.core.batch.clear()
    for s in sessions:
        holding, n = s._holding, len(s)
        assert llm.core.memory.prepare(holding, n, n + 1)
        part = Part(c=n, rows=1, kept=1, wanted=1, floor=0, start_step=0, start_kept=0)
        fill(llm.core.batch, part, TokenIds([*s.token_ids, token], 0), holding.slot, holding.blocks,
             llm.core.plan.lookback)
    return llm.core.batch


def prepare(folder: Path, positions: int) -> None:
    """A random checkpoint and its engine for so many positions, unless they are there."""
    if (folder / "engine").is_dir():
        return
    config = json.loads((checkpoint_of(CASE) / "config.json").read_text())
    config["text_config"] |= {"max_position_embeddings": 1 << 18, "index_topk": 512, "candidate_topk_blocks": 256}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    make_checkpoint(folder / "config.json", folder / "checkpoint", console=Console(file=io.StringIO()))
    compile_engine(model=str(folder / "checkpoint"), out=folder / "engine", target=resolve_target().target,
                   options=EngineOptions(max_num_seqs=2, max_num_batched_tokens=4096, max_model_len=positions + 256),
                   console=Console(file=io.StringIO()))


def long_context(folder: Path, positions: int) -> dict[str, Any]:
    """A prompt of so many rows and a few decodes, in two ways to cut it: equal bits, finite numbers."""
    prepare(folder, positions)
    out: dict[str, Any] = {"positions": positions}
    ids = np.random.default_rng(3).integers(3, 300, positions + 4)
    rows = []
    with LLM(folder / "engine", folder / "checkpoint", progress=False, num_speculative_tokens=0,
             schedule_drafts=False, prefix_cache=False) as llm:
        for chunk in (4096, 1536):
            with llm.session() as s:
                begun = time.perf_counter()
                logits = s.feed(ids[:positions], wanted=8, chunk=chunk)
                out[f"seconds in chunks of {chunk}"] = round(time.perf_counter() - begun, 2)
                rows.append(np.concatenate([logits, *(s.feed([int(i)]) for i in ids[positions:])]))
    out["equal bits"] = bool(np.array_equal(*rows))
    out["finite"] = bool(np.isfinite(rows[0]).all())
    out["rows differ"] = bool(len(np.unique(rows[0].argmax(-1))) > 1)
    return out


def main(result: str, engines: str, positions: str = "131072") -> None:
    engine = Path(engines) / f"{CASE}_{PROFILE}"
    found: dict[str, Any] = {}
    for name, work in (("start", lambda: start(engine)), ("memory", lambda: memory(engine)),
                       ("steps", lambda: steps(engine)),
                       ("long context", lambda: long_context(Path(engines) / "long", int(positions)))):
        if name == "long context" and not int(positions):
            continue
        try:
            found[name] = work()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[-800:]
        print(name, found[name], flush=True)
        Path(result).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
