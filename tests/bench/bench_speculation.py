"""What scheduled verification brings against fixed numbers of drafts.

    python tests/bench/bench_speculation.py [--steps 1500] [--json FILE]            simulated steps
    python tests/bench/bench_speculation.py --loop overlapped [--tokens 400]        the real loop on virtual time
    python tests/bench/bench_speculation.py --loop overlapped --tokens 40 --lives 2 short answers, a second start
    python tests/bench/bench_speculation.py --tiny [--record]                       assets/tiny, compiled, on this CPU

The first two take acceptance from a scripted drafter (profiles chat, code, hopeless, and a mix of the three) and times
from the curves in cost_curves.json, so that they do not depend on the machine. The third measures the demonstration
model: times alternate between the settings, the best of three counts; `--record` stores its cost curve with the others.

A row shows tokens a second as multiples of five drafts in every step and of none, the best fixed number with the
multiple of it, drafts verified for each token, and the part of them that stayed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from null_executor import NullEngine
from scripted_drafts import (
    BATCHES,
    BLOCK,
    CURVES,
    PROFILES,
    Outcome,
    Profile,
    ScriptedExecutor,
    curves,
    scripted_plan,
    simulate,
)

from deepinfer.runtime.engine_core import EngineCore
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.speculation.cost import CostCurve
from deepinfer.runtime.speculation.interface import DraftPolicy, FixedDrafts
from deepinfer.runtime.speculation.scheduled import ScheduledDrafts

MIXES: dict[str, tuple[Profile, ...]] = {**{p.name: (p,) for p in PROFILES}, "mixed": PROFILES}
TINY = Path(__file__).parents[2] / "assets" / "tiny"
Run = Callable[[DraftPolicy], Outcome]


def compared(curve: CostCurve, sequences: int, run: Run, lives: int = 1) -> dict[str, float]:
    """The scheduled policy beside every fixed number. ``lives``: of the engine; the last one counts, and knows how many
    drafts stayed in those before."""
    fixed = {k: run(FixedDrafts(k)) for k in range(BLOCK + 1)}
    known: object = None
    for _ in range(lives):
        policy = ScheduledDrafts(curve, sequences, BLOCK)
        policy.worth.recall(known)
        scheduled = run(policy)
        known = policy.worth.record()
    best = max(fixed, key=lambda k: fixed[k].speed)
    return {"to_five": scheduled.speed / fixed[BLOCK].speed, "to_none": scheduled.speed / fixed[0].speed, "best": best,
            "to_best": scheduled.speed / fixed[best].speed, "drafts": scheduled.drafts / scheduled.tokens,
            "kept": scheduled.accepted / max(1, scheduled.drafts), "speed": scheduled.speed}


def in_the_loop(policy: DraftPolicy, curve: CostCurve, mix: tuple[Profile, ...], sequences: int, lag: int,
                tokens: int) -> Outcome:
    """Two generations of requests, the second of which begins as the first ends."""
    plan = scripted_plan(sequences, lag)
    executor = ScriptedExecutor(plan, curve, mix)
    core = EngineCore(plan, NullEngine(), slots=sequences, blocks=64 * sequences, ends=(1,), seed=1, lag=lag,
                      executor=executor, policy=policy, now=executor.clock)
    for i in range(2 * sequences):
        params = SamplingParams(max_tokens=tokens // 2 + (i * 7919) % tokens, seed=i, detokenize=False)
        core.add(core.make(f"r{i}", [2, 3, 4], params))
    while core.requests and len(core.scheduler.running) + len(core.scheduler.waiting) >= sequences:
        core.step()
    return Outcome(executor.decoded, executor.clock(), executor.verified, executor.accepted)


def table(run_of: Callable[[CostCurve, tuple[Profile, ...], int], Run],
          batches: tuple[int, ...], lives: int) -> list[dict[str, Any]]:
    print(f"{'curve':14} {'profile':9} {'seqs':>5} {'to 5':>6} {'to 0':>6}  best fixed  {'drafts':>6} {'kept':>5}")
    found = []
    for name, curve in curves().items():
        for profile, mix in MIXES.items():
            for sequences in batches:
                row = compared(curve, sequences, run_of(curve, mix, sequences), lives)
                found.append({"curve": name, "profile": profile, "sequences": sequences, **row})
                print(f"{name:14} {profile:9} {sequences:5d} {row['to_five']:6.3f} {row['to_none']:6.3f}  "
                      f"{row['best']:.0f} {row['to_best']:7.3f}  {row['drafts']:6.2f} {row['kept']:5.2f}", flush=True)
    return found


def tiny(record: bool, tokens: int) -> list[dict[str, Any]]:
    """The demonstration model with its own draft head, compiled for this machine."""
    from deepinfer.backends.base import HOST
    from deepinfer.codegen.compile import compile_engine
    from deepinfer.dsl.model import EngineOptions
    from deepinfer.runtime.llm import LLM
    from deepinfer.runtime.speculation.measure import measure_costs

    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder) / "engine"
        compile_engine(model=str(TINY), out=engine, target="cpu", isa=HOST, options=EngineOptions(max_num_seqs=16))
        with LLM(engine, TINY, progress=False) as llm:
            core = llm.core
            curve = measure_costs(core.plan, core.engine, core.memory)
            print("rows", dict(zip(curve.rows, (round(1e3 * s, 2) for s in curve.step_seconds), strict=True)), "ms")
            if record:
                kept = json.loads(CURVES.read_text())
                kept["curves"]["tiny_cpu"] = curve.record()
                CURVES.write_text(json.dumps(kept, indent=1) + "\n")
            slots, m = core.memory.slots.size, core.plan.draft_tokens
            policies = {"scheduled": lambda: ScheduledDrafts(curve, slots, m),
                        **{str(k): (lambda k=k: FixedDrafts(k)) for k in (0, 1, 3, m)}}  # type: ignore[misc]
            for batch in (1, 4, slots):
                best: dict[str, float] = {}
                for _ in range(3):
                    for name, make in policies.items():
                        use(core, make())
                        prompts = [[700, 335, 284, 321, 10 + i] for i in range(batch)]
                        params = SamplingParams(max_tokens=tokens, temperature=0.7, seed=3, ignore_eos=True)
                        began = time.perf_counter()
                        outputs = llm.generate(prompts, params, progress=False)
                        speed = sum(len(o.token_ids) for o in outputs) / (time.perf_counter() - began)
                        best[name] = max(best.get(name, 0.0), speed)
                print(f"{batch:3d} sequences, tokens/s:", {k: round(v, 1) for k, v in best.items()}, flush=True)
                found.append({"sequences": batch, **best})
    return found


def use(core: EngineCore, policy: DraftPolicy) -> None:
    """Another policy between two requests."""
    core.policy = core.scheduler.policy = core.residence.policy = core.loop.results.policy = policy
    for slot in range(core.memory.slots.size):
        policy.opened(slot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="of a simulation with 256 sequences; more with fewer")
    parser.add_argument("--loop", choices=("plain", "overlapped"), help="the real loop instead of the simulator")
    parser.add_argument("--tokens", type=int, default=400, help="of an answer outside of the simulator")
    parser.add_argument("--lives", type=int, default=1, help="starts of the engine, of which the last one counts")
    parser.add_argument("--tiny", action="store_true", help="the demonstration model on this machine")
    parser.add_argument("--record", action="store_true", help="store the curve of --tiny")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    given = parser.parse_args()
    if given.tiny:
        found = tiny(given.record, given.tokens)
    elif given.loop:
        lag = int(given.loop == "overlapped")
        found = table(lambda curve, mix, n: lambda policy: in_the_loop(policy, curve, mix, n, lag, given.tokens),
                      (16, 256), given.lives)
    else:
        found = table(lambda curve, mix, n: lambda policy: simulate(
            policy, curve, mix, n, steps=given.steps * (1 if n >= 64 else 4)), BATCHES, given.lives)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
