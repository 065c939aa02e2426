"""The model's dimensions under their official configuration names."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

ARCHITECTURE, MODEL_TYPE, TEXT_TYPE = "DeepseekV41ForCausalLM", "deepseek_v41", "deepseek_v41_text"


@dataclass(frozen=True)
class Shape:
    """``text_config`` of a DeepSeek-V4.1 checkpoint.  The defaults are the demonstration model.

    Four encoder-side and four decoder-side kinds of layer occur: window only (0, 1), ratio-2 owners of a
    compressed cache (2, 4) and a layer that reuses one (3), the ratio-1 owner with the candidate filter (5), one
    that reuses it (6, 8) and one that selects anew among the candidates (7).
    """

    vocab_size: int = 4096
    hidden_size: int = 192
    num_hidden_layers: int = 9
    num_attention_heads: int = 4
    head_dim: int = 128
    qk_rope_head_dim: int = 32
    q_lora_rank: int = 64
    o_lora_rank: int = 64
    o_groups: int = 2
    rms_norm_eps: float = 1e-20
    swiglu_limit: float = 10.0
    max_position_embeddings: int = 4096
    rope_theta: int = 10000
    compress_rope_theta: int = 160000
    rope_factor: int = 8
    rope_original: int = 512
    rope_beta_fast: int = 5
    rope_beta_slow: int = 1
    moe_intermediate_size: int = 64
    n_routed_experts: int = 12
    num_experts_per_tok: int = 3
    routed_scaling_factor: float = 1.5
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0)
    kv_source_layer_ids: tuple[int, ...] = (2, 4, 5)
    index_source_layer_ids: tuple[int, ...] = (2, 4, 5, 7)
    index_n_heads: int = 4
    index_head_dim: int = 64
    index_topk: int = 128
    candidate_source_layer_id: int = 5
    candidate_topk_blocks: int = 48
    candidate_block_size: int = 8
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = (1, 4)
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 2
    engram_head_dim: int = 32
    engram_vocab_size: int = 1200
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 0  # known once the tokenizer exists
    engram_num_embeddings: tuple[int, ...] = ()
    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 0  # the system token, known once the tokenizer exists
    dspark_target_layer_ids: tuple[int, ...] = (6, 7, 8)
    dspark_markov_rank: int = 32
    dspark_n_routed_experts: int = 6
    dspark_num_experts_per_tok: int = 2

    def source(self, ids: tuple[int, ...], layer: int) -> int:
        """The layer whose cache or selection ``layer`` reads: the largest listed id that is not above it."""
        return max(i for i in ids if i <= layer)

    @property
    def first_decoder_layer(self) -> int:
        """The first ratio-1 layer: what follows it is skipped for all but the last rows in a bounded replay."""
        return self.compress_ratios.index(1)


# Values of every V4.1 text configuration that the code takes for granted, in the official spelling.
_FIXED: dict[str, Any] = {
    "num_key_value_heads": 1,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
# Our field for each key of ``rope_scaling``.
_ROPE = {
    "factor": "rope_factor",
    "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow",
    "original_max_position_embeddings": "rope_original",
}
_QUANTISATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


def to_config(shape: Shape, image_token_id: int, quantised: bool) -> dict[str, Any]:
    """``config.json`` in the official spelling."""
    values = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(shape).items()}
    rope = {"rope_type": "yarn"} | {key: values.pop(field) for key, field in _ROPE.items()}
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "dtype": "bfloat16" if quantised else "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": image_token_id,
    }
    if quantised:
        config["quantization_config"] = dict(_QUANTISATION)
    config["text_config"] = {"model_type": TEXT_TYPE, **values, **_FIXED, "rope_scaling": rope}
    return config


def from_config(config: dict[str, Any]) -> Shape:
    """The shape of a ``config.json``; raises ValueError on a value that this code does not implement."""
    text = dict(config["text_config"])
    for key, wanted in (*_FIXED.items(), ("model_type", TEXT_TYPE)):
        if text.pop(key, wanted) != wanted:
            raise ValueError(f"config.json: text_config.{key} must be {wanted!r}; the trainer implements nothing else.")
    rope = text.pop("rope_scaling")
    text |= {field: rope[key] for key, field in _ROPE.items()}
    known = {field.name for field in fields(Shape)}
    if unknown := sorted(set(text) - known):
        raise ValueError(f"config.json: text_config has keys that the trainer does not know: {', '.join(unknown)}.")
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in text.items()}
    return Shape(**values)
