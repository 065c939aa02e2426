"""A dense grouped-query model that only a test describes, against a torch twin written without the DSL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from specs import dense_gqa
from torch import Tensor
from torch.nn import functional as F

from deepinfer.codegen.passes.numerics import drop_rounding
from deepinfer.dsl import Config, EngineOptions, StoredTensor, trace
from deepinfer.dsl.interpreter import Interpreter, ReferenceSession
from deepinfer.dsl.model import Program, expected_tensors
from deepinfer.model_specs.registry import build_model

SPEC_LINES = 120
ROWS = 61
SHAPES = {
    "grouped": {"num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "one_kv_head": {"num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "as_many_kv_heads": {"num_attention_heads": 3, "num_key_value_heads": 3, "tie_word_embeddings": True},
}
# Angles reach ROWS radians with f32 frequencies, rounded at most twice on either side: 61 * 4 * 2^-24 = 1.5e-5 of a
# turned feature; two layers and logits of about 10 stay below ten times that.
TOLERANCE = 1.5e-4


def config(shape: str) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 90, "hidden_size": 32,
        "intermediate_size": 56, "num_hidden_layers": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 500.0,
        "hidden_act": "silu", "max_position_embeddings": 512, **SHAPES[shape]}


def random_weights(tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {name: torch.randn(t.shape, generator=generator) * (1.0 if len(t.shape) == 1 else 1.5 * t.shape[-1] ** -0.5)
            for name, t in tensors.items()}


def described(shape: str) -> tuple[Program, dict[str, Tensor]]:
    """The traced model in f32 storage without rounding, and weights for it."""
    options = EngineOptions(profile="wide", cache_format="f32", act_format="f32")
    names = expected_tensors(trace(build_model(Config(config(shape)), options, spec=dense_gqa)).model)
    weights = random_weights(names)
    headers = {name: StoredTensor("F32", tuple(w.shape)) for name, w in weights.items()}
    program = trace(build_model(Config(config(shape)), options, headers, spec=dense_gqa))
    graphs = {name: drop_rounding(graph) for name, graph in program.graphs.items()}
    return Program(program.model, graphs), weights


def session(program: Program, weights: Mapping[str, Tensor]) -> ReferenceSession:
    return ReferenceSession(Interpreter(program, weights, torch.float64), program.model)


def twin(c: dict[str, object], weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """Logits [n, vocab] of the whole sequence at once, f64."""
    w = {name: t.double() for name, t in weights.items()}
    heads, groups, width = int(str(c["num_attention_heads"])), int(str(c["num_key_value_heads"])), 8
    inverse = 1.0 / (500.0 ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    angle = torch.outer(torch.arange(len(ids), dtype=torch.float32), inverse).double().repeat(1, 2)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w[name], eps=1e-5)

    def turned(x: Tensor) -> Tensor:
        swapped = torch.cat((-x[..., width // 2:], x[..., : width // 2]), dim=-1)
        return x * angle.cos() + swapped * angle.sin()

    def split(x: Tensor, name: str, count: int) -> Tensor:
        return (x @ w[name].T).unflatten(-1, (count, width)).transpose(0, 1)

    h = w["model.embed_tokens.weight"][ids]
    for i in range(2):
        p = f"model.layers.{i}."
        x = norm(h, p + "input_layernorm.weight")
        q = turned(split(x, p + "self_attn.q_proj.weight", heads))
        k = turned(split(x, p + "self_attn.k_proj.weight", groups)).repeat_interleave(heads // groups, 0)
        v = split(x, p + "self_attn.v_proj.weight", groups).repeat_interleave(heads // groups, 0)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        h = h + o @ w[p + "self_attn.o_proj.weight"].T
        x = norm(h, p + "post_attention_layernorm.weight")
        gate, up = x @ w[p + "mlp.gate_proj.weight"].T, x @ w[p + "mlp.up_proj.weight"].T
        h = h + (F.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"]
    return norm(h, "model.norm.weight") @ head.T


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 90, (ROWS,), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [None, 1, 7, (3, 16, 2)])
def test_a_dense_grouped_query_model_equals_its_torch_twin(
        shape: str, chunk: int | tuple[int, ...] | None, ids: Tensor) -> None:
    program, weights = described(shape)
    logits = session(program, weights).feed(ids.tolist(), chunk=chunk)
    assert (logits - twin(config(shape), weights, ids)).abs().max() < TOLERANCE


@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_of_a_dense_prompt_change_nothing(shape: str, ids: Tensor) -> None:
    program, weights = described(shape)
    whole = session(program, weights).feed(ids.tolist())
    parts = session(program, weights).feed(ids.tolist(), chunk=(5, 1, 20))
    assert (whole - parts).abs().max() < 1e-11  # two summation orders of f64


def test_a_tied_model_reads_no_head_tensor() -> None:
    program, _ = described("one_kv_head")
    assert "lm_head.weight" not in expected_tensors(program.model)


def test_the_spec_is_short(repository: Path) -> None:
    assert len((repository / "tests/specs/dense_gqa.py").read_text().splitlines()) <= SPEC_LINES
