"""The model in the official checkpoint format, written and read back."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .draft import DraftHead
from .formats import pack_fp4_rows, pack_fp8_blocks, pack_fp8_rows, rounded, unpack
from .layers import Experts, Linear
from .model import Backbone, Block
from .shape import Shape, to_config

Entry = tuple[str, Tensor, str]  # official name without suffix, values, storage


def _linear(name: str, linear: Linear) -> Entry:
    return name, linear.weight, linear.storage


def _experts(prefix: str, ffn: Experts) -> Iterator[Entry]:
    yield f"{prefix}.gate", ffn.gate, "bf16"
    # One bias serves text; image positions never occur in training and get the same.
    yield f"{prefix}.gate.bias", ffn.bias, "plain f32"
    yield f"{prefix}.gate.bias_vl", ffn.bias, "plain f32"
    for e in range(ffn.gate.shape[0]):
        for part in ("w1", "w2", "w3"):
            yield f"{prefix}.experts.{e}.{part}", getattr(ffn, part)[e], "fp4"
    for part in ("w1", "w2", "w3"):
        yield _linear(f"{prefix}.shared_experts.{part}", getattr(ffn, f"shared_{part}"))


def _block(prefix: str, block: Block) -> Iterator[Entry]:
    for part in ("attn_norm", "ffn_norm"):
        yield f"{prefix}.{part}", getattr(block, part).weight, "bf16"
    for part in ("hc_attn", "hc_ffn"):
        mixer = getattr(block, part)
        for field in ("fn", "base", "scale"):
            yield f"{prefix}.{part}_{field}", getattr(mixer, field), "plain f32"
    attn, at = block.attn, f"{prefix}.attn"
    for part in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"):
        yield _linear(f"{at}.{part}", getattr(attn, part))
    yield f"{at}.q_norm", attn.q_norm.weight, "bf16"
    yield f"{at}.kv_norm", attn.kv_norm.weight, "bf16"
    yield f"{at}.attn_sink", attn.attn_sink, "plain f32"
    if attn.compressor is not None:
        yield _linear(f"{at}.compressor.wkv", attn.compressor.wkv)
        yield f"{at}.compressor.norm", attn.compressor.norm.weight, "bf16"
        if attn.compressor.wgate is not None:
            yield _linear(f"{at}.compressor.wgate", attn.compressor.wgate)
    if attn.indexer is not None:
        yield _linear(f"{at}.indexer.wq_b", attn.indexer.wq_b)
        yield _linear(f"{at}.indexer.weights_proj", attn.indexer.weights_proj)
        if attn.indexer.wk is not None and attn.indexer.k_norm is not None:
            yield _linear(f"{at}.indexer.wk", attn.indexer.wk)
            yield f"{at}.indexer.k_norm", attn.indexer.k_norm.weight, "bf16"
    yield from _experts(f"{prefix}.ffn", block.ffn)


def backbone_entries(backbone: Backbone) -> Iterator[Entry]:
    """Every parameter under its official name, with the form it is stored in."""
    yield "embed", backbone.embed, "bf16"
    yield "head", backbone.head, "bf16"
    yield "norm", backbone.norm.weight, "bf16"
    for i, block in enumerate(backbone.blocks()):
        yield from _block(f"layers.{i}", block)
        engram = backbone.engram_of(i)
        if engram is not None:
            yield f"layers.{i}.engram.embed", engram.embed, "fp8 rows"
            yield _linear(f"layers.{i}.engram.wkv", engram.wkv)
            yield f"layers.{i}.engram.q_weight", engram.q_weight, "plain bf16"
            yield f"layers.{i}.engram.k_weight", engram.k_weight, "plain bf16"


def draft_entries(draft: DraftHead) -> Iterator[Entry]:
    """The same of the draft head."""
    for i, block in enumerate(draft.draft_blocks()):
        yield from _block(f"mtp.{i}", block)
    last = f"mtp.{len(draft.blocks) - 1}"
    yield _linear("mtp.0.main_proj", draft.main_proj)
    yield "mtp.0.main_norm", draft.main_norm.weight, "bf16"
    yield f"{last}.norm", draft.norm.weight, "bf16"
    yield f"{last}.markov_head.embed", draft.markov_embed, "bf16"
    yield f"{last}.markov_head.head", draft.markov_head, "bf16"
    yield _linear(f"{last}.confidence_head.proj", draft.confidence)


def entries(backbone: Backbone, draft: DraftHead) -> Iterator[Entry]:
    yield from backbone_entries(backbone)
    yield from draft_entries(draft)


def tensors(backbone: Backbone, draft: DraftHead, quantised: bool) -> dict[str, Tensor]:
    """Official tensor names and values: the released storage formats, or float32 throughout."""
    packers = {"fp8": pack_fp8_blocks, "fp8 rows": pack_fp8_rows, "fp4": pack_fp4_rows}
    out: dict[str, Tensor] = {}
    for name, value, storage in entries(backbone, draft):
        value = value.detach().float().cpu()
        key = name if storage.startswith("plain") else f"{name}.weight"
        if quantised and storage in packers:
            out[key], out[f"{name}.scale"] = packers[storage](value)
        else:
            is_half = quantised and storage.endswith("bf16")
            out[key] = value.to(torch.bfloat16 if is_half else torch.float32).clone().contiguous()
    return out


@torch.no_grad()
def frozen(backbone: Backbone) -> Backbone:
    """A copy whose parameters are the values that their stored forms stand for: for modes that are ``frozen``."""
    kinds = {"fp8": "fp8_blocks", "fp8 rows": "fp8_groups", "fp4": "fp4_groups", "bf16": "bf16", "plain bf16": "bf16"}
    fixed = copy.deepcopy(backbone).eval().requires_grad_(False)
    for _, value, storage in backbone_entries(fixed):
        if storage in kinds:
            value.copy_(rounded(value, kinds[storage]))
    return fixed


def write(folder: Path, backbone: Backbone, draft: DraftHead, image_token_id: int, quantised: bool) -> None:
    """config.json, generation_config.json and model.safetensors, each aside first and then renamed into place."""
    folder.mkdir(parents=True, exist_ok=True)
    config = to_config(backbone.shape, image_token_id, quantised)
    generation: dict[str, object] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "do_sample": True}
    generation |= {"temperature": 1.0, "top_p": 1.0}
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        aside = folder / f".{name}.new"
        aside.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        os.replace(aside, folder / name)
    aside = folder / ".model.safetensors.new"
    save_file(tensors(backbone, draft, quantised), str(aside), metadata={"format": "pt"})
    os.replace(aside, folder / "model.safetensors")


@torch.no_grad()
def read(folder: Path, shape: Shape, classes: Tensor) -> tuple[Backbone, DraftHead]:
    """The model of a checkpoint folder, its parameters being the values that the stored forms stand for."""
    stored = load_file(str(folder / "model.safetensors"))
    backbone, draft = Backbone(shape, classes), DraftHead(shape)
    for name, value, storage in entries(backbone, draft):
        key = name if storage.startswith("plain") else f"{name}.weight"
        if key not in stored:
            raise ValueError(f"{folder}/model.safetensors has no tensor {key}, which its config.json implies.")
        scale = stored.get(f"{name}.scale")
        found = stored[key].float() if scale is None else unpack(stored[key], scale)
        if found.shape != value.shape:
            wanted = f"{list(value.shape)} by its config.json"
            raise ValueError(f"{folder}/model.safetensors: {key} is {list(found.shape)}, but {wanted}.")
        value.data.copy_(found)
    return backbone.eval(), draft.eval()


def parameter_count(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())
