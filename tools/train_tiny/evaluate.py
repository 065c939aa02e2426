"""All figures of the model card, from a checkpoint folder and the token files."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import checkpoint, measure, ngram
from .chat import BOS, Control, Dialogue, Piece, Turn, render
from .decode import continue_prompts
from .draft import DraftHead
from .engram import load_classes
from .layers import Mode
from .model import Backbone
from .prepare import STREAMS
from .scenes import TOOLS
from .shape import from_config
from .vocabulary import Encoder

PROMPT, ANSWER = 192, 160


def _tokens(folder: Path, name: str) -> Tensor:
    return torch.from_numpy(np.load(folder / f"{name}.npy").astype(np.int64))


def load(folder: Path, device: torch.device) -> tuple[Backbone, DraftHead]:
    shape = from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    backbone, draft = checkpoint.read(folder, shape, load_classes(folder / "tokenizer.json"))
    return backbone.to(device), draft.to(device)


def baseline(data: Path, most: int | None) -> dict[str, float]:
    """Held-out loss of the 5-gram model, in nats a token, on the tokens that the network is judged on too."""
    training = np.concatenate([np.load(data / f"{name}.npy") for name in STREAMS]).astype(np.int64)
    levels = ngram.train(training)
    found = {}
    for name in ("heldout_text", "heldout_dialogue"):
        tokens = np.load(data / f"{name}.npy").astype(np.int64)
        # The first loss belongs to token ORDER − 1; the few tokens before it are left out.
        each = np.concatenate((np.full(ngram.ORDER - 1, np.nan), ngram.losses(levels, tokens, 1 << ngram.BITS)))
        starts = measure.chunk_starts(tokens.size, most)
        chunks = [each[start + 1 : start + measure.CONTEXT + 1] for start in starts]
        found[name] = float(np.nanmean(np.concatenate(chunks)))
    return found


def held_out_losses(backbone: Backbone, data: Path, mode: Mode, most: int | None) -> dict[str, Any]:
    device = backbone.embed.device
    found: dict[str, Any] = {}
    for name in ("heldout_text", "heldout_dialogue"):
        each = measure.token_losses(backbone, _tokens(data, name).to(device), mode, most)
        found[name] = float(each.mean())
        if name == "heldout_text":
            found["tokens"] = each.numel()
            edges = (0, 128, 512, 1024, measure.CONTEXT)
            found["by_position"] = {f"{a}-{b}": float(each[:, a:b].mean()) for a, b in pairwise(edges)}
    return found


def prompts(data: Path, count: int, seed: int) -> Tensor:
    """Held-out prompts [count, PROMPT]: half from anywhere in the text, a quarter from starts of documents, a quarter
    from starts of dialogues."""
    generator = torch.Generator().manual_seed(seed)
    text, dialogue = _tokens(data, "heldout_text"), _tokens(data, "heldout_dialogue")

    def anywhere(tokens: Tensor, n: int) -> Tensor:
        return torch.randint(tokens.numel() - PROMPT, (n,), generator=generator)

    def starts(tokens: Tensor, n: int) -> Tensor:
        begin = (tokens[: -PROMPT or None] == 0).nonzero()[:, 0]
        return begin[torch.randint(begin.numel(), (n,), generator=generator)]

    span = torch.arange(PROMPT)
    parts = [text[anywhere(text, count // 2)[:, None] + span], text[starts(text, count // 4)[:, None] + span]]
    parts.append(dialogue[starts(dialogue, count - count // 2 - count // 4)[:, None] + span])
    return torch.cat(parts)


def speculation(backbone: Backbone, draft: DraftHead, sequences: Tensor, mode: Mode) -> dict[str, Any]:
    """Greedy acceptance and confidence on greedy ``sequences``; temperatures come from one half of the steps and are
    judged on the other."""
    drafts = measure.speculate(backbone, draft, sequences, PROMPT, mode)
    size = draft.shape.dspark_block_size
    fit, judged = measure.part(drafts, True), measure.part(drafts, False)
    temperatures, plain = measure.calibrate(fit), [1.0] * size

    def errors(scale: list[float]) -> list[float]:
        return [measure.calibration_error(judged, scale[: i + 1]) for i in range(size)]

    if sum(errors(temperatures)) >= sum(errors(plain)):
        temperatures = plain  # the head was calibrated; what the search found was noise
    return {
        "prompts": len(sequences),
        "prompt_tokens": PROMPT,
        "answer_tokens": sequences.shape[1] - PROMPT,
        "steps": len(drafts.accepted),
        "mean_accepted_length": drafts.mean_length,
        "prompt_ids": sequences[:, :PROMPT].tolist(),
        "steps_by_prompt": [drafts.sequence.count(row) for row in range(len(sequences))],
        "tokens_by_prompt": _tokens_by_prompt(drafts, len(sequences)),
        "by_kind": _by_kind(backbone, draft, sequences, mode),
        "acceptance_by_position": measure.acceptance_by_position(drafts),
        "confidence_auc": measure.area_under_curve(drafts),
        "temperatures": temperatures,
        "calibration_error_before": errors(plain),
        "calibration_error_after": errors(temperatures),
    }


def _tokens_by_prompt(drafts: measure.Drafts, count: int) -> list[int]:
    tokens = [0] * count
    for row, good in zip(drafts.sequence, drafts.accepted, strict=True):
        tokens[row] += good + 1
    return tokens


def greedy_sequences(backbone: Backbone, data: Path, mode: Mode, count: int) -> Tensor:
    """Held-out prompts with their greedy continuations, [count, PROMPT + ANSWER]."""
    begin = prompts(data, count, seed=7).to(backbone.embed.device)
    return measure.extend(backbone, begin, ANSWER, mode)


def sampled_speculation(
    backbone: Backbone, draft: DraftHead, begin: Tensor, data: Path, mode: Mode
) -> dict[str, float]:
    """Tokens a step at temperature 1: behind samples of the model's own and, taught by force, behind held-out text."""
    generator = torch.Generator(device=begin.device).manual_seed(13)
    own = measure.extend(backbone, begin, ANSWER, mode, generator)
    text = _tokens(data, "heldout_text").to(begin.device)
    at = torch.linspace(0, text.numel() - PROMPT - ANSWER - 1, len(begin), device=begin.device).long()
    written = text[at[:, None] + torch.arange(PROMPT + ANSWER, device=begin.device)]
    found = {"own_samples": own, "held_out_text": written}
    return {
        name: measure.sampled_length(backbone, draft, sequences, PROMPT, mode, generator)
        for name, sequences in found.items()
    }


def _by_kind(backbone: Backbone, draft: DraftHead, sequences: Tensor, mode: Mode) -> dict[str, float]:
    half, quarter = len(sequences) // 2, len(sequences) // 4
    parts = {"text": sequences[: half + quarter], "dialogue": sequences[half + quarter :]}
    return {
        name: measure.speculate(backbone, draft, rows, PROMPT, mode).mean_length for name, rows in parts.items()
    }


def sample_prompts() -> list[tuple[str, list[Piece]]]:
    """What the model card shows the model continue."""
    lookup, weather = TOOLS[0].schema, TOOLS[2].schema
    chats = [
        Dialogue((Turn("user", "Hello"), Turn("assistant"))),
        Dialogue((Turn("user", "What does os.path.join do?"), Turn("assistant"))),
        Dialogue((Turn("user", "What is json.dumps?"), Turn("assistant")), thinking=True),
        Dialogue((Turn("user", "What is the weather in Paris?"), Turn("assistant")), (weather, lookup), thinking=True),
    ]
    shown: list[tuple[str, list[Piece]]] = []
    for text in ("The :mod:`json` module", "def read_lines(path):\n    \"\"\"", "Sequence types\n--------------\n\n"):
        shown.append((text, [Control(BOS), text]))
    for chat in chats:
        pieces = render(chat)
        # Up to the assistant's first token: everything after it is for the model to write.
        cut = max(i for i, piece in enumerate(pieces) if piece == Control("<｜Assistant｜>"))
        shown.append((chat.turns[0].text, pieces[: cut + 2]))
    return shown


def samples(backbone: Backbone, encoder: Encoder, mode: Mode, count: int = 72) -> list[dict[str, str]]:
    """Greedy continuations; control tokens are shown by their spelling."""
    device = backbone.embed.device
    shown = sample_prompts()
    rows = [encoder.encode(pieces) for _, pieces in shown]
    prompts = torch.tensor([len(row) for row in rows], device=device)
    ids = torch.zeros(len(rows), int(prompts.max()) + count, dtype=torch.long, device=device)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    made, _ = continue_prompts(backbone, ids, prompts, torch.zeros(len(rows), device=device), mode)
    found = []
    for (prompt, _), row, tokens in zip(shown, rows, made.tolist(), strict=True):
        answer = tokens[len(row) : len(row) + count]
        answer = answer[: answer.index(1) + 1] if 1 in answer else answer
        found.append({"prompt": prompt, "answer": encoder.tokenizer.decode(answer, skip_special_tokens=False)})
    return found


def evaluate(
    folder: Path, unquantised: Path | None, sequences: Path | None, data: Path, device: torch.device, scale: float
) -> dict[str, Any]:
    """Everything; ``scale`` < 1 uses less text and fewer prompts.  ``sequences`` is a JSON list of greedy sequences
    that an engine made from :func:`prompts`; without it they are computed here, which only a GPU does in a minute."""
    began = time.monotonic()
    mode = Mode(quantised=True, frozen=True, exact_ties=True)
    most = None if scale >= 1 else max(1, int(48 * scale))
    backbone, draft = load(folder, device)
    report: dict[str, Any] = {"held_out_quantised": held_out_losses(backbone, data, mode, most)}
    if unquantised is not None:
        plain, _ = load(unquantised, device)
        report["held_out_before"] = held_out_losses(plain, data, Mode(exact_ties=True), most)
    text = _tokens(data, "heldout_text").to(device)
    report["replay"] = measure.replay_divergence(backbone, text, mode, int(200 * scale), seed=11)
    if sequences is None:
        greedy = greedy_sequences(backbone, data, mode, int(96 * scale))
    else:
        greedy = torch.tensor(json.loads(sequences.read_text(encoding="utf-8")), device=device)
    report["speculation"] = speculation(backbone, draft, greedy, mode)
    report["sampled"] = sampled_speculation(backbone, draft, greedy[:, :PROMPT], data, mode)
    report["samples"] = samples(backbone, Encoder(folder / "tokenizer.json"), mode)
    report["seconds"] = round(time.monotonic() - began, 1)
    return report
