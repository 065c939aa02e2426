"""Further front-end processes, as the first one keeps them: started, carried for, watched, started again, ended.

They accept from the same listening socket. Messages between them and the engine pass through the first front end, which
does not look inside.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket as sockets
import sys
import tempfile
import time
from pathlib import Path

import zmq
import zmq.asyncio

from deepinfer.errors import InternalError
from deepinfer.runtime import events
from deepinfer.runtime.server import relay, wire
from deepinfer.runtime.server.board import Board
from deepinfer.runtime.server.engine_link import EngineLink
from deepinfer.runtime.server.export import ServerMetrics
from deepinfer.runtime.server.service import ServerSettings

COMMAND = (sys.executable, "-m", "deepinfer.runtime.server.front_end_process")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 30.0  # seconds between two starts of one that ends
_STEADY_SECONDS = 60.0
_STOP_SECONDS = 5.0


class FrontEnds:
    """Fulfils `engine_link.Peers`.

    ``count``: of all front ends, the first one among them. ``sock``: the listening socket. ``log``: level, and whether
    lines are JSON.
    """

    def __init__(self, count: int, link: EngineLink, metrics: ServerMetrics, board: Board, sock: sockets.socket,
                 settings: ServerSettings, log: tuple[str, bool]) -> None:
        self._count, self._link, self._metrics, self._board = count, link, metrics, board
        self._sock, self._settings, self._log = sock, settings, log
        self._context = zmq.asyncio.Context()
        self._sockets: dict[int, zmq.asyncio.Socket] = {}
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._folder: Path | None = None
        self._stopping = asyncio.Event()

    # ---- life ---------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Begin to run the processes."""
        if self._count == 1:
            return
        self._link.peers = self
        self._folder = Path(tempfile.mkdtemp(prefix="deepinfer-"))  # readable by this user only
        self._tasks = [asyncio.create_task(self._supervise(n), name=f"front-end-{n}") for n in range(1, self._count)]

    async def stop(self) -> None:
        """Ask the processes to end, then make them."""
        self._stopping.set()
        self._tell_all(relay.Leave())
        try:
            await asyncio.wait_for(asyncio.gather(*(p.wait() for p in self._processes.values())), _STOP_SECONDS)
        except TimeoutError:
            for process in self._processes.values():
                if process.returncode is None:
                    process.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._link.peers = None
        self._context.destroy(linger=0)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def drain(self) -> None:
        """They take no new requests."""
        self._tell_all(relay.Drain())

    def give_up(self, reason: str) -> None:
        """Their answers end."""
        self._tell_all(relay.GiveUp(reason))

    async def _supervise(self, number: int) -> None:
        pause = _FIRST_PAUSE
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self._one_life(number)
            if self._stopping.is_set():
                return
            self._board.left(number)
            self._link.send(wire.Left(number))
            events.warn("front_end_down", number=number, exit_code=code)
            pause = _FIRST_PAUSE if time.monotonic() - began > _STEADY_SECONDS else min(2 * pause, _LONGEST_PAUSE)
            await asyncio.sleep(pause)

    async def _one_life(self, number: int) -> int:
        """Run one process until it ends; its exit code."""
        socket = self._context.socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        assert self._folder is not None
        path = self._folder / f"front-end-{number}.ipc"
        path.unlink(missing_ok=True)
        socket.bind(f"ipc://{path}")
        os.chmod(path, 0o600)
        level, as_json = self._log
        settings = relay.FrontEndSettings(
            number=number, front_ends=self._count, socket=self._sock.fileno(), board=self._board.fd,
            endpoint=f"ipc://{path}", server=self._settings, log_json=as_json, log_level=level)
        # a session of its own, as the engine has one
        process = await asyncio.create_subprocess_exec(
            *COMMAND, stdin=asyncio.subprocess.PIPE, start_new_session=True,
            pass_fds=(self._sock.fileno(), self._board.fd))
        assert process.stdin is not None
        process.stdin.write(relay.encode_settings(settings))
        self._processes[number] = process
        reader = asyncio.create_task(self._read(number, socket, process))
        try:
            return await process.wait()
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            self._sockets.pop(number, None)
            if process.returncode is None:
                process.kill()
            socket.close()

    # ---- messages -----------------------------------------------------------------------------------------------
    async def _read(self, number: int, socket: zmq.asyncio.Socket, process: asyncio.subprocess.Process) -> None:
        try:
            while True:
                kind, data = await socket.recv_multipart()
                if kind == relay.ENGINE:
                    self._link.carry(data)
                elif isinstance(message := relay.decode_to_first(data), relay.Joined):
                    self._sockets[number] = socket
                    self._tell_how_it_is(number)
                else:
                    self._own(number, message)
        except InternalError as error:
            events.warn("front_end_failed", number=number, reason=str(error))
            process.kill()

    def _tell_how_it_is(self, number: int) -> None:
        for message in (self._link.hello, self._link.snapshot):
            if message is not None:
                self.forward(number, wire.encode(message))
        self._tell(number, self._standing())

    def _own(self, number: int, message: relay.AskMetrics | relay.Counted | relay.Finished) -> None:
        if isinstance(message, relay.Finished):
            self._metrics.finished(message.prompt_tokens, message.tokens, message.times)
        elif isinstance(message, relay.AskMetrics):
            self._tell(number, relay.MetricsText(message.key, self._metrics.render()))
        elif message.what == "answered":
            self._metrics.answered(message.label, message.status)
        elif message.what == "refused":
            self._metrics.refused(message.label)
        else:
            self._metrics.cut(message.label)

    def forward(self, front_end: int, data: bytes) -> None:
        """See `engine_link.Peers`."""
        self._send(front_end, relay.ENGINE, data)

    def broadcast(self, data: bytes) -> None:
        """See `engine_link.Peers`."""
        for number in self._sockets:
            self._send(number, relay.ENGINE, data)

    def status(self) -> None:
        """See `engine_link.Peers`."""
        self._tell_all(self._standing())

    def _standing(self) -> relay.Standing:
        return relay.Standing(self._link.state, self._link.reason, self._link.restarts)

    def _tell_all(self, message: relay.FromFirst) -> None:
        for number in self._sockets:
            self._tell(number, message)

    def _tell(self, number: int, message: relay.FromFirst) -> None:
        self._send(number, relay.OWN, relay.encode(message))

    def _send(self, number: int, kind: bytes, data: bytes) -> None:
        if number in self._sockets:
            sent = asyncio.ensure_future(self._sockets[number].send_multipart([kind, data], zmq.NOBLOCK))
            sent.add_done_callback(lambda done: done.cancelled() or done.exception())
