"""Which rows of a step each part of a model runs for: derived, on the real configs and on small ones with known
answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.codegen.passes.liveness import NEW_ROWS, Bound, Liveness, liveness
from deepinfer.codegen.passes.narrow import Narrowing, Replay, narrow, narrow_model
from deepinfer.dsl import (
    Config,
    EngineOptions,
    Graph,
    Model,
    Node,
    Paged,
    Source,
    States,
    Window,
    attend,
    contract,
    f32,
    gather,
    output,
    reshape,
    slice_,
    token_ids,
)
from deepinfer.dsl.build import tracing
from deepinfer.dsl.model import trace
from deepinfer.dsl.params import Params
from deepinfer.dsl.parser import parse_graph
from deepinfer.dsl.printer import print_graph
from deepinfer.dsl.types import KEPT, STEP, WANTED
from deepinfer.dsl.verifier import verify
from deepinfer.errors import PlanError
from deepinfer.model_specs.registry import build_model

CONFIGS = Path(__file__).parents[1] / "golden" / "configs"
FLASH = "DeepSeek-V4.1-Flash"
V4 = ("DeepSeek-V4-Flash", "DeepSeek-V4-Flash-DSpark", "DeepSeek-V4-Pro")


@cache
def traced(name: str) -> tuple[Model, dict[str, Graph]]:
    model = build_model(Config.load(CONFIGS / name), EngineOptions())
    return model, trace(model).graphs


@cache
def narrowed(name: str, entry: str = "step") -> tuple[Graph, Narrowing]:
    model, graphs = traced(name)
    return narrow_model(model, graphs[entry])


@cache
def bounds(name: str, licensed: bool) -> Liveness:
    return liveness(traced(name)[1]["step"], licensed=licensed)


def of_layer(graph: Graph, layer: int) -> Iterator[Node]:
    """Row values of a backbone layer."""
    where = f"layers.{layer}"
    return (n for n in graph if (n.scope + ".").startswith(where + ".") and n.type.rows is not None)


def axes(name: str, layer: int) -> set[str]:
    live = bounds(name, True)
    return {str(live.axis(n)) for n in of_layer(live.graph, layer) if n.type.rows is not None}


# ---- the released model --------------------------------------------------------------------------------------
def test_the_lower_half_runs_for_all_new_rows() -> None:
    assert [axes(FLASH, layer) for layer in range(20)] == [{"T"}] * 20


def test_the_layers_above_the_last_global_write_run_for_the_last_window() -> None:
    live = bounds(FLASH, True)
    assert [axes(FLASH, layer) for layer in range(21, 39)] == [{"T_kept"}] * 18
    assert {live.bounds[n.id] for layer in range(21, 39) for n in of_layer(live.graph, layer)} == {Bound(None, 128)}


def test_the_cut_runs_through_the_layer_that_writes_the_last_global_entries() -> None:
    """Of layer 20 only collapse, norm and the way to the two global caches run for all new rows."""
    live = bounds(FLASH, True)
    wide = [n for n in of_layer(live.graph, 20) if live.axis(n) == STEP]
    assert {n.scope for n in wide} == {"layers.20.attn"}
    compressor = [n for n in wide if upstream_params(n) & {"attn.compressor.wkv.weight", "attn.indexer.wk.weight"}]
    norm = [n for n in wide if n not in compressor]
    assert Counter(n.op for n in norm) == Counter(  # collapse: 5 ops; RMSNorm: 7
        {"reshape": 2, "mul": 4, "reduce": 2, "round": 2, "add": 1, "rsqrt": 1})
    writes = [n for n in live.graph.of("append") if n.scope.startswith("layers.20.")]
    # linear, norm, linear, norm, turn, encode, write, turn, encode, write
    assert building_blocks([*compressor, *writes]) == Counter(contract=2, rsqrt=2, pair_rotate=2, encode=2, append=2)
    rest = [n for n in of_layer(live.graph, 20) if live.axis(n) != STEP]
    assert {live.bounds[n.id] for n in rest} == {Bound(None, 128)}
    assert any(n.op == "extend" and live.axis(n) == KEPT for n in live.graph if n.scope == "layers.20.attn")


def upstream_params(n: Node) -> set[str]:
    """Parameters of the same layer that a value depends on, without the layer's number."""
    if n.op == "param":
        return {n.attrs["name"].split(".", 2)[2]} if n.attrs["name"].startswith("layers.20.") else set()
    return set().union(*(upstream_params(i) for i in n.inputs if i.scope == "layers.20.attn"))


def building_blocks(nodes: list[Node]) -> Counter[str]:
    """Ops that no rounding and no arithmetic of a norm accounts for: one for each building block of the spec."""
    return Counter(n.op for n in nodes if n.op in ("contract", "rsqrt", "pair_rotate", "encode", "append"))


def test_the_last_layer_runs_for_one_row_after_its_window_key_and_the_draft_tap() -> None:
    live = bounds(FLASH, True)
    kept = [n for n in of_layer(live.graph, 39) if live.axis(n) == KEPT]
    wanted = [n for n in of_layer(live.graph, 39) if live.axis(n) == WANTED]
    assert {live.bounds[n.id] for n in wanted} == {Bound(None, 1)}
    readers = live.graph.readers()
    ends = [r for n in kept for r in readers[n.id] if live.axis(r) == KEPT and not r.scope.startswith("layers.39")]
    assert {r.scope for r in ends} == {"draft_context"}
    contractions = [n for n in kept if n.op == "contract"]
    assert [n.inputs[1].attrs["name"] for n in contractions] == ["layers.39.attn.wkv.weight"]
    assert {str(live.axis(n)) for n in live.graph if n.scope == "head" and n.type.rows} == {"T_wanted"}
    assert {str(live.axis(n)) for n in live.graph if n.scope == "draft_context" and n.type.rows} == {"T_kept"}


def test_without_the_licence_halos_grow_by_a_window_less_one_per_layer() -> None:
    live = bounds(FLASH, False)
    keys = {n.attrs["state"]: live.bounds[n.id] for n in live.graph.of("extend")}
    for layer in range(20, 40):
        assert keys[f"win.{layer}"] == Bound(None, 128 + 127 * (39 - layer))
    assert keys["win.21"].b == 2414 and keys["win.20"].b == 2541
    queries = [n for n in live.graph.of("attend") if n.scope == "layers.20.attn"]
    assert [live.bounds[n.id] for n in queries] == [Bound(None, 2414)]
    first = [n for n in live.graph.of("input") if n.attrs["name"] == "token_ids"]
    assert live.bounds[first[0].id] == Bound(20 * 127, 2541 + 20 * 127)
    assert narrowed(FLASH)[1].replay == Replay(2541, 128, 2540, 128)


def test_less_than_half_of_the_matmul_work_is_for_every_new_row() -> None:
    assert round(narrowed(FLASH)[1].step_share, 3) == 0.487


def test_rows_are_dropped_where_the_fewest_bytes_cross() -> None:
    graph, found = narrowed(FLASH)
    streams, norm = 4 * 5120 * 2, 5120 * 2
    positions, encoded, picked = 8, 5120 + 5120 // 32, 512 * 4
    assert found.kept == (
        ("layers.19 round", "T_kept", streams), ("layers.20.attn round", "T_kept", norm),
        ("layers.0.attn input", "T_kept", positions), ("layers.38 round", "T_wanted", streams),
        ("layers.39.attn encode", "T_wanted", encoded), ("layers.0.attn input", "T_wanted", positions),
        ("layers.36.attn topk", "T_wanted", picked))
    assert len(graph.of("keep")) == len(found.kept)


def test_states_learn_the_rows_that_extend_them() -> None:
    _, found = narrowed(FLASH)
    kept = {f"win.{layer}" for layer in range(20, 40)} | {f"draft.{i}" for i in range(3)}
    assert {name for name, axis in found.state_axis.items() if axis == KEPT} == kept
    assert set(found.state_axis) == {s.name for s in traced(FLASH)[0].states}
    assert set(found.state_axis.values()) == {STEP, KEPT}


# ---- every model ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [FLASH, *V4])
@pytest.mark.parametrize("entry", ["step", "draft"])
def test_a_narrowed_graph_is_legal(name: str, entry: str) -> None:
    verify(narrowed(name, entry)[0])


def test_a_narrowed_graph_prints_and_parses() -> None:
    graph, _ = narrowed(FLASH)
    assert print_graph(parse_graph(print_graph(graph))) == print_graph(graph)


@pytest.mark.parametrize("name", [FLASH, *V4])
def test_a_draft_block_keeps_all_its_rows(name: str) -> None:
    assert {str(n.type.rows) for n in narrowed(name, "draft")[0]} <= {"None", "T", "S"}


@pytest.mark.parametrize("name", V4)
def test_a_model_without_a_licence_is_narrowed_exactly_only(name: str) -> None:
    model, graphs = traced(name)
    found = narrowed(name)[1]
    last = int(model.config.raw["num_hidden_layers"]) - 1
    assert found.replay.licensed_keep is None and found.bounds == liveness(graphs["step"], licensed=False).bounds
    kept = {n.scope.split(".")[1] for n in narrowed(name)[0] if n.type.rows == KEPT and n.scope.startswith("layers.")}
    assert str(last) in kept
    assert {str(n.type.rows) for n in narrowed(name)[0] if n.op == "contract" and n.scope == "head"} == {"T_wanted"}
    with pytest.raises(PlanError, match=r"not trained for bounded replay.*found 128"):
        found.replay.keep("128")


def test_replay_options_resolve_to_rows() -> None:
    replay = narrowed(FLASH)[1].replay
    assert [replay.keep(o) for o in ("off", "exact", "128", "140")] == [None, 2541, 128, 140]
    with pytest.raises(PlanError, match=r"found 127; allowed off, exact \(here 2541 rows\) or a number >= 128"):
        replay.keep("127")


def test_a_replay_option_below_the_window_does_not_compile() -> None:
    model = build_model(Config.load(CONFIGS / FLASH), EngineOptions(replay="64"))
    with pytest.raises(PlanError, match="option replay"):
        narrow_model(model, trace(model).graphs["step"])


# ---- small models with answers counted by hand or by brute force ----------------------------------------------
WIDTH = 4
PARAMS = Params()


def stack(windows: list[int], writes: set[int], licence: int | None = None) -> Graph:
    """One window-attention layer per entry of ``windows``; those in ``writes`` also append their input to a cache."""
    states = States()
    with tracing("step") as b:
        x = gather(PARAMS.declare("embed", (10, WIDTH), "f32"), token_ids())
        for i, rows in enumerate(windows):
            if i in writes:
                states.add(Paged(f"kv.{i}", f32[WIDTH])).append(x)
            view = states.add(Window(f"win.{i}", f32[WIDTH], rows=rows, absent_before=licence)).extend(x)
            x = x + reshape(attend(reshape(x, 1, WIDTH), [Source("window", rows, view)], 1.0), WIDTH)
        output("logits", contract(x, PARAMS.declare("head", (10, WIDTH), "f32")))
    verify(b.graph)
    return b.graph


def needed(graph: Graph, n: int, c: int, wanted: int) -> dict[int, set[int]]:
    """Positions of each node that a step of rows c .. n - 1 with a prompt end at n needs, walked one by one: every
    row of
    the cache writes, the rings' last rows, the wanted outputs, and whatever these read."""
    rows: dict[int, set[int]] = {node.id: set() for node in graph}
    for o in graph.outputs.values():
        rows[o.id] |= set(range(n - wanted, n))
    for node in reversed(graph.nodes):
        if node.op == "append":
            rows[node.id] = set(range(c, n))
        if node.op == "extend":
            state = graph.states[node.attrs["state"]]
            assert isinstance(state, Window)
            rows[node.id] |= set(range(max(0, n - state.rows), n))
        for i in node.inputs:
            width = node.attrs["sources"][0][1] if node.op == "attend" and i.op == "extend" else 1
            rows[i.id] |= {p for q in rows[node.id] for p in range(max(0, q - width + 1), q + 1)}
    return rows


STACKS = st.lists(st.integers(2, 9), min_size=1, max_size=6).flatmap(
    lambda w: st.tuples(st.just(w), st.sets(st.integers(0, len(w) - 1))))


@given(STACKS, st.integers(1, 3))
def test_bounds_equal_the_rows_found_by_walking_every_position(shape: tuple[list[int], set[int]], wanted: int) -> None:
    graph = stack(*shape)
    live = liveness(graph, licensed=False, wanted=wanted)
    n, c = 200, 120  # farther apart than any halo
    rows = needed(graph, n, c, wanted)
    for node in graph:
        if node.type.rows is None and node.op != "extend":
            continue
        bound = live.bounds[node.id]
        edges = [edge for edge in (None if bound.a is None else c - bound.a, None if bound.b is None else n - bound.b)
                 if edge is not None]
        assert rows[node.id] == set(range(min(edges), n)), node


@given(STACKS, st.integers(2, 20))
def test_a_licence_caps_halos_and_moves_no_node_to_another_kind(shape: tuple[list[int], set[int]], k: int) -> None:
    """Rows a root asks for are never fewer; beyond them a halo ends at the licence."""
    graph = stack(*shape, licence=k)
    exact, licensed = liveness(graph, licensed=False), liveness(graph, licensed=True)
    for node in graph:
        for before, after, least in zip(astuple(exact.bounds[node.id]), astuple(licensed.bounds[node.id]),
                                        (0, max(shape[0])), strict=True):
            assert (before is None) == (after is None)
            if before is not None:
                assert min(before, k) <= after <= min(before, max(k, least))


def test_a_licence_shorter_than_what_is_asked_for_takes_nothing_away() -> None:
    assert Bound(12, 5).back(3, 8) == Bound(12, 8)
    assert Bound(12, 5).back(3, None) == Bound(15, 8)
    assert Bound(None, 0).back(7, 3) == Bound(None, 3)


def test_a_licence_is_not_used_by_a_model_that_was_not_trained_for_it() -> None:
    graph = stack([4, 4, 4, 4], {1}, licence=4)
    assert narrow(graph, trained=True)[1].replay == Replay(10, 4, 3, 3)
    assert narrow(graph, trained=False)[1].replay == Replay(10, None, 3, None)


def test_entries_of_older_rows_are_never_written_again() -> None:
    """Rows before c that lie in a window are needed of the layers below; of the way into a cache they are not."""
    live = liveness(stack([4, 4], {0, 1}), licensed=False)
    assert {n.attrs["state"]: live.bounds[n.id].a for n in live.graph.of("extend")} == {"win.0": 3, "win.1": None}
    read = bounds(FLASH, False)  # here layers whose rows before c are needed attend to the entries
    assert {read.bounds[n.inputs[1].id] for n in read.graph.of("append")} == {NEW_ROWS}


def test_an_entry_that_no_output_and_no_state_reads_is_left_out() -> None:
    graph = stack([4], set())
    with tracing("step") as b:
        b.graph = graph
        unread = b.add("exp", (graph.outputs["logits"],))
    assert unread in graph.nodes
    left = narrow(graph)[0]
    verify(left)
    assert not left.of("exp") and [str(n.type.rows) for n in left.of("keep")] == ["T_kept", "T_wanted"]


@pytest.mark.parametrize(("part", "crosses"), [(1, "slice"), (WIDTH, "gather")])
def test_a_cut_moves_below_a_view_that_is_smaller(part: int, crosses: str) -> None:
    """All rows are written to a cache; the output reads one feature, or two views of all of them."""
    states = States()
    with tracing("step") as b:
        x = gather(PARAMS.declare("embed", (10, WIDTH), "f32"), token_ids())
        states.add(Paged("kv", f32[WIDTH])).append(x)
        view = slice_(x, 0, part) if part < WIDTH else reshape(x, WIDTH // 2, 2)
        output("logits", view * 2.0)
    graph, found = narrow(b.graph)
    (keep,) = graph.of("keep")
    assert keep.inputs[0].op == crosses and keep.type.rows == WANTED
    assert found.kept == ((f"- {crosses}", "T_wanted", 4 * part),)


def test_an_output_has_the_rows_that_were_asked_for() -> None:
    """Also where the cut would be smaller below it."""
    states = States()
    with tracing("step") as b:
        x = gather(PARAMS.declare("embed", (10, WIDTH), "f32"), token_ids())
        states.add(Paged("kv", f32[WIDTH])).append(x)
        output("first", slice_(x, 0, 1))
    graph, _ = narrow(b.graph)
    assert graph.outputs["first"].op == "slice" and graph.outputs["first"].type.rows == WANTED


def test_position_arithmetic_is_computed_again_on_each_axis() -> None:
    graph, _ = narrowed(FLASH)
    angles = Counter(str(n.type.rows) for n in graph.of("cos"))
    assert angles == {"T": 2, "T/2": 1, "T_kept": 2, "T_wanted": 1}
    assert {k.inputs[0].op for k in graph.of("keep") if k.type.dims == ()} == {"input"}
