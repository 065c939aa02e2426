"""Requests and the sequences that answer them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Series
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import RequestError
from deepinfer.runtime.clock import Clock
from deepinfer.runtime.detokenizer import StopTexts, TextStream
from deepinfer.runtime.executor import NO_LOGPROBS, SequenceStart
from deepinfer.runtime.memory import Holding, Spilled
from deepinfer.runtime.outputs import CompletionOutput, Debug, RequestMetrics, RequestOutput, TokenLogprobs
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.structured.compiler import Grammar
from deepinfer.runtime.structured.constraint import Constraint

TokenSeries = Series[int] | NDArray[np.integer[Any]]


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


def nothing() -> None:
    """All tokens are in the list."""


@dataclass(eq=False)
class Sequence:
    """One answer: its clock, memory and text. What changes in every step lies in its row of the ``SequenceTable``
    while it has a slot.

    ``read``: tokens that the text side has seen. ``hit``: positions whose cache entries were adopted.
    ``replayed``: rows that ran although their entries were there. ``proposed``, ``accepted``: how often so many drafts
    were verified and stayed. ``drafts``: the newest ones, where the host has to know them. ``lost``: rows that were
    computed and whose memory was given up. ``pull``: brings the list of tokens up to date; while the sequence has a
    slot its newest ones lie in the table.
    """

    request: Request
    clock: Clock
    key: int
    output: CompletionOutput
    texts: TextStream | None
    stops: StopTexts
    bad: tuple[tuple[int, ...], ...] = ()
    constraint: Constraint | None = None
    drafts: list[int] = field(default_factory=list)
    holding: Holding | None = None
    spilled: Spilled | None = None
    status: Status = Status.WAITING
    serial: int = 0
    last_time: float | None = None
    read: int = 0
    pull: Callable[[], None] = nothing
    ids: TokenIds = field(default_factory=lambda: TokenIds((), 0))
    hit: int = 0
    replayed: int = 0
    proposed: NDArray[np.int64] | int = 0
    accepted: NDArray[np.int64] | int = 0
    preemptions: int = 0
    inexact: bool = False
    lost: int = 0

    @property
    def rank(self) -> tuple[float, int, int]:
        """Smaller goes first: see ``Request.turn``; then the order of the calls, then the answer."""
        r = self.request
        return (r.turn, r.order, self.output.index)

    @property
    def known(self) -> int:
        """Ids known to the host."""
        self.pull()
        return len(self.request.prompt_ids) + len(self.output.token_ids)

    def known_ids(self) -> NDArray[np.int64]:
        """[known] i64."""
        self.pull()
        if not self.output.token_ids:
            return self.request.prompt_array
        return np.concatenate((self.request.prompt_array, np.array(self.output.token_ids, np.int64)))

    def ids_in(self, first: int, stop: int) -> NDArray[np.int64]:
        """Known ids of positions first .. stop - 1, without a look at the others."""
        self.pull()
        prompt, at = self.request.prompt_array, len(self.request.prompt_ids)
        if stop <= at:
            return prompt[first:stop]
        output = np.array(self.output.token_ids[max(0, first - at) : stop - at], np.int64)
        return output if first >= at else np.concatenate((prompt[first:], output))

    def start(self, mode: int) -> SequenceStart:
        """What an executor has to know."""
        r = self.request
        return SequenceStart(r.params, mode, self.key, r.prompt_array, self.output.token_ids, tuple(sorted(r.ends)),
                             self.bad)

    @property
    def logprobs_wanted(self) -> int:
        """As ``ROW`` names it: most probable tokens beside each chosen one."""
        count = self.request.params.logprobs
        return NO_LOGPROBS if count is None else self.request.vocabulary if count == -1 else count

    @property
    def read_eagerly(self) -> bool:
        """Whether each token's text can end the answer."""
        return self.texts is not None and bool(self.stops.stops)

    # ---- text -------------------------------------------------------------------------------------------------------
    def read_on(self, tokens: Series[int]) -> tuple[int, str] | None:
        """Give the text side further tokens. (how many, stop text) when one of them completes a stop text."""
        if self.texts is None:
            return None
        for at, token in enumerate(tokens, 1):
            self.read += 1
            stop = self.stops.push(self.texts.push(token), active=self.read >= self.request.params.min_tokens)
            if stop is not None:
                return at, stop
        return None

    def read_all(self) -> None:
        """Give the text side what it has not seen; the id that ended the answer is no text unless asked for."""
        r, out = self.request, self.output
        stop = len(out.token_ids)
        if out.finish_reason == "stop" and not r.params.include_stop_str_in_output and stop and (
                out.token_ids[-1] in r.ends and not isinstance(out.stop_reason, str)):
            stop -= 1
        self.read_on(out.token_ids[self.read:stop])

    def finish(self, reason: str, stop_reason: int | str | None = None, error: str | None = None) -> None:
        """The answer ends; its memory is given back by whoever holds the engine."""
        self.pull()
        self.output.finish_reason, self.output.stop_reason, self.output.error = reason, stop_reason, error
        if self.texts is not None and not isinstance(stop_reason, str):
            self.read_all()
            self.stops.push(self.texts.finish(), active=False)
        self.stops.finish()
        self.status = Status.FINISHED
        self.clock.finish()

    def debug(self) -> Debug:
        """What happened on the way to this answer."""
        proposed, accepted = ((np.cumsum(x[:0:-1])[::-1].tolist() if isinstance(x, np.ndarray) else [])
                              for x in (self.proposed, self.accepted))
        return Debug(tuple(self.clock.log), self.hit, self.replayed, tuple(proposed), tuple(accepted),
                     self.preemptions, self.inexact)

    def update(self) -> None:
        """Text and delta of the output, as far as no stop text can begin there."""
        if self.status is not Status.FINISHED:
            self.pull()
            self.read_all()
        shown = len(self.output.text)
        self.output.text = self.stops.text[: self.stops.shown]
        self.output.delta = self.output.text[shown:]


@dataclass(eq=False)
class Request:
    """A prompt, how to answer it, and its sequences. The first sequence computes the prompt for all answers.

    ``ends``: ids that end an answer. ``most_tokens``: of an answer. ``stream``: results are wanted while it goes on,
    in ``updates``; otherwise there is one result at the end. ``turn``: arrival, made later or earlier by priority;
    smaller goes first. ``deadline``: time at which the request ends, finished or not. ``grammar``: form of the answers.
    ``prompt_array``: ``prompt_ids`` once more, [p] i64.
    ``images``: position of the first of an image's ids, and a digest of its content; equal ids of other images are
    another prefix.
    """

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    ends: frozenset[int]
    most_tokens: int
    metrics: RequestMetrics
    outputs: list[CompletionOutput]
    turn: float = 0.0
    order: int = 0
    deadline: float | None = None
    vocabulary: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    stream: bool = False
    updates: deque[RequestOutput] = field(default_factory=deque)
    grammar: Grammar | None = None
    images: tuple[tuple[int, bytes], ...] = ()
    prompt_array: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

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

    def prompt_logprobs_wanted(self, s: Sequence) -> int:
        """As ``ROW`` names it: most probable tokens beside those of the prompt, in rows of ``s``."""
        if self.prompt_logprobs is None or s is not self.sequences[0] or (
                len(self.prompt_logprobs) == len(self.prompt_ids)):
            return NO_LOGPROBS
        count = self.params.prompt_logprobs or 0
        return self.vocabulary if count == -1 else count

    def result(self, snapshot: bool = False) -> RequestOutput:
        """What is known now. ``snapshot``: a copy that later tokens do not change."""
        for s in self.sequences:
            s.update()
        outputs = self.outputs
        if snapshot:
            outputs = [replace(o, token_ids=list(o.token_ids), logprobs=o.logprobs and list(o.logprobs))
                       for o in outputs]
        first = self.sequences[0]
        return RequestOutput(self.request_id, self.prompt, self.prompt_ids, outputs, self.finished, self.metrics,
                             self.prompt_logprobs, first.hit, tuple(first.clock.log),
                             tuple(s.debug() for s in self.sequences))


def check_prompt(plan: EnginePlan, ids: TokenSeries, where: str) -> tuple[list[int], NDArray[np.int64]]:
    """A prompt as plain ints and as an array, or a RequestError that names the place."""
    array = np.array(ids, np.int64)
    out: list[int] = array.tolist()
    if not out:
        raise RequestError("the prompt is empty", where=where, next_step="send at least one token")
    if array.min() < 0 or array.max() >= plan.vocab_size:
        wrong = np.flatnonzero((array < 0) | (array >= plan.vocab_size))
        raise RequestError("token id out of range", where=f"{where}, position {wrong[0]}", found=out[wrong[0]],
                           allowed=f"0..{plan.vocab_size - 1}")
    if len(out) >= plan.max_model_len:
        raise RequestError("the prompt leaves no room for an answer", where=where, found=f"{len(out)} tokens",
                           allowed=f"at most {plan.max_model_len - 1}",
                           next_step="shorten it, or compile with a larger --max-model-len")
    return out, array
