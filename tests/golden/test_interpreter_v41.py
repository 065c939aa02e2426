"""The reference interpreter on the V4.1 spec against the golden V4.1 cases."""

from __future__ import annotations

import pytest
import torch
from golden.cases import V41, Case, as_mask, load_case, row_errors, same_argmax
from golden.gates import GATES, check, check_drafts
from torch import Tensor

from deepinfer.dsl.graph import Node
from deepinfer.dsl.interpreter import ReferenceSession, Result, Ring, Value, derived_values
from deepinfer.dsl.types import f32

# Golden tensors are f32 images of f64 values; states of cache_format=f32 hold f32 as well. Logits stay below 16, where
# half a unit in the last place is 4.8e-7; two such roundings stay below this.
F64 = 1e-6


CHUNKS: dict[str, list[int | list[int]]] = {
    "v41_a_f32": [7, [1, 33, 2]], "v41_b_bf16": [16, 128], "v41_c_quant": [64, [13, 1, 127]]}


@pytest.fixture(params=V41)
def case(request: pytest.FixtureRequest) -> Case:
    return load_case(request.param)


class Prefilled:
    """Prompts in one f64 step, each run once: ``prefilled(case)`` is (a session after it, logits of every position)."""

    def __init__(self) -> None:
        self.done: dict[str, tuple[ReferenceSession, Tensor]] = {}

    def __call__(self, case: Case) -> tuple[ReferenceSession, Tensor]:
        if case.name not in self.done:
            session = case.session(torch.float64)
            self.done[case.name] = session, session.feed(case.ids, watch=worth_keeping)
        session, logits = self.done[case.name]
        return session.fork(), logits

    def watched(self, case: Case) -> list[tuple[Node, Value]]:
        self(case)
        return self.done[case.name][0].watched


@pytest.fixture(scope="module")
def prefilled() -> Prefilled:
    return Prefilled()


def worth_keeping(n: Node) -> bool:
    """Selections, Engram rows, streams after a layer, DSpark features."""
    return (n.op in ("topk", "iadd", "concat") or (n.op == "add" and len(n.type.dims) == 2)) and n.type.rows is not None


def rows_of(case: Case, logits: Tensor) -> Tensor:
    return logits[case.golden["logits.rows"].long()]


# ---- one piece ------------------------------------------------------------------------------------------------------
def test_prompt_logits_in_f64_are_the_golden_ones(case: Case, prefilled: Prefilled) -> None:
    _, logits = prefilled(case)
    assert float(row_errors(rows_of(case, logits), case.golden["logits"]).max()) < F64


def test_prompt_logits_in_f32_stay_within_the_gates(case: Case) -> None:
    check(rows_of(case, case.session().feed(case.ids)), case.golden["logits"], GATES[case.name])


def test_bf16_rounding_points_cost_what_the_reference_loses(case: Case) -> None:
    logits, gates = case.session(profile="bf16").feed(case.ids), GATES[case.name]
    assert float(row_errors(rows_of(case, logits), case.golden["logits"]).median()) <= gates.bf16_median
    assert same_argmax(rows_of(case, logits), case.golden["logits"]) >= gates.bf16_argmax
    # Two bf16 runs with other summation orders part as far as either parts from f64.
    same = float((logits.argmax(-1) == case.golden["bf16.argmax"]).double().mean())
    assert same >= gates.bf16_argmax
    last = row_errors(logits[-16:], case.golden["bf16.logits_last16"])
    assert float(last.median()) <= gates.bf16_median


def test_bf16_values_are_held_in_bf16(case: Case) -> None:
    session = case.session(profile="bf16")
    session.feed(case.ids[:9], watch=lambda n: n.op == "round" and n.type.dtype != f32)
    assert len(session.watched) > 50
    for node, value in session.watched:
        assert isinstance(value, Tensor)
        assert torch.equal(value, value.bfloat16().float()), node


def test_token_classes_are_the_golden_ones(case: Case) -> None:
    assert torch.equal(derived_values(case.program(profile="wide"), case.folder)["token_classes"],
                       case.golden["token_map"].long())


# ---- selections and values inside -----------------------------------------------------------------------------------
def test_selections_and_inner_values_are_the_golden_ones(case: Case, prefilled: Prefilled) -> None:
    watched, g = prefilled.watched(case), case.golden
    checked = 0
    streams: dict[str, Tensor] = {}
    for n, value in watched:
        pin = n.attrs.get("pin", "")
        if pin.startswith("experts."):
            assert torch.equal(value, g[pin].long()), pin
        elif pin.startswith(("index_sel.", "candidates.")):
            expected = g[pin if pin in g else "cand_blocks"]
            assert torch.equal(as_mask(value, expected.shape[1]), expected), pin
        elif n.op == "iadd":
            assert torch.equal(value, g["engram_rows." + n.scope.split(".")[1]].long()), n.scope
        elif n.op == "add" and n.scope.startswith("layers.") and n.scope.count(".") == 1:
            streams[n.scope.split(".")[1]] = value  # the last one of a layer is what it leaves
            continue
        elif n.op == "concat" and n.type.dims == tuple(g["features_last8"].shape[1:]):
            assert float(row_errors(value[-8:], g["features_last8"]).max()) < F64
        else:
            continue
        checked += 1
    layers = case.config["text_config"]["num_hidden_layers"]
    picked = case.config["text_config"]["index_source_layer_ids"]
    assert checked == layers + len(picked) + 1 + 2 + 1  # experts, entries, candidates, Engram tables, features
    for layer, value in streams.items():
        assert float(row_errors(value[g["hidden.rows"].long()], g[f"hidden.{layer}"]).max()) < F64, layer
    assert len(streams) == layers


def test_selections_of_the_unquantised_case_in_f32_are_the_golden_ones() -> None:
    case = load_case("v41_a_f32")
    session = case.session()
    session.feed(case.ids, watch=lambda n: n.op == "topk")
    assert len(session.watched) == 10 + 5 + 1
    for n, value in session.watched:
        pin, g = n.attrs["pin"], case.golden
        expected = g[pin] if pin in g else g["cand_blocks"]
        if pin.startswith("experts."):
            assert torch.equal(value, expected.long())
        else:
            assert torch.equal(as_mask(value, expected.shape[1]), expected)


# ---- chunks, decode, drafts -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("which", [0, 1])
def test_chunks_give_the_logits_of_one_piece(case: Case, which: int, prefilled: Prefilled) -> None:
    _, whole = prefilled(case)
    logits = case.session(torch.float64).feed(case.ids, chunk=CHUNKS[case.name][which])
    assert float(row_errors(logits, whole).max()) < 1e-11


def test_token_by_token_gives_the_logits_of_one_piece(prefilled: Prefilled) -> None:
    case = load_case("v41_a_f32")
    _, whole = prefilled(case)
    logits = case.session(torch.float64).feed(case.ids[:40], chunk=1)
    assert float(row_errors(logits, whole[:40]).max()) < 1e-11


def decoded(session: ReferenceSession, row: Tensor, expected: list[int]) -> tuple[list[int], Tensor, list[Result]]:
    """Greedy tokens, the logits that follow each, and the drafts made before each was fed."""
    tokens, logits, drafts = [], [], []
    for token in expected:
        tokens.append(int(row.argmax()))
        drafts.append(session.draft(token))
        row = session.feed([token])[-1]
        logits.append(row)
    return tokens, torch.stack(logits), drafts


def published(drafts: list[Result], name: str) -> Tensor:
    return torch.stack([d.outputs[name][0] for d in drafts])


def test_decode_and_drafts_in_f64_are_the_golden_ones(case: Case, prefilled: Prefilled) -> None:
    g, (session, logits) = case.golden, prefilled(case)
    expected = g["greedy.tokens"].tolist()
    tokens, following, drafts = decoded(session, logits[-1], expected)
    assert tokens == expected
    assert float(row_errors(following, g["greedy.logits"]).max()) < F64
    assert torch.equal(published(drafts, "tokens"), g["draft.tokens"].long())
    assert float(row_errors(published(drafts, "confidence"), g["draft.confidence"]).max()) < F64
    assert float(row_errors(drafts[0].outputs["draft_logits"][0], g["draft.logits0"]).max()) < F64
    assert float(row_errors(drafts[0].outputs["base_logits"][0], g["draft.base_logits0"]).max()) < F64


def test_decode_and_drafts_in_f32_stay_within_the_gates(case: Case) -> None:
    g, gates, session = case.golden, GATES[case.name], case.session()
    expected = g["greedy.tokens"].tolist()[:8]
    tokens, following, drafts = decoded(session, session.feed(case.ids)[-1], expected)
    assert tokens == expected
    check(following, g["greedy.logits"][:8], gates)
    check(drafts[0].outputs["draft_logits"][0], g["draft.logits0"], gates)
    check_drafts(published(drafts, "tokens"), published(drafts, "draft_logits"), published(drafts, "confidence"),
                 g["draft.tokens"][:8].long(), g["draft.confidence"][:8], gates)


def test_a_rejected_draft_leaves_nothing_behind(case: Case, prefilled: Prefilled) -> None:
    plain, _ = prefilled(case)
    other = plain.fork()
    tail = case.golden["greedy.tokens"].tolist()
    expected = plain.feed(tail[:3])
    other.feed([tail[0], *case.ids[:5]])
    other.rewind(len(case.ids) + 1)
    assert float(row_errors(other.feed(tail[1:3]), expected[1:]).max()) < 1e-11
    drafts = [s.draft(tail[3]).outputs["draft_logits"] for s in (plain, other)]
    assert float((drafts[0] - drafts[1]).abs().max()) < 1e-11


# ---- bounded replay and prefix hits ---------------------------------------------------------------------------------
def replays(case: Case) -> list[int]:
    return sorted(int(k.removeprefix("replay").removesuffix(".logits")) for k in case.golden if k.endswith(".logits")
                  and k.startswith("replay"))


@pytest.mark.parametrize("chunk", [None, 37])
@pytest.mark.parametrize("which", [0, 1])
def test_decoder_replay_gives_the_golden_logits(case: Case, which: int, chunk: int | None) -> None:
    keep = replays(case)[which]
    logits = case.session(torch.float64, narrowed=True).feed(case.ids, keep=keep, chunk=chunk)
    assert len(logits) == keep
    assert float(row_errors(logits[-8:], case.golden[f"replay{keep}.logits"]).max()) < F64


@pytest.mark.parametrize("which", [0, 1])
def test_decode_and_drafts_after_decoder_replay_are_the_golden_ones(case: Case, which: int) -> None:
    keep, session = replays(case)[which], case.session(narrowed=True)
    logits = session.feed(case.ids, keep=keep)
    check(logits[-8:], case.golden[f"replay{keep}.logits"], GATES[case.name])
    tokens, following = session.greedy(logits, 8)
    assert tokens == case.golden[f"replay{keep}.tokens"].tolist()
    draft = session.draft(int(following[-1].argmax()))
    assert draft.outputs["tokens"][0].tolist() == case.golden[f"replay{keep}.draft"].tolist()


def test_narrowing_changes_no_row_that_is_kept(case: Case, prefilled: Prefilled) -> None:
    _, whole = prefilled(case)
    logits = case.session(torch.float64, narrowed=True).feed(case.ids, chunk=[90, 200])
    assert float(row_errors(logits, whole).max()) < 1e-11


def test_keeping_the_whole_prompt_is_a_plain_run(case: Case, prefilled: Prefilled) -> None:
    _, whole = prefilled(case)
    logits = case.session(torch.float64, narrowed=True).feed(case.ids, keep=len(case.ids), chunk=150)
    assert float(row_errors(logits, whole).max()) < 1e-11


@pytest.mark.parametrize("chunk", [None, 19])
def test_a_prefix_hit_without_windows_gives_the_golden_logits(
        case: Case, chunk: int | None, prefilled: Prefilled) -> None:
    session, _ = prefilled(case)
    cached = int(case.golden["prefix.cached"])
    session.adopt(cached)
    logits = session.feed(case.ids[cached:], chunk=chunk)
    assert float(row_errors(logits[-8:], case.golden["prefix.logits"]).max()) < F64


def test_a_replayed_prefix_keeps_its_entries(case: Case, prefilled: Prefilled) -> None:
    session, _ = prefilled(case)
    cached = int(case.golden["prefix.cached"])
    session.adopt(cached)
    before = dict(session.state.values)
    session.feed(case.ids[cached:])
    for name, entries in before.items():
        after = session.state.values[name]
        assert torch.equal(after.rows[: len(entries.rows)], entries.rows), name
        assert len(after.rows) > len(entries.rows), name


def test_replaying_the_whole_prefix_is_a_plain_run(case: Case, prefilled: Prefilled) -> None:
    session, whole = prefilled(case)
    cached = int(case.golden["prefix.cached"])
    session.adopt(cached, replay=cached)
    logits = session.feed(case.ids[cached:])
    assert float(row_errors(logits, whole[cached:]).max()) < 1e-11
    windows = [v for v in session.state.values.values() if isinstance(v, Ring)]
    assert windows and all(v.first == 0 and v.stop == len(case.ids) for v in windows)


def test_a_short_suffix_after_a_hit_replays_enough_rows_for_the_decoder() -> None:
    case = load_case("v41_a_f32")
    ids, keep = case.ids[:264], 32
    cold = case.session(torch.float64, narrowed=True)
    expected = cold.feed(ids, keep=keep)[-8:]
    hit = case.session(torch.float64, narrowed=True)
    hit.feed(ids, keep=keep)
    hit.adopt(256, replay=256)  # the encoder part in full: only the kept rows differ from a plain run
    assert float(row_errors(hit.feed(ids[256:], keep=keep)[-8:], expected).max()) < 1e-11
