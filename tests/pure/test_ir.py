"""Graph IR as text and as law: what is printed parses back, and what is illegal is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.dsl import (
    Config,
    EngineOptions,
    Graph,
    GroupTail,
    Model,
    Node,
    Paged,
    Params,
    Source,
    States,
    Window,
    attend,
    bf16,
    const,
    contract,
    exp,
    f32,
    gather,
    mxfp8,
    output,
    positions,
    reshape,
    rounded,
    scan,
    scope,
    slice_,
    token_ids,
    top_k,
    trace,
)
from deepinfer.dsl.build import tracing
from deepinfer.dsl.graph import Loc
from deepinfer.dsl.parser import parse_graph
from deepinfer.dsl.printer import print_graph
from deepinfer.dsl.types import KEPT, STEP, DType, Type, groups
from deepinfer.dsl.verifier import verify
from deepinfer.errors import SpecError

D = 32


def small_graph() -> Graph:
    """An entry that uses every kind of state, a scan and infinities."""
    p, s = Params().root(), States()
    window = s.add(Window("win", mxfp8(1, 32)[D], rows=4, slack=2, absent_before=4))
    entries = s.add(Paged("kv", f32[D], tokens_per_entry=2))
    tail = s.add(GroupTail("tail", f32[2 * D], group=2, slack=1))
    with tracing("step") as b:
        x = rounded(gather(p.embed.vector(50, D), token_ids()))
        with scope("layers.0"):
            view = window.extend(x)
            pooled = tail.pool(contract(x, p.wkv.plain_matrix(D, D)), x)
            kv = entries.append(pooled)
            q = reshape(contract(x, p.wq.matrix(2 * D, D)), 2, D)
            o = attend(q, [Source("window", 4, view), Source("dense", 2, kv)], 0.25, sink=const([-math.inf, 1e-20]))
            y = scan(o, 3, lambda c, k: exp(c) / (k + 1e-6), x)
        output("y", y)
        output("best", top_k(slice_(y, 0, 1, dim=0), 3, "experts.0"))
    return b.graph


def same(a: Graph, b: Graph) -> bool:
    return print_graph(a) == print_graph(b)


# ---- text -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("places", [True, False])
def test_a_printed_graph_parses_back_to_itself(places: bool) -> None:
    graph = small_graph()
    text = print_graph(graph, places)
    parsed = parse_graph(text)
    verify(parsed)
    assert print_graph(parsed, places) == text
    assert parsed.digest() == graph.digest()
    assert parsed.states == graph.states
    assert [n.type for n in parsed.nodes] == [n.type for n in graph.nodes]


def test_a_digest_does_not_follow_places_and_follows_every_attribute() -> None:
    graph, moved = small_graph(), small_graph()
    for n in moved.nodes:
        n.loc, n.scope = Loc("elsewhere.py", 7), "moved"
    assert moved.digest() == graph.digest() and not same(moved, graph)
    for n in small_graph().of("topk", "attend", "scan"):
        changed = small_graph()
        twin = changed.nodes[[m.id for m in changed.nodes].index(n.id)]
        twin.attrs |= {"topk": {"k": 2}, "attend": {"scale": 0.5}, "scan": {"trips": 4}}[n.op]
        assert changed.digest() != graph.digest(), n.op
    changed = small_graph()
    changed.states["win"] = replace(changed.states["win"], slack=3)  # type: ignore[call-arg]
    assert changed.digest() != graph.digest()


scalars = st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.none(),
                    st.text("abc.%{}[]()=,:@ '\"\\", max_size=8))
attributes = st.dictionaries(st.sampled_from(["k", "values", "pin", "how"]),
                             st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6))


@given(attrs=attributes)
def test_any_literal_attribute_survives_the_text(attrs: dict[str, Any]) -> None:
    node = Node(3, "const", (), attrs, Type(None, (2, "entries/2"), f32), Loc("spec.py", 41), "layers.1.attn")
    text = print_graph(Graph("g", [node], {"o": node}))
    parsed = parse_graph(text)
    (back,) = parsed.nodes
    assert back.attrs == attrs
    assert {k: repr(v) for k, v in back.attrs.items()} == {k: repr(v) for k, v in attrs.items()}
    assert (back.op, back.type, back.loc, back.scope) == (node.op, node.type, node.loc, node.scope)


@pytest.mark.parametrize("text", ["f32", "bf16", "i64", "mxfp8(32,32)", "mxfp4(1,32)", "fp4_e4m3(16)",
                                  "mxfp8(1,64)[448]+bf16[64]", "f32[1024]"])
def test_dtypes_print_as_they_parse(text: str) -> None:
    dtype = DType.parse(text)
    assert str(dtype) == text
    for rows in (None, STEP, KEPT, groups(128)):
        t = Type(rows, (4, 64), dtype)
        assert Type.parse(str(t)) == t


GOOD = """\
graph g {
  %0 = const() {type='- [2] f32', values=(1.0, 2.0)} : - [2] f32
  out x = %0
}"""


@pytest.mark.parametrize(("old", "new", "said"), [
    ("graph g {", "grph g {", "line 1: a graph starts with"),
    ("= const() {", "= const( {", "line 2: unreadable node"),
    ("(1.0, 2.0)}", "(1.0, 2.0}", "line 2: unreadable attributes"),
    ("(1.0, 2.0)}", "(1.0, f(2))}", "line 2: unreadable attributes"),
    (": - [2] f32\n", ": - [2] f33\n", "line 2: unknown dtype"),
    (": - [2] f32\n", ": X [2] f32\n", "line 2: unknown row axis"),
    ("const()", "neg(%7)", "line 2: value %7 is used before it is defined"),
    ("out x = %0", "out x = %4", "line 3: output %4 is not defined"),
    ("  out x = %0\n}", "  out x = %0", "the text ends inside a graph"),
    ("  out", "  state w Ring f32[4] {rows=4}\n  out", "line 3: unknown state kind"),
    ("  out", "  state w Window f32[4] {depth=4}\n  out", "line 3: unknown attribute of a state"),
    ("  out", "  %0 = const() {type='- [1] f32', values=(1.0,)} : - [1] f32\n  out", "line 3: %0 is defined twice"),
])
def test_text_that_does_not_parse_is_named_by_line(old: str, new: str, said: str) -> None:
    assert same(parse_graph(GOOD), parse_graph(print_graph(parse_graph(GOOD))))
    with pytest.raises(SpecError) as e:
        parse_graph(GOOD.replace(old, new))
    assert said in str(e.value)


# ---- law --------------------------------------------------------------------------------------------------------
def test_the_small_graph_is_legal() -> None:
    verify(small_graph())


def of(graph: Graph, op: str) -> Node:
    return graph.of(op)[0]


def late_input(g: Graph) -> None:
    g.nodes.append(g.nodes.pop(g.nodes.index(of(g, "contract"))))


def wrong_type(g: Graph) -> None:
    of(g, "topk").type = Type(STEP, (1, 4), DType("i32"))


def unknown_op(g: Graph) -> None:
    of(g, "topk").op = "top_k"


def missing_attribute(g: Graph) -> None:
    del of(g, "topk").attrs["k"]


def mixed_rows(g: Graph) -> None:
    n, x = of(g, "concat"), of(g, "round")
    narrow = Node(len(g.nodes), "keep", (x,), {"rows": "T_kept"}, replace(x.type, rows=KEPT))
    g.nodes.insert(g.nodes.index(x) + 1, narrow)
    n.inputs = (n.inputs[0], narrow)


def written_twice(g: Graph) -> None:
    first = of(g, "append")
    g.nodes.append(Node(len(g.nodes), "append", first.inputs, dict(first.attrs), first.type, first.loc))


def stale_read(g: Graph) -> None:
    handle = of(g, "append").inputs[0]
    n = of(g, "attend")
    n.inputs = tuple(handle if i.op == "append" else i for i in n.inputs)


def other_state(g: Graph) -> None:
    of(g, "append").attrs["state"] = "win"


def wrong_write(g: Graph) -> None:
    g.states["kv"] = Window("kv", f32[D], rows=4)


def undeclared(g: Graph) -> None:
    del g.states["tail"]


def same_number(g: Graph) -> None:
    of(g, "topk").id = of(g, "scan").id


def bad_body(g: Graph) -> None:
    of(of(g, "scan").attrs["body"], "exp").type = Type(STEP, (2, D), bf16)


def body_reads_more(g: Graph) -> None:
    of(g, "scan").inputs = of(g, "scan").inputs[:1]


def body_sees_other_dims(g: Graph) -> None:
    n = of(g, "scan")
    n.inputs = (n.inputs[0], of(g, "token_ids") if g.of("token_ids") else of(g, "input"))


@pytest.mark.parametrize(("damage", "said"), [
    (late_input, "is not defined before its use"), (wrong_type, "the stated type is not the inferred one"),
    (unknown_op, "unknown op"), (missing_attribute, "lacks attribute 'k'"),
    (mixed_rows, "values on different row axes meet"), (written_twice, "is written twice"),
    (stale_read, "is read after a write"), (other_state, "is no handle of state win"),
    (wrong_write, "does not fit state kv"), (undeclared, "the state is not declared"),
    (same_number, "two values have this number"), (bad_body, "the stated type is not the inferred one"),
    (body_reads_more, "a value that the scan does not give"), (body_sees_other_dims, "with another type"),
], ids=lambda v: v.__name__ if callable(v) else None)
def test_an_illegal_graph_is_named_with_node_and_place(damage: Callable[[Graph], None], said: str) -> None:
    graph = small_graph()
    damage(graph)
    with pytest.raises(SpecError) as e:
        verify(graph)
    assert said in str(e.value)
    assert "test_ir.py:" in str(e.value) or "scan" in str(e.value)


def test_an_output_must_be_a_value_of_the_graph() -> None:
    graph = small_graph()
    graph.outputs["z"] = Node(999, "const", (), {}, Type(None, (), f32))
    with pytest.raises(SpecError, match="output z is not a value of the graph"):
        verify(graph)


# ---- tracing ----------------------------------------------------------------------------------------------------
def model(entry: Callable[[], None]) -> Model:
    return Model(name="m", config=Config({}), options=EngineOptions(), states=States(), params=Params(),
                 entries={"step": entry}, vocab_size=8, max_positions=16, window=4)


def test_equal_pure_nodes_are_made_once() -> None:
    def entry() -> None:
        a, b = exp(reshape(const([1.0, 2.0]), 1, 2)), exp(reshape(const([1.0, 2.0]), 1, 2))
        assert a is b
        assert const(1.0) is not const(1, positions().type.dtype)
        output("y", a + 1.0)

    graph = trace(model(entry)).graphs["step"]
    assert len(graph.of("exp")) == 1


def test_a_mistake_in_a_spec_names_op_scope_file_and_line() -> None:
    def entry() -> None:
        with scope("layers.3"):
            output("y", contract(const([1.0, 2.0]), const([1.0] * 6, dims=(2, 3))))

    with pytest.raises(SpecError) as e:
        trace(model(entry))
    line = entry.__code__.co_firstlineno + 2
    assert f"test_ir.py:{line}" in str(e.value)
    assert "layers.3" in str(e.value) and "op contract" in str(e.value) and "[2]" in str(e.value)


def test_an_op_outside_of_a_trace_is_refused() -> None:
    with pytest.raises(SpecError, match=r"outside of trace\(\)"):
        positions()
