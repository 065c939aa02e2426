"""With the golden selections pinned no near-tie can turn a rounding into another expert or entry: values are then held
layer by layer to what their dtypes allow."""

from __future__ import annotations

import pytest
import torch
from golden.cases import V4, V41, Case, load_case, row_errors, same_argmax, stream_errors
from torch import Tensor

from deepinfer.dsl.graph import Node

# A row of streams passes through about sixteen roundings per layer, each of half a unit in the last place (2^-24 in
# f32, 2^-9 in bf16), which add in squares: 2^-22 and 2^-7 per layer. The V4 golden values are f32 themselves, and sums
# of some hundred f32 terms come on top: 2^-20.
F32_LAYER, BF16_LAYER = 2.0**-20, 2.0**-7
# Where activations are FP8 before every matrix (step 2^-3), a bf16 error of 2^-9 moves one value in 32 by a step:
# sqrt(2^-5) * 2^-3 of the input of each matrix.
FP8_LAYER = 2.0**-5
ARGMAX = 0.93


@pytest.fixture(params=V41 + V4)
def case(request: pytest.FixtureRequest) -> Case:
    return load_case(request.param)


def layer_end(n: Node) -> bool:
    at_layer = n.scope.startswith("layers.") and n.scope.count(".") == 1
    return at_layer and n.op in ("add", "round") and n.type.rows is not None and len(n.type.dims) == 2


def pinned(case: Case, profile: str) -> tuple[dict[int, Tensor], Tensor]:
    """(streams after each layer at ``hidden.rows``, logits at ``logits.rows``) of an f32 run with pinned selections."""
    session, g = case.session(profile=profile), case.golden
    logits = session.feed(case.ids, pins=case.pins, watch=layer_end)
    last = {int(n.scope.split(".")[1]): v for n, v in session.watched if isinstance(v, Tensor)}
    return {L: v[g["hidden.rows"].long()] for L, v in last.items()}, logits[g["logits.rows"].long()]


def check(case: Case, streams: dict[int, Tensor], layer_error: float) -> None:
    assert len(streams) == sum(k.startswith("hidden.") for k in case.golden) - 1
    for L, found in streams.items():
        median = float(stream_errors(found, case.golden[f"hidden.{L}"]).median())
        assert median < layer_error * (L + 1) ** 0.5, L


def test_f32_streams_and_logits_follow_the_golden_ones(case: Case) -> None:
    streams, logits = pinned(case, "wide")
    check(case, streams, F32_LAYER)
    errors = row_errors(logits, case.golden["logits"])
    assert float(errors.median()) < 2e-5
    assert float(errors.max()) < (1e-2 if "spec" in case.formats.values() else 2e-4)  # a step of a stored value is seen
    assert same_argmax(logits, case.golden["logits"]) == 1.0


def test_bf16_streams_and_logits_follow_the_golden_ones(case: Case) -> None:
    streams, logits = pinned(case, "bf16")
    check(case, streams, FP8_LAYER if case.formats["act_format"] == "spec" else BF16_LAYER)
    assert same_argmax(logits, case.golden["logits"]) >= ARGMAX


def test_pinning_its_own_selections_changes_nothing(case: Case) -> None:
    ids = case.ids[:120]
    free = case.session(torch.float64)
    expected = free.feed(ids, watch=lambda n: n.op == "topk")
    own = {n.attrs["pin"]: v for n, v in free.watched if isinstance(v, Tensor)}
    assert set(own) == set(case.pins)
    assert torch.equal(case.session(torch.float64).feed(ids, pins=own), expected)


def test_pinning_other_experts_changes_the_logits() -> None:
    case = load_case("v41_a_f32")
    experts = case.config["text_config"]["n_routed_experts"]
    other = case.pins | {"experts.0": (case.pins["experts.0"] + 1) % experts}
    logits = case.session().feed(case.ids, pins=other)
    assert float(row_errors(logits[case.golden["logits.rows"].long()], case.golden["logits"]).max()) > 0.1
