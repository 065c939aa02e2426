"""What the host costs beside an engine that takes a fixed time a step.

    python tests/bench/bench_host.py [--loop overlapped] [--sequences 256] [--steps 2000] [--drafts 0]
        [--messages] [--prefix]
    python tests/bench/bench_host.py --long-prefill [--json FILE]

The first measures everything that the host does in a step except making text: messages in, planning, memory, results,
stops, counters, but not what stands in for the device. `host` is that time, `host_cpu` the processor's part of it (on
a shared machine the difference is others' work), and `exposed` is how long the engine had nothing to do between two
steps. Requests arrive at random times, 16 a second, and are so long that the given number of sequences runs.

The second puts one prompt of a million tokens beside 32 sequences that decode, on an engine whose steps cost 4 ms and
1 us for each prompt row, and compares the time between two tokens of the 32 with and without it. Its clock is virtual:
nothing sleeps.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))
from null_executor import NullEngine, NullExecutor, VirtualClock, VirtualExecutor, null_plan

from deepinfer.runtime.engine_core import EngineCore
from deepinfer.runtime.prefix.cache import MemoryCache
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.server import wire
from deepinfer.runtime.server.engine_loop import EngineLoop

STEP_SECONDS = 4e-3
ARRIVALS = 16.0


def make(lag: int, sequences: int, drafts: int, executor: type[NullExecutor] = NullExecutor, **how: Any) -> EngineCore:
    plan = null_plan(seqs=sequences, drafts=drafts, lag=lag)
    now = how.pop("now", time.perf_counter)
    runs = executor(plan, how.pop("cost"), now=now)
    return EngineCore(plan, NullEngine(), slots=sequences, blocks=how.pop("blocks", sequences * 64), ends=(1,), seed=1,
                      lag=lag, executor=runs, now=now, **how)


class Sink:
    """Where a server's messages go."""

    def send_multipart(self, parts: list[bytes]) -> None:
        pass


def host(loop: str, sequences: int, steps: int, drafts: int, server: bool, cached: bool = False) -> dict[str, Any]:
    """Steady state: as many requests end as arrive. ``server``: with the messages of an engine process; ``cached``:
    with a prefix cache, in which most prompts are found."""
    prefix = MemoryCache(null_plan(seqs=sequences, drafts=drafts), snapshots=4 * sequences) if cached else None
    core = make(int(loop == "overlapped"), sequences, drafts, prefix=prefix,
                cost=lambda decoding, prompt: STEP_SECONDS)
    rng = np.random.default_rng(0)
    runs = core.executor
    assert isinstance(runs, NullExecutor)
    waited = [0.0]

    def sleep(seconds: float) -> None:
        began = time.perf_counter()
        time.sleep(max(0.0, seconds))
        waited[0] += time.perf_counter() - began
    runs.sleep = sleep  # type: ignore[method-assign]
    hashed, run = [0.0, 0.0], runs._run

    def timed(*arguments: Any) -> float:
        began, worked = time.perf_counter(), time.thread_time()
        seconds = run(*arguments)
        hashed[0] += time.perf_counter() - began
        hashed[1] += time.thread_time() - worked
        return seconds
    runs._run = timed  # type: ignore[method-assign]
    answer = int(sequences / ARRIVALS / STEP_SECONDS * (1 if not drafts else 3))
    process = EngineLoop(core, Sink())  # type: ignore[arg-type]
    count = 0
    prompts = [rng.integers(3, 100_000, int(rng.integers(500, 1500)), np.int32) for _ in range(64)]

    def arrive(tokens: int) -> None:
        nonlocal count
        prompt = prompts[count % len(prompts)]
        how: wire.Sampling = {"temperature": 1.0, "top_p": 0.95, "max_tokens": tokens}
        if server:
            process._submit(wire.Submit(count, prompt=wire.pack_ids(prompt), sampling=how))
        else:
            core.add(core.make(str(count), prompt, SamplingParams(**how)))
        count += 1
    for i in range(sequences):
        arrive(1 + answer * (i + 1) // sequences)
    while core.scheduler.waiting:
        core.step()
    for _ in range(50):
        core.step()
    gc.collect()
    gc.freeze()
    times, cpu, rows = [], [], []
    next_arrival = time.perf_counter()
    first_gap = len(runs.gaps)
    for _ in range(steps):
        waited[0] = hashed[0] = hashed[1] = 0.0
        began, worked = time.perf_counter(), time.thread_time()
        while began >= next_arrival:
            arrive(answer)
            next_arrival += rng.exponential(1 / ARRIVALS)
        core.step()
        if server:
            process._flush()
        times.append(time.perf_counter() - began - waited[0] - hashed[0])
        cpu.append(time.thread_time() - worked - hashed[1])
        rows.append(len(core.scheduler.running))
    gc.unfreeze()
    return {"what": "host", "loop": loop, "sequences": sequences, "running_mean": round(float(np.mean(rows)), 1),
            "drafts": drafts, "messages": server, "prefix": cached, "steps": steps, "arrivals_per_second": ARRIVALS,
            "step_ms": STEP_SECONDS * 1e3, "host_ms": shares(times), "host_cpu_ms": shares(cpu),
            "exposed_ms": shares(runs.gaps[first_gap:])}


def shares(seconds: list[float]) -> dict[str, float]:
    ms = np.array(seconds) * 1e3
    return {name: round(float(np.percentile(ms, p)), 3) for name, p in (("p50", 50), ("p90", 90), ("p99", 99))} | {
        "max": round(float(ms.max()), 3)}


def long_prefill(loop: str, tokens: int = 1_000_000, others: int = 32) -> dict[str, Any]:
    gaps: dict[bool, NDArray[np.float64]] = {}
    longest = 0.0
    for beside in (False, True):
        clock = VirtualClock()
        lag = int(loop == "overlapped")
        core = make(lag, others + 1, 0, VirtualExecutor, now=clock, stretch=2.0, blocks=others * 200 + 8192,
                    cost=lambda decoding, prompt: STEP_SECONDS + 1e-6 * prompt)
        p = SamplingParams(temperature=0, max_tokens=20_000, ignore_eos=True)
        requests = [core.make(str(i), [3 + i] * 100, p) for i in range(others)]
        for r in requests:
            core.add(r)
        for _ in range(100):
            core.step()
        big = core.make("long", np.full(tokens, 7), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        if beside:
            core.add(big)
        began, seen = clock.time, [clock.time]
        while (not big.finished and beside) or (not beside and len(seen) < 1000):
            core.step()
            seen.append(clock.time)
        gaps[beside] = np.diff([t for t in seen])
        gaps[beside] = gaps[beside][gaps[beside] > 0]
        longest = clock.time - began
    alone, beside_it = (float(np.percentile(gaps[b], 99)) for b in (False, True))
    return {"what": "long_prefill", "loop": loop, "prompt_tokens": tokens, "others": others,
            "p99_ms_alone": round(alone * 1e3, 3), "p99_ms_beside": round(beside_it * 1e3, 3),
            "ratio": round(beside_it / alone, 3), "prefill_seconds": round(longest, 2), "chunks": len(gaps[True])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--loop", choices=("plain", "overlapped"), default="overlapped")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--messages", action="store_true", help="with the messages that an engine process sends")
    parser.add_argument("--prefix", action="store_true", help="with a prefix cache")
    parser.add_argument("--long-prefill", action="store_true")
    parser.add_argument("--json", type=Path, help="where the figures are written besides")
    given = parser.parse_args()
    found = long_prefill(given.loop) if given.long_prefill else host(given.loop, given.sequences, given.steps,
                                                                     given.drafts, given.messages, given.prefix)
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
