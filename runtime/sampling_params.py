"""What a request asks of sampling, with vLLM's names, checked when it is made."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer.errors import RequestError
from deepinfer.runtime.plan import ReplayOption
from deepinfer.runtime.structured.options import StructuredOutputs, structured_outputs

_SEED_BITS = 64
CACHE_CLASS = re.compile(r"[a-z0-9_]{1,15}")  # a retention class of the prefix store


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. Steps are taken in this order (``sampling.py`` has the formulas):
    allowed and banned tokens, ``logit_bias``, penalties, temperature, ``top_k``, ``top_p``, ``min_p``, draw.

    Args:
        n: independent answers to the prompt.
        temperature: divides the logits; 0 takes the largest (ties: the lower id) and nothing is drawn.
        top_k: only the k largest; 0 or -1: all. ``top_p``: of these, the fewest whose probabilities reach p.
        min_p: of these, only tokens at least this many times as probable as the most probable one.
        repetition_penalty: logits of tokens seen in prompt or answer are divided (if > 0) or multiplied by it.
        presence_penalty, frequency_penalty: subtracted once, and once per occurrence, for tokens of the answer.
        logit_bias: token id -> number added to its logit.
        allowed_token_ids: if given, no other token is chosen. ``bad_words``: token sequences that are never
            completed: those into which the tokenizer cuts each text, alone and behind a blank. The same letters
            may still come about through other tokens; a ``stop`` text acts on letters.
        seed: makes draws repeatable: a draw depends on seed, answer index and position and on nothing else.
            None: a seed from the system.
        max_tokens: most tokens of an answer; None: up to the engine's ``max_model_len``.
        min_tokens: no end, stop id or stop string before so many tokens. ``ignore_eos``: the end token is one
            like others.
        stop, stop_token_ids: the answer ends before these texts and at these ids;
            ``include_stop_str_in_output`` leaves them in the text.
        logprobs: log-probabilities of the chosen and of so many most probable tokens, -1: of all; taken from the
            logits as the model gives them. ``prompt_logprobs``: the same for the prompt; every row of the prompt
            is then computed, whatever ``replay`` says.
        deadline: seconds after its arrival at which the request ends, with what there is then and the finish_reason
            ``deadline``; None: it may take as long as it does.
        detokenize: make text. ``skip_special_tokens``: without control tokens.
        replay: rows of the prompt that all layers compute: ``off`` (all), ``exact`` or a number; None: the
            engine's default. With ``off`` and ``exact`` the answer never depends on what the prefix cache holds.
        cache_salt: a tenant's secret: cached prefixes are shared among requests with the same one only.
        cache_class: how long a store on disk keeps what this request computes: ``chat``, ``agent`` or a
            class of its settings; None: chat.
        structured_outputs: the form of the answer (a ``StructuredOutputs`` or a mapping with its fields): a JSON
            schema, a regular expression, a list of texts, a grammar, or any JSON object. The answer ends as soon as
            nothing can follow, also before ``min_tokens`` and with ``ignore_eos``.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    replay: ReplayOption = None
    deadline: float | None = None
    cache_salt: str | None = None
    cache_class: str | None = None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    stop_strings: tuple[str, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        _whole("n", self.n, 1)
        _real("temperature", self.temperature, 0)
        _real("top_p", self.top_p, 0, 1, open_low=True)
        _whole("top_k", self.top_k, -1)
        _real("min_p", self.min_p, 0, 1)
        _real("presence_penalty", self.presence_penalty, -2, 2)
        _real("frequency_penalty", self.frequency_penalty, -2, 2)
        _real("repetition_penalty", self.repetition_penalty, 0, open_low=True)
        if self.seed is not None:
            require_seed(self.seed)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), -1)
        require_switches(ignore_eos=self.ignore_eos, include_stop_str_in_output=self.include_stop_str_in_output,
                         detokenize=self.detokenize, skip_special_tokens=self.skip_special_tokens)
        if self.deadline is not None:
            _real("deadline", self.deadline, 0, open_low=True)
        self._check_lists()
        if self.cache_salt is not None and not (isinstance(self.cache_salt, str) and self.cache_salt):
            raise RequestError("a text with at least one character is needed", where="cache_salt",
                               found=repr(self.cache_salt), next_step="leave it out to share with everybody")
        kept = self.cache_class
        if kept is not None and not (isinstance(kept, str) and CACHE_CLASS.fullmatch(kept)):
            raise RequestError("not a class of the prefix store", where="cache_class", found=repr(self.cache_class),
                               allowed="chat, agent, or a class of the store's settings")
        object.__setattr__(self, "structured_outputs", structured_outputs(self.structured_outputs))
        if self.greedy and self.n > 1:
            raise RequestError("several answers at temperature 0 would be equal", where="n", found=self.n, allowed=1,
                               next_step="raise temperature or ask for one answer")

    def _check_lists(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop)
        object.__setattr__(self, "stop_strings", stops)
        for name in ("bad_words", "stop_token_ids"):
            object.__setattr__(self, name, _items(name, getattr(self, name)))
        for name, texts in (("stop", stops), ("bad_words", self.bad_words)):
            if not all(isinstance(s, str) and s for s in texts):
                raise RequestError("texts with at least one character are needed", where=name, found=repr(texts))
            for text in texts:
                check_text(text, name)
        if stops and not self.detokenize:
            raise RequestError("stop strings need text", where="stop",
                               next_step="leave detokenize on, or use stop_token_ids")
        for i in self.stop_token_ids or ():
            _whole("stop_token_ids", i, 0)
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _items("allowed_token_ids", self.allowed_token_ids))
            if not len(self.allowed_token_ids):
                raise RequestError("no token is allowed", where="allowed_token_ids", next_step="list at least one id")
            for i in self.allowed_token_ids:
                _whole("allowed_token_ids", i, 0)
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise RequestError("a mapping from token ids to numbers is needed", where="logit_bias",
                               found=repr(self.logit_bias))
        for i, bias in (self.logit_bias or {}).items():
            _whole("logit_bias", i, 0)
            _real(f"logit_bias[{i}]", bias, -100, 100)

    @property
    def form(self) -> StructuredOutputs | None:
        """The form of the answer, checked."""
        return structured_outputs(self.structured_outputs)

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is taken and nothing is drawn."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def check_vocabulary(self, size: int) -> None:
        """Refuse token ids that the model does not have."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            wrong = [i for i in getattr(self, name) or () if i >= size]
            if wrong:
                raise RequestError("token id out of range", where=name, found=wrong[0], allowed=f"0..{size - 1}")


def check_text(text: str, where: str) -> None:
    """Refuse a text with half of a surrogate pair: no encoding of Unicode has it, so no tokenizer reads it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError("the text holds a lone surrogate", where=f"{where}, character {error.start}",
                           found=f"U+{ord(text[error.start]):04X}", next_step="decode the text as UTF-8") from None


def _items(name: str, value: Any) -> tuple[Any, ...]:
    """A list parameter as a tuple; None stands for no items."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError("a list is needed", where=name, found=repr(value))
    return tuple(value)


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def require_whole(name: str, value: Any) -> None:
    """RequestError when a value is no whole number."""
    if not is_whole(value):
        raise RequestError("a whole number is needed", where=name, found=repr(value))


def require_seed(value: Any) -> None:
    """RequestError when a value is no seed: 64 bits, with a sign or without."""
    _whole("seed", value, -(1 << (_SEED_BITS - 1)), (1 << _SEED_BITS) - 1)


def require_switches(**values: Any) -> None:
    """RequestError when one of the values, by name, is neither True nor False."""
    for name, value in values.items():
        if not isinstance(value, bool | np.bool_):
            raise RequestError("True or False is needed", where=name, found=repr(value))


def _whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    require_whole(name, value)
    if value < low or (high is not None and value > high):
        raise RequestError("out of range", where=name, found=value, allowed=_range(low, high))


def _real(name: str, value: Any, low: float, high: float | None = None, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not math.isfinite(value):
        raise RequestError("a finite number is needed", where=name, found=repr(value))
    if value < low or (open_low and value == low) or (high is not None and value > high):
        raise RequestError("out of range", where=name, found=value, allowed=_range(low, high, open_low))


def _range(low: float, high: float | None, open_low: bool = False) -> str:
    sign = ">" if open_low else ">="
    return f"{sign} {low}" if high is None else f"{sign} {low} and <= {high}"
