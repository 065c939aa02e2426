"""An executor in Python over ``Engine.run``: tokens are chosen, drafts judged and made row by row on the host.

It is the meaning of the native executor, and what runs engines that have none.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import InternalError, RequestError
from deepinfer.runtime.backend import Engine
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.executor import (
    DECODE,
    GREEDY,
    NO_LOGPROBS,
    NO_TOKEN,
    REJECTION,
    Logprobs,
    SequenceStart,
    StepPlan,
    StepResult,
    share_drafts,
)
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.sampling import Row, TokenChooser, bad_logits, top_logprobs
from deepinfer.runtime.sequence import TokenIds
from deepinfer.runtime.speculation.rejection import TARGET, draft, judge
from deepinfer.runtime.steps import StepQueue


class _Held:
    """What the executor knows of the sequence in a slot."""

    def __init__(self, start: SequenceStart, m: int) -> None:
        self.mode = start.mode
        self.chooser = TokenChooser(start.params, start.key, start.prompt, start.ends, start.bad)
        for token in start.output:
            self.chooser.took(token)
        self.ids = TokenIds(start.prompt, len(start.output) + 64)
        self.ids.extend(start.output)
        self.n = self.ids.count - 1
        self.drafts = np.zeros(0, np.int64)
        self.confidence = np.full(m, np.nan, np.float32)
        self.judged = start.mode == REJECTION and not start.params.greedy
        self.drafted: Row | None = None  # [m, V], what the drafts were drawn from

    def choose(self, logits: Row, position: int, draft: int | None) -> int:
        """The token of ``position``. ``draft``: its place in the block, where one has to be judged."""
        if draft is not None and self.judged:
            row = None if self.drafted is None else self.drafted[draft]
            return judge(self.chooser, logits, row, int(self.drafts[draft]), position)
        return self.chooser.choose(logits, position, TARGET if self.judged else None)


class HostExecutor(StepQueue):
    """``lag``: see ``StepQueue``. ``rejection``: drafts can be judged by rejection."""

    rejection = True

    def __init__(self, plan: EnginePlan, engine: Engine, *, lag: int = 0) -> None:
        super().__init__(engine, lag)
        self.plan = plan
        self.batch = Batch(plan)
        self._held: dict[int, _Held] = {}
        self._results: dict[int, StepResult] = {}
        self._m = plan.draft_tokens if "draft" in plan.entries else 0

    # ---- Executor -------------------------------------------------------------------------------------------------
    def begin(self, slot: int, start: SequenceStart) -> None:
        self._held[slot] = _Held(start, self._m)

    def submit(self, step: StepPlan) -> int:
        if id(step) not in self._results:
            self._results[id(step)] = StepResult(self.plan)
        return self.start(partial(self._run, step))

    # ---- one step ---------------------------------------------------------------------------------------------------
    def _run(self, step: StepPlan) -> StepResult:
        began = time.perf_counter()
        out = self._results[id(step)]
        out.clear()
        rows = step.sequences
        out.verified[: step.count] = self._verified(rows, step.budget)
        self._fill(step, out)
        logits = self.engine.run("step", self.batch)["logits"]
        first = 0
        for i, row in enumerate(rows):
            wanted = int(row["wanted"]) if row["kind"] != DECODE else int(out.verified[i]) + 1
            self._sequence(i, row, logits[first : first + wanted], step, out)
            first += wanted
        if self._m:
            self._draft(step, out)
        out.seconds = time.perf_counter() - began
        return out

    def _verified(self, rows: NDArray[np.void], budget: int) -> NDArray[np.int32]:
        most = np.zeros(len(rows), np.int32)
        confidence = np.full((len(rows), max(1, self._m)), np.nan, np.float32)
        for i, row in enumerate(rows):
            held = self._held[int(row["slot"])]
            if row["kind"] == DECODE:
                most[i] = min(int(row["rows"]) - 1, len(held.drafts))
                confidence[i, : self._m] = held.confidence
        return share_drafts(confidence, most, budget)

    def _fill(self, step: StepPlan, out: StepResult) -> None:
        self.batch.clear()
        for i, row in enumerate(step.sequences):
            shared = {k: int(row[k]) for k in ("slot", "floor", "start_step", "start_kept")}
            table = _table(row)
            if row["kind"] != DECODE:
                ids = slice(int(row["first"]), int(row["first"]) + int(row["rows"]))
                self.batch.add(step.token_ids[ids], c=int(row["c"]), blocks=table, kept=int(row["kept"]),
                               wanted=int(row["wanted"]), before=_older(step.lookback[ids]), **shared)
                continue
            held, drafts = self._held[int(row["slot"])], int(out.verified[i])
            n = held.n
            if held.ids.count != n + 1:
                raise InternalError(f"slot {shared['slot']} has {n} rows and {held.ids.count} ids before a decode")
            self.batch.add(np.concatenate((held.ids[n:], held.drafts[:drafts])), c=n, blocks=table, wanted=drafts + 1,
                           before=held.ids[max(0, n - self.plan.lookback) : n], **shared)

    def _sequence(self, i: int, row: np.void, logits: Row, step: StepPlan, out: StepResult) -> None:
        """Judge and choose behind the rows of one sequence."""
        held, decode = self._held[int(row["slot"])], row["kind"] == DECODE
        if not decode:
            held.n = int(row["c"]) + int(row["rows"])
        out.n[i] = held.n
        broken = bad_logits(logits) if len(logits) else np.zeros(0, bool)
        if broken.any() and (not decode or broken[0]):
            out.finite[i] = False
            self._stand_in(held)
            return
        if row["prompt_logprobs"] != NO_LOGPROBS and len(logits):
            out.prompt_logprobs[i] = self._prompt_logprobs(row, logits, step, held)
        if not row["draws"]:
            return
        try:
            self._choose(i, row, logits, broken, step.masks.get(i), out)
        except RequestError as error:
            out.errors[i] = str(error)
            self._stand_in(held)

    def _stand_in(self, held: _Held) -> None:
        """Nothing was chosen behind a prompt: an anchor for the step that was planned meanwhile; nobody reads its
        result."""
        if held.ids.count == held.n:
            held.ids.extend((0,))

    def _choose(self, i: int, row: np.void, logits: Row, broken: NDArray[np.bool_],
                mask: NDArray[np.uint32] | None, out: StepResult) -> None:
        """Tokens of the last rows, as far as drafts stay. A row behind a draft from which nothing can be chosen ends
        the run: if the draft stays, it fails by itself in the next step, as it does without drafts."""
        held, drafts = self._held[int(row["slot"])], int(out.verified[i])
        at = held.n + 1 if row["kind"] == DECODE else held.n
        chosen_from = logits[-drafts - 1 :]
        tokens, found = list[int](), list[dict[int, Any]]()
        for j, raw in enumerate(chosen_from):
            if j and broken[j]:
                break
            try:
                token = held.choose(raw if mask is None else _allowed(raw, mask[j]), at + j, j if j < drafts else None)
            except RequestError:
                if not j:
                    raise
                break
            tokens.append(token)
            held.chooser.took(token)
            if row["logprobs"] != NO_LOGPROBS:
                found.append(top_logprobs(raw, token, int(row["logprobs"])))
            if j == drafts or token != held.drafts[j]:
                break
        if found:
            out.logprobs[i] = _arrays(found, tokens)
        held.ids.extend(tokens)
        if row["kind"] == DECODE:
            held.n += len(tokens)
        out.n[i], out.count[i], out.accepted[i] = held.n, len(tokens), len(tokens) - 1
        out.tokens[i, : len(tokens)] = tokens

    def _prompt_logprobs(self, row: np.void, logits: Row, step: StepPlan, held: _Held) -> Logprobs:
        """Of the ids behind the wanted rows, as far as they are known."""
        first = int(row["c"]) + int(row["rows"]) - int(row["wanted"])
        behind = held.ids[first + 1 : first + 1 + len(logits)].tolist()
        count = int(row["prompt_logprobs"])
        return _arrays([top_logprobs(r, t, count) for r, t in zip(logits, behind, strict=False)], behind)

    # ---- drafts -----------------------------------------------------------------------------------------------------
    def _draft(self, step: StepPlan, out: StepResult) -> None:
        limits, m = self.plan.limits, self._m
        asked = list[int]()
        for i, row in enumerate(step.sequences):
            held = self._held[int(row["slot"])]
            held.drafts = held.drafts[:0]
            if row["want_draft"] and out.count[i]:
                asked.append(i)
        turn = max(1, min(limits["step"] // m, limits["kept"] // m, limits["wanted"] // m, limits["seq"]))
        for first in range(0, len(asked), turn):
            self._draft_some(asked[first : first + turn], step, out)

    def _draft_some(self, asked: Sequence[int], step: StepPlan, out: StepResult) -> None:
        m, filler = self._m, self.plan.draft_filler
        self.batch.clear()
        for i in asked:
            row = step.rows[i]
            held = self._held[int(row["slot"])]
            n = held.n
            self.batch.add(np.concatenate((held.ids[n:], np.full(m - 1, filler))), slot=int(row["slot"]), c=n,
                           blocks=_table(row), wanted=m, floor=int(row["floor"]), start_step=int(row["start_step"]),
                           start_kept=int(row["start_kept"]), before=held.ids[max(0, n - self.plan.lookback) : n])
        got = self.engine.run("draft", self.batch)
        for k, i in enumerate(asked):
            held = self._held[int(step.rows[i]["slot"])]
            held.drafts = self._drafts(held, got["tokens"][k], got.get("draft_logits", {}), k)
            if "confidence" in got:
                held.confidence = _sigmoid(np.asarray(got["confidence"][k], np.float32))
                out.confidence[i] = held.confidence
            else:
                out.confidence[i] = np.nan
            out.drafts[i, : len(held.drafts)] = held.drafts
            out.drafted[i] = len(held.drafts)

    def _drafts(self, held: _Held, tokens: NDArray[np.int64], logits: Any, k: int) -> NDArray[np.int64]:
        """The block, drawn with the noise that the target will use where there are logits to draw from."""
        held.drafted = None
        if held.mode == GREEDY or not len(logits) or bad_logits(logits[k]).any():
            return np.array(tokens, np.int64)
        if held.judged:
            held.drafted = np.array(logits[k])
            try:
                return np.array([draft(held.chooser, row, held.n + 1 + j, held.n)
                                 for j, row in enumerate(held.drafted)])
            except RequestError:  # nothing is left of a row: the block is certain
                held.drafted = None
                return np.array(tokens, np.int64)
        chooser = copy(held.chooser)
        chooser.output, chooser._counts = list(chooser.output), dict(chooser._counts)
        out = np.array(tokens, np.int64)
        try:
            for j, row in enumerate(logits[k]):
                out[j] = chooser.choose(row, held.n + 1 + j)
                chooser.took(int(out[j]))
        except RequestError:  # the target finds out for itself
            return out
        return out


def _table(row: np.void) -> NDArray[np.int32]:
    """The block table of a row, where it lies."""
    count = int(row["num_blocks"])
    if not count:
        return np.zeros(0, np.int32)
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(int(row["blocks"])))


def _older(lookback: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ids before the first row, oldest first, from its look-back."""
    older = lookback[0, :0:-1]
    return older[older >= 0]


def _allowed(logits: Row, mask: NDArray[np.uint32]) -> Row:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(logits)].astype(bool)
    return np.where(bits, logits, np.float32(-np.inf))


def _sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    out: NDArray[np.float32] = (1 / (1 + np.exp(-x))).astype(np.float32)
    return out


def _arrays(found: Sequence[dict[int, Any]], tokens: Sequence[int]) -> Logprobs:
    """Dicts of ``top_logprobs`` as arrays; the token itself comes first."""
    width = max((len(d) for d in found), default=0) + 1
    out = Logprobs(np.full((len(found), width), NO_TOKEN, np.int64), np.full((len(found), width), -np.inf),
                   np.zeros((len(found), width), np.int32))
    for i, (d, token) in enumerate(zip(found, tokens, strict=True)):
        ranked = [(token, d[token]), *((t, x) for t, x in d.items())]
        for j, (t, x) in enumerate(ranked):
            out.ids[i, j], out.values[i, j], out.ranks[i, j] = t, x.logprob, x.rank
    return out


def make_executor(plan: EnginePlan, engine: Engine, lag: int) -> Any:
    """The engine's own executor where it has one (``engine.executor(plan, lag)``), else one on the host."""
    own: Callable[[EnginePlan, int], Any] | None = getattr(engine, "executor", None)
    return own(plan, lag) if own is not None else HostExecutor(plan, engine, lag=lag)
