"""The reference interpreter op by op, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from pure.small_graphs import keep, run, traced
from torch import Tensor

from deepinfer.codegen.passes.numerics import drop_rounding
from deepinfer.dsl import (
    Paged,
    Params,
    Source,
    States,
    by_sequence,
    const,
    contract,
    draw,
    encode,
    f32,
    functional,
    gather,
    group_positions,
    hadamard_matrix,
    i64,
    imod,
    imul,
    ixor,
    lookback,
    mxfp8,
    output,
    override_rows,
    positions,
    reshape,
    rounded,
    scan,
    silu,
    softplus,
    take,
    to_float,
    token_ids,
    top_k,
)
from deepinfer.dsl.build import current
from deepinfer.dsl.interpreter import Interpreter, Override, SequenceState, StepRows, evaluate
from deepinfer.dsl.verifier import verify
from deepinfer.errors import ArtifactError, InternalError


# ---- rows -------------------------------------------------------------------------------------------------------
def test_row_axes_of_a_step_follow_start_end_kept_and_wanted_rows() -> None:
    def entry() -> None:
        output("T", positions())
        kept = output("kept", keep(positions(), "T_kept"))
        output("wanted", keep(kept, "T_wanted"))
        output("groups", group_positions(4))

    out = run(entry, StepRows([0] * 11, start=7, prompt_end=20, keep=8, wanted=3))
    assert out["T"].tolist() == list(range(7, 18))
    assert out["kept"].tolist() == list(range(12, 18))
    assert out["wanted"].tolist() == [15, 16, 17]
    assert out["groups"].tolist() == [4, 8, 12]  # the group 4..7 is completed here, 16..19 is not


def test_a_step_far_from_the_prompt_end_keeps_no_row() -> None:
    out = run(lambda: output("kept", keep(positions(), "T_kept")), StepRows([0] * 4, prompt_end=100, keep=8))
    assert out["kept"].tolist() == []
    with pytest.raises(InternalError, match="3 rows are wanted and 2 are kept"):
        run(lambda: output("x", positions()), StepRows([0] * 4, keep=2, wanted=3))


def test_a_value_without_the_leading_dims_of_another_broadcasts_over_them() -> None:
    def entry() -> None:
        row = to_float(positions())  # [] per row
        grid = const([0.0, 10.0, 20.0, 30.0, 40.0, 50.0], dims=(2, 3))
        output("a", row + grid)
        output("b", grid * reshape(row, 1, 1) + reshape(row, 1) + const([1.0, 2.0, 3.0]))

    out = run(entry, StepRows([0] * 3))
    assert out["a"].shape == (3, 2, 3) and out["a"][2, 1, 2] == 52
    assert out["b"].shape == (3, 2, 3) and out["b"][2].tolist() == [[3, 24, 45], [63, 84, 105]]


def test_look_back_stops_at_the_start_and_at_rows_given_from_outside() -> None:
    def entry() -> None:
        output("ids", lookback(3))

    start = StepRows([5, 6, 7], history=())
    assert run(entry, start)["ids"].tolist() == [[5, -1, -1, -1], [6, 5, -1, -1], [7, 6, 5, -1]]
    image = Override(torch.tensor([2]), torch.zeros(1, 4))
    later = StepRows([13, 14, 15], start=3, history=[10, 11, 12], overrides={"image": image})
    assert run(entry, later)["ids"].tolist() == [[13, -1, -1, -1], [14, 13, -1, -1], [15, 14, 13, -1]]
    with pytest.raises(InternalError, match="looks back at 3"):
        run(entry, StepRows([9], start=5, history=[8]))


def test_rows_given_from_outside_replace_only_their_positions() -> None:
    def entry() -> None:
        output("x", override_rows(reshape(to_float(positions()), 1), "image"))

    given = Override(torch.tensor([1, 5, 9]), torch.tensor([[-1.0], [-5.0], [-9.0]]))
    out = run(entry, StepRows([0] * 3, start=4, history=[0] * 4, overrides={"image": given}))
    assert out["x"].flatten().tolist() == [4, -5, 6]


# ---- arithmetic -------------------------------------------------------------------------------------------------
def test_integers_wrap_in_64_bits() -> None:
    big = 2**62 + 12345

    def entry() -> None:
        x = imul(const(big, i64), const(7, i64))
        output("product", x)
        output("mixed", imod(ixor(const(big, i64), const(99, i64)), const(1009, i64)))

    out = run(entry)
    assert int(out["product"]) == (big * 7 + 2**63) % 2**64 - 2**63
    assert int(out["mixed"]) == (big ^ 99) % 1009


def test_softplus_is_accurate_far_out() -> None:
    out = run(lambda: output("y", softplus(const([-800.0, -30.0, 0.0, 30.0, 800.0]))))["y"].tolist()
    assert out == [0.0, math.log1p(math.exp(-30)), math.log(2), 30 + math.log1p(math.exp(-30)), 800.0]


def test_pairs_turn_by_their_angles_and_back() -> None:
    def entry() -> None:
        x = const([9.0, 1.0, 0.0, 0.0, 1.0])
        c, s = const([0.0, 1.0]), const([1.0, 0.0])
        turned = current().add("pair_rotate", (x, c, s), inverse=False)
        output("turned", turned)
        output("back", current().add("pair_rotate", (turned, c, s), inverse=True))

    out = run(entry)
    assert out["turned"].tolist() == [9, 0, 1, 0, 1]
    assert out["back"].tolist() == [9, 1, 0, 0, 1]


def test_a_scan_repeats_its_body_on_carry_and_captured_values() -> None:
    out = run(lambda: output("y", scan(const([1.0, 2.0]), 5, lambda c, k: c * 2.0 + k, const([1.0, -1.0]))))
    assert out["y"].tolist() == [63.0, 33.0]


def test_a_hadamard_matrix_has_orthogonal_rows() -> None:
    m = run(lambda: output("m", hadamard_matrix(16)))["m"]
    assert torch.equal(m @ m.T, 16 * torch.eye(16, dtype=m.dtype)) and set(m.flatten().tolist()) == {1.0, -1.0}
    assert m[1, 1] == -1 and m[3, 3] == 1 and m[3, 1] == -1


def test_rounding_and_encoding_give_real_values_in_the_compute_dtype() -> None:
    def entry() -> None:
        x = const([1.0 + 2.0**-9, 3.0] * 16)
        output("bf16", rounded(x))
        output("mxfp8", encode(x, mxfp8(1, 32)))

    for dtype in (torch.float32, torch.float64):
        out = run(entry, dtype=dtype)
        assert out["bf16"].dtype == dtype and out["bf16"][0] == 1.0
        assert out["mxfp8"][0] == 1.0 and out["mxfp8"][1] == 3.0


# ---- lookups and selections -------------------------------------------------------------------------------------
def test_top_k_breaks_ties_to_the_lower_index_and_marks_missing() -> None:
    inf = math.inf
    out = run(lambda: output("k", top_k(const([2.0, 5.0, 5.0, -inf, 7.0, 2.0]), 6)))
    assert out["k"].tolist() == [4, 1, 2, 0, 5, -1]
    many = run(lambda: output("k", top_k(const([1.0, 0.0] * 3000), 3100)))["k"].tolist()
    assert many == [*range(0, 6000, 2), *range(1, 200, 2)]


def test_a_pinned_selection_replaces_what_is_found_on_the_rows_of_the_node() -> None:
    def entry() -> None:
        scores = reshape(to_float(positions()), 1) * const([1.0, -1.0, 2.0])
        output("all", top_k(scores, 1, "pick"))
        output("kept", top_k(keep(scores, "T_kept"), 1, "pick"))

    step = StepRows([0] * 4, start=1, history=[0], keep=2)
    assert run(entry, step)["all"].flatten().tolist() == [2, 2, 2, 2]
    out = run(entry, step, pins={"pick": torch.tensor([[0], [1], [0], [1]])})
    assert out["all"].flatten().tolist() == [0, 1, 0, 1]
    assert out["kept"].flatten().tolist() == [0, 1]
    with pytest.raises(InternalError, match="pick has shape"):
        run(entry, step, pins={"pick": torch.zeros(4, 2)})


def test_each_slot_of_a_row_meets_its_own_expert() -> None:
    weights = {f"e.{i}.weight": torch.full((2, 3), float(i + 1)) for i in range(4)}

    def entry() -> None:
        w = Params(headers=None).root().e.each.stacked(4, 2, 3)
        picked = top_k(gather(const([0.0, 1.0, 3.0, 2.0, 3.0, 2.0, 1.0, 0.0], dims=(2, 4)), token_ids()), 2)
        x = const([1.0, 2.0, 3.0])
        output("picked", picked)
        output("values", take(const([10.0, 20.0, 30.0, 40.0]), picked))
        output("y", current().add("grouped_contract", (x, picked, w)))

    out = run(entry, StepRows([0, 1]), {k: v.bfloat16() for k, v in weights.items()})
    assert out["picked"].tolist() == [[2, 3], [0, 1]]
    assert out["values"].tolist() == [[30.0, 40.0], [10.0, 20.0]]
    assert out["y"][..., 0].tolist() == [[18.0, 24.0], [6.0, 12.0]]


def test_a_draw_is_the_callers_choice() -> None:
    graph = traced(lambda: output("t", draw(gather(const([1.0, 3.0, 2.0, 3.0, 0.0, 9.0], dims=(2, 3)), token_ids()))))
    step = StepRows([0, 1], start=4, history=[0] * 4)
    greedy = Interpreter({"step": graph}, {})
    assert greedy.step(SequenceState(), step).outputs["t"].tolist() == [1, 2]
    by_position = Interpreter({"step": graph}, {}, draw=lambda logits, at: at)
    assert by_position.step(SequenceState(), step).outputs["t"].tolist() == [4, 5]


# ---- regions, parameters, numerics ------------------------------------------------------------------------------
def test_a_region_alone_computes_what_it_computes_in_its_graph() -> None:
    w = {"w.weight": torch.randn(6, 5, generator=torch.Generator().manual_seed(3)).bfloat16()}

    def entry() -> None:
        x = reshape(to_float(positions()), 1) * const([0.1, -0.2, 0.3, 0.4, 0.5])
        output("y", silu(rounded(contract(x, Params().root().w.plain_matrix(6, 5)))) + 1.0)

    graph, step = traced(entry), StepRows([0] * 4, start=3, history=[0] * 3)
    interpreter = Interpreter({"step": graph}, w)
    seen: dict[int, Tensor] = {}
    ctx = interpreter.context(step, SequenceState())
    evaluate(ctx, graph.nodes, {}, seen=lambda n, v: seen.__setitem__(n.id, v))  # type: ignore[arg-type]
    cut = [n.op for n in graph.nodes].index("contract")
    region, given = graph.nodes[cut:], {n.id: seen[n.id] for n in graph.nodes[:cut]}
    values = interpreter.run_region(region, given, step)
    assert torch.equal(values[graph.outputs["y"].id], seen[graph.outputs["y"].id])  # type: ignore[arg-type]


def test_wrong_weights_are_named() -> None:
    def entry() -> None:
        output("y", contract(const([1.0, 2.0]), Params().root().a.w.plain_matrix(3, 2)))

    with pytest.raises(ArtifactError, match=r"a\.w\.weight: the checkpoint lacks a tensor"):
        run(entry)
    with pytest.raises(ArtifactError, match="another dtype"):
        run(entry, weights={"a.w.weight": torch.zeros(3, 2)})
    with pytest.raises(ArtifactError, match="another shape"):
        run(entry, weights={"a.w.weight": torch.zeros(2, 3, dtype=torch.bfloat16)})


def test_dropping_rounding_leaves_encoding_and_f32_rounding() -> None:
    kv = States().add(Paged("kv", mxfp8(1, 32)[32]))

    def entry() -> None:
        x = rounded(reshape(to_float(positions()), 1) * const([0.3] * 32))
        angle = rounded(x * 1.1, f32)
        q = scan(reshape(angle, 1, 32), 2, lambda c: rounded(c * 0.5))
        o = functional.attend(q, [Source("dense", 1, kv.append(x))], 1.0)
        output("y", by_sequence(rounded(o), 3))

    graph = traced(entry)
    wide = drop_rounding(graph)
    verify(wide)
    assert [n.attrs["dtype"] for n in wide.of("round")] == ["f32"]
    assert wide.of("attend")[0].attrs["rounds"] == "" and graph.of("attend")[0].attrs["rounds"] == "bf16"
    assert not wide.of("scan")[0].attrs["body"].of("round") and graph.of("scan")[0].attrs["body"].of("round")
    assert len(wide.of("encode")) == 1 and wide.outputs["y"].type.dtype == f32
    assert len(graph.of("round")) == 3 and len(graph) == len(wide) + 2
    assert {n.loc for n in wide.nodes} == {n.loc for n in graph.nodes if n.op != "round"} | {wide.of("round")[0].loc}


def test_by_sequence_wants_exactly_its_rows() -> None:
    out = run(lambda: output("x", by_sequence(positions(), 3)), StepRows([0] * 3))
    assert out["x"].tolist() == [[0, 1, 2]]
    with pytest.raises(InternalError, match="brings 2 rows and 3 are needed"):
        run(lambda: output("x", by_sequence(positions(), 3)), StepRows([0] * 2))
