"""The compiled CPU engine of the V4 spec against the golden V4 cases, and the MTP draft."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from golden.cases import V4, load_case, row_errors, same_argmax
from golden.engines import Run, decoded, fed, generated, longer_prompt, run_of
from golden.gates import V4_GATE


@pytest.fixture(params=V4)
def run(request: pytest.FixtureRequest) -> Run:
    return run_of(request.param)


def largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float(row_errors(found, expected).max())


def test_prompt_logits_are_the_golden_ones(run: Run) -> None:
    assert largest(run.rows(), run.case.golden["logits"]) < V4_GATE


def test_selections_are_the_golden_ones(run: Run) -> None:
    pinned = torch.from_numpy(fed(run.llm, run.case.ids, pins=run.case.pins))
    # The same sums in other order: another expert or entry would move a row by far more.
    assert largest(pinned, torch.from_numpy(run.logits)) < 5e-5


def test_greedy_tokens_and_logits_are_the_golden_ones(run: Run) -> None:
    g = run.case.golden
    expected = g["greedy_ids"].tolist()
    with run.after_prompt() as s:
        tokens, following, _ = decoded(s, run.logits[-1], expected)
    assert tokens == expected
    found = torch.cat((torch.from_numpy(run.logits[-1:]), following[:-1]))
    assert largest(found, g["greedy_logits"]) < V4_GATE


def test_a_batch_is_answered_with_the_golden_tokens(run: Run) -> None:
    expected = run.case.golden["greedy_ids"].tolist()
    assert generated(run.llm, run.case.ids, len(expected)) == expected


@pytest.mark.parametrize("name", ["v4_case_a", "v4_case_d"])
def test_rows_beyond_the_prompt_are_those_of_the_interpreter(name: str) -> None:
    run = run_of(name)
    ids = longer_prompt(run.case)
    assert largest(torch.from_numpy(fed(run.llm, ids)), load_case(name).session().feed(ids)) < V4_GATE


def test_a_prefix_hit_gives_the_rows_of_a_cold_run(run: Run) -> None:
    """V4 is not trained for bounded replay: as many rows run again as make the result exact."""
    with run.after_prompt() as s:
        s.adopt(128)
        assert np.array_equal(s.feed(run.case.ids[128:], chunk=[50, 7]), run.logits[128:])


def test_dspark_drafts_are_the_golden_ones() -> None:
    run = run_of("v4_case_d")
    g = run.case.golden
    ids = [*run.case.ids, *g["greedy_ids"].tolist()]
    with run.llm.session() as s:
        for i, anchor in enumerate(g["dspark.anchor_positions"].tolist()):
            s.feed(ids[len(s): anchor])
            draft = s.draft(ids[anchor])
            assert draft.tokens.tolist() == g["dspark.tokens"][i].tolist()
            assert largest(torch.from_numpy(draft.logits), g["dspark.logits"][i]) < V4_GATE
            assert float(np.abs(draft.confidence - g["dspark.confidence"][i].numpy()).max()) < V4_GATE


# ---- quantisers -----------------------------------------------------------------------------------------------------
def test_logits_with_a_quantised_cache_are_the_golden_ones() -> None:
    """Golden values come from an f32 run. From position 19 on a stored value on a rounding boundary may fall as it does
    there, or as it does in f64; either way everything behind it follows."""
    run = run_of("v4_case_d", cache_format="spec", act_format="f32")
    g, logits = run.case.golden, torch.from_numpy(run.logits)
    before = g["logits.rows"] < 19
    assert largest(run.rows()[before], g["kv_quant.logits"][before]) < V4_GATE
    f64 = run.case.session(torch.float64, cache_format="spec", act_format="f32").feed(run.case.ids)
    assert min(largest(run.rows(), g["kv_quant.logits"]), largest(logits, f64)) < V4_GATE


def test_logits_with_quantised_cache_and_activations_are_the_golden_ones() -> None:
    """Sooner or later one activation rounds the other way in every other implementation and moves all rows behind it:
    the golden file holds the 29 rows before that; the rest is held to the interpreter by its statistics."""
    run = run_of("v4_case_d", cache_format="spec", act_format="spec")
    g, logits = run.case.golden, torch.from_numpy(run.logits)
    assert largest(logits[:29], g["full_quant.logits"]) < V4_GATE
    expected = run.case.session(cache_format="spec", act_format="spec").feed(run.case.ids)
    errors = row_errors(logits, expected)
    assert float(errors.median()) < V4_GATE
    assert float(errors.quantile(0.9)) < 0.5  # a moved activation is worth about 0.2
    assert same_argmax(logits, expected) >= 0.95


# ---- MTP ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def mtp() -> Run:
    return run_of("v4_mtp")


# Around the first rows, the window's edge, and the ends of CSA and HCA groups.
PLACES = (0, 1, 2, 3, 4, 17, 18, 19, 20, 21, 22, 39, 40, 41, 126, 127, 128, 129, 148, 149)


def test_the_backbone_of_a_model_with_an_mtp_block_is_right(mtp: Run) -> None:
    assert largest(torch.from_numpy(mtp.logits), mtp.case.golden["logits"]) < V4_GATE


@pytest.mark.parametrize("piece", [None, 1, 7])
def test_mtp_drafts_predict_what_the_reference_does(mtp: Run, piece: int | None) -> None:
    g = mtp.case.golden
    after = [*mtp.case.ids, int(g["mtp.next_ids"][-1])]
    for t in PLACES:
        with mtp.llm.session() as s:
            s.feed(mtp.case.ids[: t + 1], chunk=piece)
            draft = s.draft(after[t + 1])
        assert draft.confidence is None
        assert draft.tokens.tolist() == [int(draft.logits.argmax())]
        assert largest(torch.from_numpy(draft.logits), g["mtp.logits"][t: t + 1]) < V4_GATE, t


@pytest.mark.parametrize("t", [1, 2, 19, 20, 41, 128])
def test_a_rejected_mtp_draft_leaves_no_trace(mtp: Run, t: int) -> None:
    ids = mtp.case.ids
    with mtp.llm.session() as s:
        s.feed(ids[:t])
        s.feed([ids[t], (ids[t + 1] + 1) % 128])  # verified together; the second one was wrong
        s.rewind(t + 1)
        draft = s.draft(ids[t + 1])
    assert largest(torch.from_numpy(draft.logits), mtp.case.golden["mtp.logits"][t: t + 1]) < V4_GATE
