"""Fetching ahead: what is asked for when a step begins, and when it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.codegen.compile import load_backend
from deepinfer.codegen.kernels.spec import KernelSpec, TileOp
from deepinfer.codegen.lower import Plan, lower
from deepinfer.codegen.plan.cost import StepShape, launch_cost, tensor_bytes
from deepinfer.codegen.plan.launch import Launch
from deepinfer.dsl import Config, EngineOptions
from deepinfer.model_specs import deepseek_v41_flash

CONFIGS = Path(__file__).parents[1] / "golden" / "configs"


@pytest.fixture(scope="module")
def flash() -> Plan:
    model = deepseek_v41_flash.build(Config.load(CONFIGS / "DeepSeek-V4.1-Flash"), EngineOptions())
    return lower(model, load_backend("cpu"), "cpu")


def ops(spec: KernelSpec, kind: str) -> list[TileOp]:
    return [o for _, program in spec.slots for o in program.ops if o.op == kind]


def tables(plan: Plan, kind: str) -> dict[str, int]:
    """Table of each op of a kind -> place of its launch in the step."""
    lowered, found = plan.lowered, dict[str, int]()
    for at, x in enumerate(lowered.table.entries["step"].launches):
        if isinstance(x, Launch):
            for o in ops(lowered.specs[x.kernel], kind):
                if o.get("operand") is not None:
                    found[lowered.params[x.args[o.get("operand")].index].name] = at
    return found


def test_every_row_of_a_table_is_asked_for_in_the_first_kernel_of_a_step(flash: Plan) -> None:
    asked = tables(flash, "fetch")
    declared = {p.name for p in flash.lowered.params if p.table and not p.derive}
    assert set(asked) == declared and declared
    assert set(asked.values()) == {0}


def test_a_table_is_read_where_its_layer_begins(flash: Plan) -> None:
    launches = flash.lowered.table.entries["step"].launches
    for name, at in tables(flash, "gather").items():
        if ".engram.embed" not in name:
            continue
        layer = ".".join(name.split(".")[:2])
        before = f"layers.{int(layer.split('.')[1]) - 1}"
        assert any(x.scope.startswith(f"{before}.ffn") for x in launches[:at]), (name, at)
        assert not any(x.scope.startswith(f"{layer}.attn") for x in launches[:at]), (name, at)


def test_fetching_is_counted_as_no_bytes_of_its_own(flash: Plan) -> None:
    entry, lowered = flash.lowered.table.entries["step"], flash.lowered
    first = entry.launches[0]
    assert isinstance(first, Launch) and ops(lowered.specs[first.kernel], "fetch")
    params = [lowered.params[a.index] for a in first.args if a.kind == "p"]
    values = sum(entry.buffers[a.index].row_bytes for a in first.args if a.kind == "b")
    vectors = sum(tensor_bytes(p) for p in params if not p.table and not p.derive)
    embedding = max(p.dtype.data_bytes(p.shape[-1]) for p in params if p.table)  # looked up by this kernel itself
    assert launch_cost(first, entry, lowered).bytes(StepShape(1, 1, 1024, 1)) < values + vectors + embedding + 1024
