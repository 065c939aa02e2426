"""Golden cases on their compiled engines: each engine is started once, each prompt fed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compiled import checkpoint_of, engine_of
from golden.cases import Case, load_case
from numpy.typing import NDArray
from torch import Tensor

from deepinfer import LLM, SamplingParams
from deepinfer.runtime.clock import Part
from deepinfer.runtime.engine_core import fill
from deepinfer.runtime.sequence import TokenIds
from deepinfer.runtime.session import Session

Logits = NDArray[np.float32]
# Whole prompts in one step, and a few hundred rows beyond the shortest.
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 768, "max_model_len": 768}
BEYOND = 513  # rows that lengths are tried up to


@dataclass(frozen=True, eq=False)
class Run:
    """An engine and the case's prompt on it, fed in one step: ``logits`` [n, V], and a session to fork."""

    case: Case
    profile: str
    llm: LLM
    prompt: Session
    logits: Logits

    def after_prompt(self) -> Session:
        return self.prompt.fork()

    def rows(self) -> Tensor:
        """Logits at the positions of ``logits.rows``."""
        return torch.from_numpy(self.logits)[self.case.golden["logits.rows"].long()]


def llm_of(name: str, profile: str = "wide", threads: int = 1, **formats: str) -> LLM:
    """The started engine of a case under its formats, with ``formats`` laid over them."""
    return _started(engine_of(name, profile=profile, **LIMITS, **formats), name, threads)


def run_of(name: str, profile: str = "wide", **formats: str) -> Run:
    return _fed(name, profile, llm_of(name, profile, **formats))


@cache
def _started(engine: Path, name: str, threads: int) -> LLM:
    return LLM(engine, checkpoint_of(name), threads=threads, progress=False)


@cache
def _fed(name: str, profile: str, llm: LLM) -> Run:
    session = llm.session()
    return Run(load_case(name), profile, llm, session, session.feed(load_case(name).ids))


def fed(llm: LLM, ids: Sequence[int], *, replay: Any = "off", **how: Any) -> Logits:
    """Logits of a new sequence."""
    with llm.session(replay) as s:
        return s.feed(ids, **how)


def together(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[Logits]:
    """Logits of several sequences whose rows are all of one step."""
    core = llm.core
    core.batch.clear()
    sessions = [llm.session() for _ in prompts]
    for s, ids in zip(sessions, prompts, strict=True):
        holding, rows = s._holding, len(ids)
        assert holding is not None and core.memory.prepare(holding, 0, rows)
        part = Part(c=0, rows=rows, kept=rows, wanted=rows, floor=0, start_step=0, start_kept=0)
        fill(core.batch, part, TokenIds(ids, 0), holding.slot, holding.blocks, core.plan.lookback)
    logits = np.array(core.engine.run("step", core.batch)["logits"])
    for s in sessions:
        s.close()
    return np.split(logits, np.cumsum([len(ids) for ids in prompts])[:-1])


def drafted_together(llm: LLM, sessions: Sequence[Session], anchors: Sequence[int]) -> list[Logits]:
    """Draft logits of several sequences whose blocks are all of one step."""
    core, plan = llm.core, llm.plan
    core.batch.clear()
    for s, anchor in zip(sessions, anchors, strict=True):
        part, holding = s._clock.draft(plan.draft_tokens), s._holding
        assert holding is not None
        ids = TokenIds([*s.token_ids, anchor, *[plan.draft_filler] * (plan.draft_tokens - 1)], 0)
        fill(core.batch, part, ids, holding.slot, holding.blocks, plan.lookback)
    return list(np.array(core.engine.run("draft", core.batch)["draft_logits"]))


def longer_prompt(case: Case, rows: int = BEYOND) -> list[int]:
    """``rows`` ids that begin with the prompt: the golden greedy tokens follow, then drawn ones."""
    g = case.golden
    greedy = g["greedy.tokens" if "greedy.tokens" in g else "greedy_ids"].tolist()
    drawn = torch.randint(3, 200, (rows,), generator=torch.Generator().manual_seed(9)).tolist()
    return [*case.ids, *greedy, *drawn][:rows]


def decoded(session: Session, row: Logits, expected: Sequence[int]) -> tuple[list[int], Tensor, list[Any]]:
    """Greedy tokens, the logits that follow each, and the drafts made before each expected token was fed."""
    tokens, following, drafts = [], [], []
    drafting = "draft" in session._core.plan.entries
    for token in expected:
        tokens.append(int(row.argmax()))
        if drafting:
            drafts.append(session.draft(token))
        row = session.feed([token])[-1]
        following.append(torch.from_numpy(row))
    return tokens, torch.stack(following), drafts


def generated(llm: LLM, ids: Sequence[int], tokens: int) -> list[int]:
    """Greedy continuation of a prompt that runs amid shorter ones."""
    prompts = [ids[:33], ids, ids[:1], ids[:128], ids]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outputs = [o.outputs[0].token_ids for o in llm.generate(prompts, params, progress=False)]
    assert outputs[1] == outputs[4]
    for prompt, found in zip(prompts, outputs, strict=True):
        rows = fed(llm, [*prompt, *found[:-1]])[len(prompt) - 1:]
        assert rows.argmax(-1).tolist() == found
    return outputs[1]


def stacked(drafts: Sequence[Any], name: str) -> Tensor:
    return torch.stack([torch.from_numpy(getattr(d, name)) for d in drafts])


@cache
def lengths() -> tuple[int, ...]:
    """Around the ends of groups, windows and blocks."""
    return *range(1, 21), *(n + d for n in (32, 128, 256, 512) for d in (-1, 0, 1))
