"""Plain completions: a prompt as text or ids, with or without a suffix, answered as `text_completion`."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from deepinfer.recipe import Event, RecipeTokenizer, StreamDecoder
from deepinfer.recipe.fields import Field
from deepinfer.recipe.sampling import MOST_TOP_LOGPROBS, check_sampling, check_stop
from deepinfer.runtime.detokenizer import StopTexts
from deepinfer.runtime.outputs import Debug
from deepinfer.runtime.server.answer import finish_of
from deepinfer.runtime.server.failures import HttpFailure
from deepinfer.runtime.server.vocabulary import Vocabulary
from deepinfer.runtime.server.wire import Sampling, TokenLogprob, Update

DEFAULT_LENGTH = 16  # what the API documents where max_tokens is missing


@dataclass(frozen=True)
class CompletionRequest:
    """A body of /v1/completions. ``prompt_text``: None for a prompt of ids without a tokenizer; ``text_from_ids``: it
    is what the client's ids spell, so that control tokens among them are part of it."""

    model: str
    ids: list[int]
    prompt_text: str | None
    text_from_ids: bool
    sampling: Sampling
    echo: bool
    logprobs: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    no_tokens: bool


def read_completions(root: Field, vocabulary: Vocabulary, max_model_len: int, most: int) -> list[CompletionRequest]:
    """A request as the engine takes it, one for each prompt.

    ``most``: prompts that can be open at the same time.

    Raises:
        SchemaError, HttpFailure: the body is no such request, or asks for what is not built.
    """
    prompts = _prompts(root.required("prompt"))
    if len(prompts) > most:
        raise HttpFailure(400, f"prompt holds {len(prompts)} prompts, at most {most} can be taken at the same time.",
                          param="prompt")
    return [_read(root, prompt, vocabulary, max_model_len) for prompt in prompts]


def _read(root: Field, prompt: Field, vocabulary: Vocabulary, max_model_len: int) -> CompletionRequest:
    model = root.required("model").text()
    suffix = root.text_at("suffix")
    ids, text = _prompt(prompt, suffix, vocabulary)
    temperature, top_p = root.number_at("temperature"), root.number_at("top_p")
    check_sampling(temperature, top_p)
    logprobs = root.integer_at("logprobs", 8)
    if logprobs is not None and logprobs > MOST_TOP_LOGPROBS:
        raise HttpFailure(400, f"Invalid logprobs value, the valid range of logprobs is [0, {MOST_TOP_LOGPROBS}].",
                          param="logprobs")
    echo = root.flag_at("echo") or False
    if echo and (suffix is not None or (root.integer_at("n", 32) or 1) > 1):
        raise HttpFailure(400, f"echo and {'n > 1' if suffix is None else 'suffix'} exclude each other.", param="echo")
    asked = root.integer_at("max_tokens", 32)
    most = DEFAULT_LENGTH if asked is None else asked
    if len(ids) + most > max_model_len:
        if asked is not None or len(ids) >= max_model_len:
            raise HttpFailure(400, f"This model's maximum context length is {max_model_len} tokens. However, you "
                                   f"requested {len(ids) + most} tokens ({len(ids)} in the prompt, {most} in the "
                                   "completion). Please reduce the length of the prompt or completion.",
                              code="context_length_exceeded")
        most = max_model_len - len(ids)
    if most == 0 and not echo:
        raise HttpFailure(400, "max_tokens: 0 is possible only with echo.", param="max_tokens")
    sampling: Sampling = {"temperature": 1.0 if temperature is None else temperature,
                          "top_p": 1.0 if top_p is None else top_p, "max_tokens": max(1, most)}
    for name in ("presence_penalty", "frequency_penalty"):
        if (value := root.number_at(name)) is not None:
            sampling[name] = value
    if (seed := root.integer_at("seed", 63)) is not None:
        sampling["seed"] = seed
    if logprobs is not None:
        sampling["logprobs"] = logprobs
        if echo:
            sampling["prompt_logprobs"] = logprobs
    options = root.optional("stream_options")
    stop = _stop(root)
    if stop and not vocabulary.has_text:
        raise HttpFailure(400, "stop needs a tokenizer, which this checkpoint lacks.", param="stop")
    return CompletionRequest(model, ids, text, isinstance(prompt.value, list), sampling, echo, logprobs, stop,
                             root.flag_at("stream") or False, bool(options and options.flag_at("include_usage")),
                             most == 0)


def _prompts(field: Field) -> list[Field]:
    """The prompts of a list of them, or the only one."""
    value = field.value
    several = isinstance(value, list) and value and isinstance(value[0], str | list)
    return list(field.items()) if several else [field]


def _prompt(field: Field, suffix: str | None, vocabulary: Vocabulary) -> tuple[list[int], str | None]:
    value = field.value
    if isinstance(value, str):
        text = field.text()
        return vocabulary.completion(text, suffix), text
    if not isinstance(value, list) or not value:
        raise field.wrong("a text or a list of token ids")
    if suffix is not None:
        raise HttpFailure(400, "suffix needs the prompt as text.", param="suffix")
    ids = [item.integer(31) for item in field.items()]
    return ids, vocabulary.tokenizer.decode(ids) if vocabulary.has_text else None


def _stop(root: Field) -> tuple[str, ...]:
    stop = root.optional("stop")
    if stop is None:
        return ()
    return check_stop([stop.text()] if isinstance(stop.value, str) else [item.text() for item in stop.items()])


class CompletionAnswer:
    """One `text_completion`. Without a tokenizer the text stays empty and only counts and ids are known."""

    done_line: str | None = "[DONE]"

    def __init__(self, request: CompletionRequest, answer_id: str, tokenizer: RecipeTokenizer | None,
                 fingerprint: str, index: int = 0) -> None:
        self._over = False
        self._index, self._cached = index, 0
        self._debug: Debug | None = None
        self._request, self._id, self._fingerprint = request, answer_id, fingerprint
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer) if tokenizer is not None else None
        self._stops = StopTexts(request.stop, include=False)
        self._created = int(time.time())
        self._shown = 0
        self._tokens = 0
        self._finish: str | None = None
        self._prefix = (request.prompt_text or "") if request.echo else ""
        self._logprobs = _Logprobs(tokenizer)
        self._sent_logprobs = 0
        self._failure: dict[str, Any] | None = None

    def is_over(self) -> bool:
        return self._over

    def begin(self, cached_tokens: int) -> list[Event]:
        self._cached = cached_tokens
        return [self._chunk(self._prefix)] if self._prefix and self._request.logprobs is None else []

    def push(self, update: Update) -> list[Event]:
        request, first = self._request, not self._tokens
        text, self._debug = "", update.debug
        if update.prompt_logprobs is not None:
            self._logprobs.add(request.ids, update.prompt_logprobs, placed=not request.text_from_ids)
            text = self._prefix
        for place, token in enumerate(() if request.no_tokens else update.tokens):
            self._tokens += 1
            if update.logprobs is not None:
                self._logprobs.add([token], [update.logprobs[place]])
            if self._stops.push(self._decoder.push(token) if self._decoder else "") is not None:
                return self._end("stop", text, flush=False)
        if request.no_tokens:
            return self._end("length", text) if first else []
        if update.finish is not None:
            return self._end(finish_of(update), text)
        text += self._new_text()
        return [self._chunk(text)] if text or update.tokens else []

    def _end(self, reason: str, text: str, *, flush: bool = True) -> list[Event]:
        self._over, self._finish = True, reason
        if self._decoder is not None and flush:
            self._stops.push(self._decoder.finish(), active=False)
        self._stops.finish()
        events = [self._chunk(text + self._new_text(), self._finish)]
        if self._request.include_usage:
            events.append(Event(None, {**self._frame(), "choices": [], "usage": self._usage()}))
        return events

    def fail(self, message: str, *, overloaded: bool) -> list[Event]:
        self._over = True
        code = "overloaded" if overloaded else "server_error"
        self._failure = {"error": {"message": message, "type": "server_error", "param": None, "code": code}}
        return [Event(None, self._failure)]

    def body(self) -> dict[str, Any]:
        if self._failure is not None:
            return self._failure
        choice = {"index": self._index, "text": self._prefix + self._stops.text[: self._stops.shown],
                  "logprobs": self._logprobs.shown(0) if self._request.logprobs is not None else None,
                  "finish_reason": self._finish}
        return {**self._frame(), "choices": [choice], "usage": self._usage(), **self._shown_debug()}

    def _new_text(self) -> str:
        new = self._stops.text[self._shown : self._stops.shown]
        self._shown = self._stops.shown
        return new

    def _frame(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._request.model,
                "system_fingerprint": self._fingerprint}

    def _chunk(self, text: str, finish: str | None = None) -> Event:
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = self._logprobs.shown(self._sent_logprobs)
            self._sent_logprobs = len(self._logprobs.tokens)
        choice = {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        more: dict[str, Any] = {"usage": None} if self._request.include_usage else {}
        if finish is not None:
            more |= self._shown_debug()
        return Event(None, {**self._frame(), "choices": [choice], **more})

    def _shown_debug(self) -> dict[str, Any]:
        return {} if self._debug is None else {"debug": asdict(self._debug)}

    def _usage(self) -> dict[str, Any]:
        prompt = len(self._request.ids)
        return {"prompt_tokens": prompt, "completion_tokens": self._tokens, "total_tokens": prompt + self._tokens,
                "prompt_tokens_details": {"cached_tokens": self._cached}}


class _Logprobs:
    """The four parallel lists of this API."""

    def __init__(self, tokenizer: RecipeTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.tokens: list[str] = []
        self._values: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []
        self._decoder = StreamDecoder(tokenizer) if tokenizer is not None else None
        self._length = 0

    def add(self, ids: list[int], found: list[Any], *, placed: bool = False) -> None:
        """``placed``: control tokens among ``ids`` were put there by the server and are no part of the text."""
        for token, logprob in zip(ids, found, strict=True):
            self.tokens.append(self._text(token))
            self._offsets.append(self._length)
            if self._decoder is not None and not (placed and self._tokenizer and self._tokenizer.is_special(token)):
                self._length += len(self._decoder.push(token))
            if isinstance(logprob, TokenLogprob):
                self._values.append(logprob.value)
                shown: dict[str, float] = {}
                for rival, value in [*logprob.top, (token, logprob.value)]:
                    shown.setdefault(self._text(rival), value)  # of two ids that look alike the likelier one
                self._top.append(shown)
            else:
                self._values.append(None)
                self._top.append(None)

    def shown(self, first: int) -> dict[str, Any]:
        return {"tokens": self.tokens[first:], "token_logprobs": self._values[first:],
                "top_logprobs": self._top[first:], "text_offset": self._offsets[first:]}

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.token_text(token)
