"""Small engines for both loops, the answer of a request that has one for itself, what holds with steps in flight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from witness import Reference, witness_plan

from deepinfer.runtime.engine_core import EngineCore
from deepinfer.runtime.sampling import TokenChooser, sequence_key
from deepinfer.runtime.sampling_params import SamplingParams

LOOPS = (0, 1)
PLANS = {(lag, m): witness_plan(window=4, block=8, seqs=4, step=24, wanted=24, max_len=64, drafts=m, lag=lag)
         for lag in LOOPS for m in (0, 1, 5)}


def prompt(seed: int, length: int) -> list[int]:
    out: list[int] = np.random.default_rng(seed).integers(0, 61, length).tolist()
    return out


def alone(ids: Sequence[int], params: SamplingParams, answer: int = 0, ends: tuple[int, ...] = (0,)) -> list[int]:
    """The answer of a request that has an engine without rings, pages, batches and drafts for itself."""
    plan = PLANS[0, 0]
    reference, out = Reference(plan), list[int]()
    stops = tuple(sorted({*(params.stop_token_ids or ()), *(() if params.ignore_eos else ends)}))
    chooser = TokenChooser(params, sequence_key(params.seed or 0, answer), np.array(ids), stops)
    row = reference.feed(ids, plan.replay_rows(params.replay).keep)[-1]
    while len(out) < min(params.max_tokens or 10**9, plan.max_model_len - len(ids)):
        out.append(chooser.choose(row, len(ids) + len(out)))
        chooser.took(out[-1])
        if out[-1] in stops:
            break
        row = reference.feed(out[-1:], None)[-1]
    return out


def check_flights(c: EngineCore) -> None:
    """I15: a slot or block that a step in flight may touch belongs to somebody; I1: no step writes beyond the plan."""
    for flight in c.loop.flights:
        for row in flight.step.sequences:
            slot = int(row["slot"])
            assert c.memory.slots._holders[slot], "a slot of a step in flight is free"
            table = c.memory.tables[slot, : row["num_blocks"]]
            assert c.memory.blocks._holders[table].all(), "a block of a step in flight is free"
    clocks, m = c.table.clocks, c.plan.draft_tokens
    for s in c.scheduler.running:
        assert s.holding is not None
        at = s.holding.slot
        assert clocks.n[at] <= clocks.w[at] <= max(clocks.row[at], clocks.n[at]) + (c.loop.lag + 1) * (m + 1)
        assert s.holding.count >= c.plan.blocks_for(int(clocks.row[at] + clocks.verifying[at]))
