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

from deepinfer.errors import ArtifactError, DeepInferError, InternalError, PlanError, SpecError, ToolchainError
from deepinfer.runtime import events
from deepinfer.runtime.server.app import make_app
from deepinfer.runtime.server.engine_process import EngineSettings
from deepinfer.runtime.server.gate import tenant_of
from deepinfer.runtime.server.service import ServerSettings, Service
from deepinfer.runtime.server.wire import Failed

ENGINE_COMMAND = (sys.executable, "-m", "deepinfer.runtime.server.engine_process")
INTERRUPTED = 130  # 128 + SIGINT, what shells report
_BACKLOG = 2048


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
    service = Service(settings, engine, list(command))
    config = uvicorn.Config(make_app(service), log_config=None, access_log=False, lifespan="off", server_header=False,
                            timeout_keep_alive=75, timeout_graceful_shutdown=2)
    server = _Server(config, service)
    service.start()
    host, port = sock.getsockname()[:2]
    events.info("listening", url=f"http://{host}:{port}", pid=os.getpid(), models=",".join(settings.names),
                tenants=",".join(map(tenant_of, settings.keys)))
    try:
        await server.serve(sockets=[sock])
    finally:
        await service.stop()
        events.info("stopped")
    if service.fatal is not None:
        raise service.fatal
    if service.link.gave_up:
        raise _as_error(service.link.failure, service.link.reason)
    return INTERRUPTED if server.interrupted else 0


class _Server(uvicorn.Server):
    """Ends when its engine cannot be started, and drains on a signal; a second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.interrupted = False
        self._service = service
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
            if service.link.open_requests and time.monotonic() > self._deadline:
                service.link.give_up_all("the server is shutting down")
            if not service.link.open_requests:
                self.should_exit = True
        if service.fatal is not None or service.link.gave_up:
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
