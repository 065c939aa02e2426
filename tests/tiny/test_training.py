"""The trainer of the demonstration model, on a model that is smaller still."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tools.train_tiny import checkpoint
from tools.train_tiny.decode import Decoder, continue_prompts
from tools.train_tiny.draft import DraftHead
from tools.train_tiny.engram import table_primes
from tools.train_tiny.layers import Mode
from tools.train_tiny.model import Backbone
from tools.train_tiny.schedule import Phase, parse
from tools.train_tiny.shape import Shape, from_config, to_config
from tools.train_tiny.train import Trainer

VOCAB = 128
CLASSES = torch.arange(VOCAB)
PLAN = (
    Phase("short", 4, 64, 4, 4e-3, 4e-3, warm_up=1, index_rows=4),
    Phase("final", 2, 96, 2, 4e-3, 0.0, quantised=True, sparse=True, replay=0.5, index_rows=4),
    Phase("draft", 2, 96, 2, 3e-3, 0.0, quantised=True, sparse=True, anchors=6, pool=5),
)


def small_shape() -> Shape:
    """Every kind of layer; the window, the selection and the candidates all leave something out at 96 tokens."""
    shape = Shape(
        vocab_size=VOCAB, hidden_size=64, head_dim=32, qk_rope_head_dim=16, num_attention_heads=4, q_lora_rank=32,
        o_lora_rank=32, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, sliding_window=16,
        index_n_heads=2, index_head_dim=32, index_topk=16, candidate_topk_blocks=5, candidate_block_size=4,
        engram_vocab_size=40, engram_n_heads=1, engram_compressed_vocab_size=VOCAB, dspark_noise_token_id=5,
        dspark_n_routed_experts=3, dspark_markov_rank=16,
    )
    return replace(shape, engram_num_embeddings=tuple(sum(p) for p in table_primes(shape).values()))


@pytest.fixture(scope="module")
def token_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Streams in which each token follows from the one before, so that a few steps learn something."""
    folder = tmp_path_factory.mktemp("tokens")
    rng = np.random.default_rng(3)
    for name in ("prose", "code", "dialogue"):
        tokens = np.zeros(4000, dtype=np.uint16)
        for i in range(1, tokens.size):
            tokens[i] = 0 if i % 97 == 0 else 3 + (tokens[i - 1] * 5 + rng.integers(0, 2)) % 20
        np.save(folder / f"{name}.npy", tokens)
    return folder


def trainer(folder: Path) -> Trainer:
    return Trainer(small_shape(), CLASSES, folder, PLAN, torch.device("cpu"))


def random_model(seed: int) -> tuple[Backbone, DraftHead]:
    torch.manual_seed(seed)
    backbone, draft = Backbone(small_shape(), CLASSES), DraftHead(small_shape())
    for block in [*backbone.blocks(), *draft.draft_blocks()]:
        block.ffn.bias.normal_(std=0.1)
    return backbone.eval(), draft.eval()


@torch.no_grad()
def logits(backbone: Backbone, ids: Tensor, mode: Mode, segments: Tensor | None = None) -> Tensor:
    return backbone.logits(backbone(ids, mode, segments).hidden, mode)


def random_ids(length: int) -> Tensor:
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(1))


def test_a_few_steps_lower_the_loss_and_every_phase_runs(token_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    run = trainer(token_folder)
    run.plan = (replace(PLAN[0], steps=30), *PLAN[1:])
    assert run.run(log, seconds=600)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["phase"] for line in lines] == ["short", "short", "final", "final", "draft", "draft"]
    assert lines[1]["loss"] < lines[0]["loss"] - 1.0
    assert all(np.isfinite(line["norm"]) and line["norm"] > 0 for line in lines)


def test_rounding_passes_a_gradient_to_every_quantised_matrix(token_folder: Path) -> None:
    run = trainer(token_folder)
    run.progress.phase = 1
    run._start_phase()
    run._loss(run._draw())[0].backward()
    without = [name for name, p in run.backbone.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


def test_a_run_in_two_legs_ends_with_the_weights_of_a_run_in_one(token_folder: Path, tmp_path: Path) -> None:
    whole = trainer(token_folder)
    whole.run(tmp_path / "whole.jsonl", seconds=600)
    first = trainer(token_folder)
    while not first.run(tmp_path / "parts.jsonl", seconds=0):
        first.save(tmp_path / "state.pt")
        first = trainer(token_folder)
        first.load(tmp_path / "state.pt")
    for name, value in whole.backbone.state_dict().items():
        assert torch.equal(value, first.backbone.state_dict()[name]), name
    for name, value in whole.draft.state_dict().items():
        assert torch.equal(value, first.draft.state_dict()[name]), name


def test_a_finished_state_is_read_where_random_numbers_are_made_otherwise(token_folder: Path, tmp_path: Path) -> None:
    """As on another device: what is exported there needs the weights alone."""
    run = trainer(token_folder)
    run.progress.phase = len(PLAN)
    run.save(tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    torch.save(state | {"generator": torch.zeros(16, dtype=torch.uint8)}, tmp_path / "state.pt")
    other = Trainer(small_shape(), CLASSES, token_folder, (), torch.device("cpu"))
    other.load(tmp_path / "state.pt")
    assert torch.equal(other.backbone.embed, run.backbone.embed)


@pytest.mark.parametrize("quantised", [False, True])
def test_a_written_checkpoint_computes_what_the_trained_model_computes(quantised: bool, tmp_path: Path) -> None:
    backbone, draft = random_model(7)
    checkpoint.write(tmp_path, backbone, draft, image_token_id=VOCAB - 1, quantised=quantised)
    config = json.loads((tmp_path / "config.json").read_text())
    again, draft_again = checkpoint.read(tmp_path, from_config(config), CLASSES)
    mode, ids = Mode(quantised=quantised, exact_ties=True), random_ids(96)
    assert torch.equal(logits(backbone, ids, mode), logits(again, ids, mode))
    anchors = torch.tensor([[20, 60, 90]])
    with torch.no_grad():
        drafts = [
            head.propose(model, head.context_keys(model(ids, mode).features, mode), ids, anchors, mode)
            for model, head in ((backbone, draft), (again, draft_again))
        ]
    assert torch.equal(drafts[0][0], drafts[1][0])
    assert torch.equal(drafts[0][1], drafts[1][1])


def test_a_checkpoint_without_a_tensor_is_refused_in_one_sentence(tmp_path: Path) -> None:
    backbone, draft = random_model(7)
    checkpoint.write(tmp_path, backbone, draft, image_token_id=VOCAB - 1, quantised=True)
    deeper = replace(small_shape(), dspark_n_routed_experts=4)
    with pytest.raises(ValueError, match=r"mtp\.0\.ffn"):
        checkpoint.read(tmp_path, deeper, CLASSES)


def test_a_config_comes_back_as_the_shape_that_wrote_it() -> None:
    shape = small_shape()
    assert from_config(to_config(shape, 9, quantised=True)) == shape


def test_an_unknown_config_key_is_refused() -> None:
    config = to_config(small_shape(), 9, quantised=True)
    config["text_config"]["hidden_act"] = "gelu"
    with pytest.raises(ValueError, match="hidden_act"):
        from_config(config)


def test_no_logit_depends_on_a_later_token() -> None:
    backbone, _ = random_model(5)
    ids = random_ids(96)
    changed = ids.clone()
    changed[0, 70:] = (changed[0, 70:] + 11) % VOCAB
    mode = Mode(quantised=True, exact_ties=True)
    a, b = logits(backbone, ids, mode), logits(backbone, changed, mode)
    assert torch.equal(a[:, :70], b[:, :70])
    assert not torch.equal(a[:, 70:], b[:, 70:])


def test_a_replay_of_the_whole_prompt_is_exact_and_a_shorter_one_is_not() -> None:
    backbone, _ = random_model(5)
    ids, mode = random_ids(96), Mode(exact_ties=True)
    exact = logits(backbone, ids, mode)
    start = torch.zeros_like(ids)
    assert torch.equal(logits(backbone, ids, mode, start), exact)
    start[:, 80:] = 80
    replayed = logits(backbone, ids, mode, start)
    assert torch.equal(replayed[:, :80], exact[:, :80])
    assert not torch.allclose(replayed[:, -1], exact[:, -1], atol=1e-6)


@pytest.mark.parametrize("quantised", [False, True])
def test_decoding_with_caches_computes_what_one_pass_does(quantised: bool) -> None:
    backbone, _ = random_model(5)
    ids, mode = random_ids(96), Mode(quantised=quantised, exact_ties=True)
    decoder = Decoder(backbone, len(ids), ids.shape[1], mode)
    rows = [decoder.step(ids[:, : i + 1]) for i in range(ids.shape[1])]
    with torch.no_grad():
        whole = backbone(ids, mode)
    torch.testing.assert_close(torch.cat([row.hidden for row in rows], 1), whole.hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat([row.features for row in rows], 1), whole.features, rtol=1e-4, atol=1e-4)


def test_a_frozen_backbone_computes_what_the_rounded_one_does() -> None:
    backbone, _ = random_model(5)
    ids, mode = random_ids(96), Mode(quantised=True, exact_ties=True)
    fixed = checkpoint.frozen(backbone)
    assert torch.equal(logits(fixed, ids, replace(mode, frozen=True)), logits(backbone, ids, mode))


def test_a_continuation_keeps_the_prompt_and_takes_the_most_probable_tokens() -> None:
    backbone, _ = random_model(5)
    ids, mode = random_ids(48).expand(2, -1), Mode(exact_ties=True)
    prompts = torch.tensor([20, 48])
    made, out = continue_prompts(backbone, ids, prompts, torch.zeros(2), mode, torch.Generator().manual_seed(0))
    assert torch.equal(made[1], ids[1]) and torch.equal(made[0, :20], ids[0, :20])
    assert torch.equal(made[0, 20:], logits(backbone, made, mode)[0, 19:-1].argmax(-1))
    with torch.no_grad():
        torch.testing.assert_close(out.hidden, backbone(made, mode).hidden, rtol=1e-4, atol=1e-4)


def test_a_plan_with_an_unknown_phase_is_refused() -> None:
    with pytest.raises(ValueError, match="shrt"):
        parse("shrt=5")
