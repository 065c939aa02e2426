"""Run the server: the listening socket, signals, the drain, the exit code."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

from deepinfer.errors import ArtifactError, DeepInferError, InternalError, PlanError, SpecError, ToolchainError
from deepinfer.runtime import events
from deepinfer.runtime.server.app import make_app
from deepinfer.runtime.server.board import Board
from deepinfer.runtime.server.engine_link import EngineLink
from deepinfer.runtime.server.engine_process import EngineSettings
from deepinfer.runtime.server.export import ServerMetrics
from deepinfer.runtime.server.front_ends import FrontEnds
from deepinfer.runtime.server.gate import tenant_of
from deepinfer.runtime.server.service import ServerSettings, Service
from deepinfer.runtime.server.wire import Failed

ENGINE_COMMAND = (sys.executable, "-m", "deepinfer.runtime.server.engine_process")
INTERRUPTED = 130  # 128 + SIGINT, what shells report
_BACKLOG = 2048
_AT_ONCE = 16  # connections that a front end accepts before it looks at anything else
_GIVING_UP_SECONDS = 3.0  # that a front end which does not listen any more is waited for
_SHUTTING_DOWN = "the server is shutting down"


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket; PlanError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # with the protocol named asyncio knows it for TCP and switches Nagle's delay off
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError as error:
        raise PlanError("the address cannot be listened on", where=f"{host}:{port}", found=error.strerror or error,
                        next_step="choose another --port or --host, or end what uses it") from None
    return sock


def run_server(settings: ServerSettings, engine: EngineSettings, sock: socket.socket,
               command: tuple[str, ...] = ENGINE_COMMAND) -> int:
    """Serve until a signal; the exit code.

    Raises:
        DeepInferError: the engine cannot be started, in its own words.
    """
    return asyncio.run(_serve(settings, engine, sock, command))


async def _serve(settings: ServerSettings, engine: EngineSettings, sock: socket.socket,
                 command: tuple[str, ...]) -> int:
    board = Board(settings.front_ends)
    link = EngineLink(command, engine, board, most_waiting=settings.stream_buffer)
    metrics = ServerMetrics(settings.names[0], lambda: link.snapshot, lambda: link.restarts, lambda: link.hello)
    service = Service(settings, link, metrics)
    others = FrontEnds(settings.front_ends, link, metrics, board, sock, settings, (engine.log_level, engine.log_json))
    server = _Server(configure(make_app(service)), service, link, others)
    others.start()
    service.start(summary=True)
    link.start()
    host, port = sock.getsockname()[:2]
    events.info("listening", url=f"http://{host}:{port}", pid=os.getpid(), front_ends=settings.front_ends,
                models=",".join(settings.names),
                tenants=",".join(map(tenant_of, settings.keys)))
    try:
        await server.serve(sockets=[sock])
    finally:
        await others.stop()
        await service.stop()
        await link.stop()
        events.info("stopped")
    if service.fatal is not None:
        raise service.fatal
    if link.gave_up:
        raise _as_error(link.failure, link.reason)
    return INTERRUPTED if server.interrupted else 0


def configure(app: FastAPI) -> uvicorn.Config:
    """How every front end serves."""
    return uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", server_header=False,
                          timeout_keep_alive=75, timeout_graceful_shutdown=2, backlog=_AT_ONCE)


class Listener(uvicorn.Server):
    """Accepts a few connections at a time, so that front ends share them, and lets many wait."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        for sock in sockets or ():
            sock.listen(_BACKLOG)  # asyncio has set it to what is accepted at a time


class _Server(Listener):
    """Ends when its engine cannot be started, and drains on a signal; a second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, service: Service, link: EngineLink, others: FrontEnds) -> None:
        super().__init__(config)
        self.interrupted = False
        self._service, self._link, self._others = service, link, others
        self._deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._deadline is not None:
            self.should_exit = self.force_exit = True
            return
        self.interrupted = sig == signal.SIGINT
        self._deadline = time.monotonic() + (0 if self.interrupted else self._service.settings.drain)

    async def on_tick(self, counter: int) -> bool:
        service = self._service
        if self._deadline is not None:
            if not service.draining:
                service.drain()
                self._others.drain()
            late = time.monotonic() - self._deadline
            if service.open_requests and late > 0:
                self._link.give_up_all(_SHUTTING_DOWN)
                self._others.give_up(_SHUTTING_DOWN)
            if not service.open_requests or late > _GIVING_UP_SECONDS:
                self.should_exit = True
        if service.fatal is not None or self._link.gave_up:
            self.should_exit = True
        return await super().on_tick(counter)


def _as_error(failure: Failed | None, reason: str) -> Exception:
    """What the engine process said, as the error it was there."""
    kinds: tuple[type[DeepInferError], ...] = (SpecError, PlanError, ToolchainError, ArtifactError)
    if failure is not None:
        for kind in kinds:
            if kind.exit_code == failure.exit_code:
                return kind(failure.sentence)
    return InternalError(reason)
