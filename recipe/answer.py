"""What the writers of all three APIs share: usage, the end of an answer, ids and clocks."""

from __future__ import annotations

import json
import secrets
import string
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from deepinfer.recipe.signals import Signal

_ALPHANUMERIC = string.ascii_letters + string.digits


class Finish(StrEnum):
    """Why the backend stopped."""

    STOP = "stop"
    LENGTH = "length"
    CONTENT_FILTER = "content_filter"
    OVERLOADED = "insufficient_system_resource"


@dataclass
class Usage:
    """Token counts of one answer; `reasoning_tokens` is None where nobody could count them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int | None = None

    @property
    def missed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


@dataclass
class Ending:
    """How the answer ended: the backend's reason, the stop sequence that matched, whether calls were made."""

    finish: Finish
    stop_sequence: str | None = None
    has_calls: bool = False


@dataclass(frozen=True)
class Event:
    """One event of a stream; `name` is the SSE event name, None where the API uses none."""

    name: str | None
    data: dict[str, Any]

    def sse(self) -> str:
        """The event as it goes over the wire."""
        named = f"event: {self.name}\n" if self.name is not None else ""
        return f"{named}data: {json.dumps(self.data, ensure_ascii=False, separators=(',', ':'))}\n\n"


@dataclass(frozen=True)
class AnswerIdentity:
    """Names and clocks of one answer.

    Attributes:
        id: the response id; also the signature of thinking blocks.
        model: the name the client asked for.
        clock: seconds since the epoch; read at the start and at the end.
        random_id: makes the random tail of a tool-call id: 20 letters or digits and 4 digits.
    """

    id: str
    model: str
    clock: Callable[[], int] = field(default=lambda: int(time.time()))
    random_id: Callable[[], str] = field(default=lambda: new_random_id())

    def call_id(self, index: int, *, empty_thinking: bool) -> str:
        """An id for call `index`; the mark ET tells a later request that this turn had no reasoning to return."""
        return f"call_{index:02d}_{'ET_' if empty_thinking else ''}{self.random_id()}"


class Writer(Protocol):
    """Gives signals the form of one API, as a stream and as a body."""

    done_line: str | None

    def begin(self, usage: Usage, fingerprint: str | None) -> list[Event]:
        """The events before the first text."""

    def signal(self, signal: Signal, call_id: str | None) -> list[Event]:
        """The events of one signal; `call_id` comes with the begin of a call."""

    def end(self, ending: Ending, usage: Usage) -> list[Event]:
        """The last events."""

    def fail(self, message: str, *, overloaded: bool) -> list[Event]:
        """The events of an answer that cannot be completed."""

    def body(self) -> dict[str, Any]:
        """The answer in one piece, valid after `end` or `fail`."""


def new_random_id() -> str:
    """20 letters or digits and 4 digits."""
    letters = "".join(secrets.choice(_ALPHANUMERIC) for _ in range(20))
    return letters + "".join(secrets.choice(string.digits) for _ in range(4))
