"""Sessions and `LLM` on the reference interpreter against the golden cases: what the runtime adds changes nothing."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from golden.cases import V41, Case, load_case
from interpreter_engine import InterpreterEngine

from deepinfer.codegen.lower import row_limits
from deepinfer.codegen.passes.narrow import narrow_model
from deepinfer.codegen.plan.cache_plan import cache_plan
from deepinfer.errors import RequestError
from deepinfer.runtime.engine_core import EngineCore
from deepinfer.runtime.plan import EnginePlan, engine_plan
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.session import Session

F64 = 1e-6  # golden tensors are f32 images of logits below 16
BLOCKS = 40


@cache
def plan_of(name: str) -> EnginePlan:
    model = load_case(name).program(profile="wide").model
    narrowed = {k: narrow_model(model, g) for k, g in load_case(name).program(profile="wide").graphs.items()}
    return engine_plan(model, {k: g for k, (g, _) in narrowed.items()}, cache_plan(model, narrowed["step"][1]),
                       target="cpu", limits=row_limits(model))


def core(case: Case) -> EngineCore:
    plan = plan_of(case.name)
    engine = InterpreterEngine(plan, case.interpreter(torch.float64, narrowed=True), plan.max_num_seqs, BLOCKS)
    return EngineCore(plan, engine, slots=plan.max_num_seqs, blocks=BLOCKS)


def close(found: Any, expected: torch.Tensor) -> None:
    assert found.shape == tuple(expected.shape)
    assert float(np.abs(found - expected.numpy()).max()) < F64


def prompt_close(found: Any, case: Case, first: int = 0) -> None:
    """Logits of prompt positions ``first`` on against those that are stored."""
    at = case.golden["logits.rows"]
    kept = at >= first
    assert len(found) == len(case.ids) - first
    close(found[(at[kept] - first).numpy()], case.golden["logits"][kept])


@pytest.fixture(params=V41[:2])
def case(request: pytest.FixtureRequest) -> Case:
    return load_case(request.param)


@pytest.fixture
def small() -> Case:
    return load_case(V41[0])


def test_plans_hold_what_the_spec_derives(case: Case) -> None:
    plan, model = plan_of(case.name), case.program(profile="wide").model
    assert (plan.window, plan.draft_tokens, plan.lookback) == (model.window, 5, case.config["text_config"][
        "engram_max_ngram_size"] - 1)
    assert plan.rerun == plan.least_keep == model.window < plan.exact_keep
    assert {s.axis for s in plan.rings} == {"T", "T_kept"}
    assert plan.rewind_rows == 5 and plan.entry_positions == 2
    assert EnginePlan.from_dict(plan.as_dict()) == plan


@pytest.mark.parametrize("chunk", [None, 16, [1, 33, 2]])
def test_feeding_decoding_and_drafting_give_the_golden_values(case: Case, chunk: Any) -> None:
    g = case.golden
    with Session(core(case)) as s:
        prompt_close(s.feed(case.ids, chunk=chunk), case)
        for i in range(4):
            anchor = int(g["greedy.tokens"][i])
            draft = s.draft(anchor)
            assert draft.tokens.tolist() == g["draft.tokens"][i].tolist()
            close(draft.confidence, g["draft.confidence"][i])
            if i == 0:
                close(draft.logits, g["draft.logits0"])
                close(draft.base_logits, g["draft.base_logits0"])
            if i == 2:  # a verify whose drafts are all rejected leaves nothing behind
                s.feed([anchor, *draft.tokens])
                s.rewind(len(s) - 5)
            else:
                close(s.feed([anchor])[0], g["greedy.logits"][i])


@pytest.mark.parametrize("chunk", [None, 37])
@pytest.mark.parametrize("extra", [0, 12])
def test_bounded_replay_gives_the_golden_values(case: Case, extra: int, chunk: int | None) -> None:
    g, keep = case.golden, plan_of(case.name).window + extra
    with Session(core(case), keep) as s:
        row = s.feed(case.ids, chunk=chunk)
        assert len(row) == keep
        close(row[-8:], g[f"replay{keep}.logits"])
        for token in g[f"replay{keep}.tokens"].tolist():
            assert int(row[-1].argmax()) == token
            row = s.feed([token])
        assert s.draft(int(row[-1].argmax())).tokens.tolist() == g[f"replay{keep}.draft"].tolist()
        assert [(r.axis, r.start) for r in s.replay_log] == [("T_kept", len(case.ids) - keep)]


@pytest.mark.parametrize("chunk", [None, 19])
def test_a_prefix_hit_gives_the_golden_values(case: Case, chunk: int | None) -> None:
    cached = int(case.golden["prefix.cached"])
    with Session(core(case)) as s:
        s.feed(case.ids, wanted=0)
        with s.fork() as other:
            s.adopt(cached)
            rows = s.feed(case.ids[cached:], chunk=chunk)
            assert len(rows) == len(case.ids) - cached
            close(rows[-8:], case.golden["prefix.logits"])
            other.adopt(cached, rerun=cached)
            prompt_close(other.feed(case.ids[cached:]), case, cached)
            assert other.replay_log == ()


def test_exact_replay_equals_a_run_that_keeps_every_row(small: Case) -> None:
    assert plan_of(small.name).exact_keep < len(small.ids)
    with Session(core(small), "exact") as s:
        close(s.feed(small.ids, chunk=64), small.golden["logits"][-1:])
        close(s.feed(small.golden["greedy.tokens"][:3].tolist(), wanted=1), small.golden["greedy.logits"][2:3])


def test_a_batch_of_mixed_lengths_gives_each_its_greedy_tokens(small: Case) -> None:
    c, n = core(small), len(small.ids)
    p = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    requests = [c.make(str(i), small.ids[:length], p) for i, length in enumerate((n, 1, n, 33, 128))]
    for r in requests:
        c.add(r)
    while c.step():
        pass
    assert requests[0].outputs[0].token_ids == requests[2].outputs[0].token_ids
    assert requests[0].outputs[0].token_ids == small.golden["greedy.tokens"][:6].tolist()
    for r in requests[1:4:2]:
        with Session(c) as s:
            rows = s.feed([*r.prompt_ids, *r.outputs[0].token_ids])
            assert rows[len(r.prompt_ids) - 1 : -1].argmax(axis=1).tolist() == r.outputs[0].token_ids


def test_pinned_selections_are_the_ones_that_count(small: Case) -> None:
    name = next(k for k in sorted(small.golden) if k.startswith("experts."))
    experts = small.golden[name].numpy()
    with Session(core(small)) as s:
        prompt_close(s.feed(small.ids, pins={name: experts}, chunk=50), small)
    with Session(core(small)) as s:
        shifted = (experts + 1) % small.config["text_config"]["n_routed_experts"]
        moved = s.feed(small.ids, pins={name: shifted}, chunk=50)
        assert float(np.abs(moved[-1] - small.golden["logits"][-1].numpy()).max()) > 0.01


def test_a_model_without_a_licence_runs_again_what_makes_a_hit_exact() -> None:
    """V4: overlapping groups, two ratios. Golden logits are of f32 arithmetic, which lands within 1.3e-4 of f64."""
    v4 = load_case("v4_case_a")
    plan = plan_of(v4.name)
    assert plan.least_keep == plan.exact_keep and plan.rerun > plan.window and plan.entry_positions == 128
    with Session(core(v4)) as s:
        rows = s.feed(v4.ids, chunk=[1, 33, 128])
        assert float(np.abs(rows[v4.golden["logits.rows"].numpy()] - v4.golden["logits"].numpy()).max()) < 2e-4
        s.adopt(256)
        again = s.feed(v4.ids[256:], chunk=50)
        assert s.replay_log[-1].start == 257 - plan.exact_keep - plan.exact_rerun
        assert float(np.abs(again - rows[256:]).max()) < F64
        with pytest.raises(RequestError, match="replay: replay keeps too few rows: this model was not trained for"):
            Session(s._core, plan.window)
