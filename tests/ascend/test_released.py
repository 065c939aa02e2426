"""The released V4.1-Flash config for this target: every kernel is printed, its plan fits, and its time is predicted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from deepinfer.backends.ascend950.backend import backend
from deepinfer.backends.ascend950.cost import cycles
from deepinfer.backends.ascend950.source import AscendSource
from deepinfer.backends.ascend950.target import CAPACITY
from deepinfer.codegen.kernels.spec import KernelSpec, Operand, TileOp, TileProgram
from deepinfer.codegen.lower import Plan, lower
from deepinfer.codegen.package.explanation import explanation
from deepinfer.codegen.report.model import EngineFacts, decoding, prefilling
from deepinfer.dsl import Config, EngineOptions
from deepinfer.errors import PlanError
from deepinfer.model_specs.registry import build_model

PIPES = cycles({})


@pytest.fixture(scope="module")
def plan(repository: Path) -> Plan:
    """The whole model with default options."""
    raw = json.loads((repository / "tests/golden/configs/DeepSeek-V4.1-Flash/config.json").read_text())
    return lower(build_model(Config(raw), EngineOptions()), backend("ascend950"), "ascend950")


def test_every_kernel_is_printed_with_a_plan_that_fits(plan: Plan) -> None:
    sources = [s for s in plan.lowered.sources if isinstance(s, AscendSource)]
    assert len(sources) == len(plan.lowered.specs) > 60
    assert {s.family for s in sources} == {"rowwise", "gemm", "grouped_gemm", "attend", "score_select", "draw"}
    for s in sources:
        for line in s.text.splitlines():
            if line.strip().startswith("DI_BUFFER("):
                space, _, offset, nbytes = re.findall(r'\w+|"[^"]*"', line.strip()[len("DI_BUFFER("):])
                assert int(offset) + int(nbytes) <= CAPACITY[space], (s.symbol, line)


def test_predicted_times_lie_above_the_roof(plan: Plan) -> None:
    roofs = backend("ascend950").capabilities("ascend950").roofs
    facts = EngineFacts({}, json.loads(json.dumps(explanation(plan, roofs))))
    for shape in (decoding(1, 4096), decoding(8, 4096), prefilling(2048, 128)):
        for roof in facts.roofs:
            for account in facts.accounts(shape, {str(s.number): [s] for s in facts.steps() if s.is_kernel}, roof):
                assert account.predicted is not None and account.predicted >= 0.99 * account.least, (account, shape)
            parts = facts.bounds(facts.steps(), shape, roof)
            assert set(parts) <= {*PIPES, "L2", "HBM", "launch"} and sum(parts.values()) == pytest.approx(1)
    pr, dt = facts.roofs
    total = {r.machine: facts.predicted(facts.steps(), decoding(8, 4096), r) for r in (pr, dt)}
    assert total[dt.machine] < total[pr.machine]  # type: ignore[operator]


def test_a_plan_beyond_a_capacity_names_the_buffer() -> None:
    n = 80_000  # rotated as one head, whose pairs no piece holds
    operands = (Operand("value", "T", (n,), "f32"), Operand("value", "T", (32,), "f32"),
                Operand("value", "T", (32,), "f32"), Operand("value", "T", (n,), "f32", write=True))
    body = TileProgram((*(TileOp("load", (), o.dims, "f32", (("operand", i),)) for i, o in enumerate(operands[:3])),
                        TileOp("pair_rotate", (0, 1, 2), (n,), "f32"),
                        TileOp("store", (3,), (n,), "f32", (("operand", 3),))))
    with pytest.raises(PlanError, match=r"buffer \w+ does not fit into UB; found .* allowed 253952 bytes"):
        backend("ascend950").emit(KernelSpec("rowwise", "T", operands, (), (("body", body),), title="wide"))
