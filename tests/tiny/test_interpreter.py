"""The trainer and the reference interpreter, written apart from each other, on the shipped checkpoint.

Without roundings both are f32 programs of the same sums: the gates of the unquantised golden case hold. With them, one
unit in the last place of a value on an FP8 or FP4 boundary becomes a step of the activation, and a trained network
carries a step on to every later row: an f32 and an f64 run of the interpreter itself part there by as much as 0.5 in
the median of rows, on logits up to 30. So the quantised gates of golden case c can hold only where no such step has
happened yet, on short prompts, for the median; beyond that, two f32 programs may part as far as f32 parts from f64.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from golden.cases import row_errors, same_argmax
from golden.gates import FACTOR, GATES
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.codegen.passes.numerics import drop_rounding
from deepinfer.dsl import Config, EngineOptions, trace
from deepinfer.dsl.interpreter import Interpreter, ReferenceSession, derived_values
from deepinfer.model_specs.registry import build_model
from deepinfer.runtime.checkpoint.headers import read_headers
from tools.train_tiny import checkpoint
from tools.train_tiny.draft import DraftHead
from tools.train_tiny.evaluate import load
from tools.train_tiny.layers import Mode
from tools.train_tiny.model import Backbone

FOLDER = Path(__file__).parents[2] / "assets" / "tiny"
PLAIN = Mode(exact_ties=True)
STORED = Mode(quantised=True, frozen=True, exact_ties=True)
# Beyond 384 latents the candidate filter leaves blocks out; from 128 on the indexer selects.
LONG = 416


@cache
def model() -> tuple[Backbone, DraftHead]:
    return load(FOLDER, torch.device("cpu"))


@cache
def prompts() -> list[list[int]]:
    found: list[list[int]] = json.loads((FOLDER / "speculation.json").read_text(encoding="utf-8"))["prompt_ids"]
    return found


def long_prompt() -> list[int]:
    return [token for prompt in prompts()[:3] for token in prompt][:LONG]


@torch.no_grad()
def trained(ids: list[int], mode: Mode) -> Tensor:
    backbone, _ = model()
    return backbone.logits(backbone(torch.tensor([ids]), mode).hidden[0], mode)


def session(folder: Path, dtype: torch.dtype, formats: str) -> ReferenceSession:
    options = EngineOptions(profile="wide", cache_format=formats, act_format=formats)
    spec = build_model(Config.load(folder), options, read_headers(folder))
    program = trace(spec)
    graphs = {name: drop_rounding(graph) for name, graph in program.graphs.items()}
    weights = load_file(folder / "model.safetensors")
    return ReferenceSession(Interpreter(graphs, weights, dtype, derived_values(program, folder)), spec)


@pytest.fixture(scope="module")
def unquantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as ``export --float32`` writes it."""
    folder = tmp_path_factory.mktemp("float32")
    image = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))["image_token_id"]
    checkpoint.write(folder, *model(), image_token_id=image, quantised=False)
    (folder / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())
    return folder


def test_logits_and_drafts_without_roundings_stay_within_the_f32_gates(unquantised: Path) -> None:
    ids, gates = long_prompt(), GATES["v41_a_f32"]
    s = session(unquantised, torch.float32, "f32")
    found, expected = trained(ids[:-1], PLAIN), s.feed(ids[:-1])
    assert float(row_errors(found, expected).max()) <= gates.largest
    assert same_argmax(found, expected) >= gates.argmax
    drafted = s.draft(ids[-1]).outputs
    backbone, draft = model()
    with torch.no_grad():
        context = draft.context_keys(backbone(torch.tensor([ids]), PLAIN).features, PLAIN)
        anchors = torch.tensor([[LONG - 1]])
        tokens, confidence, _ = draft.propose(backbone, context, torch.tensor([ids]), anchors, PLAIN)
    assert torch.equal(tokens[0, 0], drafted["tokens"][0])
    assert float((confidence[0, 0] - drafted["confidence"][0]).abs().max()) <= gates.largest


def test_logits_of_the_stored_formats_stay_within_the_gates_until_a_value_lies_on_a_boundary() -> None:
    f32, gates = session(FOLDER, torch.float32, "spec"), GATES["v41_c_quant"]
    begins = [prompt[:32] for prompt in prompts()[::6]]
    found = torch.cat([trained(ids, STORED) for ids in begins])
    expected = torch.cat([f32.fork().feed(ids) for ids in begins])
    assert float(row_errors(found, expected).median()) <= gates.median
    f64 = session(FOLDER, torch.float64, "spec")
    exact = torch.cat([f64.fork().feed(ids) for ids in begins])
    assert same_argmax(found, expected) >= min(gates.argmax, same_argmax(expected, exact))
    assert worst(found, expected) <= max(gates.quantile99, FACTOR * worst(expected, exact))


def test_logits_behind_a_long_prompt_part_no_further_than_f32_from_f64() -> None:
    ids = long_prompt()
    expected, exact = (session(FOLDER, dtype, "spec").feed(ids) for dtype in (torch.float32, torch.float64))
    found = trained(ids, STORED)
    for quantile in (0.5, 0.99):
        spread = float(row_errors(expected, exact).quantile(quantile))
        assert float(row_errors(found, expected).quantile(quantile)) <= FACTOR * spread
    assert same_argmax(found, expected) >= 1 - FACTOR * (1 - same_argmax(expected, exact))


def worst(found: Tensor, expected: Tensor) -> float:
    return float(row_errors(found, expected).quantile(0.99))
