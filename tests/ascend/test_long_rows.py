"""What does not fit into UB at once: heads moved in smaller numbers, rows made of several heads, released models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from ascend.on_twin import run, source_of
from ascend.test_kernels_regions import SCENES, check, fused_for_ascend, kernels
from cpu.harness import Seq, Step, from_bf16

from deepinfer.backends.ascend950.backend import backend
from deepinfer.backends.ascend950.families import attend, rowwise
from deepinfer.backends.ascend950.target import CAPACITY
from deepinfer.backends.ascend950.tile import pieces
from deepinfer.codegen.kernels.spec import KernelSpec, Operand, TileOp, TileProgram
from deepinfer.codegen.lower import lower
from deepinfer.dsl import Config, EngineOptions
from deepinfer.dsl.interpreter import formats
from deepinfer.dsl.types import DType
from deepinfer.model_specs.registry import build_model

__all__ = ["fused_for_ascend"]  # a fixture that every test here takes
ROWS, HEADS, WIDTH, GROUPS, TURNED = 2, 8, 64, 2, 16


@pytest.fixture(autouse=True)
def made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ascend.on_twin._MADE", {})


def test_heads_moved_two_at_a_time_give_the_same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "MOVED", (2,))
    runner, found = kernels(SCENES[0])
    check(runner, [k for k in found if k.spec.family == "attend"][:1], SCENES[0].profile)


def test_a_row_of_groups_of_heads_is_made_a_group_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are rotated, joined into groups and encoded, as attention hands them to a grouped projection."""
    form, joined = "mxfp8(1,32)", (GROUPS, HEADS // GROUPS * WIDTH)
    operands = (Operand("value", "T", (HEADS, WIDTH), "f32"), Operand("value", "T", (TURNED,), "f32"),
                Operand("value", "T", (TURNED,), "f32"), Operand("value", "T", joined, form, write=True))
    ops = [TileOp("load", (), o.dims, o.dtype, (("operand", i),)) for i, o in enumerate(operands[:3])]
    ops += [TileOp("pair_rotate", (0, 1, 2), (HEADS, WIDTH), "f32", (("inverse", True),)),
            TileOp("reshape", (3,), joined, "f32"), TileOp("encode", (4,), joined, form, (("dtype", form),)),
            TileOp("store", (5,), joined, form, (("operand", 3),))]
    spec = KernelSpec("rowwise", "T", operands, (), (("body", TileProgram(tuple(ops))),), title="groups")
    monkeypatch.setattr(pieces, "LEAST", WIDTH)
    monkeypatch.setattr(pieces, "PIECE", WIDTH)
    monkeypatch.setattr(rowwise, "_fitting", lambda spec, body: rowwise._planned(spec, body, pieces=True, spills=False))
    assert f"part < {GROUPS}" in backend("ascend950").emit(spec).text
    rng = np.random.default_rng(5)
    x = rng.standard_normal((ROWS, HEADS, WIDTH)).astype(np.float32)
    angle = rng.uniform(0, 6, (ROWS, TURNED))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    step = Step([Seq(ROWS)], [], 128, np.zeros(ROWS, np.int64), np.zeros((ROWS, 1)))
    got = from_bf16(run(spec, step, [x.reshape(ROWS, -1), cos, sin, None])[3]).reshape(ROWS, *joined)
    want, a, b = x.copy(), x[..., -2 * TURNED::2], x[..., 1 - 2 * TURNED::2]
    want[..., -2 * TURNED::2] = a * cos[:, None] + b * sin[:, None]
    want[..., 1 - 2 * TURNED::2] = b * cos[:, None] - a * sin[:, None]
    wanted = formats.quantised(torch.from_numpy(want.reshape(ROWS, *joined)), DType.parse(form)).numpy()
    assert np.array_equal(got, wanted)


@pytest.mark.parametrize("features", [7168, 32768])
def test_streams_of_any_width_are_mixed_normed_and_encoded(features: int) -> None:
    """Every float that lives longer than a piece is in memory: UB holds no more for wider rows."""
    streams, form = (4, features), "mxfp8(1,128)"
    operands = (Operand("value", "T", streams, "f32"), Operand("value", "T", (4, 1), "f32"),
                Operand("value", "T", (features,), "f32"), Operand("value", "T", streams, "f32", write=True),
                Operand("value", "T", streams, form, write=True))
    ops = [TileOp("load", (), o.dims, o.dtype, (("operand", i),)) for i, o in enumerate(operands[:3])]
    ops += [TileOp("mul", (1, 2), streams, "f32"), TileOp("add", (0, 3), streams, "f32"),
            TileOp("store", (4,), streams, "f32", (("operand", 3),)), TileOp("mul", (4, 4), streams, "f32"),
            TileOp("reduce", (6,), (4, 1), "f32", (("dims", (1,)), ("how", "mean"))),
            TileOp("rsqrt", (7,), (4, 1), "f32"), TileOp("mul", (4, 8), streams, "f32"),
            TileOp("encode", (9,), streams, form, (("dtype", form),)),
            TileOp("store", (10,), streams, form, (("operand", 4),))]
    spec = KernelSpec("rowwise", "T", operands, (), (("body", TileProgram(tuple(ops))),), title="streams")
    source = source_of(spec)
    assert source.stages[0].used[0][1] < CAPACITY["UB"] // 2


@pytest.mark.slow
@pytest.mark.parametrize(("model", "options"), [
    ("DeepSeek-V4-Pro", {}),
    ("DeepSeek-V4.1-Flash", {"profile": "wide", "cache_format": "f32", "wo_a_input": "production"})])
def test_the_widest_rows_of_released_models_fit(model: str, options: dict[str, str], repository: Path) -> None:
    raw = json.loads((repository / "tests/golden/configs" / model / "config.json").read_text())
    plan = lower(build_model(Config(raw), EngineOptions(**options)), backend("ascend950"), "ascend950")
    assert any(getattr(s, "scratch", (0, 0))[0] and s.family == "rowwise"  # type: ignore[attr-defined]
               for s in plan.lowered.sources)
