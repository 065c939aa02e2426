"""A tier below the prefix cache that is a dictionary, slow and spoilt as it is told."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.store.tier import Flags, Status, Ticket


class LateTicket(Ticket):
    """A publish that ends when it was asked for a few times."""

    def __init__(self, tier: DictTier) -> None:
        super().__init__(1)
        self.tier, self.asked = tier, 0

    @property
    def done(self) -> bool:
        self.asked += 1
        if self.asked > 3:
            self.tier.land()
        return self._left == 0


class DictTier:
    """A tier in a dictionary. ``delay``: calls of ``poll`` until a fetch ends; ``spoil``: says how a block ends."""

    def __init__(self, plan: EnginePlan, delay: int = 0, spoil: Any = lambda: Status.OK) -> None:
        self.block_tokens = plan.block_tokens
        self.sections = tuple((s.name, s.unit_bytes) for s in plan.paged)
        self.records: dict[bytes, tuple[bytes, list[bytes], Flags, str]] = {}
        self.delay, self.spoil = delay, spoil
        self.waiting: list[list[Any]] = []
        self.writes: list[Any] = []
        self.fetched = 0

    def lookup(self, keys: Any, exact: bool = False) -> int:
        found = [self.records.get(k.tobytes()) for k in keys]
        return next((i for i, r in enumerate(found) if r is None or (exact and r[2])), len(found))

    def fetch(self, keys: Any, ids: Any, into: Sequence[Any], *, extra: Any = None, exact: bool = False) -> Ticket:
        ticket = Ticket(len(keys))
        self.waiting.append([self.delay, ticket, [k.tobytes() for k in keys], ids.reshape(len(keys), -1), into])
        return ticket

    def poll(self, ticket: Ticket, deadline: float | None = None) -> Sequence[Status]:
        for item in list(self.waiting):
            item[0] = 0 if deadline is not None else item[0] - 1
            if item[0] <= 0:
                self.waiting.remove(item)
                self._end(*item[1:])
        self.land()
        return ticket.statuses

    def _end(self, ticket: Ticket, keys: list[bytes], ids: Any, into: Any) -> None:
        for i, key in enumerate(keys):
            status = self.spoil()
            known, parts, flags, _ = self.records.get(key, (b"", [], Flags.NONE, ""))
            if status is Status.OK and known != ids[i].astype("<i4").tobytes():
                status = Status.MISS
            if status is Status.OK:
                self.fetched += 1
                for target, part in zip(into[i], parts, strict=True):
                    target[:] = np.frombuffer(part, np.uint8)
            else:
                for target in into[i]:
                    target[:] = 0xEE  # the disk may have written half of it
            ticket.end(i, status, flags)

    def publish(self, key: bytes, parent: bytes, number: int, ids: Any, payload: Any, *, flags: Flags = Flags.NONE,
                cls: str = "chat", extra: bytes = b"") -> Ticket:
        ticket = LateTicket(self)
        self.writes.append((ticket, key, ids.astype("<i4").tobytes(), payload, flags, cls))
        return ticket

    def land(self) -> None:
        """What was published is read now: a block that was recycled meanwhile would be stored wrong."""
        for ticket, key, known, payload, flags, cls in self.writes:
            self.records.setdefault(key, (known, [bytes(p) for p in payload], flags, cls))
            ticket.end(0, Status.OK)
        self.writes.clear()

    def pin(self, keys: Any) -> Any:
        raise NotImplementedError

    def metrics(self) -> Any:
        return SimpleNamespace()

    def close(self) -> None:
        self.land()
        for _, ticket, *_ in self.waiting:
            ticket.wait(0.0)
