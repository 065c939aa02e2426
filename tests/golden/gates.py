"""How close an engine of a golden case has to be, as README.md says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from golden.cases import QUANTILES, row_errors, same_argmax
from torch import Tensor

# V4: three f32 implementations agree to 4e-5 on logits up to 16; a RoPE table in other precision alone moves them by
# 1e-4.
V4_GATE = 2e-4
# How far the reference interpreter lies from the golden values, by kind of run, case and quantity: see measure.py.
MEASURED: dict[str, dict[str, dict[str, float]]] = json.loads(Path(__file__).with_name("measured.json").read_text())
FACTOR = 3


@dataclass(frozen=True)
class Gates:
    """Row errors allowed to an f32 run and to a bf16 run of a case."""

    median: float
    quantile99: float
    largest: float
    argmax: float
    bf16_median: float
    bf16_argmax: float


GATES = {
    "v41_a_f32": Gates(1e-4, 1e-4, 1e-4, 1.0, 0.15, 0.96),
    "v41_b_bf16": Gates(2e-3, 0.2, 0.2, 1.0, 0.25, 0.93),
    "v41_c_quant": Gates(1e-3, 0.1, float("inf"), 0.99, 0.7, 0.87),
}


def check(found: Tensor, expected: Tensor, gates: Gates) -> None:
    """The gates on quantiles need many rows; few rows are held to the 99 % quantile."""
    errors = row_errors(found, expected)
    assert same_argmax(found, expected) >= gates.argmax
    if len(errors) < 100:
        assert float(errors.max()) <= gates.quantile99
        return
    assert float(errors.median()) <= gates.median
    assert float(errors.quantile(0.99)) <= gates.quantile99
    assert float(errors.max()) <= gates.largest


def check_drafts(tokens: Tensor, logits: Tensor, confidence: Tensor, wanted: Tensor, wanted_confidence: Tensor,
                 gates: Gates) -> None:
    """Drafts [n, m] with logits [n, m, V] and confidence [n, m] of an f32 engine against the golden ones.

    A draft may leave the golden one where two tokens lie closer than the gate on logits; what follows depends on it.
    """
    for i in range(len(wanted)):
        different = (tokens[i] != wanted[i]).nonzero()
        equal = int(different[0]) if len(different) else len(wanted[i])
        if equal < len(wanted[i]):
            row = logits[i, equal]
            assert float(row[tokens[i, equal]] - row[wanted[i, equal]]) < gates.quantile99, (i, equal)
        # Confidence j reads the token before j.
        errors = (confidence[i, : equal + 1] - wanted_confidence[i, : equal + 1]).abs()
        assert float(errors.max()) <= gates.quantile99, i


def check_few(found: Tensor, name: str, expected: Tensor, case: str, gates: Gates) -> None:
    """Rows of the golden tensor ``name``, too few for quantiles: the gate on 99 % of the rows, or three times what an
    f32 run of the interpreter is off."""
    assert same_argmax(found, expected) >= gates.argmax
    limit = max(gates.quantile99, FACTOR * MEASURED["f32"][case][name])
    assert float(row_errors(found, expected).max()) <= limit


def check_bf16(found: Tensor, expected: Tensor, case: str) -> None:
    """Logits under pinned selections: within three times what bf16 rounding costs the interpreter."""
    errors = row_errors(found, expected)
    for quantile, q in QUANTILES.items():
        assert float(errors.quantile(q)) <= FACTOR * MEASURED["bf16"][case][quantile], quantile
