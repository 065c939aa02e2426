"""Whole models for NVIDIA targets, without Triton: every golden case lowers, and layers take as few kernels as they
should."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden.cases import load_case
from golden.test_dense_gqa import SHAPES, config

from deepinfer.backends.cuda_sm100.backend import backend
from deepinfer.codegen.census import layer_kinds
from deepinfer.codegen.lower import Plan, lower
from deepinfer.dsl import Config, EngineOptions
from deepinfer.dsl.model import Model
from deepinfer.model_specs import deepseek_v41_flash
from deepinfer.model_specs.registry import build_model

CASES = ("v41_a_f32", "v41_b_bf16", "v41_c_quant", "v4_case_a", "v4_case_b", "v4_case_d", "v4_mtp")
FLASH = Path(__file__).parents[1] / "golden" / "configs" / "DeepSeek-V4.1-Flash"


def lowered(model: Model) -> Plan:
    return lower(model, backend("sm90"), "sm90")


@pytest.mark.parametrize("profile", ["wide", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_every_golden_model_lowers(name: str, profile: str) -> None:
    case = load_case(name)
    options = EngineOptions(**(case.formats | {"profile": profile, "max_num_seqs": 8, "max_num_batched_tokens": 768,
                                               "max_model_len": 768}))
    assert lowered(build_model(Config(case.config), options, case.headers)).lowered.specs


@pytest.mark.parametrize("shape", SHAPES)
def test_a_dense_model_lowers(shape: str) -> None:
    options = EngineOptions(max_num_seqs=8, max_num_batched_tokens=96, max_model_len=96)
    assert lowered(build_model(Config(config(shape)), options, spec="specs.dense_gqa")).lowered.specs


def test_a_reuse_layer_takes_few_kernels() -> None:
    plan = lowered(deepseek_v41_flash.build(Config.load(FLASH), EngineOptions()))
    kinds = layer_kinds(plan.lowered.table, [s.family for s in plan.lowered.specs], "step")
    reuse = next(k for k in kinds if k.layers.startswith("layers.21"))
    assert reuse.launches <= 14
    assert reuse.families["rowwise"] <= 4
