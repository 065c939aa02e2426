"""From engine updates to the events and the body of an API."""

from __future__ import annotations

from typing import Any, Protocol

from deepinfer.recipe import AnswerIdentity, ConvertedRequest, Event, RecipeTokenizer, StreamProcessor
from deepinfer.runtime.server.wire import Update


class Answer(Protocol):
    """One answer in the making. ``done_line``: data of the line that ends its stream, if the API has one."""

    done_line: str | None

    def is_over(self) -> bool:
        """Nothing more will be shown, so the engine may stop."""

    def begin(self) -> list[Event]:
        """The events before the first text."""

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
        self._processor = StreamProcessor(request, identity, tokenizer=tokenizer, repair=repair)
        self._prompt_tokens, self._fingerprint = prompt_tokens, fingerprint
        self.done_line = self._processor.done_line
        self._over = False

    def is_over(self) -> bool:
        return self._over

    def begin(self) -> list[Event]:
        return self._processor.ready(self._prompt_tokens, 0, self._fingerprint)

    def push(self, update: Update) -> list[Event]:
        logprobs = [(x.value, x.top) for x in update.logprobs or ()]
        events = self._processor.tokens(update.tokens, logprobs)
        if self._processor.stopped_early:
            self._over = True
            return events + self._processor.finish()
        if update.finish is not None:
            self._over = True
            events += self._processor.finish(update.finish)
        return events

    def fail(self, message: str, *, overloaded: bool) -> list[Event]:
        self._over = True
        return self._processor.fail(message, overloaded=overloaded)

    def body(self) -> dict[str, Any]:
        return self._processor.body()
