"""What the routes share: settings, the engine, the vocabulary, and who may be served now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from deepinfer.errors import DeepInferError
from deepinfer.recipe import ConversionOptions, Model
from deepinfer.recipe.options import CLAUDE_PREFIXES
from deepinfer.runtime import events
from deepinfer.runtime.server import wire
from deepinfer.runtime.server.board import Column
from deepinfer.runtime.server.failures import HttpFailure, unavailable
from deepinfer.runtime.server.garbage import spare_what_was_loaded
from deepinfer.runtime.server.link import Link, State
from deepinfer.runtime.server.ticket import EngineGone, Ticket, Tickets
from deepinfer.runtime.server.vocabulary import Vocabulary, read_vocabulary

_SUMMARY_SECONDS = 10.0
_SHARES = {"prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
           "drafts_accepted": ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total")}
_AVERAGING = 0.1  # weight of the newest request in the mean time that Retry-After is made of
_LONGEST_RETRY = 60.0


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Choices of whoever runs the server.

    Attributes:
        names: served model names, the first one is shown. ``keys``: API keys; none: everybody may ask.
        max_model_len: shorter than the engine's, if given. ``max_queue``: requests that wait beside the running ones.
        max_body: bytes of a request. ``keep_alive``: seconds of silence before a sign of life.
        stream_buffer: tokens of one answer that wait for a slow reader before it is cut.
        tokenizer: a tokenizer.json or its folder, where it is not the checkpoint's. ``dialect``: of prompts, by name.
        default_thinking: where a request does not say. ``repair``: read malformed tool calls for what they mean.
        drain: seconds that running answers get after SIGTERM. ``priorities``: clients may say who goes first.
        retention: seconds by class, of the store below the engine's prefix cache; None: there is none.
        front_ends: processes that answer clients.
        origins: of web pages of others whose scripts may read answers. ``created``: when the server began, in seconds
            since the epoch, the same in every front end.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...] = ()
    max_model_len: int | None = None
    max_queue: int = 256
    max_body: int = 48 << 20
    keep_alive: float = 10.0
    stream_buffer: int = 4096
    tokenizer: Path | None = None
    dialect: str | None = None
    default_thinking: bool = True
    repair: bool = False
    drain: float = 30.0
    priorities: bool = False
    retention: dict[str, int] | None = None
    front_ends: int = 1
    origins: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))


class MetricsBook(Protocol):
    """Counts what happens in a front end; see `export.ServerMetrics`."""

    def finished(self, prompt_tokens: int, tokens: int, times: wire.Times | None) -> None: ...

    def answered(self, route: str, status: int) -> None: ...

    def refused(self, reason: str) -> None: ...

    def cut(self, reason: str) -> None: ...

    async def text(self) -> bytes: ...


@dataclass(frozen=True)
class Prompt:
    """What the engine is asked: ids, and arguments of SamplingParams."""

    ids: list[int]
    sampling: wire.Sampling


class Service:
    """The state of a front end. All methods run in its event loop."""

    def __init__(self, settings: ServerSettings, link: Link, metrics: MetricsBook) -> None:
        self.settings, self.link, self.metrics = settings, link, metrics
        self.created = settings.created
        link.on_update = self._updated
        self.vocabulary: Vocabulary | None = None
        self.fatal: DeepInferError | None = None  # why the server cannot go on
        self.draining = False
        self.has_taken = asyncio.Event()  # requests could be taken once
        self._mean_seconds = 1.0
        self._tasks: list[asyncio.Task[None]] = []

    # ---- life ---------------------------------------------------------------------------------------------------
    def start(self, *, summary: bool) -> None:
        """Begin to watch the engine. ``summary``: log what goes on."""
        self._tasks = [asyncio.create_task(self._watch())]
        if summary:
            self._tasks.append(asyncio.create_task(self._summarise()))

    async def stop(self) -> None:
        """Watch it no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drain(self) -> None:
        """Take no new requests; those that run go on."""
        self.draining = True
        events.info("draining", open_requests=self.link.open_requests, seconds=self.settings.drain)

    async def _watch(self) -> None:
        while True:
            takes = self._cannot_take is None
            if takes:
                self.has_taken.set()
            if self.has_taken.is_set():
                self.link.board.set(self.link.number, Column.READY, takes)
            await self.link.changed.wait()
            self.link.changed.clear()
            if self.link.state is State.READY and self.vocabulary is None:
                try:
                    self.vocabulary = await asyncio.to_thread(self._read_vocabulary)
                except DeepInferError as error:
                    self.fatal = error
                self.link.changed.set()

    def _read_vocabulary(self) -> Vocabulary:
        s, folder = self.settings, self.link.require_hello().checkpoint
        found = read_vocabulary(s.tokenizer or (Path(folder) if folder else None), s.dialect)
        dialect = found.dialect.name if found.dialect is not None else None
        spare_what_was_loaded()
        events.info("vocabulary_ready", tokenizer=found.has_text, dialect=dialect)
        return found

    # ---- admission ----------------------------------------------------------------------------------------------
    @property
    def not_ready(self) -> str | None:
        """Why not all front ends take requests now; None: they do."""
        reason = self._cannot_take
        return reason or (None if self.link.board.all_ready else "another front end is starting")

    @property
    def open_requests(self) -> int:
        """Requests of all front ends that the engine has not finished."""
        return self.link.board.total(Column.OPEN)

    @property
    def _cannot_take(self) -> str | None:
        """Why this front end can take no request now; None: it can."""
        if self.draining:
            return "the server is shutting down"
        if self.link.state is not State.READY:
            return self.link.reason
        return "the tokenizer is being read" if self.vocabulary is None else None

    def require_ready(self, prompts: int = 1) -> Vocabulary:
        """HttpFailure 503 when no request can be taken, 429 when too many wait already for so many prompts more."""
        reason = self._cannot_take
        if reason is not None or self.vocabulary is None:
            self.metrics.refused("draining" if self.draining else "unavailable")
            raise unavailable(reason or "", retry_after=5.0 if self.draining else 1.0)
        slots, waiting = self.link.require_hello().slots, self.open_requests
        if waiting + prompts > self.most_open:
            self.metrics.refused("queue_full")
            seconds = min(_LONGEST_RETRY, self._mean_seconds * (waiting + prompts - slots) / slots)
            raise HttpFailure(429, f"The queue is full: {waiting} requests are open, at most {self.most_open} are "
                                   "taken.", code="queue_full", retry_after=seconds)
        return self.vocabulary

    @property
    def most_open(self) -> int:
        """Prompts that may run and wait at the same time."""
        return self.link.require_hello().slots + self.settings.max_queue

    def submit(self, prompts: Sequence[Prompt], priority: int, debug: bool) -> Ticket | Tickets:
        """Hand the prompts of a request to the engine; HttpFailure as `require_ready`."""
        self.require_ready(len(prompts))
        tickets: list[Ticket] = []
        try:
            for prompt in prompts:
                beside = tickets[0] if tickets else None
                tickets.append(self.link.submit(prompt.ids, prompt.sampling, priority, debug, beside))
        except EngineGone as gone:
            for ticket in tickets:
                ticket.close()
            raise unavailable(str(gone)) from None
        return tickets[0] if len(tickets) == 1 else Tickets(tickets, int(prompts[0].sampling.get("n", 1)))

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer."""
        engine = self.link.require_hello().max_model_len
        return min(engine, self.settings.max_model_len or engine)

    def conversion(self, api: str, vocabulary: Vocabulary) -> ConversionOptions:
        """How requests of an API are converted: every served name has the dialect of the one model."""
        dialect = vocabulary.conversation_dialect()
        model = Model(self.link.require_hello().model, dialect.name)
        prefixes = tuple((beginning, model) for beginning, _ in CLAUDE_PREFIXES) if api == "messages" else ()
        return ConversionOptions(default_thinking=self.settings.default_thinking,
                                 models=dict.fromkeys(self.settings.names, model), prefixes=prefixes)

    # ---- bookkeeping --------------------------------------------------------------------------------------------
    def _updated(self, ticket: Ticket, update: wire.Update) -> None:
        board, number = self.link.board, self.link.number
        board.add(number, Column.TOKENS, len(update.tokens))
        if update.last:
            seconds = time.monotonic() - ticket.started
            self._mean_seconds += _AVERAGING * (seconds - self._mean_seconds)
            board.add(number, Column.PROMPT_TOKENS, ticket.prompt_tokens)
            if update.finish != "refused":
                self.metrics.finished(ticket.prompt_tokens, ticket.tokens, update.times)

    async def _summarise(self) -> None:
        """One line every ten seconds in which something happened."""
        idle, before, board = True, dict.fromkeys(_SHARES.values(), (0.0, 0.0)), self.link.board
        tokens = (0, 0)
        while True:
            await asyncio.sleep(_SUMMARY_SECONDS)
            was, tokens = tokens, (board.total(Column.PROMPT_TOKENS), board.total(Column.TOKENS))
            prompt, generated = (max(0, now - then) for now, then in zip(tokens, was, strict=True))
            snapshot, hello = self.link.snapshot, self.link.hello
            quiet = not (prompt or generated or self.open_requests)
            if snapshot is not None and hello is not None and not (idle and quiet):
                used = 1 - snapshot.free_blocks / max(1, hello.blocks)
                shares = {}
                for name, counters in _SHARES.items():
                    (part, whole), (was_part, was_whole) = _counted(snapshot, counters), before[counters]
                    before[counters] = part, whole
                    if whole > was_whole and part >= was_part:  # an engine that has started again begins at 0
                        shares[name] = round((part - was_part) / (whole - was_whole), 3)
                events.info("load", running=snapshot.running, waiting=snapshot.waiting, open=self.open_requests,
                            cache_used=round(used, 3), prompt_tokens_per_s=round(prompt / _SUMMARY_SECONDS, 1),
                            tokens_per_s=round(generated / _SUMMARY_SECONDS, 1), **shares)
            idle = quiet


def _counted(snapshot: wire.Snapshot, names: tuple[str, str]) -> tuple[float, float]:
    """Two counters of an engine, summed over labels."""
    found = {m.name: sum(m.values.values()) for m in snapshot.metrics if m.name in names}
    return found.get(names[0], 0.0), found.get(names[1], 0.0)
