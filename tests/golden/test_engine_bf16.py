"""Profile bf16 on compiled engines: as near to the golden values as bf16 allows, with every rounding where the spec has
it."""

from __future__ import annotations

import pytest
import torch
from golden.cases import V4, V41, load_case, row_errors, same_argmax
from golden.engines import fed, run_of
from golden.gates import GATES, check_bf16

# Sums in another order differ by some units of f32; where that crosses no rounding boundary the results are equal.
EQUAL = 1e-5
PROMPTS, ROWS = 24, 4


@pytest.mark.parametrize("name", V41)
def test_prompt_logits_stay_within_the_bf16_gates(name: str) -> None:
    run, gates = run_of(name, "bf16"), GATES[name]
    g = run.case.golden
    assert float(row_errors(run.rows(), g["logits"]).median()) <= gates.bf16_median
    assert same_argmax(run.rows(), g["logits"]) >= gates.bf16_argmax
    # Two bf16 runs with other summation orders part as far as either parts from f64.
    logits = torch.from_numpy(run.logits)
    assert float((logits.argmax(-1) == g["bf16.argmax"]).double().mean()) >= gates.bf16_argmax
    assert float(row_errors(logits[-16:], g["bf16.logits_last16"]).median()) <= gates.bf16_median


@pytest.mark.parametrize("name", V41 + V4)
def test_logits_with_pinned_selections_are_as_near_as_the_interpreters(name: str) -> None:
    run = run_of(name, "bf16")
    logits = torch.from_numpy(fed(run.llm, run.case.ids, pins=run.case.pins))
    check_bf16(logits[run.case.golden["logits.rows"].long()], run.case.golden["logits"], name)


@pytest.mark.parametrize("name", V41 + V4)
def test_values_are_rounded_exactly_where_the_spec_says(name: str) -> None:
    """Half of the first rows of short prompts meet no value that two orders of summation round to different sides: they
    are those of the interpreter. One rounding left out or moved would leave none."""
    run = run_of(name, "bf16")
    interpreter = load_case(name)
    equal = 0
    for start in range(0, PROMPTS * ROWS, ROWS):
        ids = run.case.ids[start: start + ROWS]
        expected = interpreter.session(profile="bf16").feed(ids)
        equal += int((row_errors(torch.from_numpy(fed(run.llm, ids)), expected) < EQUAL).sum())
    assert equal >= PROMPTS * ROWS / 2
