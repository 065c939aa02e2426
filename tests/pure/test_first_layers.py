"""Engines of a model's first layers: what the config becomes, and what a whole checkpoint is to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden.cases import load_case

from deepinfer.dsl import Config, EngineOptions, trace
from deepinfer.errors import SpecError
from deepinfer.model_specs.registry import build_model
from deepinfer.runtime.checkpoint.declared import check_tensors

CONFIGS = Path(__file__).parents[1] / "golden" / "configs"


@pytest.mark.parametrize(("name", "layers"), [("DeepSeek-V4.1-Flash", n) for n in (2, 3, 15, 22, 40)] + [
    ("DeepSeek-V4-Flash", 2), ("DeepSeek-V4-Flash", 30), ("DeepSeek-V4-Flash-DSpark", 43)])
def test_a_released_config_is_described_at_every_depth(name: str, layers: int) -> None:
    raw = json.loads((CONFIGS / name / "config.json").read_text())
    program = trace(build_model(Config(raw), EngineOptions(layers=layers)))
    scopes = {n.scope.split(".attn")[0] for n in program.graphs["step"].nodes if n.scope.startswith("layers.")}
    assert {int(s.split(".")[1]) for s in scopes} == set(range(layers))
    assert set(program.graphs) == {"step"} and program.model.draft_tokens == 0


@pytest.mark.parametrize(("name", "layers"), [("v41_c_quant", 5), ("v41_c_quant", 2), ("v4_case_d", 3)])
def test_a_whole_checkpoint_is_one_of_its_first_layers(name: str, layers: int) -> None:
    case = load_case(name)
    model = trace(build_model(Config(case.config), EngineOptions(layers=layers, **case.formats), case.headers)).model
    left = check_tensors(case.headers, tuple(model.params.declared.values()),
                         [(i.pattern, i.reason) for i in model.ignored], name)
    names = [n for g in left for n in g.names if n.startswith("layers.") and "bias_vl" not in n]
    total = case.config.get("text_config", case.config)["num_hidden_layers"]
    assert {int(n.split(".")[1]) for n in names} == set(range(layers, total))


@pytest.mark.parametrize("layers", [1, 41])
def test_a_depth_that_there_is_not_is_refused(layers: int) -> None:
    raw = json.loads((CONFIGS / "DeepSeek-V4.1-Flash" / "config.json").read_text())
    with pytest.raises(SpecError, match=rf"--layers: the model has no such number of first layers; found {layers}; "
                                        r"allowed 2\.\.40"):
        build_model(Config(raw), EngineOptions(layers=layers))
