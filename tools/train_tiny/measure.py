"""Numbers of a trained model: held-out loss, what bounded replay costs, how drafts are accepted, how sure they are."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from .decode import continue_prompts
from .draft import DraftHead
from .layers import Mode
from .model import Backbone

CONTEXT = 2048


def chunk_starts(tokens: int, most: int | None) -> list[int]:
    """Starts of the chunks of CONTEXT tokens that a stream is judged on: all of them, or ``most`` spread evenly."""
    count = (tokens - 1) // CONTEXT
    kept = count if most is None else min(most, count)
    return [i * count // kept * CONTEXT for i in range(kept)]


@torch.no_grad()
def token_losses(backbone: Backbone, tokens: Tensor, mode: Mode, most: int | None = None, batch: int = 4) -> Tensor:
    """-ln p [chunks, CONTEXT] of each chunk's next tokens; every chunk starts without context."""
    starts = torch.tensor(chunk_starts(tokens.numel(), most), device=tokens.device)
    at = starts[:, None] + torch.arange(CONTEXT, device=tokens.device)
    ids, targets = tokens[at], tokens[at + 1]
    parts = []
    for some, following in zip(ids.split(batch), targets.split(batch), strict=True):
        parts.append(backbone.loss(backbone(some, mode).hidden, following, mode))
    return torch.cat(parts)


def _last_log_probabilities(backbone: Backbone, ids: Tensor, mode: Mode, segments: Tensor | None = None) -> Tensor:
    out = backbone(ids, mode, segments)
    return backbone.logits(out.hidden[:, -1], mode).double().log_softmax(-1)[0]


@torch.no_grad()
def replay_divergence(backbone: Backbone, tokens: Tensor, mode: Mode, prompts: int, seed: int) -> dict[str, float]:
    """Mean KL in nats at the last row of prompts of 400 to 2,000 tokens: exact against bounded replay of one window,
    and exact against the last window of tokens alone."""
    window = backbone.shape.sliding_window
    generator = torch.Generator().manual_seed(seed)
    replay, alone, agree = [], [], []
    for _ in range(prompts):
        length = int(torch.randint(400, 2001, (), generator=generator))
        length += length % window == 0
        at = int(torch.randint(tokens.numel() - length, (), generator=generator))
        ids = tokens[None, at : at + length]
        start = torch.zeros_like(ids)
        start[:, -window:] = length - window
        exact = _last_log_probabilities(backbone, ids, mode)
        bounded = _last_log_probabilities(backbone, ids, mode, start)
        short = _last_log_probabilities(backbone, ids[:, -window:], mode)
        replay.append(float((exact.exp() * (exact - bounded)).sum()))
        alone.append(float((exact.exp() * (exact - short)).sum()))
        agree.append(float(exact.argmax() == bounded.argmax()))
    mean = {"replay": replay, "last_window_only": alone, "replay_same_argmax": agree}
    return {name: sum(values) / len(values) for name, values in mean.items()}


def extend(
    backbone: Backbone, ids: Tensor, count: int, mode: Mode, generator: torch.Generator | None = None
) -> Tensor:
    """ids [B, T] with ``count`` tokens more: greedy ones, or samples at temperature 1 when there is a generator."""
    longer = F.pad(ids, (0, count))
    rows = torch.ones(len(ids), device=ids.device)
    return continue_prompts(backbone, longer, rows * ids.shape[1], rows, mode, generator)[0]


@dataclass
class Drafts:
    """What speculative greedy decoding of ``sequences`` did.

    ``accepted`` holds the accepted drafts of every verification step, ``hits`` [steps, block] the outcome of each
    drafted position, NaN after a rejection, ``confidence`` [steps, block] the confidence logits and ``sequence`` the
    number of each step's sequence.
    """

    accepted: list[int]
    hits: Tensor
    confidence: Tensor
    sequence: list[int] = field(default_factory=list)

    @property
    def mean_length(self) -> float:
        """Tokens a step, the bonus token included."""
        return sum(self.accepted) / len(self.accepted) + 1


@torch.no_grad()
def speculate(backbone: Backbone, draft: DraftHead, sequences: Tensor, prompt: int, mode: Mode) -> Drafts:
    """Replay greedy speculative decoding on sequences [B, prompt + n] whose tail is the greedy continuation.

    A draft at anchor a is a pure function of the tokens up to a, so every anchor is drafted at once and the
    steps that decoding would take are then walked through.
    """
    size = draft.shape.dspark_block_size
    out = backbone(sequences, mode)
    context = draft.context_keys(out.features, mode)
    anchors = torch.arange(prompt, sequences.shape[1] - size, device=sequences.device)
    tokens, confidence, _ = draft.propose(backbone, context, sequences, anchors.expand(len(sequences), -1), mode)
    at = anchors[:, None] + 1 + torch.arange(size, device=sequences.device)
    right = (tokens == sequences[:, at]).cpu()
    confidence = confidence.float().cpu()
    accepted: list[int] = []
    sequence: list[int] = []
    hits, sure = [], []
    for row in range(len(sequences)):
        step = 0
        while step < right.shape[1]:
            good = int(right[row, step].long().cumprod(0).sum())
            accepted.append(good)
            sequence.append(row)
            reached = torch.arange(size) <= good
            hits.append(torch.where(reached, right[row, step].float(), torch.nan))
            sure.append(confidence[row, step])
            step += good + 1
    return Drafts(accepted, torch.stack(hits), torch.stack(sure), sequence)


@torch.no_grad()
def sampled_length(
    backbone: Backbone,
    draft: DraftHead,
    sequences: Tensor,
    prompt: int,
    mode: Mode,
    generator: torch.Generator,
    anchors: int = 8,
) -> float:
    """Expected tokens a step, bonus included, of drafts sampled at temperature 1 and kept by rejection sampling, at
    ``anchors`` evenly spaced positions of sequences [B, prompt + n], which are samples at temperature 1 or text."""
    size = draft.shape.dspark_block_size
    context = draft.context_keys(backbone(sequences, mode).features, mode)
    places = torch.linspace(prompt, sequences.shape[1] - size - 1, anchors).long().tolist()
    total = 0.0
    for place in places:
        at = torch.full((len(sequences), 1), place, device=sequences.device)
        tokens, _, chance = draft.propose(backbone, context, sequences, at, mode, generator)
        ids = torch.cat((sequences[:, : place + 1], tokens[:, 0]), 1)
        hidden = backbone(ids, mode).hidden[:, place:-1]
        wanted = backbone.logits(hidden, mode).softmax(-1).gather(-1, tokens[:, 0, :, None])[..., 0]
        total += float((wanted / chance[:, 0]).clamp(max=1).cumprod(-1).sum(-1).mean())
    return 1 + total / len(places)


def acceptance_by_position(drafts: Drafts) -> list[float]:
    """Share of accepted drafts at each position among steps that reached it."""
    return [float(column[~column.isnan()].mean()) for column in drafts.hits.T]


def area_under_curve(drafts: Drafts) -> float:
    """Chance that an accepted draft has a higher confidence than a rejected one, ties counting half."""
    known = ~drafts.hits.isnan()
    label, score = drafts.hits[known], drafts.confidence[known]
    _, group, counts = score.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = (last - (counts - 1) / 2)[group]  # equal scores share the mean of their ranks
    positive, negative = float(label.sum()), float((1 - label).sum())
    return (float(ranks[label > 0].sum()) - positive * (positive + 1) / 2) / (positive * negative)


def _cumulative(drafts: Drafts, temperatures: list[float]) -> tuple[Tensor, Tensor]:
    """(predicted, observed) [steps]: that the first len(temperatures) drafts of a step are all accepted."""
    count = len(temperatures)
    observed = torch.nan_to_num(drafts.hits[:, :count], nan=0.0).prod(-1)
    return torch.sigmoid(drafts.confidence[:, :count] / torch.tensor(temperatures)).prod(-1), observed


def calibration_error(drafts: Drafts, temperatures: list[float], bins: int = 10) -> float:
    """Expected calibration error of the running product of confidences: the mean gap between predicted and observed
    frequency over equally wide bins, weighted by their counts."""
    predicted, observed = _cumulative(drafts, temperatures)
    bucket = (predicted * bins).long().clamp(max=bins - 1)
    gap = torch.zeros(bins).index_add_(0, bucket, predicted - observed)
    return float(gap.abs().sum() / predicted.numel())


def calibrate(drafts: Drafts) -> list[float]:
    """Sequential temperature scaling: position by position the temperature with the least calibration error of the
    running product, earlier ones fixed."""
    grid = [round(0.3 * 1.04**i, 3) for i in range(68)]
    chosen: list[float] = []
    for _ in range(drafts.hits.shape[1]):
        chosen.append(min(grid, key=lambda t: calibration_error(drafts, [*chosen, t])))
    return chosen


def part(drafts: Drafts, first: bool) -> Drafts:
    """Every other verification step, for calibrating on one half and judging on the other."""
    keep = slice(0, None, 2) if first else slice(1, None, 2)
    return Drafts(drafts.accepted[keep], drafts.hits[keep], drafts.confidence[keep], drafts.sequence[keep])
