"""What a V4.1 config must satisfy beyond single values, and the vision tensors that a text engine leaves out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer.dsl import Config, StoredTensor
from deepinfer.errors import SpecError

if TYPE_CHECKING:
    from deepinfer.model_specs.deepseek_v41_flash import V41

_WHERE = "config.json: text_config"


def _require(ok: bool, what: str, found: object, allowed: object) -> None:
    if not ok:
        raise SpecError(what, where=_WHERE, found=found, allowed=allowed)


def check_layers(m: V41) -> None:
    """Layer lists must agree with each other; raises SpecError with key, value and what would be allowed."""
    total = m.layers + m.drafts
    _require(len(m.ratios) == total, "compress_ratios must have one entry per layer and draft layer", len(m.ratios),
             total)
    _require(min(m.ratios) >= 0, "compress_ratios has a negative entry", min(m.ratios), ">= 0")
    _require(not any(m.ratios[m.layers:]), "compress_ratios of draft layers must be 0", m.ratios[m.layers:], 0)
    for key, ids in (("kv_source_layer_ids", m.kv_sources), ("index_source_layer_ids", m.index_sources)):
        _require(list(ids) == sorted(set(ids)) and all(0 <= i < m.layers for i in ids),
                 f"{key} must be rising layer ids", list(ids), f"0..{m.layers - 1}, rising")
        _require(all(m.ratios[i] for i in ids), f"{key} names a layer without compression",
                 [i for i in ids if not m.ratios[i]], "layers with compress_ratios > 0")
    missing = sorted(set(m.kv_sources) - set(m.index_sources))
    _require(not missing, "a key/value source must choose its own entries", missing, "ids of index_source_layer_ids")
    for L, r in enumerate(m.ratios[: m.layers]):
        if r:
            sources = [i for i in m.kv_sources if i <= L]
            _require(bool(sources), f"layer {L} is compressed but no kv_source_layer_ids is at or below it",
                     list(m.kv_sources), f"a source <= {L}")
            _require(m.ratios[sources[-1]] == r, f"layer {L} and its key/value source have different compress_ratios",
                     f"{r} and {m.ratios[sources[-1]]} (layer {sources[-1]})", "equal ratios")
    if m.candidate >= 0:
        _require(m.candidate in m.index_sources, "candidate_source_layer_id must be an index source", m.candidate,
                 list(m.index_sources))
        reach = (m.candidate_blocks - 1) * m.candidate_size + 1
        _require(reach >= m.index_topk, "the candidate blocks may hold fewer entries than index_topk", reach,
                 f">= {m.index_topk}")
        later = [i for i in m.index_sources if i > m.candidate]
        wrong = [i for i in later if m.source(m.kv_sources, i) != m.source(m.kv_sources, m.candidate)]
        _require(not wrong, "an index source after the candidate source reads other keys", wrong, "the same source")
    _require(m.rope_dim % 2 == 0 and m.rope_dim <= min(m.head_dim, m.index_dim), "qk_rope_head_dim does not fit",
             m.rope_dim, f"even, <= {min(m.head_dim, m.index_dim)}")
    _require(m.experts_per_tok <= m.experts, "num_experts_per_tok exceeds n_routed_experts", m.experts_per_tok,
             f"<= {m.experts}")


@dataclass(frozen=True)
class VisionTensors:
    tower: dict[str, StoredTensor]
    aligner: dict[str, StoredTensor]
    markers: dict[str, StoredTensor]


def vision_tensors(cfg: Config, hidden: int) -> VisionTensors:
    """Tensors of the vision part as ``vision_config`` describes them (empty without one), all bf16."""
    v = cfg.raw.get("vision_config")
    if not v:
        return VisionTensors({}, {}, {})
    width, inner, patch = v["hidden_size"], v["intermediate_size"], v["patch_size"]
    joined = width * v["downsample_ratio"] ** 2

    def bf16(*shape: int) -> StoredTensor:
        return StoredTensor("BF16", shape)

    tower = {"vision.patch_embed.proj.weight": bf16(width, 3 * patch * patch),
             "vision.patch_embed.proj.bias": bf16(width), "vision.norm.weight": bf16(width)}
    for i in range(v["num_hidden_layers"]):
        b = f"vision.blocks.{i}."
        tower |= {b + "norm1.weight": bf16(width), b + "norm2.weight": bf16(width),
                  b + "attn.wqkv.weight": bf16(3 * width, width), b + "attn.wqkv.bias": bf16(3 * width),
                  b + "attn.wo.weight": bf16(width, width), b + "attn.wo.bias": bf16(width),
                  b + "mlp.w1.weight": bf16(2 * inner, width), b + "mlp.w2.weight": bf16(width, inner)}
    aligner = {"aligner.w1.weight": bf16(hidden, joined), "aligner.w1.bias": bf16(hidden),
               "aligner.w2.weight": bf16(hidden, hidden), "aligner.w2.bias": bf16(hidden)}
    markers = {f"image_{k}": bf16(hidden) for k in ("start", "end", "newline")}
    return VisionTensors(tower, aligner, markers)
