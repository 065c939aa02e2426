"""Why the host's part of a decode step takes longer beside a large model: its own code and data are no longer cached.

    python tests/bench/bench_cpu_host.py [--read 384] [--json FILE]

runs the demonstration model, one sequence, one thread, in the plain loop. `warm`: steps as they come. `cold`: behind
each step so many megabytes are read, as a larger model reads its weights, before the host goes on. Nothing else
differs, so the difference between the two is what the caches lost. Lower quartiles of 70 steps in microseconds: `host`
is all that a step takes outside the engine's call; of that `plan` is the scheduler, `call` what stands around the
native call, and `take` what brings the sequences up to date.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer import LLM, SamplingParams
from deepinfer.codegen import compile_engine
from deepinfer.codegen.cache import cache_root
from deepinfer.dsl import EngineOptions

MODEL = Path(__file__).resolve().parents[2] / "assets" / "tiny"
STEPS, SKIPPED = 80, 5


class Phases:
    """Microseconds of each call of what was put under a clock."""

    def __init__(self) -> None:
        self.us: dict[str, list[float]] = defaultdict(list)

    def time(self, owner: Any, method: str, name: str, then: Callable[[], object] = lambda: None) -> None:
        """``then`` is called before the clock stops."""
        run = getattr(owner, method)

        def timed(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                out = run(*given, **named)
                then()
                return out
            finally:
                self.us[name].append(1e6 * (time.perf_counter() - start))
        setattr(owner, method, timed)

    def quarter(self, name: str, without: str = "") -> int:
        own = np.array(self.us[name][SKIPPED : STEPS - SKIPPED])
        return round(float(np.percentile(own - np.array(self.us[without][SKIPPED : STEPS - SKIPPED])
                                         if without else own, 25)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Host work of a decode step with warm and with cold caches.")
    parser.add_argument("--read", type=int, default=384, metavar="MB", help="read behind each step (default: 384)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also writes all results to a file")
    given = parser.parse_args()
    out = cache_root() / "bench" / "host_engine"
    out.parent.mkdir(parents=True, exist_ok=True)
    compile_engine(model=str(MODEL), out=out, target="cpu", isa="host",
                   options=EngineOptions(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=2048))
    weights = np.ones(given.read * 1_000_000 // 8)
    phases, results, cold = Phases(), list[dict[str, Any]](), False
    with LLM(out, MODEL, max_num_seqs=1, num_speculative_tokens=0, threads=1, loop="plain", progress=False) as llm:
        core = llm.core
        phases.time(core.engine, "loop_step", "native", lambda: weights.sum() if cold else None)
        phases.time(core.executor, "_run", "run")
        phases.time(core.loop.scheduler, "schedule", "plan")
        phases.time(core.loop.results, "take", "take")
        phases.time(core, "step", "step")
        for turn in range(2 * given.rounds):
            cold = turn % 2 == 1
            phases.us.clear()
            request = core.make(str(turn), list(range(3, 67)),
                                SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True))
            core.add(request)
            while not request.finished:
                core.step()
            results.append({"caches": "cold" if cold else "warm", "read_MB": given.read * cold,
                            "host": phases.quarter("step", "native"), "plan": phases.quarter("plan"),
                            "call": phases.quarter("run", "native"), "take": phases.quarter("take")})
            print(json.dumps(results[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
