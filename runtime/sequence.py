"""Requests and the sequences that answer them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Series
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import RequestError
from deepinfer.runtime.clock import Clock
from deepinfer.runtime.detokenizer import StopTexts, TextStream
from deepinfer.runtime.memory import Holding, Spilled
from deepinfer.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobs
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.sampling import TokenChooser
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.structured.compiler import Grammar
from deepinfer.runtime.structured.constraint import Constraint


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # no memory yet, or given up: its rows run from the start
    RUNNING = "running"
    SPILLED = "spilled"  # its memory is on the host
    FINISHED = "finished"


class TokenIds:
    """The ids of a sequence, appended without a copy of what is there."""

    def __init__(self, ids: Series[int] | NDArray[np.int64], room: int) -> None:
        """``room``: further ids that fit before the array grows."""
        self._ids = np.empty(len(ids) + room, dtype=np.int64)
        self._ids[: len(ids)] = ids
        self.count = len(ids)

    def extend(self, ids: Series[int] | NDArray[np.int64]) -> None:
        stop = self.count + len(ids)
        if stop > len(self._ids):
            grown = np.empty(max(stop, 2 * len(self._ids)), dtype=np.int64)
            grown[: self.count] = self._ids[: self.count]
            self._ids = grown
        self._ids[self.count:stop] = ids
        self.count = stop

    def cut(self, count: int) -> None:
        self.count = min(self.count, count)

    def __getitem__(self, span: slice) -> NDArray[np.int64]:
        """A view."""
        return self._ids[: self.count][span]

    def copy(self) -> TokenIds:
        return TokenIds(self._ids[: self.count], len(self._ids) - self.count)


@dataclass(eq=False)
class Sequence:
    """One answer: its clock, memory, token choice and text."""

    request: Request
    clock: Clock
    ids: TokenIds
    chooser: TokenChooser
    output: CompletionOutput
    texts: TextStream | None
    stops: StopTexts
    holding: Holding | None = None
    spilled: Spilled | None = None
    status: Status = Status.WAITING
    constraint: Constraint | None = None

    @property
    def rank(self) -> tuple[int, float, int, int]:
        """Smaller goes first: priority, arrival, order of the call, answer."""
        r = self.request
        return (r.priority, r.metrics.arrival_time, r.order, self.output.index)

    @property
    def free_choice(self) -> bool:
        """Whether the next token is simply the largest logit of its row."""
        return self.chooser.untouched and (self.constraint is None or not self.constraint.active)

    def take(self, token: int, now: float, logprobs: TokenLogprobs | None) -> None:
        """The next token is chosen: ids, text, log-probabilities and the reasons to stop are brought up to date."""
        out, m = self.output, self.request.metrics
        self.clock.sampled()
        self.ids.extend((token,))
        self.chooser.took(token)
        out.token_ids.append(token)
        if logprobs is not None:
            if out.logprobs is None:
                out.logprobs, out.cumulative_logprob = [], 0.0
            out.logprobs.append(logprobs)
            out.cumulative_logprob = (out.cumulative_logprob or 0.0) + logprobs[token].logprob
        m.first_token_time = now if m.first_token_time is None else m.first_token_time
        m.last_token_time = now
        if self.constraint is not None:
            self.constraint.accept((token,))
            self.constraint.require_equal(len(out.token_ids), out.token_ids[-1:])
        self._stop_after(token)

    def _stop_after(self, token: int) -> None:
        r, out, p = self.request, self.output, self.request.params
        ended, stop = token in r.ends, None
        if self.texts is not None and (not ended or p.include_stop_str_in_output):
            stop = self.stops.push(self.texts.push(token), active=len(out.token_ids) >= p.min_tokens)
        if stop is not None:
            self.finish("stop", stop)
        elif ended:
            self.finish("stop", token if token in (p.stop_token_ids or ()) else None)
        elif self.constraint is not None and self.constraint.over:
            self.finish("stop")
        elif len(out.token_ids) >= r.most_tokens:
            self.finish("length")

    def finish(self, reason: str, stop_reason: int | str | None = None, error: str | None = None) -> None:
        """The answer ends; its memory is given back by whoever holds the engine."""
        if self.texts is not None and not isinstance(stop_reason, str):
            self.stops.push(self.texts.finish(), active=False)
        self.stops.finish()
        self.output.finish_reason, self.output.stop_reason, self.output.error = reason, stop_reason, error
        self.status = Status.FINISHED
        self.clock.finish()

    def update(self) -> None:
        """Text and delta of the output, as far as no stop text can begin there."""
        shown = len(self.output.text)
        self.output.text = self.stops.text[: self.stops.shown]
        self.output.delta = self.output.text[shown:]


@dataclass(eq=False)
class Request:
    """A prompt, how to answer it, and its sequences. The first sequence computes the prompt for all answers.

    ``ends``: ids that end an answer. ``most_tokens``: of an answer. ``stream``: results are wanted while it goes on,
    in ``updates``; otherwise there is one result at the end.
    """

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    ends: frozenset[int]
    most_tokens: int
    metrics: RequestMetrics
    outputs: list[CompletionOutput]
    priority: int = 0
    order: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    stream: bool = False
    updates: deque[RequestOutput] = field(default_factory=deque)
    grammar: Grammar | None = None

    @property
    def finished(self) -> bool:
        return all(out.finish_reason is not None for out in self.outputs)

    @property
    def to_fork(self) -> int:
        """Answers that have no sequence of their own yet."""
        return len(self.outputs) - len(self.sequences)

    @property
    def prompt_rows_done(self) -> int:
        """Prompt rows whose log-probabilities are known."""
        return len(self.prompt_logprobs) - 1 if self.prompt_logprobs is not None else 0

    def rows_wanted(self, first: int, stop: int, known: int) -> int:
        """Of rows first .. stop - 1 of ``known`` ids, the last ones whose logits are needed."""
        if self.prompt_logprobs is not None and known == len(self.prompt_ids):
            return stop - max(first, min(self.prompt_rows_done, stop))
        return int(stop == known)

    def result(self, snapshot: bool = False) -> RequestOutput:
        """What is known now. ``snapshot``: a copy that later tokens do not change."""
        for s in self.sequences:
            s.update()
        outputs = self.outputs
        if snapshot:
            outputs = [replace(o, token_ids=list(o.token_ids), logprobs=o.logprobs and list(o.logprobs))
                       for o in outputs]
        return RequestOutput(self.request_id, self.prompt, self.prompt_ids, outputs, self.finished, self.metrics,
                             self.prompt_logprobs, replay_log=tuple(self.sequences[0].clock.log))


def check_prompt(plan: EnginePlan, ids: Series[int], where: str) -> list[int]:
    """A prompt as plain ints, or a RequestError that names the place."""
    out = [int(i) for i in ids]
    if not out:
        raise RequestError("the prompt is empty", where=where, next_step="send at least one token")
    wrong = next((at for at, i in enumerate(out) if not 0 <= i < plan.vocab_size), None)
    if wrong is not None:
        raise RequestError("token id out of range", where=f"{where}, position {wrong}", found=out[wrong],
                           allowed=f"0..{plan.vocab_size - 1}")
    if len(out) >= plan.max_model_len:
        raise RequestError("the prompt leaves no room for an answer", where=where, found=f"{len(out)} tokens",
                           allowed=f"at most {plan.max_model_len - 1}",
                           next_step="shorten it, or compile with a larger --max-model-len")
    return out
