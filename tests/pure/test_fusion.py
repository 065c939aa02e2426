"""Fusion and the launch table on the real configs: counts, order, and checks that can fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer.backends.base import Capabilities, Source
from deepinfer.backends.cuda_sm100.target import SM100
from deepinfer.codegen.census import layer_kinds
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.codegen.lower import Plan, lower, row_limits
from deepinfer.codegen.passes.fuse import Region, fuse
from deepinfer.codegen.plan.checks import check_table
from deepinfer.codegen.plan.cost import StepShape, launch_cost, tensor_bytes
from deepinfer.codegen.plan.launch import Commit, Launch
from deepinfer.dsl import Config, EngineOptions
from deepinfer.dsl.types import DType, bf16
from deepinfer.errors import InternalError, PlanError
from deepinfer.model_specs import deepseek_v4, deepseek_v41_flash

CONFIGS = Path(__file__).parents[1] / "golden" / "configs"
ELEMENT = Capabilities("cpu", epilogue={"gemm": "element", "grouped_gemm": "element"}, shared_input=True)


class PlanOnly:
    """A backend that plans and prints nothing."""

    TARGETS, BUILT = ("cpu",), True

    def capabilities(self, target: str) -> Capabilities:
        return ELEMENT

    def stored(self, dtype: DType) -> DType:
        return bf16 if dtype.is_encoded else dtype

    def emit(self, spec: KernelSpec) -> Source:
        return Source(spec.symbol, "", "cpp", 1, 1, 0, 64 if spec.family == "score_select" else 0)

    def compile(self, *args: object, **kw: object) -> None:
        raise AssertionError("a plan compiles nothing")


@pytest.fixture(scope="module")
def flash() -> Plan:
    model = deepseek_v41_flash.build(Config.load(CONFIGS / "DeepSeek-V4.1-Flash"), EngineOptions())
    return lower(model, PlanOnly(), "cpu")  # type: ignore[arg-type]


def layer(regions: list[Region], name: str) -> list[Region]:
    return [r for r in regions if r.scope == name or r.scope.startswith(name + ".")]


def test_a_reuse_layer_takes_at_most_ten_kernels_with_the_sm100_table(flash: Plan) -> None:
    regions = fuse(flash.graphs["step"], SM100)
    for reuse in (3, 7, 19, 21, 38):  # layers that inherit keys, values and selection
        assert len(layer(regions, f"layers.{reuse}")) <= 10
    assert len(layer(regions, "layers.24")) > len(layer(regions, "layers.21"))  # Reindex selects anew


def test_capabilities_alone_decide_what_shares_a_kernel(flash: Plan) -> None:
    bare = fuse(flash.graphs["step"], Capabilities("bare"))
    cpu = fuse(flash.graphs["step"], ELEMENT)
    sm100 = fuse(flash.graphs["step"], SM100)
    assert len(bare) > len(cpu) > len(sm100)
    for regions in (bare, cpu, sm100):  # every computing node lies in exactly one kernel
        nodes = [n.id for r in regions for n in r.nodes]
        assert len(nodes) == len(set(nodes))


def test_equal_layers_share_kernels(flash: Plan) -> None:
    families = [s.family for s in flash.lowered.specs]
    kinds = layer_kinds(flash.lowered.table, families, "step")
    assert any(k.layers == "layers.3-7,9-13,15-19" and k.count == 15 for k in kinds)
    launches = sum(isinstance(x, Launch) for x in flash.lowered.table.entries["step"].launches)
    assert len(flash.lowered.specs) < launches / 5


def test_the_second_spec_lowers_with_the_same_passes() -> None:
    for name in ("DeepSeek-V4-Flash", "DeepSeek-V4-Flash-DSpark", "DeepSeek-V4-Pro"):
        model = deepseek_v4.build(Config.load(CONFIGS / name), EngineOptions())
        assert lower(model, PlanOnly(), "cpu").lowered.specs  # type: ignore[arg-type]


def test_the_plan_is_a_function_of_config_and_options(flash: Plan) -> None:
    model = deepseek_v41_flash.build(Config.load(CONFIGS / "DeepSeek-V4.1-Flash"), EngineOptions())
    again = lower(model, PlanOnly(), "cpu")  # type: ignore[arg-type]
    assert again.lowered.table.text() == flash.lowered.table.text()
    assert [s.digest() for s in again.lowered.specs] == [s.digest() for s in flash.lowered.specs]


def test_a_batch_smaller_than_one_verify_of_every_sequence_is_refused() -> None:
    options = EngineOptions(max_num_seqs=64, max_num_batched_tokens=64)
    model = deepseek_v41_flash.build(Config.load(CONFIGS / "DeepSeek-V4.1-Flash"), options)
    with pytest.raises(PlanError, match="max_num_batched_tokens"):
        row_limits(model)


def mutants(plan: Plan) -> Iterator[str]:
    """Applies one mistake to the step's table, yields its name, takes it back."""
    entry, table = plan.lowered.table.entries["step"], plan.lowered.table
    launches = list(entry.launches)
    moved = [i for i, x in enumerate(launches) if isinstance(x, Launch)][20]
    entry.launches = [launches[moved], *launches[:moved], *launches[moved + 1:]]
    yield "a launch before the one that makes its input"
    commit = next(i for i, x in enumerate(launches) if isinstance(x, Commit))
    entry.launches = [launches[commit], *launches[:commit], *launches[commit + 1:]]
    yield "a ring that commits before its last reader"
    entry.launches = [x for i, x in enumerate(launches) if i != commit]
    yield "a ring that never commits"
    entry.launches = [*launches, launches[moved]]
    yield "two writers of one buffer"
    second = next(i for i, x in enumerate(launches) if isinstance(x, Launch) and x.stage)
    entry.launches = [*launches[:second], *launches[second + 1:], launches[second]]
    yield "a second stage that does not follow its first"
    entry.launches = launches
    buffers = list(entry.buffers)
    big = max(range(len(buffers)), key=lambda i: buffers[i].row_bytes)
    life = buffers[big]
    other = next(i for i, b in enumerate(buffers) if i != big and b.first <= life.last and life.first <= b.last)
    entry.buffers = [replace(b, offset=buffers[big].offset) if i == other else b for i, b in enumerate(buffers)]
    yield "two live buffers in the same bytes"
    entry.buffers = buffers
    first = next(i for i, x in enumerate(launches) if isinstance(x, Launch))
    zero = replace(launches[first], rows_per_item=0)  # type: ignore[type-var]
    entry.launches = [zero if i == first else x for i, x in enumerate(launches)]
    yield "a launch without items"
    entry.launches = launches
    check_table(table, plan.lowered.specs)


def test_each_mistake_in_a_launch_table_is_caught(flash: Plan) -> None:
    caught = []
    for name in mutants(flash):
        with pytest.raises(InternalError):
            check_table(flash.lowered.table, flash.lowered.specs)
        caught.append(name)
    assert len(caught) == 7


def test_a_decode_step_reads_every_dense_weight_once_and_the_picked_experts(flash: Plan) -> None:
    entry, lowered = flash.lowered.table.entries["step"], flash.lowered
    costs = [launch_cost(x, entry, lowered) for x in entry.launches if isinstance(x, Launch)]
    dense = {a.index for x in entry.launches if isinstance(x, Launch) for a in x.args if a.kind == "p"}
    looked_up = {"embed.weight"} | {p.name for p in lowered.params if p.table or p.dtype.name == "i64"}
    sizes = {i: tensor_bytes(p) for i, p in enumerate(lowered.params) if i in dense and p.name not in looked_up}
    once = sum(s for i, s in sizes.items() if not lowered.params[i].stack)
    assert sum(c.weights for c in costs) == pytest.approx(once, rel=1e-5)  # a few norms are read by two kernels
    config = flash.model.config.raw["text_config"]
    one = StepShape(1, 1, 0, 1)
    read = sum(c.bytes(one) for c in costs if c.experts[0])
    picked = sum(s for i, s in sizes.items() if lowered.params[i].stack) * config["num_experts_per_tok"]
    assert read - sum(c.row_bytes for c in costs if c.experts[0]) == pytest.approx(picked)


def test_every_dumped_pass_says_how_to_read_it_and_names_what_it_holds(tmp_path: Path) -> None:
    model = deepseek_v41_flash.build(Config.load(CONFIGS / "DeepSeek-V4.1-Flash"), EngineOptions(profile="wide"))
    plan = lower(model, PlanOnly(), "cpu", dump=tmp_path)  # type: ignore[arg-type]
    files = {f.stem.partition("-")[2]: f.read_text() for f in tmp_path.iterdir()}
    assert sorted(f.name for f in tmp_path.iterdir()) == [f"{i:02d}-{p.name}.txt" for i, p in
                                                                enumerate(plan.passes, 1)]
    for text in files.values():
        legend = [line for line in text.splitlines() if line.startswith("#")]
        assert len(legend) >= 3 and text.startswith("# ")
    assert "layers.20.attn" in files["plan"] and "layers.20.attn.wq_a.weight" in files["plan"]
    assert all(s.symbol in files["plan"] for s in plan.lowered.specs)
