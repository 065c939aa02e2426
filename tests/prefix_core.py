"""Requests through the real loop with a prefix cache on a witness engine, and what their answers have to be."""

from __future__ import annotations

from typing import Any

import numpy as np
from prefix_loop import expected
from witness import WitnessEngine, witness_plan

from deepinfer.runtime.engine_core import EngineCore
from deepinfer.runtime.outputs import RequestOutput
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.prefix.cache import MemoryCache
from deepinfer.runtime.prefix.road import must_be_exact
from deepinfer.runtime.sampling_params import SamplingParams


def ids(seed: int, count: int) -> list[int]:
    out: list[int] = np.random.default_rng(seed).integers(1, 61, count).tolist()
    return out


def plan_for(lag: int = 0, drafts: int = 0, **changes: Any) -> EnginePlan:
    return witness_plan(**{"window": 8, "block": 16, "max_len": 220, "step": 48, "wanted": 24, "seqs": 4,
                           "drafts": drafts, "lag": lag, **changes})


def core(plan: EnginePlan, blocks: int = 60, snapshots: int = 16, lag: int = 0, spill: int = 1 << 30,
         **cache: Any) -> EngineCore:
    return EngineCore(plan, WitnessEngine(plan, plan.max_num_seqs, blocks), slots=plan.max_num_seqs, blocks=blocks,
                      seed=1, prefix=MemoryCache(plan, snapshots=snapshots, **cache), lag=lag, spill_bytes=spill)


def params(replay: Any = "off", count: int = 20, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": count, "ignore_eos": True, "replay": replay, **more})


def answered(c: EngineCore, asked: list[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
    requests = [c.make(f"{id(asked)}.{i}", prompt, p) for i, (prompt, p) in enumerate(asked)]
    for r in requests:
        c.add(r)
    while c.step():
        pass
    return [r.updates[-1] for r in requests]


def check(plan: EnginePlan, out: RequestOutput, replay: Any) -> None:
    """The tokens that the log says; for requests that have to be exact, those of a cold run. Of a sequence whose rows
    ran again behind another hit, the log speaks of its last life."""
    assert out.token_ids == expected(plan, out.prompt_token_ids, len(out.token_ids), out.replay_log)
    if must_be_exact(plan, replay):
        assert out.token_ids == expected(plan, out.prompt_token_ids, len(out.token_ids))
