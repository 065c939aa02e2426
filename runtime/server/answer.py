"""From engine updates to the events and the body of an API."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

from deepinfer.recipe import AnswerIdentity, ConvertedRequest, Event, RecipeTokenizer, StreamProcessor
from deepinfer.runtime.outputs import Debug
from deepinfer.runtime.server.wire import Update


class Answer(Protocol):
    """One answer in the making. ``done_line``: data of the line that ends its stream, if the API has one."""

    done_line: str | None

    def is_over(self) -> bool:
        """Nothing more will be shown, so the engine may stop."""

    def begin(self, cached_tokens: int) -> list[Event]:
        """The events before the first text. ``cached_tokens``: of the prompt, those that the prefix cache had."""

    def push(self, update: Update) -> list[Event]:
        """The events of an update; after its last one the answer is over."""

    def fail(self, message: str, *, overloaded: bool) -> list[Event]:
        """The events of an answer that cannot be completed."""

    def body(self) -> dict[str, Any]:
        """The answer in one piece, once it is over."""


class ConversationAnswer:
    """An answer to Chat Completions, Responses or Messages."""

    def __init__(self, request: ConvertedRequest, identity: AnswerIdentity, tokenizer: RecipeTokenizer, *,
                 prompt_tokens: int, fingerprint: str, repair: bool) -> None:
        self._api = request.api
        self._processor = StreamProcessor(request, identity, tokenizer=tokenizer, repair=repair)
        self._prompt_tokens, self._fingerprint = prompt_tokens, fingerprint
        self.done_line = self._processor.done_line
        self._over = False
        self._debug: Debug | None = None

    def is_over(self) -> bool:
        return self._over

    def begin(self, cached_tokens: int) -> list[Event]:
        return self._processor.ready(self._prompt_tokens, cached_tokens, self._fingerprint)

    def push(self, update: Update) -> list[Event]:
        self._debug = update.debug
        logprobs = [(x.value, x.top) for x in update.logprobs or ()]
        events = self._processor.tokens(update.tokens, logprobs)
        if self._processor.stopped_early:
            self._over = True
            events += self._processor.finish()
        elif update.finish is not None:
            self._over = True
            events += self._processor.finish(finish_of(update))
        if self._over and self._debug is not None:
            self._closing(events)["debug"] = asdict(self._debug)
        return events

    def _closing(self, events: list[Event]) -> dict[str, Any]:
        """What stands for the whole answer in its last events."""
        if self._api == "messages":
            return events[-2].data  # message_delta; the last one only says that it was
        found: dict[str, Any] = events[-1].data["response"] if self._api == "responses" else events[-1].data
        return found

    def fail(self, message: str, *, overloaded: bool) -> list[Event]:
        self._over = True
        return self._processor.fail(message, overloaded=overloaded)

    def body(self) -> dict[str, Any]:
        found = self._processor.body()
        return found if self._debug is None else {**found, "debug": asdict(self._debug)}


class CountedAnswer:
    """Another answer whose every chunk tells the usage so far, as clients of vLLM may ask for."""

    def __init__(self, answer: Answer, prompt_tokens: int) -> None:
        self._answer, self._prompt, self._tokens = answer, prompt_tokens, 0
        self.done_line, self.is_over, self.fail, self.body = answer.done_line, answer.is_over, answer.fail, answer.body

    def begin(self, cached_tokens: int) -> list[Event]:
        return self._told(self._answer.begin(cached_tokens))

    def push(self, update: Update) -> list[Event]:
        self._tokens += len(update.tokens)
        return self._told(self._answer.push(update))

    def _told(self, events: list[Event]) -> list[Event]:
        for event in events:
            if event.data.get("usage") is None:
                event.data["usage"] = {"prompt_tokens": self._prompt, "completion_tokens": self._tokens,
                                       "total_tokens": self._prompt + self._tokens}
        return events


def finish_of(update: Update) -> str:
    """Why an answer ended, in a word that the APIs have: a deadline is a limit like that of the length."""
    return "length" if update.finish == "deadline" else update.finish or ""
