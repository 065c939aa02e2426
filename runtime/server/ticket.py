"""One request on its way through the engine, as the front end sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from deepinfer.runtime.server.wire import Update


class EngineGone(Exception):
    """The engine ended or was never there; `str()` says why in one sentence."""


class SlowReader(Exception):
    """More of the answer waits for its reader than the server keeps."""


class Ticket:
    """Collects the updates of one request.

    ``most_waiting``: tokens that may wait for the reader. ``beside``: a ticket whose reader reads this one too.
    """

    def __init__(self, key: int, prompt_tokens: int, most_waiting: int, abort: Callable[[int], None],
                 beside: Ticket | None = None) -> None:
        self.key, self.prompt_tokens = key, prompt_tokens
        self.tokens = self.cached = 0
        self.finish: str | None = None
        self.started = time.monotonic()
        self.first: float | None = None
        self._most, self._abort = most_waiting, abort
        self._pending: list[Update] = []
        self._waiting = 0
        self._news: asyncio.Event = asyncio.Event() if beside is None else beside._news
        self.failed: asyncio.Event = asyncio.Event() if beside is None else beside.failed
        self._failure: Exception | None = None

    def push(self, update: Update) -> None:
        """The engine has news."""
        if self.first is None and update.tokens:
            self.first = time.monotonic()
        self.tokens += len(update.tokens)
        self.cached = max(self.cached, update.cached)
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
        if not self.has_news and not await self.wait(timeout):
            return []
        return self.collect()

    @property
    def has_news(self) -> bool:
        """Whether `collect` has something to give, or to raise."""
        return bool(self._pending) or self._failure is not None

    async def wait(self, timeout: float) -> bool:
        """Until there may be news, here or beside; False: nothing came within ``timeout`` seconds."""
        self._news.clear()
        try:
            await asyncio.wait_for(self._news.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def collect(self) -> list[Update]:
        """What has come; raises as `take` when nothing has and nothing will."""
        taken, self._pending, self._waiting = self._pending, [], 0
        if not taken and self._failure is not None:
            raise self._failure
        return taken

    def close(self) -> None:
        """Nobody reads any more: unless the answer is over, the engine is told to stop."""
        if self.finish is None and self._failure is None:
            self._abort(self.key)


class Tickets:
    """The tickets of several prompts of one request, in the order of the prompts, read as one.

    An update's ``index`` counts the answers of all prompts, ``answers`` of each; ``last`` is never set, since no update
    is the last one of all.
    """

    def __init__(self, tickets: Sequence[Ticket], answers: int) -> None:
        self._tickets, self._answers = list(tickets), answers
        self._open = list(enumerate(self._tickets))
        self.key, self.started, self.failed = tickets[0].key, tickets[0].started, tickets[0].failed

    async def take(self, timeout: float) -> list[Update]:
        """As `Ticket.take`."""
        if not any(t.has_news for _, t in self._open) and not await self._tickets[0].wait(timeout):
            return []
        taken = []
        for place, ticket in self._open:
            if ticket.has_news:
                taken += [msgspec.structs.replace(u, index=u.index + place * self._answers, last=False)
                          for u in ticket.collect()]
        self._open = [(place, t) for place, t in self._open if t.finish is None or t.has_news]
        return taken

    def close(self) -> None:
        """As `Ticket.close`, for all of them."""
        for ticket in self._tickets:
            ticket.close()

    @property
    def tokens(self) -> int:
        return sum(t.tokens for t in self._tickets)

    @property
    def cached(self) -> int:
        return sum(t.cached for t in self._tickets)

    @property
    def finish(self) -> str | None:
        """How the last prompt's answers ended, once all have."""
        return None if any(t.finish is None for t in self._tickets) else self._tickets[-1].finish

    @property
    def first(self) -> float | None:
        return min((t.first for t in self._tickets if t.first is not None), default=None)
