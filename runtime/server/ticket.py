"""One request on its way through the engine, as the front end sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from deepinfer.runtime.server.wire import Update


class EngineGone(Exception):
    """The engine ended or was never there; `str()` says why in one sentence."""


class SlowReader(Exception):
    """More of the answer waits for its reader than the server keeps."""


class Ticket:
    """Collects the updates of one request. ``most_waiting``: tokens that may wait for the reader."""

    def __init__(self, key: int, prompt_tokens: int, most_waiting: int, abort: Callable[[int], None]) -> None:
        self.key, self.prompt_tokens = key, prompt_tokens
        self.tokens = self.cached = 0
        self.finish: str | None = None
        self.started = time.monotonic()
        self.first: float | None = None
        self._most, self._abort = most_waiting, abort
        self._pending: list[Update] = []
        self._waiting = 0
        self._news = asyncio.Event()
        self.failed = asyncio.Event()
        self._failure: Exception | None = None

    def push(self, update: Update) -> None:
        """The engine has news."""
        if self.first is None and update.tokens:
            self.first = time.monotonic()
        self.tokens += len(update.tokens)
        self.cached = update.cached
        if update.last:
            self.finish = update.finish
        self._pending.append(update)
        self._waiting += len(update.tokens)
        self._news.set()
        if self._waiting > self._most:
            self.fail(SlowReader(f"the reader is {self._waiting} tokens behind; at most {self._most} are kept"))
            self._abort(self.key)

    def fail(self, failure: Exception) -> None:
        """Nothing more will come."""
        if self._failure is None and self.finish is None:
            self._failure = failure
        if isinstance(failure, SlowReader):
            self.failed.set()
        self._news.set()

    async def take(self, timeout: float) -> list[Update]:
        """What has come since the last call; empty when nothing comes within ``timeout`` seconds.

        Raises:
            EngineGone, SlowReader: nothing more will come.
        """
        if not self._pending and self._failure is None:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), timeout)
            except TimeoutError:
                return []
        taken, self._pending, self._waiting = self._pending, [], 0
        if not taken and self._failure is not None:
            raise self._failure
        return taken

    def close(self) -> None:
        """Nobody reads any more: unless the answer is over, the engine is told to stop."""
        if self.finish is None and self._failure is None:
            self._abort(self.key)
