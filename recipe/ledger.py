"""Which tokens of an answer were seen where: counts and log-probabilities by channel."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from deepinfer.recipe.signals import Logprobs


class Channel(Enum):
    """The parts of an answer whose tokens are reported."""

    REASONING = "reasoning"
    CONTENT = "content"


@dataclass
class _Entry:
    """Tokens that share their text: usually one, more where a character is spread over several."""

    start: int
    end: int
    tokens: int
    logprobs: Logprobs
    seen: bool = False


class TokenLedger:
    """Follows the reading of an answer; offsets are code points from its start.

    Attributes:
        reasoning_tokens: tokens of which at least one character showed in the reasoning.
    """

    def __init__(self) -> None:
        self.reasoning_tokens = 0
        self._entries: deque[_Entry] = deque()
        self._end = 0

    def add(self, length: int, tokens: int, logprobs: Logprobs) -> None:
        """Tokens that brought the next `length` characters."""
        self._entries.append(_Entry(self._end, self._end + length, tokens, logprobs))
        self._end += length

    def advance(self, end: int, channel: Channel | None) -> Logprobs:
        """Everything up to `end` went to `channel`, None for what is not shown.

        Returns the log-probabilities that go along.
        """
        found: Logprobs = []
        for entry in self._entries:
            if entry.start >= end:
                break
            if channel is not None and not entry.seen:
                entry.seen = True
                found.extend(entry.logprobs)
                if channel is Channel.REASONING:
                    self.reasoning_tokens += entry.tokens
        while self._entries and self._entries[0].end <= end:
            self._entries.popleft()
        return found
