"""The seam between the loop and what runs its steps: one ``submit`` and one ``wait`` a step.

The loop plans rows and memory; an executor computes rows, chooses tokens, verifies drafts and makes new ones. What it
chooses stays with it: it knows of every slot how many rows are committed, the anchor (the last token chosen, whose row
has not run), the drafts behind it and the last ids. A DECODE row therefore names a slot and says nothing of positions
or ids, so that the next step can be planned while this one runs.

All arrays are sized once. A plan belongs to the executor from ``submit`` to the end of ``wait``; a result is valid
until the plan that it belongs to is submitted again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime.batch import look_back
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.sampling_params import SamplingParams

PREFILL, DECODE = 0, 1
GREEDY, COUPLED, REJECTION = 0, 1, 2
NO_LOGPROBS = -1
NO_TOKEN = -1

# One sequence of a step, laid out as C does it.
ROW = np.dtype([
    ("slot", "i4"),
    ("kind", "i4"),  # PREFILL: ids and position are given; DECODE: anchor and drafts of the slot, behind its rows
    ("rows", "i4"),  # PREFILL: q; DECODE: 1 + most drafts that are verified
    ("kept", "i4"),  # PREFILL: last rows on the kept axis; DECODE: all are
    ("wanted", "i4"),  # PREFILL: last rows whose logits are needed; DECODE: all are
    ("first", "i4"),  # PREFILL: where its ids begin in token_ids
    ("c", "i8"),  # PREFILL: position of the first row
    ("floor", "i8"), ("start_step", "i8"), ("start_kept", "i8"),  # as DiSeq of the native ABI
    ("blocks", "u8"),  # address of the block table, i32
    ("mask", "u8"),  # address of [rows that choose][ceil(V / 32)] u32, bit 1: the token is allowed; 0: all are
    ("num_blocks", "i4"),  # covers every row that this step may write, whatever steps before it accept
    ("draws", "i4"),  # 1: a token is chosen behind the last row
    ("want_draft", "i4"),  # 1: afterwards a block of drafts is made
    ("logprobs", "i4"),  # most probable tokens to report beside each chosen one; NO_LOGPROBS: none of it
    ("prompt_logprobs", "i4"),  # PREFILL: the same for the token behind each wanted row, where ids hold one
    ("reserved", "i4"),
], align=True)

# How a sequence's tokens are chosen, laid out as C does it; lists are in SequenceStart.
SAMPLING = np.dtype([
    ("mode", "i4"), ("top_k", "i4"), ("min_tokens", "i4"), ("reserved", "i4"),
    ("temperature", "f8"), ("top_p", "f8"), ("min_p", "f8"),
    ("repetition", "f8"), ("frequency", "f8"), ("presence", "f8"),
    ("key", "u8"),  # draws are functions of (key, position, token, purpose) alone
], align=True)


@dataclass(frozen=True)
class SequenceStart:
    """What an executor has to know of the sequence that takes a slot.

    Args:
        params: of the request. ``mode``: how drafts are judged; GREEDY when nothing is drawn.
        key: seed and answer, mixed.
        prompt, output: ids known so far [p], [o] i64, the output without the tokens that rows of the next steps draw.
        ends: ids that end the answer; not chosen before ``min_tokens``. ``bad``: id sequences never completed.
    """

    params: SamplingParams
    mode: int
    key: int
    prompt: NDArray[np.int64]
    output: Sequence[int] = ()
    ends: tuple[int, ...] = ()
    bad: tuple[tuple[int, ...], ...] = ()

    def record(self) -> np.void:
        """The numbers as SAMPLING; top_k 0: all."""
        p = self.params
        out = np.zeros(1, SAMPLING)
        out[0] = (self.mode, max(0, p.top_k), p.min_tokens, 0, p.temperature, p.top_p, p.min_p, p.repetition_penalty,
                  p.frequency_penalty, p.presence_penalty, self.key)
        record: np.void = out[0]
        return record


def words_of(rows: NDArray[np.void]) -> NDArray[np.int64]:
    """[n, bytes / 8], the same memory: numpy copies words many times faster than records."""
    return rows.view(np.int64).reshape(len(rows), -1)


class StepPlan:
    """One step: ``rows[:count]`` in batch order, ids of PREFILL rows in ``token_ids[:ids]`` with ``lookback``.

    Args (after ``clear`` and filling):
        lookback: [ids, E + 1] i64, newest first, -1 before the start of the sequence.
        decoding: DECODE rows; the loop puts them first.
        budget: drafts that the step verifies in all, given to the sequences by their newest confidences; -1: as many
            as each row has room for.
        masks: keep what ``mask`` points to alive, by index of the row.
    """

    def __init__(self, plan: EnginePlan) -> None:
        limits = plan.limits
        self.rows = np.zeros(limits["seq"], ROW)
        self.words = words_of(self.rows)
        self.token_ids = np.zeros(limits["step"], np.int64)
        self.lookback = np.full((limits["step"], plan.lookback + 1), -1, np.int64)
        self.masks: dict[int, NDArray[np.uint32]] = {}
        self.count = self.decoding = self.ids = 0
        self.budget = -1

    def clear(self) -> None:
        self.masks.clear()
        self.count = self.decoding = self.ids = 0
        self.budget = -1

    @property
    def sequences(self) -> NDArray[np.void]:
        """[count] ROW."""
        return self.rows[: self.count]

    def rows_run(self, result: StepResult) -> int:
        """Anchors, verified drafts and prompt rows."""
        return self.decoding + int(result.verified[: self.decoding].sum()) + self.ids

    def add_prompt(self, ids: NDArray[np.int64], before: NDArray[np.int64], template: np.void, **fields: int) -> None:
        """Append a PREFILL row for ``ids`` [q]; ``before``: ids in front of them, oldest first.

        ``template``: a row with the fields that a sequence keeps; ``fields``: the others by name.
        """
        row, stop = self.rows[self.count], self.ids + len(ids)
        self.rows[self.count] = template
        row["kind"], row["rows"], row["first"] = PREFILL, len(ids), self.ids
        for name, value in fields.items():
            row[name] = value
        self.token_ids[self.ids : stop] = ids
        look_back(self.lookback[self.ids : stop], ids, before)
        self.count, self.ids = self.count + 1, stop


@dataclass
class Logprobs:
    """Of q tokens: ids [q, k] i64, values [q, k] f64, ranks [q, k] i32 (1: the most probable). Column 0 is the token
    itself, the others are the most probable ones."""

    ids: NDArray[np.int64]
    values: NDArray[np.float64]
    ranks: NDArray[np.int32]


class StepResult:
    """What a step brought, one row for each sequence of its plan.

    Attributes:
        accepted: [seq] i32, r: drafts that stay. ``verified``: [seq] i32, m': drafts that were looked at.
        count: [seq] i32, tokens that are new: r + 1, or 0 for rows that choose none.
        tokens: [seq, m + 1] i64, the new ones first.
        n: [seq] i64, committed rows afterwards.
        finite: [seq] bool; False: a wanted row has logits that are no numbers, and nothing was chosen.
        drafts, confidence: [seq, m] i64 and f32 (0 .. 1, NaN: the draft head states none), the block made after the
            step; ``drafted``: [seq] i32, its length.
        logprobs, prompt_logprobs: by index of the row, when asked for.
        errors: by index of the row, the sentence of a row for which nothing could be chosen.
        seconds: time that the step took on the device.
    """

    def __init__(self, plan: EnginePlan) -> None:
        seqs, m = plan.limits["seq"], plan.draft_tokens
        self.accepted = np.zeros(seqs, np.int32)
        self.verified = np.zeros(seqs, np.int32)
        self.count = np.zeros(seqs, np.int32)
        self.tokens = np.zeros((seqs, m + 1), np.int64)
        self.n = np.zeros(seqs, np.int64)
        self.finite = np.ones(seqs, bool)
        self.drafted = np.zeros(seqs, np.int32)
        self.drafts = np.zeros((seqs, m), np.int64)
        self.confidence = np.full((seqs, m), np.nan, np.float32)
        self.logprobs: dict[int, Logprobs] = {}
        self.prompt_logprobs: dict[int, Logprobs] = {}
        self.errors: dict[int, str] = {}
        self.seconds = 0.0

    def clear(self) -> None:
        self.accepted[:] = self.verified[:] = self.count[:] = self.drafted[:] = 0
        self.finite[:] = True
        for found in (self.logprobs, self.prompt_logprobs, self.errors):
            found.clear()


class Executor(Protocol):
    """Runs steps in the order of ``submit``. At most ``plan.host_lag`` + 1 are submitted and not waited for."""

    def begin(self, slot: int, start: SequenceStart) -> None:
        """A sequence takes a slot that no step in flight touches; drafts of who had it are forgotten."""
        ...

    def submit(self, step: StepPlan) -> int:
        """Start a step behind those submitted before; returns a ticket at once."""
        ...

    def wait(self, ticket: int) -> StepResult:
        """The result of a step; raises what the engine raised. Tickets are waited for in order."""
        ...

    def state(self, name: str, unit: int) -> NDArray[np.uint8]:
        """Writable bytes of one slot or block that no step in flight touches."""
        ...

    def close(self) -> None:
        """Give all memory back."""
        ...


def share_drafts(confidence: NDArray[np.floating[Any]], most: NDArray[np.int32], budget: int) -> NDArray[np.int32]:
    """How many drafts each sequence verifies so that there are no more than ``budget`` in all.

    ``confidence``: [k, m], probability that draft j is accepted if those before it are; NaN counts as 1. ``most``: [k],
    drafts that a sequence has and may verify. The largest cumulative products win, ties go to the lower sequence, then
    the lower position; products never rise, so that each sequence gets a leading part.
    """
    if budget < 0 or int(most.sum()) <= budget:
        return most.astype(np.int32)
    m = confidence.shape[1]
    reach = np.cumprod(np.nan_to_num(confidence, nan=1.0).astype(np.float64), axis=1)
    reach[np.arange(m) >= most[:, None]] = -1.0
    best = np.argsort(-reach, axis=None, kind="stable")[:budget]
    best = best[reach.reshape(-1)[best] >= 0]
    return np.bincount(best // m, minlength=len(most)).astype(np.int32)

