"""What a request gets back, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer.runtime.clock import Replayed
from deepinfer.runtime.sampling import Logprob

TokenLogprobs = dict[int, Logprob]


@dataclass
class CompletionOutput:
    """One answer.

    Args:
        text, token_ids: so far. ``delta``: the text that is new since the previous update of a stream.
        cumulative_logprob, logprobs: when asked for; one dict a token, the chosen token among its keys.
        finish_reason: ``stop`` (end token, stop id or text), ``length``, ``abort``, ``deadline``, ``error``; None while
            it goes on.
        stop_reason: the stop text or stop id that ended it; None for the end token.
        error: the sentence that belongs to ``error``.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    delta: str = ""
    error: str | None = None


@dataclass
class RequestMetrics:
    """Times in seconds of one clock that only goes forward, and what happened on the way."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True)
class Debug:
    """How one answer came about. With the ids, the seed and the sampling options, ``replay_log`` determines it.

    Args:
        cached_tokens: prompt tokens whose cache entries were adopted. ``replayed_rows``: rows that ran although their
            entries were there, to fill windows.
        drafts_proposed, drafts_accepted: by draft position.
        preemptions: how often the sequence gave up its memory. ``inexact``: its rows ran again behind another replay
            log, so that it is not what an undisturbed run gives.
    """

    replay_log: tuple[Replayed, ...]
    cached_tokens: int = 0
    replayed_rows: int = 0
    drafts_proposed: tuple[int, ...] = ()
    drafts_accepted: tuple[int, ...] = ()
    preemptions: int = 0
    inexact: bool = False


@dataclass
class RequestOutput:
    """A request and its answers.

    Args:
        prompt_logprobs: when asked for; None for the first token, then one dict a token.
        num_cached_tokens: prompt tokens whose cache entries were there already.
        replay_log: where windows were cut or run again; with the ids, the seed and the sampling options it determines
            the answer.
        debug: the same and more, for each answer whose prompt was read.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    replay_log: tuple[Replayed, ...] = ()
    debug: tuple[Debug, ...] = ()

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Ids of the first answer."""
        return self.outputs[0].token_ids
