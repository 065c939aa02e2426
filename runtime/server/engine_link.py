"""The front end's side of the engine process: start it, talk to it, notice its end, start it again."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from deepinfer.errors import InternalError
from deepinfer.runtime import events
from deepinfer.runtime.server import wire
from deepinfer.runtime.server.engine_process import EngineSettings
from deepinfer.runtime.server.ticket import EngineGone, Ticket

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 30.0  # seconds between two starts of a failing engine
_STEADY_SECONDS = 60.0  # an engine that served so long is started again without a pause
_STOP_SECONDS = 10.0


class State(StrEnum):
    """Where the engine process is in its life."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    STOPPED = "stopped"


class EngineLink:
    """Owns the engine process.

    Args:
        command: starts a process that speaks `wire`.
        settings: for it; the endpoint is set here.
        most_waiting: tokens of one answer that may wait for a slow reader.
        on_update: called with every update and its ticket.
    """

    def __init__(self, command: Sequence[str], settings: EngineSettings, *, most_waiting: int,
                 on_update: Callable[[Ticket, wire.Update], None] = lambda ticket, update: None) -> None:
        self.command, self.settings = list(command), settings
        self.state, self.reason = State.STARTING, "the engine is starting"
        self.hello: wire.Hello | None = None
        self.snapshot: wire.Snapshot | None = None
        self.failure: wire.Failed | None = None  # what a failing engine said last
        self.gave_up = False
        self.restarts = 0
        self.pid: int | None = None
        self.changed = asyncio.Event()  # set when the state changes; whoever waits clears it
        self._most_waiting, self._on_update = most_waiting, on_update
        self._keys = itertools.count(1)
        self._tickets: dict[int, Ticket] = {}
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
        self._send(wire.Stop())
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
        self._set(State.STOPPED, "the server is shutting down")
        self._fail_all()
        self._context.destroy(linger=0)

    async def _supervise(self) -> None:
        pause = _FIRST_PAUSE
        while not self._stopping.is_set():
            began = time.monotonic()
            reason = await self._one_life()
            if self._stopping.is_set():
                return
            self._set(State.DOWN, reason)
            self._fail_all()
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

    def _set(self, state: State, reason: str) -> None:
        self.state, self.reason = state, reason
        self.changed.set()

    # ---- messages -----------------------------------------------------------------------------------------------
    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        try:
            while True:
                self._receive(await socket.recv())
        except InternalError as error:
            self.failure = wire.Failed(str(error), InternalError.exit_code)
            if self._process is not None and self._process.returncode is None:
                self._process.kill()

    async def _drain(self, socket: zmq.asyncio.Socket) -> None:
        """What a process sent before it ended."""
        while await socket.poll(50):
            self._receive(await socket.recv())

    def _receive(self, data: bytes) -> None:
        message = wire.decode_from_engine(data)
        if isinstance(message, wire.Step):
            for update in message.all():
                ticket = self._tickets.get(update.id)
                if ticket is not None:
                    if update.last:
                        del self._tickets[update.id]
                    ticket.push(update)
                    self._on_update(ticket, update)
        elif isinstance(message, wire.Snapshot):
            self.snapshot = message
        elif isinstance(message, wire.Hello):
            self.hello = message
            # an engine that has served is there: a restart takes it as it is
            self.settings = msgspec.structs.replace(self.settings, compile=None)
            self._set(State.READY, "")
            events.info("engine_ready", model=message.model, target=message.target, pid=self.pid,
                        max_model_len=message.max_model_len, slots=message.slots, blocks=message.blocks,
                        seconds=message.seconds, restarts=self.restarts)
        else:
            self.failure = message

    def _send(self, message: wire.ToEngine) -> None:
        socket = self._socket
        if socket is not None:
            # without a limit on what is queued this cannot block
            sent = asyncio.ensure_future(socket.send(wire.encode(message), zmq.NOBLOCK))
            sent.add_done_callback(lambda done: done.cancelled() or done.exception())

    # ---- requests -----------------------------------------------------------------------------------------------
    @property
    def open_requests(self) -> int:
        """Requests that the engine has not finished."""
        return len(self._tickets)

    def submit(self, prompt_ids: Sequence[int], sampling: wire.Sampling, priority: int = 0,
               debug: bool = False, beside: Ticket | None = None) -> Ticket:
        """Hand a request to the engine; see `wire.Submit` and, for ``beside``, `Ticket`.

        Raises:
            EngineGone: there is no engine that could take it.
        """
        if self.state is not State.READY:
            raise EngineGone(self.reason)
        key = next(self._keys)
        ticket = Ticket(key, len(prompt_ids), self._most_waiting, self._abort, beside)
        self._tickets[key] = ticket
        self._send(wire.Submit(key, wire.pack_ids(prompt_ids), sampling, priority, debug))
        return ticket

    def _abort(self, key: int) -> None:
        """Free the request; its last update still arrives, and its ticket ends with it."""
        self._send(wire.Abort(key))

    def _fail_all(self) -> None:
        """End every answer with the reason of the state."""
        tickets, self._tickets = self._tickets, {}
        for ticket in tickets.values():
            ticket.fail(EngineGone(self.reason))

    def give_up_all(self, reason: str) -> None:
        """End every answer that runs, here and in the engine."""
        for key in self._tickets:
            self._abort(key)
        self.reason = reason
        self._fail_all()

    def require_hello(self) -> wire.Hello:
        """What the engine said of itself; only after it was ready once."""
        if self.hello is None:
            raise InternalError("the engine was never ready")
        return self.hello
