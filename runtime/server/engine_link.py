"""The front end's side of the engine process: start it, talk to it, notice its end, start it again."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from deepinfer.errors import InternalError
from deepinfer.runtime import events
from deepinfer.runtime.server import wire
from deepinfer.runtime.server.board import Board
from deepinfer.runtime.server.engine_process import EngineSettings
from deepinfer.runtime.server.link import Link, State

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 30.0  # seconds between two starts of a failing engine
_STEADY_SECONDS = 60.0  # an engine that served so long is started again without a pause
_STOP_SECONDS = 10.0


class Peers(Protocol):
    """The other front ends, for which this one carries messages."""

    def forward(self, front_end: int, data: bytes) -> None:
        """A message of the engine for one of them."""

    def broadcast(self, data: bytes) -> None:
        """A message of the engine for all of them."""

    def status(self) -> None:
        """The engine is in another state."""


class EngineLink(Link):
    """Owns the engine process. It is the link of front end 0, and carries what the others say and hear.

    Args:
        command: starts a process that speaks `wire`.
        settings: for it; the endpoint is set here.
        board, most_waiting: see `Link`.
    """

    def __init__(self, command: Sequence[str], settings: EngineSettings, board: Board, *, most_waiting: int) -> None:
        super().__init__(0, board, most_waiting=most_waiting)
        self.command, self.settings = list(command), settings
        self.peers: Peers | None = None
        self.gave_up = False
        self.pid: int | None = None
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    # ---- life ---------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Begin to run engine processes, one after another."""
        self._task = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def stop(self) -> None:
        """Ask the process to end, then make it."""
        self._stopping.set()
        self.send(wire.Stop())
        process = self._process
        if process is not None and process.returncode is None:
            try:
                # one that still loads does not listen yet
                await asyncio.wait_for(process.wait(), _STOP_SECONDS if self.state is State.READY else 0)
            except TimeoutError:
                process.kill()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.set(State.STOPPED, "the server is shutting down")
        self.fail_all()
        self._context.destroy(linger=0)

    async def _supervise(self) -> None:
        pause = _FIRST_PAUSE
        while not self._stopping.is_set():
            began = time.monotonic()
            reason = await self._one_life()
            if self._stopping.is_set():
                return
            self.set(State.DOWN, reason)
            self.fail_all()
            events.warn("engine_down", reason=reason, restarts=self.restarts)
            if self.hello is None:
                self.gave_up = True  # it never served: what is wrong is for a person to mend
                self.changed.set()
                return
            pause = _FIRST_PAUSE if time.monotonic() - began > _STEADY_SECONDS else min(2 * pause, _LONGEST_PAUSE)
            await asyncio.sleep(pause)
            self.restarts += 1

    async def _one_life(self) -> str:
        """Run one process until it ends; why it ended."""
        folder = Path(tempfile.mkdtemp(prefix="deepinfer-"))  # readable by this user only
        socket = self._context.socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        process: asyncio.subprocess.Process | None = None
        reader: asyncio.Task[None] | None = None
        try:
            path = folder / "engine.ipc"
            socket.bind(f"ipc://{path}")
            os.chmod(path, 0o600)
            settings = msgspec.structs.replace(self.settings, endpoint=f"ipc://{path}")
            # a session of its own: Ctrl-C reaches the front end alone, which then ends the engine in order
            process = await asyncio.create_subprocess_exec(*self.command, stdin=asyncio.subprocess.PIPE,
                                                           start_new_session=True)
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(settings) + b"\n")
            self._process, self._socket, self.pid, self.failure = process, socket, process.pid, None
            reader = asyncio.create_task(self._read(socket), name="engine-reader")
            code = await process.wait()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            await self._drain(socket)
            return self._why(code)
        except OSError as error:
            return f"the engine process cannot be started: {error}"
        finally:
            self._socket = self.pid = None
            if process is not None and process.returncode is None:
                process.kill()
            if reader is not None:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
            socket.close()
            shutil.rmtree(folder, ignore_errors=True)

    def _why(self, code: int) -> str:
        if self.failure is not None:
            return self.failure.sentence
        if code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = f"signal {-code}"
            return f"the engine process was ended by {name}"
        return f"the engine process ended with exit code {code}"

    def set(self, state: State, reason: str) -> None:
        super().set(state, reason)
        if self.peers is not None:
            self.peers.status()

    # ---- messages -----------------------------------------------------------------------------------------------
    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        try:
            while True:
                self._take(await socket.recv_multipart())
        except InternalError as error:
            self.failure = wire.Failed(str(error), InternalError.exit_code)
            if self._process is not None and self._process.returncode is None:
                self._process.kill()

    async def _drain(self, socket: zmq.asyncio.Socket) -> None:
        """What a process sent before it ended."""
        while await socket.poll(50):
            self._take(await socket.recv_multipart())

    def _take(self, frames: list[bytes]) -> None:
        """A message of the engine: the number of a front end, or none for all, and what it should know."""
        to, data = frames
        if to not in (b"", b"0") and self.peers is not None:
            self.peers.forward(int(to), data)
            return
        message = self.receive(data)
        if to == b"" and self.peers is not None:
            self.peers.broadcast(data)
        if isinstance(message, wire.Hello):
            # an engine that has served is there: a restart takes it as it is, and traces no first steps again
            self.settings = msgspec.structs.replace(self.settings, compile=None, profile_steps=0)
            self.set(State.READY, "")
            events.info("engine_ready", model=message.model, target=message.target, pid=self.pid,
                        max_model_len=message.max_model_len, slots=message.slots, blocks=message.blocks,
                        seconds=message.seconds, restarts=self.restarts)

    def send(self, message: wire.ToEngine) -> None:
        self.carry(wire.encode(message))

    def carry(self, data: bytes) -> None:
        """Hand an encoded message to the engine."""
        socket = self._socket
        if socket is not None:
            # without a limit on what is queued this cannot block
            sent = asyncio.ensure_future(socket.send(data, zmq.NOBLOCK))
            sent.add_done_callback(lambda done: done.cancelled() or done.exception())
