"""What the host costs beside an engine that takes a fixed time a step.

    python tests/bench/bench_host.py [--loop overlapped] [--sequences 256] [--steps 2000] [--drafts 0]
        [--messages] [--prefix]
    python tests/bench/bench_host.py --long-prefill [--json FILE]

The first measures everything that the host does in a step except making text: messages in, planning, memory, results,
stops, counters, but not what stands in for the device. `host` is that time, `host_cpu` the processor's part of it (on
a shared machine the difference is others' work), and `exposed` is how long the engine had nothing to do between two
steps. Requests arrive at random times, 16 a second, and are so long that the given number of sequences runs.
`phases_ms` says where the time goes, in all steps (median) and in the slowest hundredth (mean): `messages` in, `plan`
with requests that enter, `results` with answers that end, `send`, and the `rest`.

The second puts one prompt of a million tokens beside 32 sequences that decode, on an engine whose steps cost 4 ms and
1 us for each prompt row, and compares the time between two tokens of the 32 with and without it. Its clock is virtual:
nothing sleeps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
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
from deepinfer.runtime.server.garbage import spare_what_was_loaded

STEP_SECONDS = 4e-3
ARRIVALS = 16.0


def make(lag: int, sequences: int, drafts: int, executor: type[NullExecutor] = NullExecutor, **how: Any) -> EngineCore:
    plan = null_plan(seqs=sequences, drafts=drafts, lag=lag)
    now = how.pop("now", time.perf_counter)
    runs = executor(plan, how.pop("cost"), now=now)
    return EngineCore(plan, NullEngine(), slots=sequences, blocks=how.pop("blocks", sequences * 64), ends=(1,), seed=1,
                      lag=lag, executor=runs, now=now, **how)


ENGINE = "engine"  # the phase that stands in for the device


class Phases:
    """Wall seconds of the parts of each step; parts inside of others are left out of those. ``worked``: processor's
    seconds of the whole step without the engine's."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.worked: list[float] = []
        self._now: dict[str, float] = {}
        self._inner = self._engine = 0.0

    def watch(self, holder: Any, method: str, name: str) -> None:
        """Count what calls of the method take as ``name``."""
        setattr(holder, method, partial(self.timed, name, getattr(holder, method)))

    def timed(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        outer, self._inner = self._inner, 0.0
        began, worked = time.perf_counter(), time.thread_time()
        try:
            return call(*arguments)
        finally:
            took = time.perf_counter() - began
            if name == ENGINE:
                self._engine += time.thread_time() - worked
            self._now[name] = self._now.get(name, 0.0) + took - self._inner
            self._inner = outer + took

    def step(self, turn: Callable[[], None]) -> None:
        """One step: ``turn`` does all of it."""
        self._now, self._engine, worked = {}, 0.0, time.thread_time()
        self.timed("rest", turn)
        self.worked.append(time.thread_time() - worked - self._engine)
        self.steps.append(self._now)

    def seconds(self) -> list[float]:
        """Of each step, without the engine's."""
        return [sum(took for name, took in step.items() if name != ENGINE) for step in self.steps]

    def table(self) -> dict[str, dict[str, float]]:
        """In ms by part: the median of all steps, and the mean of the slowest hundredth."""
        slowest = np.argsort(self.seconds())[-max(1, len(self.steps) // 100):]
        parts = sorted({name for step in self.steps for name in step} - {ENGINE})
        found = {name: 1e3 * np.array([step.get(name, 0.0) for step in self.steps]) for name in parts}
        return {name: {"p50": round(float(np.median(ms)), 3), "slowest": round(float(ms[slowest].mean()), 3)}
                for name, ms in found.items()}


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
    spare_what_was_loaded()
    phases, rows = Phases(), []
    for holder, method, name in ((runs, "sleep", ENGINE), (runs, "_run", ENGINE), (core.scheduler, "schedule", "plan"),
                                 (core.loop.results, "take", "results"), (process, "_flush", "send")):
        phases.watch(holder, method, name)
    next_arrival = time.perf_counter()
    first_gap = len(runs.gaps)

    def turn() -> None:
        nonlocal next_arrival
        began = time.perf_counter()
        while began >= next_arrival:
            phases.timed("messages", arrive, answer)
            next_arrival += rng.exponential(1 / ARRIVALS)
        core.step()
        if server:
            process._flush()
    for _ in range(steps):
        phases.step(turn)
        rows.append(len(core.scheduler.running))
    return {"what": "host", "loop": loop, "sequences": sequences, "running_mean": round(float(np.mean(rows)), 1),
            "drafts": drafts, "messages": server, "prefix": cached, "steps": steps, "arrivals_per_second": ARRIVALS,
            "step_ms": STEP_SECONDS * 1e3, "host_ms": shares(phases.seconds()), "host_cpu_ms": shares(phases.worked),
            "exposed_ms": shares(runs.gaps[first_gap:]), "phases_ms": phases.table()}


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
