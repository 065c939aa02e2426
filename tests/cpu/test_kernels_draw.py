"""Draws: every token is the one that runtime/sampling.py chooses from the same logits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from cpu.harness import Array, Seq, Step, available_isas, run

from deepinfer.codegen.kernels.spec import KernelSpec, Operand
from deepinfer.runtime.executor import COUPLED, GREEDY, REJECTION, SequenceStart
from deepinfer.runtime.native_sampling import NativeSampling
from deepinfer.runtime.noise import mixed
from deepinfer.runtime.sampling import TokenChooser, leading, top_logprobs
from deepinfer.runtime.sampling_params import SamplingParams

DRAW = np.dtype([("how", "u8"), ("mask", "u8"), ("counts", "u8"), ("recent", "u8"), ("drafted", "u8"),
                 ("logprobs", "u8"), ("ids", "u8"), ("ranks", "u8"), ("draft", "i8"), ("answered", "i8"),
                 ("round", "i8"), ("mode", "i4"), ("noise", "i4"), ("uncounted", "i4"), ("top", "i4"),
                 ("bare", "i4"), ("reserved", "i4")], align=True)
NONE, CHOOSE, JUDGE, GIVEN = range(4)
DRAFT_NOISE, TARGET_NOISE = 1, 2
RNG = np.random.default_rng(5)
PROMPT = np.array([1, 5, 5, 9, 30], np.int64)


def spec_of(size: int, ahead: int = 0) -> KernelSpec:
    operands = (Operand("value", "T", (size,), "f32"), Operand("value", "T", (), "i64", write=True))
    return KernelSpec("draw", "T", operands, (("ahead", ahead), ("logits", 0), ("out", 1)), (), title=f"draw_{size}")


@dataclass
class Drawn:
    """Draws of the rows of one step; keeps what they point to alive. Row i is at position ``c`` + i."""

    rows: int
    c: int = 40
    kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draws = np.zeros(self.rows, DRAW)

    def address(self, x: Any) -> int:
        self.kept.append(x)
        return int(x.ctypes.data)

    def row(self, i: int, start: SequenceStart, size: int, mode: int = CHOOSE, uncounted: int = 0, **more: Any) -> None:
        how = NativeSampling(start, size)
        output = list(start.output)
        self.kept.append(how)
        counts = np.zeros(size, np.uint32)
        counts[np.unique(start.prompt[start.prompt < size])] = 1 << 31
        for token in output[: len(output) - uncounted]:
            counts[token] += 1
        ids = np.array([*start.prompt, *output], np.int64)
        values = {"how": how.record.ctypes.data, "counts": self.address(counts), "answered": len(output),
                  "recent": self.address(ids) + ids.nbytes, "mode": mode, "uncounted": uncounted,
                  "top": -1, **{k: self.address(v) if isinstance(v, np.ndarray) else v for k, v in more.items()}}
        for name, value in values.items():
            self.draws[name][i] = value

    def every(self, start: SequenceStart, size: int, **more: Any) -> Drawn:
        """All rows alike."""
        self.row(0, start, size, **more)
        self.draws[:] = self.draws[0]
        return self

    def tokens(self, logits: Array, isa: str = "", ahead: int = 0) -> list[int]:
        step = Step([Seq(self.rows, self.c)])
        step.c.draws = self.draws.ctypes.data
        return run(spec_of(logits.shape[1], ahead), step, [logits, None], isa=isa)[1].ravel().tolist()


def start_of(params: SamplingParams, output: tuple[int, ...] = (), ends: tuple[int, ...] = (),
             bad: tuple[tuple[int, ...], ...] = (), key: int = 77, mode: int = COUPLED) -> SequenceStart:
    return SequenceStart(params, GREEDY if params.greedy else mode, key, PROMPT, output, ends, bad)


def oracle(start: SequenceStart, logits: Array, position: int) -> int:
    chooser = TokenChooser(start.params, start.key, start.prompt, start.ends, start.bad)
    for token in start.output:
        chooser.took(token)
    return chooser.choose(logits, position)


def kinds_of_logits(size: int) -> Array:
    """Peaked, flat, tied, quantised and far-ranging rows."""
    rows = [RNG.normal(size=size) * s for s in (0.1, 1, 3, 30)]
    rows += [np.zeros(size), np.round(RNG.normal(size=size) * 2), RNG.normal(size=size) * 2 + 1000]
    rows += [np.where(np.arange(size) % 7 == 0, RNG.normal(size=size), -40.0), np.linspace(-300, 20, size)]
    rows += [np.where(np.arange(size) == size - 1, 60.0, 0.0)]
    return np.array(rows, np.float32)


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0}, {}, {"temperature": 0.7}, {"temperature": 2}, {"temperature": 0.02}, {"temperature": 1e-7},
    {"top_k": 1}, {"top_k": 7}, {"top_k": 400, "top_p": 0.9}, {"top_p": 0.5}, {"top_p": 0.95, "temperature": 1.3},
    {"top_p": 1e-6}, {"min_p": 0.05}, {"min_p": 1.0}, {"top_k": 50, "top_p": 0.8, "min_p": 0.02},
    {"allowed_token_ids": [3, 9, 30, 31]}, {"logit_bias": {5: 4.0, 9: -100}}, {"min_tokens": 9},
    {"repetition_penalty": 1.3}, {"frequency_penalty": 0.7}, {"presence_penalty": -1.5, "temperature": 0},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.5, "presence_penalty": 0.4, "top_p": 0.9, "min_tokens": 9,
     "logit_bias": {9: 3.0}}]


@pytest.mark.parametrize("size", [33, 1000, 5003])
def test_a_draw_is_the_token_that_the_oracle_chooses(size: int) -> None:
    logits, output = kinds_of_logits(size), (9, 9, 2, 31, 9)
    for isa in available_isas(spec_of(size)):
        for at, options in enumerate(OPTIONS):
            start = start_of(SamplingParams(**options), output, (0, 2), ((4,), (31, 9, 6), (9, 7)), mixed(at))
            drawn = Drawn(len(logits))
            for i in range(len(logits)):
                drawn.row(i, start, size)
            want = [oracle(start, row, 41 + i) for i, row in enumerate(logits)]
            assert drawn.tokens(logits, isa) == want, (isa, options)


@pytest.mark.parametrize("uncounted", [1, 3, 5])
def test_penalties_count_the_drafts_before_a_row(uncounted: int) -> None:
    logits = np.round(kinds_of_logits(300) * 4) / 4
    params = SamplingParams(temperature=0.5, repetition_penalty=1.7, frequency_penalty=0.9, presence_penalty=0.3)
    start = start_of(params, (9, 9, 2, 31, 9))
    drawn = Drawn(len(logits))
    for i in range(len(logits)):
        drawn.row(i, start, 300, uncounted=uncounted)
    assert drawn.tokens(logits) == [oracle(start, row, 41 + i) for i, row in enumerate(logits)]


def test_a_token_outside_the_mask_is_never_chosen() -> None:
    logits = kinds_of_logits(300)
    start = start_of(SamplingParams(temperature=1.2, top_p=0.9))
    drawn, want = Drawn(len(logits)), []
    for i, row in enumerate(logits):
        allowed = RNG.random(300) < (0.02 if i % 2 else 0.9)
        allowed[[17, 299]] = True
        bits = np.packbits(np.concatenate((allowed, np.ones(20, bool))), bitorder="little").view(np.uint32)
        drawn.row(i, start, 300, mask=np.ascontiguousarray(bits))
        want.append(oracle(start, np.where(allowed, row, -np.inf).astype(np.float32), 41 + i))
    assert drawn.tokens(logits) == want


def test_rows_without_numbers_or_without_a_token_left_say_so() -> None:
    logits = kinds_of_logits(64)[:5]
    logits[0, 63], logits[1, 5], logits[2, :] = np.nan, np.inf, -np.inf
    drawn = Drawn(5)
    for i in range(4):
        drawn.row(i, start_of(SamplingParams(temperature=i % 2)), 64)
    drawn.row(4, start_of(SamplingParams(allowed_token_ids=[3]), bad=((3,),)), 64)
    assert drawn.tokens(logits)[:3] == [-1, -1, -1] and drawn.tokens(logits)[4] == -2


def test_without_options_the_largest_logit_is_taken_and_ties_go_to_the_lower_index() -> None:
    for size in (1, 15, 16, 17, 511, 512, 513, 1024, 2000):
        logits = np.round(RNG.normal(size=(6, size)) * 2).astype(np.float32)
        for isa in available_isas(spec_of(size)):
            found = run(spec_of(size), Step([Seq(6)]), [logits, None], isa=isa)[1].ravel()
            assert found.tolist() == logits.argmax(1).tolist()


def test_a_draw_further_ahead_uses_the_noise_of_its_own_position() -> None:
    logits, start = kinds_of_logits(200), start_of(SamplingParams())
    drawn = Drawn(len(logits))
    for i in range(len(logits)):
        drawn.row(i, start, 200, bare=1)
    assert drawn.tokens(logits, ahead=3) == [oracle(start, row, 44 + i) for i, row in enumerate(logits)]


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_log_probabilities_are_those_of_the_oracle(top: int) -> None:
    logits = kinds_of_logits(3000)
    drawn = Drawn(len(logits))
    values, ids = np.zeros((len(logits), 1 + top)), np.zeros((len(logits), 1 + top), np.int64)
    ranks = np.zeros((len(logits), 1 + top), np.int32)
    for i in range(len(logits)):
        drawn.row(i, start_of(SamplingParams()), 3000, GIVEN if i % 2 else CHOOSE, draft=3 * i + 1, top=top,
                  logprobs=values[i], ids=ids[i], ranks=ranks[i])
    tokens = drawn.tokens(logits)
    for i, token in enumerate(tokens):
        assert token == 3 * i + 1 if i % 2 else token >= 0
        want = top_logprobs(logits[i], token, top)
        assert ids[i, 0] == token and abs(values[i, 0] - want[token].logprob) < 1e-6
        assert ranks[i, 0] == want[token].rank
        for j in range(1, 1 + top):
            found = want[int(ids[i, j])]
            assert abs(values[i, j] - found.logprob) < 1e-6 and ranks[i, j] == found.rank


# ---- rejection -------------------------------------------------------------------------------------------------------
def chance(found: Array, expected: Array) -> float:
    """Of a chi-square at least as large, when draws follow ``expected``."""
    distance = ((found - expected) ** 2 / expected).sum()
    free = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(free, torch.tensor(distance / 2, dtype=torch.float64)))


def probabilities(logits: Array, params: SamplingParams) -> Array:
    """What the options leave of a row, as probabilities."""
    z = logits.astype(np.float64) / params.temperature
    ids = leading(z, params.top_k, params.top_p, params.min_p)
    p = np.exp(z - z.max())
    if ids is not None:
        p[np.setdiff1d(np.arange(len(z)), ids)] = 0
    return p / p.sum()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8}])
@pytest.mark.parametrize("distance", [0.3, 3.0])
def test_a_judged_draft_is_a_draw_from_the_target(options: dict[str, Any], distance: float) -> None:
    """Chi-square over 20,000 draws; a draft is also accepted as often as theory says, 1 - |p - q| / 2."""
    n, size, params = 20_000, 6, SamplingParams(**options)
    rng = np.random.default_rng(3)
    target = rng.normal(size=size).astype(np.float32)
    drafter = (target + distance * rng.normal(size=size)).astype(np.float32)
    start = start_of(params, mode=REJECTION)
    block = 500
    found, accepted = Counter[int](), 0
    for first in range(0, n, block):
        drafts = Drawn(block, c=first).every(start, size, bare=1, noise=DRAFT_NOISE)
        chosen = drafts.tokens(np.tile(drafter, (block, 1)))
        judged = Drawn(block, c=first).every(start, size, mode=JUDGE, drafted=drafter, noise=TARGET_NOISE)
        judged.draws["draft"] = chosen
        tokens = judged.tokens(np.tile(target, (block, 1)))
        found.update(tokens)
        accepted += sum(a == b for a, b in zip(tokens, chosen, strict=True))
    p, q = probabilities(target, params), probabilities(drafter, params)
    live = p > 0
    assert sum(found[i] for i in np.flatnonzero(~live)) == 0
    assert chance(np.array([found[i] for i in np.flatnonzero(live)]), p[live] * n) > 1e-3
    assert abs(accepted / n - np.minimum(p, q).sum()) < 4 * 0.5 / np.sqrt(n)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_draft_from_logits_that_are_no_numbers_is_replaced_by_a_draw_from_the_target(wrong: float) -> None:
    n, size = 4000, 5
    target, start = RNG.normal(size=size).astype(np.float32), start_of(SamplingParams(top_p=0.99), mode=REJECTION)
    drafter = np.full(size, wrong, np.float32)
    judged = Drawn(n).every(start, size, mode=JUDGE, drafted=drafter, noise=TARGET_NOISE)
    found = np.bincount(judged.tokens(np.tile(target, (n, 1))), minlength=size)
    assert chance(found, probabilities(target, SamplingParams()) * n) > 1e-3


def test_a_plain_draw_follows_the_probabilities() -> None:
    n, size = 20_000, 6
    logits, start = RNG.normal(size=size).astype(np.float32), start_of(SamplingParams())
    drawn = Drawn(n).every(start, size)
    found = np.bincount(drawn.tokens(np.tile(logits, (n, 1))), minlength=size)
    assert chance(found, probabilities(logits, SamplingParams()) * n) > 1e-3
