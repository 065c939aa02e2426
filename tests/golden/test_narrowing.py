"""Narrowed graphs in the reference interpreter: the rows they compute are those of the graph as written.

The golden replay tensors are compared in test_interpreter_v41.py, on narrowed graphs too.
"""

from __future__ import annotations

import pytest
import torch
from golden.cases import Case, load_case, row_errors
from torch import Tensor

from deepinfer.codegen.passes.narrow import narrow_model
from deepinfer.dsl.interpreter import ReferenceSession

# Both graphs run the same f64 operations per row; a matrix product of other row counts may sum in another order.
SAME = 1e-11


@pytest.fixture(scope="module", params=["v41_a_f32", "v4_case_a"])
def case(request: pytest.FixtureRequest) -> Case:
    return load_case(request.param)


@pytest.fixture(scope="module")
def expected(case: Case) -> Tensor:
    """Logits of all rows of the prompt from the graph as written."""
    return case.session(torch.float64).feed(case.ids)


@pytest.fixture(scope="module")
def halo(case: Case) -> int:
    """Rows kept at the end of the prompt that lose nothing."""
    program = case.program(profile="wide")
    rows = narrow_model(program.model, program.graphs["step"])[1].replay.exact_keep
    assert rows < len(case.ids)
    return rows


def narrowed(case: Case) -> ReferenceSession:
    return case.session(torch.float64, narrowed=True)


def test_with_every_row_kept_the_logits_are_those_of_the_graph_as_written(case: Case, expected: Tensor) -> None:
    assert float(row_errors(narrowed(case).feed(case.ids), expected).max()) < SAME


@pytest.mark.parametrize("chunk", [None, 64])
def test_the_exact_halo_loses_nothing(case: Case, expected: Tensor, halo: int, chunk: int | None) -> None:
    row = narrowed(case).feed(case.ids, keep=halo, chunk=chunk)[-1:]
    assert float(row_errors(row, expected[-1:])) < SAME


def test_one_row_less_than_the_exact_halo_loses_something(case: Case, expected: Tensor, halo: int) -> None:
    row = narrowed(case).feed(case.ids, keep=halo - 1)[-1:]
    assert float(row_errors(row, expected[-1:])) > SAME


def test_after_the_exact_halo_drafts_and_decoding_are_those_of_a_full_run(case: Case, halo: int) -> None:
    full, kept = case.session(torch.float64), narrowed(case)
    logits, row = full.feed(case.ids), kept.feed(case.ids, keep=halo)
    if case.program(profile="wide").model.draft_tokens:
        anchor = int(logits[-1].argmax())
        a, b = full.draft(anchor).outputs, kept.draft(anchor).outputs
        assert set(a) == set(b) and all(float(row_errors(a[k], b[k]).max()) < SAME for k in a)
    assert full.greedy(logits, 4)[0] == kept.greedy(row, 4)[0]
