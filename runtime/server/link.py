"""A front end's side of what it says to the engine, over whatever way: requests out, updates in."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from enum import StrEnum

from deepinfer.errors import InternalError
from deepinfer.runtime.server import wire
from deepinfer.runtime.server.board import Board, Column
from deepinfer.runtime.server.ticket import EngineGone, Ticket


class State(StrEnum):
    """Where the engine process is in its life."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    STOPPED = "stopped"


class Link:
    """The engine as a front end knows it.

    Args:
        number: of the front end; it is part of the ids of its requests.
        board: where open requests are counted.
        most_waiting: tokens of one answer that may wait for a slow reader.

    ``on_update`` is called with every update and its ticket.
    """

    def __init__(self, number: int, board: Board, *, most_waiting: int) -> None:
        self.number, self.board = number, board
        self.state, self.reason = State.STARTING, "the engine is starting"
        self.hello: wire.Hello | None = None
        self.snapshot: wire.Snapshot | None = None
        self.failure: wire.Failed | None = None  # what a failing engine said last
        self.restarts = 0
        self.changed = asyncio.Event()  # set when the state changes; whoever waits clears it
        self.on_update: Callable[[Ticket, wire.Update], None] = lambda ticket, update: None
        self._most_waiting = most_waiting
        self._keys = itertools.count(wire.first_key(number))
        self._tickets: dict[int, Ticket] = {}

    def send(self, message: wire.ToEngine) -> None:
        """Hand a message to the engine, if there is one."""
        raise NotImplementedError

    def set(self, state: State, reason: str) -> None:
        """The engine is in another state."""
        self.state, self.reason = state, reason
        self.changed.set()

    # ---- from the engine ----------------------------------------------------------------------------------------
    def receive(self, data: bytes) -> wire.FromEngine:
        """Take a message of the engine, and return it."""
        message = wire.decode_from_engine(data)
        if isinstance(message, wire.Step):
            for update in message.all():
                ticket = self._tickets.get(update.id)
                if ticket is not None:
                    if update.last:
                        del self._tickets[update.id]
                        self._count()
                    ticket.push(update)
                    self.on_update(ticket, update)
        elif isinstance(message, wire.Snapshot):
            self.snapshot = message
        elif isinstance(message, wire.Hello):
            self.hello = message
        else:
            self.failure = message
        return message

    # ---- requests -----------------------------------------------------------------------------------------------
    @property
    def open_requests(self) -> int:
        """Requests of this front end that the engine has not finished."""
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
        self._count()
        self.send(wire.Submit(key, wire.pack_ids(prompt_ids), sampling, priority, debug))
        return ticket

    def _abort(self, key: int) -> None:
        """Free the request; its last update still arrives, and its ticket ends with it."""
        self.send(wire.Abort(key))

    def _count(self) -> None:
        self.board.set(self.number, Column.OPEN, len(self._tickets))

    def fail_all(self) -> None:
        """End every answer with the reason of the state."""
        tickets, self._tickets = self._tickets, {}
        self._count()
        for ticket in tickets.values():
            ticket.fail(EngineGone(self.reason))

    def give_up_all(self, reason: str) -> None:
        """End every answer that runs, here and in the engine."""
        for key in self._tickets:
            self._abort(key)
        self.reason = reason
        self.fail_all()

    def require_hello(self) -> wire.Hello:
        """What the engine said of itself; only after it was ready once."""
        if self.hello is None:
            raise InternalError("the engine was never ready")
        return self.hello
