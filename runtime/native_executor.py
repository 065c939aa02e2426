"""The executor of compiled engines: one native call runs a step, chooses tokens, judges drafts and makes new ones.

It means what ``HostExecutor`` means. The sequences' state lies with the engine, so that a step that was submitted needs
nothing of the host. With a lag, the engine is sent the next step while one runs and goes on by itself; for an engine
that cannot, a thread makes the calls, which hold no lock of the interpreter.
"""

from __future__ import annotations

import ctypes
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime.executor import (
    DECODE,
    NO_LOGPROBS,
    NO_TOKEN,
    ROW,
    Logprobs,
    SequenceStart,
    StepPlan,
    StepResult,
)
from deepinfer.runtime.native_sampling import NativeSampling
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.sampling import nothing_left, top_logprobs
from deepinfer.runtime.steps import StepQueue

if TYPE_CHECKING:
    from deepinfer.runtime.native_engine import NativeEngine

# Most probable tokens that the engine finds itself; who asks for more gets them from a copy of the logits.
MOST_LOGPROBS = 20
_POINTER, _I32 = ctypes.c_void_p, ctypes.c_int32
_OK, _NOT_FINITE = 0, -1
_LOGPROBS, _PROMPT_LOGPROBS = (list(ROW.fields or ()).index(n) for n in ("logprobs", "prompt_logprobs"))
_NONE, _FIRST = np.zeros(0, np.intp), np.zeros(1, np.intp)


class _Work(ctypes.Structure):
    """DiWork of runtime/native/abi.h."""

    _fields_ = (("rows", _POINTER), ("token_ids", _POINTER), ("lookback", _POINTER), ("behind", _POINTER),
                ("logits", _POINTER), ("count", _I32), ("budget", _I32))


class _Outcome(ctypes.Structure):
    """DiOutcome of runtime/native/abi.h."""

    _fields_ = (("accepted", _POINTER), ("verified", _POINTER), ("chosen", _POINTER), ("tokens", _POINTER),
                ("n", _POINTER), ("status", _POINTER), ("wanted", _POINTER), ("drafted", _POINTER),
                ("drafts", _POINTER), ("confidence", _POINTER), ("logprobs", _POINTER), ("ids", _POINTER),
                ("ranks", _POINTER), ("top", _I32), ("reserved", _I32))


class _Slate:
    """Memory for the outcome of one step plan, and the two records that the engine is given."""

    def __init__(self, plan: EnginePlan, step: StepPlan) -> None:
        seqs, wanted = plan.limits["seq"], plan.limits["wanted"]
        self.step = step  # its arrays are pointed to
        self.result = r = StepResult(plan)
        self.status, self.wanted = np.zeros(seqs, np.int32), np.zeros(seqs, np.int32)
        self.behind, self.logits = np.full(seqs, NO_TOKEN, np.int64), np.zeros(seqs, np.uint64)
        self.values = np.zeros((wanted, 1 + MOST_LOGPROBS))
        self.ids = np.zeros((wanted, 1 + MOST_LOGPROBS), np.int64)
        self.ranks = np.zeros((wanted, 1 + MOST_LOGPROBS), np.int32)
        self.copies: dict[int, NDArray[np.float32]] = {}
        self.flawed = False  # a row of the last step failed
        self.asked = _NONE  # rows of the step in flight that report more than tokens
        self.work = _Work(step.rows.ctypes.data, step.token_ids.ctypes.data, step.lookback.ctypes.data,
                          self.behind.ctypes.data, self.logits.ctypes.data, 0, -1)
        arrays = (r.accepted, r.verified, r.count, r.tokens, r.n, self.status, self.wanted, r.drafted, r.drafts,
                  r.confidence, self.values, self.ids, self.ranks)
        self.outcome = _Outcome(*(a.ctypes.data for a in arrays), MOST_LOGPROBS, 0)

    def forget(self) -> None:
        """What the last step left that the engine does not write anew: it writes all numbers of its rows."""
        r = self.result
        if self.flawed or r.logprobs or r.prompt_logprobs:
            r.clear()
            self.flawed = False

    def reported(self, first: int, count: int, top: int) -> Logprobs:
        """Of ``count`` wanted rows from ``first`` on."""
        at = np.s_[first : first + count, : 1 + top]
        return Logprobs(self.ids[at].copy(), self.values[at].copy(), self.ranks[at].copy())


class NativeExecutor(StepQueue):
    """``lag``: see ``StepQueue``. ``rejection``: drafts can be judged by rejection."""

    engine: NativeEngine

    rejection = True

    def __init__(self, plan: EnginePlan, engine: NativeEngine, *, lag: int = 0) -> None:
        self._ahead = bool(lag and engine.sends_ahead)
        super().__init__(engine, 0 if self._ahead else lag)
        self.plan = plan
        self._ended = 0.0  # when the last step that was sent ahead was waited for
        self._sampling: dict[int, NativeSampling] = {}
        self._known: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self._slates: dict[int, _Slate] = {}

    # ---- Executor -------------------------------------------------------------------------------------------------
    def begin(self, slot: int, start: SequenceStart) -> None:
        how = NativeSampling(start, self.plan.vocab_size)
        prompt = np.ascontiguousarray(start.prompt, np.int64)
        output = np.array(start.output, np.int64)
        self.engine.begin(slot, how.record, prompt, output)
        self._sampling[slot], self._known[slot] = how, (prompt, output)

    def submit(self, step: StepPlan) -> int:
        slate = self._slates.get(id(step))
        if slate is None:
            slate = self._slates[id(step)] = _Slate(self.plan, step)
        if self._ahead:
            collect = partial(self._collect, step, slate, time.perf_counter())
            return self.ahead(partial(self._send, step, slate), collect)
        return self.start(partial(self._run, step, slate))

    # ---- one step ---------------------------------------------------------------------------------------------------
    def _run(self, step: StepPlan, slate: _Slate) -> StepResult:
        began = time.perf_counter()
        asked = self._prepare(step, slate)
        self.engine.loop_step(slate.work, slate.outcome)
        self._conclude(step, slate, asked)
        slate.result.seconds = time.perf_counter() - began
        return slate.result

    def _send(self, step: StepPlan, slate: _Slate) -> None:
        slate.asked = self._prepare(step, slate)
        self.engine.submit(slate.work, slate.outcome)

    def _collect(self, step: StepPlan, slate: _Slate, began: float) -> StepResult:
        self.engine.finish()
        self._conclude(step, slate, slate.asked)
        before, self._ended = self._ended, time.perf_counter()
        slate.result.seconds = self._ended - max(began, before)  # it ran behind the step before it
        return slate.result

    def _prepare(self, step: StepPlan, slate: _Slate) -> NDArray[np.intp]:
        """Rows that report more than tokens."""
        rows = step.sequences
        slate.forget()
        asked = self._asked(rows)
        if len(asked):
            self._ask(asked, rows, slate)
        slate.work.count, slate.work.budget = step.count, step.budget
        return asked

    def _conclude(self, step: StepPlan, slate: _Slate, asked: NDArray[np.intp]) -> None:
        out = slate.result
        status = slate.status[: step.count]
        if status.any():
            slate.flawed = True
            out.finite[: step.count] = status != _NOT_FINITE
            for i in np.flatnonzero(status).tolist():
                if status[i] != _NOT_FINITE:
                    out.errors[i] = str(nothing_left(int(out.n[i])))
        if len(asked):
            self._answer(asked, step.sequences, slate, step)

    def _asked(self, rows: NDArray[np.void]) -> NDArray[np.intp]:
        """Rows that report more than tokens. Steps of one are the ones whose host work shows: few operations for
        them."""
        if len(rows) == 1:
            row = rows[0].item()
            return _FIRST if row[_LOGPROBS] != NO_LOGPROBS or row[_PROMPT_LOGPROBS] != NO_LOGPROBS else _NONE
        return np.flatnonzero((rows["logprobs"] != NO_LOGPROBS) | (rows["prompt_logprobs"] != NO_LOGPROBS))

    def _ask(self, asked: NDArray[np.intp], rows: NDArray[np.void], slate: _Slate) -> None:
        """What rows need that report more than tokens: the id behind the last row, room for a copy of logits."""
        slate.copies.clear()
        for i in asked.tolist():
            row = rows[i]
            if row["kind"] != DECODE:
                slate.behind[i] = self._known_id(int(row["slot"]), int(row["c"]) + int(row["rows"]))
            if max(row["logprobs"], row["prompt_logprobs"]) > MOST_LOGPROBS:
                wanted = int(row["rows"] if row["kind"] == DECODE else row["wanted"])
                copy = slate.copies[i] = np.empty((wanted, self.plan.vocab_size), np.float32)
                slate.logits[i] = copy.ctypes.data

    def _answer(self, asked: NDArray[np.intp], rows: NDArray[np.void], slate: _Slate, step: StepPlan) -> None:
        out = slate.result
        for i in asked.tolist():
            slate.logits[i] = 0
            row, count = rows[i], int(out.count[i])
            if not out.finite[i]:
                continue
            first = 0 if row["kind"] == DECODE else int(row["wanted"]) - 1  # of the rows that choose
            if row["logprobs"] != NO_LOGPROBS and count:
                out.logprobs[i] = self._logprobs(i, first, out.tokens[i, :count], int(row["logprobs"]), slate)
            if row["prompt_logprobs"] != NO_LOGPROBS and row["wanted"] and row["kind"] != DECODE:
                behind = self._behind(row, step, int(slate.behind[i]))
                out.prompt_logprobs[i] = self._logprobs(i, 0, behind, int(row["prompt_logprobs"]), slate)

    def _logprobs(self, i: int, first: int, tokens: NDArray[np.int64], top: int, slate: _Slate) -> Logprobs:
        """Of ``tokens`` from the wanted rows of sequence i from its row ``first`` on."""
        if top <= MOST_LOGPROBS:
            return slate.reported(int(slate.wanted[i]) + first, len(tokens), min(top, self.plan.vocab_size))
        top = min(top, self.plan.vocab_size)
        out = Logprobs(np.zeros((len(tokens), 1 + top), np.int64), np.zeros((len(tokens), 1 + top)),
                       np.zeros((len(tokens), 1 + top), np.int32))
        for k, token in enumerate(tokens.tolist()):
            found = top_logprobs(slate.copies[i][first + k], token, top)
            best = list(found.items())[-top:]
            for at, (t, x) in enumerate([(token, found[token]), *best]):
                out.ids[k, at], out.values[k, at], out.ranks[k, at] = t, x.logprob, x.rank
        return out

    def _behind(self, row: np.void, step: StepPlan, last: int) -> NDArray[np.int64]:
        """Ids behind the wanted rows of a prefill, as far as they are known."""
        stop = int(row["first"]) + int(row["rows"])
        ids = step.token_ids[stop - int(row["wanted"]) + 1 : stop]
        return np.append(ids, last) if last != NO_TOKEN else ids

    def _known_id(self, slot: int, position: int) -> int:
        prompt, output = self._known[slot]
        if position < len(prompt):
            return int(prompt[position])
        at = position - len(prompt)
        return int(output[at]) if at < len(output) else NO_TOKEN
