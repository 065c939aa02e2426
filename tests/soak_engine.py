"""Random traffic on a compiled engine: every answer is that of a cold run, or of its replay log, bit by bit.

    python tests/soak_engine.py --budget 2000

An operation is a sequence's part of a step that was sent or has ended, an arrival, an abort or a fault. Arrivals repeat
and continue earlier texts, so that they hit the prefix cache; they fork, have priorities, take memory from each other,
and are aborted at any point; a step breaks down. The plain and the overlapped loop take turns.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from compiled import checkpoint_of, engine_of

from deepinfer.runtime.clock import STEP, Replayed
from deepinfer.runtime.executor import StepPlan
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.sequence import Request

CASE, VOCABULARY, KEEP = "v41_a_f32", 336, 32
SHAPES = tuple((loop, spill) for spill in (1 << 30, 0) for loop in ("overlapped", "plain"))


class Fault(Exception):
    """The engine breaks down."""


def start(**options: Any) -> LLM:
    """The engine, in one thread."""
    engine = engine_of(CASE, profile="wide", max_num_seqs=6, max_num_batched_tokens=64, max_model_len=640, host_lag=1)
    return LLM(engine, checkpoint_of(CASE), threads=1, progress=False, decode_stretch=None, schedule_drafts=False,
               **options)


def by_log(llm: LLM, prompt: Sequence[int], log: Iterable[Replayed], keep: int, count: int) -> list[int]:
    """Greedy tokens of a session that replays where the log says."""
    with llm.session(keep) as s:
        for r in log:
            if r.axis == STEP:
                s.feed(prompt[len(s):r.floor], wanted=1)
                s.adopt(r.floor, rerun=r.floor - r.start)
        row, out = s.feed(prompt[len(s):], wanted=1)[-1], list[int]()
        while len(out) < count:
            out.append(int(row.argmax()))
            row = s.feed(out[-1:])[-1]
        return out


class EngineSoak:
    """Traffic on ``llm``, whose answers ``cold`` checks."""

    def __init__(self, llm: LLM, cold: LLM, seed: int) -> None:
        self.llm, self.cold, self.core, self.rng = llm, cold, llm.core, random.Random(seed)
        self.texts = [self.words(self.rng.choice((40, 150, 300))) for _ in range(4)]
        self.open: list[Request] = []
        self.events: Counter[str] = Counter()
        self.fault = False
        submit = self.core.executor.submit

        def counted(step: StepPlan) -> int:
            self.events["operations"] += 2 * step.count
            if self.fault:
                self.fault = False
                raise Fault
            return submit(step)
        self.core.executor.submit = counted  # type: ignore[method-assign]

    def words(self, count: int) -> list[int]:
        return [self.rng.randrange(3, VOCABULARY - 2) for _ in range(count)]

    def run(self, budget: int) -> Counter[str]:
        """Until ``budget`` operations were seen; then everything ends and the books are even."""
        while self.events["operations"] < budget:
            self.happen()
            self.step()
        while self.step():
            pass
        self.core.settle()
        m = self.core.metrics
        return self.events + Counter({"spilled": int(m.spilled.value), "dropped": int(m.restarted.value),
                                      "steps": int(m.steps.value), "drafts kept": int(m.accepted_tokens.value)})

    def happen(self) -> None:
        what = self.rng.random()
        if len(self.open) < 9 and (not self.open or what < 0.3):
            self.arrive()
        elif what < 0.33:
            self.event("aborts")
            self.core.abort(self.rng.choice(self.open).request_id)
        elif what < 0.336:
            self.event("faults")
            self.fault = True

    def event(self, name: str) -> None:
        self.events[name] += 1
        self.events["operations"] += 1

    def arrive(self) -> None:
        rng, text = self.rng, self.rng.choice(self.texts)
        reused = rng.choice((len(text), rng.randrange(1, len(text) + 1)))
        prompt = [*text[:reused], *self.words(rng.choice((1, 9, 60)))]
        replay = rng.choice(("off", "off", "exact", KEEP, KEEP))
        greedy = replay == KEEP or rng.random() < 0.3
        params = SamplingParams(temperature=0 if greedy else 0.8, seed=rng.randrange(1 << 30), ignore_eos=True,
                                n=1 if greedy else rng.choice((1, 1, 2)), max_tokens=rng.choice((1, 8, 30, 60)),
                                logprobs=None if replay == KEEP else 0, replay=replay)
        request = self.core.make(f"r{self.events['arrivals']}", prompt[:580], params,
                                 priority=rng.choice((0, 0, -1, 1)))
        self.core.add(request)
        self.open.append(request)
        self.event("arrivals")

    def step(self) -> bool:
        try:
            more = self.core.step()
        except Fault:
            more = True
        for request in [r for r in self.open if r.finished]:
            self.open.remove(request)
            self.finished(request)
        self.core.memory.check()
        return more

    def finished(self, r: Request) -> None:
        """An answer that ended in order is the one that it has to be; an aborted one is the beginning of it."""
        reason = r.outputs[0].finish_reason
        self.events[f"ended by {reason}"] += 1
        if not r.updates or any(d.inexact for d in r.updates[-1].debug):
            return
        self.events["cached tokens"] += r.updates[-1].num_cached_tokens
        if r.params.replay == KEEP:
            out = r.outputs[0]
            expected = by_log(self.cold, r.prompt_ids, r.updates[-1].replay_log, KEEP, len(out.token_ids))
            assert out.token_ids == expected, (r.request_id, r.updates[-1].debug)
            return
        cold = self.cold.generate([r.prompt_ids], r.params, progress=False)[0]
        for ours, theirs in zip(r.outputs, cold.outputs, strict=True):
            count = len(ours.token_ids)
            assert ours.token_ids == theirs.token_ids[:count], (r.request_id, r.updates[-1].debug)
            assert (ours.logprobs or []) == (theirs.logprobs or [])[:count]
            assert reason != "length" or count == r.most_tokens
        if len(r.outputs[0].token_ids) > 4:
            self.texts = [*self.texts[-5:], (r.prompt_ids + r.outputs[0].token_ids)[:500]]


def soak(budget: int, seed: int = 0) -> dict[str, Any]:
    """All shapes in turn, ``budget`` operations in all."""
    began, found = time.monotonic(), Counter[str]()
    with start(loop="plain", num_speculative_tokens=0, prefix_cache=False) as cold:
        for i, (loop, spill) in enumerate(SHAPES):
            with start(loop=loop, num_blocks=8, spill_bytes=spill) as llm:
                found += EngineSoak(llm, cold, seed + i).run(-(-budget // len(SHAPES)))
    return {"seconds": round(time.monotonic() - began, 1), "first_seed": seed, **dict(sorted(found.items()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=2_000, help="operations (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(soak(options.budget, options.seed), indent=2))


if __name__ == "__main__":
    main()
