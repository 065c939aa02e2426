"""The compiled CPU engine of the V4.1 spec against the golden V4.1 cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from golden.cases import V41, load_case, row_errors
from golden.engines import Run, decoded, fed, generated, longer_prompt, run_of, stacked
from golden.gates import GATES, check, check_drafts, check_few
from torch import Tensor


@pytest.fixture(params=V41)
def run(request: pytest.FixtureRequest) -> Run:
    return run_of(request.param)


def few(run: Run, name: str, found: Tensor) -> None:
    check_few(found, name, run.case.golden[name], run.case.name, GATES[run.case.name])


def test_prompt_logits_stay_within_the_f32_gates(run: Run) -> None:
    check(run.rows(), run.case.golden["logits"], GATES[run.case.name])


def test_the_selections_of_the_unquantised_case_are_the_golden_ones() -> None:
    run = run_of("v41_a_f32")
    pinned = torch.from_numpy(fed(run.llm, run.case.ids, pins=run.case.pins))
    # The same sums in other order: another expert or entry would move a row by far more.
    assert float(row_errors(pinned, torch.from_numpy(run.logits)).max()) < 1e-5


@pytest.mark.parametrize("kind", ["experts", "index_sel", "candidates"])
def test_pinned_selections_are_the_ones_that_count(kind: str) -> None:
    run = run_of("v41_a_f32")
    name = next(p for p in run.case.pins if p.startswith(kind))
    other = run.case.pins[name].clone()
    other[200:] = run.case.pins[name][150:250]
    golden, moved = (fed(run.llm, run.case.ids, pins={name: p}) for p in (run.case.pins[name], other))
    assert np.array_equal(golden[:200], moved[:200])
    assert float(np.abs(golden[200:] - moved[200:]).max()) > 0.01


@pytest.mark.parametrize("replay", ["off", 44])
def test_pinned_selections_keep_to_their_rows_in_chunks(replay: Any) -> None:
    """Selections of layers that compute kept rows only are given for all rows too."""
    run = run_of("v41_a_f32")
    moved = {name: p.roll(7, 0) for name, p in run.case.pins.items() if name.startswith("experts")}
    whole, parts = (fed(run.llm, run.case.ids, replay=replay, pins=moved, chunk=c) for c in (None, [50, 1, 7]))
    assert np.array_equal(whole, parts)
    assert not np.array_equal(whole, run.logits[-len(whole):])


def test_greedy_tokens_and_drafts_are_the_golden_ones(run: Run) -> None:
    g, gates = run.case.golden, GATES[run.case.name]
    expected = g["greedy.tokens"].tolist()
    with run.after_prompt() as s:
        tokens, following, drafts = decoded(s, run.logits[-1], expected)
    assert tokens == expected
    few(run, "greedy.logits", following)
    few(run, "draft.logits0", torch.from_numpy(drafts[0].logits))
    few(run, "draft.base_logits0", torch.from_numpy(drafts[0].base_logits))
    check_drafts(stacked(drafts, "tokens"), stacked(drafts, "logits"), stacked(drafts, "confidence"),
                 g["draft.tokens"].long(), g["draft.confidence"], gates)


def test_a_batch_is_answered_with_the_golden_tokens(run: Run) -> None:
    expected = run.case.golden["greedy.tokens"].tolist()
    assert generated(run.llm, run.case.ids, len(expected)) == expected


@pytest.mark.parametrize("chunk", [None, 37])
@pytest.mark.parametrize("which", [0, 1])
def test_bounded_replay_gives_the_golden_logits_tokens_and_draft(run: Run, which: int, chunk: int | None) -> None:
    g = run.case.golden
    keep = sorted(int(k[6:-7]) for k in g if k.startswith("replay") and k.endswith(".logits"))[which]
    with run.llm.session(keep) as s:
        logits = s.feed(run.case.ids, chunk=chunk)
        assert len(logits) == keep
        few(run, f"replay{keep}.logits", torch.from_numpy(logits[-8:]))
        expected = g[f"replay{keep}.tokens"].tolist()
        tokens, following, _ = decoded(s, logits[-1], expected)
        assert tokens == expected
        assert s.draft(int(following[-1].argmax())).tokens.tolist() == g[f"replay{keep}.draft"].tolist()


def test_exact_replay_gives_the_last_row_and_drafts_of_a_full_run(run: Run) -> None:
    token = int(run.case.golden["greedy.tokens"][0])
    with run.llm.session("exact") as s, run.after_prompt() as whole:
        assert np.array_equal(s.feed(run.case.ids, chunk=50)[-1], run.logits[-1])
        assert np.array_equal(s.draft(token).logits, whole.draft(token).logits)


@pytest.mark.parametrize("chunk", [None, 19])
def test_a_prefix_hit_without_windows_gives_the_golden_logits(run: Run, chunk: int | None) -> None:
    cached = int(run.case.golden["prefix.cached"])
    with run.after_prompt() as s:
        s.adopt(cached)
        logits = s.feed(run.case.ids[cached:], chunk=chunk)
    few(run, "prefix.logits", torch.from_numpy(logits[-8:]))


def test_replaying_the_whole_prefix_is_a_plain_run(run: Run) -> None:
    cached = int(run.case.golden["prefix.cached"])
    with run.after_prompt() as s:
        s.adopt(cached, rerun=cached)
        assert np.array_equal(s.feed(run.case.ids[cached:]), run.logits[cached:])


def test_quantised_inputs_of_the_output_projection_are_the_interpreters() -> None:
    """As in production; the golden runs have the reference's. Until a value falls another way in f32 than in f64 the
    rows are equal, behind it they part no further than these two."""
    run, production = run_of("v41_c_quant", wo_a_input="production"), {"wo_a_input": "production"}
    f32, f64 = (run.case.session(dtype, **production).feed(run.case.ids) for dtype in (torch.float32, torch.float64))
    errors, between = row_errors(torch.from_numpy(run.logits), f32), row_errors(f32, f64)
    same = int((between > 1e-4).nonzero()[0])
    assert same > 10 and float(errors[:same].max()) < 1e-4
    assert float(errors.median()) < 3 * float(between.median())
    assert float(row_errors(run.rows(), run.case.golden["logits"])[:same].min()) > 1e-3  # it is another model


@pytest.mark.parametrize("name", V41[:2])
def test_rows_beyond_the_prompt_are_those_of_the_interpreter(name: str) -> None:
    run = run_of(name)
    ids = longer_prompt(run.case)
    found = torch.from_numpy(fed(run.llm, ids))
    check(found, load_case(name).session(torch.float64).feed(ids), GATES[name])
