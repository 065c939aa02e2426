"""Carries an answer from the engine to the client: stream or body, keep-alives, disconnects, slow readers.

The status is decided by the first news of the engine, or when the first keep-alive is due. A client that goes away,
or reads too slowly, ends its request in the engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from deepinfer.recipe import Event
from deepinfer.runtime.sampling import NOTHING_LEFT
from deepinfer.runtime.server.answer import Answer
from deepinfer.runtime.server.failures import HttpFailure, error_body, error_response, unavailable
from deepinfer.runtime.server.ticket import EngineGone, SlowReader, Ticket, Tickets
from deepinfer.runtime.server.wire import Update

_JSON = b"application/json"
_SSE = b"text/event-stream; charset=utf-8"


class EngineResponse(Response):
    """The response to one generation request.

    Args:
        narrowing: fields of the request that leave it fewer tokens to choose from: at fault when none is left.
        notes: the log line of the request; what became of the answer is added.
        keep_alive: seconds of silence after which a comment (stream) or an empty line (body) is sent.
        on_cut: called when the client went away or was too slow, with the word for it.
    """

    def __init__(self, ticket: Ticket | Tickets, answer: Answer, *, stream: bool, narrowing: Sequence[str], path: str,
                 request_id: str, notes: dict[str, Any], keep_alive: float, on_cut: Callable[[str], None]) -> None:
        super().__init__()
        self._ticket, self._answer, self._stream, self._narrowing = ticket, answer, stream, narrowing
        self._path, self._request_id, self._keep_alive, self._on_cut = path, request_id, keep_alive, on_cut
        self._notes = notes
        # the status is sent; the answer's first events are made; all of it is handed on
        self._begun = self._started = self._given = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._answer_to(scope, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        slow = asyncio.create_task(self._ticket.failed.wait())
        try:
            await asyncio.wait({work, gone, slow}, return_when=asyncio.FIRST_COMPLETED)
            # a burst wakes the reading and the watch for slow readers in one turn: either may come first
            if not work.done() or (self._ticket.failed.is_set() and not self._given):
                why = "disconnected" if gone.done() else "slow_reader"
                self._on_cut(why)
                self._notes["cut"] = why
        finally:
            self._ticket.close()
            for task in (work, gone, slow):
                if not task.done():
                    task.cancel()
            results = await asyncio.gather(work, gone, slow, return_exceptions=True)
            ticket = self._ticket
            self._notes.update(tokens=ticket.tokens, cached_tokens=ticket.cached, finish=ticket.finish)
            if ticket.first is not None:
                self._notes["first_token_seconds"] = round(ticket.first - ticket.started, 4)
        if isinstance(results[0], Exception) and not isinstance(results[0], SlowReader | OSError):
            raise results[0]

    async def _answer_to(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._run(send)
        except HttpFailure as failure:
            if not self._begun:
                # the status can still tell
                await error_response(self._path, failure, self._request_id)(scope, receive, send)
            elif self._stream:
                shown = [] if self._started else self._answer.begin(0)
                shown += self._answer.fail(failure.message, overloaded=failure.status == 503)
                await _chunk(send, _wire(shown))
                await _chunk(send, self._last_line(), more=False)
            else:
                body = error_body(self._path, failure, self._request_id)
                await _chunk(send, _json(body), more=False)

    async def _run(self, send: Send) -> None:
        answer = self._answer
        while not answer.is_over():
            shown: list[Event] = []
            for update in await self._news(send):
                if not self._started:
                    self._started = True
                    shown += answer.begin(update.cached)
                shown += answer.push(update)
                if answer.is_over():
                    break
            if self._stream:
                await self._open(send)
                if shown:
                    await _chunk(send, _wire(shown))
        last = self._last_line() if self._stream else _json(answer.body())
        await self._open(send, length=None if self._stream else len(last))
        await _chunk(send, last, more=False)
        self._given = True

    async def _news(self, send: Send) -> list[Update]:
        """The next updates; keep-alives go out meanwhile. HttpFailure: the answer cannot go on."""
        while True:
            try:
                taken = await self._ticket.take(self._keep_alive)
            except EngineGone as gone:
                raise unavailable(str(gone)) from None
            for update in taken:
                failure = _failure_of(update, self._narrowing)
                if failure is not None:
                    raise failure
            if taken:
                return taken
            await self._open(send)
            await _chunk(send, b": keep-alive\n\n" if self._stream else b"\n")

    async def _open(self, send: Send, length: int | None = None) -> None:
        """Send the status; ``length`` of the body, if known."""
        if self._begun:
            return
        self._begun = True
        headers = [(b"content-type", _SSE if self._stream else _JSON), (b"cache-control", b"no-cache")]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        if self._stream:
            headers.append((b"x-accel-buffering", b"no"))  # proxies of nginx's kind would hold events back
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    def _last_line(self) -> bytes:
        done = self._answer.done_line
        return f"data: {done}\n\n".encode() if done else b""


def _failure_of(update: Update, narrowing: Sequence[str]) -> HttpFailure | None:
    if update.finish == "refused":
        return HttpFailure(400, update.error or "The engine cannot serve this request.", code="invalid_request_error")
    if update.finish == "error" and narrowing and NOTHING_LEFT in (update.error or ""):
        verb = "contradict each other" if len(narrowing) > 1 else "cannot be met"
        return HttpFailure(400, f"{' and '.join(narrowing)} {verb}: {NOTHING_LEFT}. Loosen or leave out one of them.",
                           code="invalid_request_error", param=narrowing[0])
    if update.finish == "error":
        return HttpFailure(500, f"The answer failed: {update.error}.", code="server_error")
    if update.finish == "abort":
        return unavailable("the request was ended by the server")
    return None


async def _disconnected(receive: Receive) -> None:
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return


async def _chunk(send: Send, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


def _json(body: object) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


def _wire(shown: list[Event]) -> bytes:
    return "".join(event.sse() for event in shown).encode()
