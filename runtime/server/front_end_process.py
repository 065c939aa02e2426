"""A further front end: one line of settings on standard input, then it serves until that input ends.

    python -m deepinfer.runtime.server.front_end_process
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket as sockets
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
import zmq
import zmq.asyncio

from deepinfer.errors import InternalError
from deepinfer.runtime import events
from deepinfer.runtime.server import relay, wire
from deepinfer.runtime.server.app import make_app
from deepinfer.runtime.server.board import Board
from deepinfer.runtime.server.link import Link, State
from deepinfer.runtime.server.logs import start_logging
from deepinfer.runtime.server.run import Listener, configure
from deepinfer.runtime.server.service import Service


class RelayedLink(Link):
    """The engine, by way of the first front end. ``service`` and ``server`` are set before it starts."""

    service: Service
    server: uvicorn.Server

    def __init__(self, settings: relay.FrontEndSettings, board: Board) -> None:
        super().__init__(settings.number, board, most_waiting=settings.server.stream_buffer)
        self.metrics = RelayedMetrics(self)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(settings.endpoint)
        self._task: asyncio.Task[None] | None = None
        self.leaves = asyncio.Event()

    def start(self) -> None:
        self._task = asyncio.create_task(self._read(), name="first-front-end")
        self.tell(relay.Joined())

    async def stop(self) -> None:
        self.set(State.STOPPED, "the server is shutting down")
        self.fail_all()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()
        self._context.term()

    def send(self, message: wire.ToEngine) -> None:
        self._send(relay.ENGINE, wire.encode(message))

    def tell(self, message: relay.ToFirst) -> None:
        """Something for the first front end itself."""
        self._send(relay.OWN, relay.encode(message))

    def _send(self, kind: bytes, data: bytes) -> None:
        sent = asyncio.ensure_future(self._socket.send_multipart([kind, data], zmq.NOBLOCK))
        sent.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _read(self) -> None:
        while True:
            kind, data = await self._socket.recv_multipart()
            try:
                if kind == relay.ENGINE:
                    self.receive(data)
                else:
                    self._own(relay.decode_from_first(data))
            except InternalError as error:
                events.warn("front_end_failed", number=self.number, reason=str(error))
                self._leave()
                return

    def _own(self, message: relay.FromFirst) -> None:
        if isinstance(message, relay.Standing):
            self.restarts = message.restarts
            self.set(message.state, message.reason)
            if message.state in (State.DOWN, State.STOPPED):
                self.fail_all()
        elif isinstance(message, relay.Drain):
            self.service.drain()
        elif isinstance(message, relay.GiveUp):
            self.give_up_all(message.reason)
        elif isinstance(message, relay.MetricsText):
            self.metrics.arrived(message)
        else:
            self._leave()

    def _leave(self) -> None:
        self.leaves.set()
        self.server.should_exit = True


class RelayedMetrics:
    """Fulfils `service.MetricsBook`: the first front end counts for all, and says what there is."""

    def __init__(self, link: RelayedLink) -> None:
        self._link = link
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._keys = itertools.count()

    def finished(self, prompt_tokens: int, tokens: int, times: wire.Times | None) -> None:
        self._link.tell(relay.Finished(prompt_tokens, tokens, times))

    def answered(self, route: str, status: int) -> None:
        self._link.tell(relay.Counted("answered", route, status))

    def refused(self, reason: str) -> None:
        self._link.tell(relay.Counted("refused", reason))

    def cut(self, reason: str) -> None:
        self._link.tell(relay.Counted("cut", reason))

    async def text(self) -> bytes:
        key = next(self._keys)
        self._asked[key] = asyncio.get_running_loop().create_future()
        self._link.tell(relay.AskMetrics(key))
        return await self._asked[key]

    def arrived(self, message: relay.MetricsText) -> None:
        """The answer to `text`."""
        asked = self._asked.pop(message.key)
        if not asked.done():
            asked.set_result(message.text)


class _Server(Listener):
    """Ends when the first front end says so; signals are its business."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(settings: relay.FrontEndSettings) -> None:
    board = Board(settings.front_ends, settings.board)
    link = RelayedLink(settings, board)
    service = Service(settings.server, link, link.metrics)
    server = _Server(configure(make_app(service)))
    link.service, link.server = service, server
    link.start()
    service.start(summary=False)
    try:
        # the first one answers until this one can
        await asyncio.wait([asyncio.ensure_future(event.wait()) for event in (service.has_taken, link.leaves)],
                           return_when=asyncio.FIRST_COMPLETED)
        if not link.leaves.is_set():
            events.info("front_end_listening", number=settings.number, pid=os.getpid())
            await server.serve(sockets=[sockets.socket(fileno=settings.socket)])
    finally:
        await service.stop()
        await link.stop()


def _end_with_the_first() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    """Read the settings and serve."""
    settings = relay.decode_settings(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_the_first, daemon=True, name="first-front-end-watch").start()
    start_logging(settings.log_level, as_json=settings.log_json)
    code = 0
    try:
        asyncio.run(_serve(settings))
    except Exception:
        traceback.print_exc()
        code = InternalError.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the watching thread sits in a read that nothing can end


if __name__ == "__main__":
    main()
