"""The shipped demonstration model: complete, small enough, and better than chance by far."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tools.train_tiny.evaluate import load
from tools.train_tiny.layers import Mode
from tools.train_tiny.shape import from_config
from tools.train_tiny.vocabulary import HEAD_TOKENS, IMAGE, Encoder

FOLDER = Path(__file__).parents[2] / "assets" / "tiny"


def test_the_folder_is_complete_and_no_larger_than_twelve_megabytes() -> None:
    needed = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "README.md"}
    assert needed <= {path.name for path in FOLDER.iterdir()}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 12_000_000


def test_the_ids_of_the_config_are_the_tokenizers() -> None:
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    encoder, shape = Encoder(FOLDER / "tokenizer.json"), from_config(config)
    assert [encoder.control_ids[token] for token in HEAD_TOKENS] == [0, 1, 2]
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (0, 1, 2)
    assert config["image_token_id"] == encoder.control_ids[IMAGE]
    assert shape.dspark_noise_token_id == encoder.control_ids["<｜System｜>"]
    assert shape.vocab_size == encoder.tokenizer.get_vocab_size()
    assert encoder.encode_text(["<think>"])[0] != [encoder.control_ids["<think>"]]


def test_the_model_predicts_held_out_text_well_below_the_baselines_loss() -> None:
    backbone, _ = load(FOLDER, torch.device("cpu"))
    prompts = json.loads((FOLDER / "speculation.json").read_text(encoding="utf-8"))["prompt_ids"]
    ids = torch.tensor(prompts[:6])
    mode = Mode(quantised=True)
    with torch.no_grad():
        loss = backbone.loss(backbone(ids[:, :-1], mode).hidden, ids[:, 1:], mode)
    assert float(loss[:, 64:].mean()) < 2.9
