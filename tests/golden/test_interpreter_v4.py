"""The reference interpreter on the V4 spec against the golden V4 cases."""

from __future__ import annotations

import pytest
import torch
from golden.cases import V4, Case, load_case, row_errors
from golden.gates import V4_GATE as GATE
from torch import Tensor

from deepinfer.dsl.graph import Node

CHUNKS: dict[str, int | list[int]] = {"v4_case_a": [7, 50, 1, 129, 3], "v4_case_b": 64, "v4_case_d": 16}
# The activation quantisers turn one unit in the last place into a visible step sooner or later: golden and released
# code part after 29 positions, which is how many the golden file holds.
QUANTISED = {"kv_quant.logits": ("spec", "f32"), "full_quant.logits": ("spec", "spec")}


@pytest.fixture(params=V4)
def case(request: pytest.FixtureRequest) -> Case:
    return load_case(request.param)


def worth_keeping(n: Node) -> bool:
    """Expert choices of scored and hashed layers, entries picked, streams after a layer."""
    picks = n.op == "topk" or (n.op == "gather" and n.type.dtype.is_int and len(n.type.dims) == 1)
    return n.type.rows is not None and (picks or (n.op == "add" and len(n.type.dims) == 2))


def rows_of(case: Case, logits: Tensor) -> Tensor:
    return logits[case.golden["logits.rows"].long()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_prompt_logits_selections_and_streams_are_the_golden_ones(case: Case, dtype: torch.dtype) -> None:
    session, g = case.session(dtype), case.golden
    logits = session.feed(case.ids, watch=worth_keeping)
    assert float(row_errors(rows_of(case, logits), g["logits"]).max()) < GATE
    streams: dict[str, Tensor] = {}
    seen: set[str] = set()
    for n, value in session.watched:
        layer = n.scope.split(".")[1] if n.scope.startswith("layers.") else ""
        assert isinstance(value, Tensor)
        if n.op == "add" and n.scope == f"layers.{layer}":
            streams[layer] = value  # the last one of a layer is what it leaves
        elif n.op == "topk" and n.attrs["pin"].startswith("index_sel."):
            expected = g[f"index_ids.{layer}"].long()
            assert torch.equal(value.sort(-1).values, expected.sort(-1).values), layer
            seen.add(f"index_ids.{layer}")
        elif n.op in ("topk", "gather"):
            assert torch.equal(value.sort(-1).values, g[f"experts.{layer}"].long().sort(-1).values), layer
            seen.add(f"experts.{layer}")
    assert seen == {k for k in g if k.startswith(("experts.", "index_ids."))}
    for layer, value in streams.items():
        assert float(row_errors(value[g["hidden.rows"].long()], g[f"hidden.{layer}"]).max()) < GATE, layer
    assert len(streams) == case.config["num_hidden_layers"]


def test_chunks_and_greedy_decode_are_the_golden_ones(case: Case) -> None:
    g, session = case.golden, case.session()
    logits = session.feed(case.ids, chunk=CHUNKS[case.name])
    assert float(row_errors(rows_of(case, logits), g["logits"]).max()) < GATE
    expected = g["greedy_ids"].tolist()
    tokens, following = session.greedy(logits, len(expected))
    assert tokens == expected
    assert float(row_errors(torch.cat((logits[-1:], following[:-1])), g["greedy_logits"]).max()) < GATE


def test_token_by_token_gives_the_logits_of_one_piece(case: Case) -> None:
    ids = case.ids[:37]
    whole, single = (case.session(torch.float64).feed(ids, chunk=c) for c in (None, 1))
    assert float(row_errors(single, whole).max()) < 1e-11


def test_narrowing_changes_no_row(case: Case) -> None:
    ids = case.ids[:150]
    whole, narrowed = (case.session(torch.float64, narrowed=n).feed(ids, chunk=[70, 41]) for n in (False, True))
    assert float(row_errors(narrowed, whole).max()) < 1e-11


def test_a_rejected_draft_leaves_nothing_behind(case: Case) -> None:
    session = case.session(torch.float64)
    session.feed(case.ids[:126])  # the drafts below close groups of 4 and of 128, which have to open again
    plain, other = session.fork(), session
    tail = case.ids[126:140]
    expected = plain.feed(tail)
    other.feed([tail[0], 3, 4, 5, 6, 7])
    other.rewind(127)
    assert float(row_errors(other.feed(tail[1:]), expected[1:]).max()) < 1e-11


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dspark_drafts_are_the_golden_ones(dtype: torch.dtype) -> None:
    case = load_case("v4_case_d")
    g, session = case.golden, case.session(dtype)
    ids = case.ids + g["greedy_ids"].tolist()
    for i, anchor in enumerate(g["dspark.anchor_positions"].tolist()):
        session.feed(ids[len(session.ids): anchor])
        draft = session.draft(ids[anchor])
        assert torch.equal(draft.outputs["tokens"][0], g["dspark.tokens"][i])
        assert float(row_errors(draft.outputs["draft_logits"][0], g["dspark.logits"][i]).max()) < GATE
        assert float((draft.outputs["confidence"][0] - g["dspark.confidence"][i]).abs().max()) < GATE


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_logits_are_the_golden_ones(name: str) -> None:
    """In f32, as the golden run: in f64 a value on a rounding boundary falls the other way."""
    case = load_case("v4_case_d")
    cache, act = QUANTISED[name]
    expected = case.golden[name]
    ids = case.ids if len(expected) == len(case.golden["logits.rows"]) else case.ids[: len(expected)]
    logits = case.session(cache_format=cache, act_format=act).feed(ids)
    found = rows_of(case, logits) if len(ids) == len(case.ids) else logits
    assert float(row_errors(found, expected).max()) < GATE


def test_an_exact_rerun_of_a_prefix_is_a_plain_run() -> None:
    """V4 is not trained for bounded replay: re-running all rows before a hit must give the cold run."""
    case = load_case("v4_case_d")
    session = case.session(torch.float64)
    expected = session.feed(case.ids)
    session.adopt(128, replay=128)
    assert float(row_errors(session.feed(case.ids[128:]), expected[128:]).max()) < 1e-11
