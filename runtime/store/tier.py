"""What the runtime asks of a tier below its own memory: look up, fetch, publish. ``Store`` is one.

A tier may lose anything and serves nothing wrong: what ``lookup`` says is a hint, and only a block whose status is
``OK`` was proved to be the block asked for. No call blocks on a disk but ``poll`` with a deadline, and none raises
for a disk that is full, slow, read-only or gone: blocks end with a status, requests run cold.

    keys = chain.array(h // B, t // B)                  # what memory does not hold
    n = tier.lookup(keys)
    ticket = tier.fetch(keys[:n], ids, into)            # ids [n * B]; into[b]: one buffer a section
    ...                                                 # other requests' steps
    if ticket.done: statuses = tier.poll(ticket)        # cut the hit at the first that is not OK
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from enum import IntFlag, StrEnum
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from deepinfer.runtime.store.metrics import StoreMetrics

Buffer = NDArray[np.uint8] | memoryview | bytearray | bytes
Keys = NDArray[np.void]
Ids = NDArray[np.integer[Any]]
NO_EXTRA = bytes(16)


def view_of(buffer: Buffer) -> memoryview:
    """The bytes of a contiguous buffer."""
    return memoryview(cast(bytes, buffer)).cast("B")


class Status(StrEnum):
    """How one block of a fetch or publish ended."""

    PENDING = "pending"
    OK = "ok"  # fetch: proved and copied; publish: written, or there already
    MISS = "miss"  # no such record, or one that turned out to be another
    DAMAGED = "damaged"  # a record that does not prove itself; it is forgotten
    EXPIRED = "expired"
    FULL = "full"  # not stored: no room, publishing is off, or too much is queued
    IO_ERROR = "io_error"
    CANCELLED = "cancelled"  # the deadline passed, or the tier was closed


class Flags(IntFlag):
    """What is known about a block's bytes. A chain is as exact as its least exact block."""

    NONE = 0
    REPLAYED = 1  # entries that depend on where a replayed hit lay (lineage); absent: exact
    IMAGE = 2  # positions of an image; the key covers its digest


class Ticket:
    """A fetch or publish on its way. Buffers given to it stay as they are until it is ``done``.

    Attributes:
        statuses: one a block.
        flags: of fetched blocks, known once their status is OK.
        guard: called before blocks are CANCELLED: when it returns, nothing outside this class writes to their buffers.
    """

    def __init__(self, blocks: int) -> None:
        self.statuses = [Status.PENDING] * blocks
        self.flags = [Flags.NONE] * blocks
        self.begun = time.monotonic()
        self.guard: Callable[[], None] | None = None
        self._left = blocks
        self._changed = threading.Condition()

    @property
    def done(self) -> bool:
        """Whether no block is pending. Cheap; meant to be asked once a step."""
        return self._left == 0

    @property
    def leading(self) -> int:
        """Blocks before the first that is not OK: what a hit may use."""
        for index, status in enumerate(self.statuses):
            if status is not Status.OK:
                return index
        return len(self.statuses)

    def end(self, index: int, status: Status, flags: Flags = Flags.NONE,
            copy: Callable[[], None] | None = None) -> bool:
        """Set a block's end; the tier's side. ``copy`` fills the caller's buffers and runs before the block is done.

        False, and nothing copied, when the block was cancelled meanwhile: its buffers may be in use elsewhere.
        """
        with self._changed:
            if self.statuses[index] is not Status.PENDING:
                return False
            if copy is not None:
                copy()
            self.statuses[index], self.flags[index] = status, flags
            self._left -= 1
            if not self._left:
                self._changed.notify_all()
            return True

    def end_many(self, indices: Sequence[int], statuses: Sequence[Status], flags: Sequence[Flags]) -> list[Status]:
        """Set the ends of blocks whose buffers are filled; statuses of those that were not cancelled meanwhile."""
        ended = []
        with self._changed:
            for index, status, flag in zip(indices, statuses, flags, strict=True):
                if self.statuses[index] is Status.PENDING:
                    self.statuses[index], self.flags[index] = status, flag
                    ended.append(status)
            self._left -= len(ended)
            if ended and not self._left:
                self._changed.notify_all()
        return ended

    def wait(self, deadline: float) -> bool:
        """Wait until it is done or ``time.monotonic()`` reaches the deadline; then what is pending is CANCELLED.

        Returns whether every block ended by itself.
        """
        with self._changed:
            while self._left and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            late = self._left > 0
            if late and self.guard is not None:
                self.guard()
            self.statuses = [Status.CANCELLED if s is Status.PENDING else s for s in self.statuses]
            self._left = 0
            return not late


class Pin(Protocol):
    """Records that neither quota nor compaction takes away until it is released."""

    def release(self) -> None: ...


class Tier(Protocol):
    """A prefix cache below memory. All methods may be called from one thread; tickets end on others.

    ``block_tokens``: B, ids of a block. ``sections``: (name, bytes) of the parts of a block's payload, in order: one
    a paged state of the plan, or several neighbours together where a plan has more than the format has sections.
    """

    @property
    def block_tokens(self) -> int: ...

    @property
    def sections(self) -> tuple[tuple[str, int], ...]: ...

    def lookup(self, keys: Keys, exact: bool = False) -> int:
        """Leading blocks that are probably present: a hint without I/O on the store's folder.

        Args:
            keys: V16 [n] of consecutive blocks.
            exact: count exact blocks only.
        """
        ...

    def fetch(self, keys: Keys, ids: Ids, into: Sequence[Sequence[Buffer]], *, extra: Sequence[bytes] | None = None,
              exact: bool = False) -> Ticket:
        """Read blocks into the caller's memory.

        Args:
            keys: V16 [n].
            ids: [n * B] their ids, compared with those that the records hold.
            into: for each block writable buffers, one a section (or one for the whole payload). They are written
                only with a block that was proved, before its status says OK. One that is CANCELLED may have been
                written just before; after CANCELLED it never is.
            extra: for each block the digest it was published with; None: none had one.
            exact: a replayed block counts as a miss.
        """
        ...

    def poll(self, ticket: Ticket, deadline: float | None = None) -> Sequence[Status]:
        """Statuses of a ticket's blocks, without waiting, or after waiting until ``time.monotonic()`` = deadline.

        A block that is not done by its deadline is CANCELLED; its I/O may end later and touches no caller's memory.
        """
        ...

    def publish(self, key: bytes, parent: bytes, number: int, ids: Ids, payload: Sequence[Buffer], *,
                flags: Flags = Flags.NONE, cls: str = "chat", extra: bytes = NO_EXTRA) -> Ticket:
        """Store one block; returns at once.

        Args:
            key, parent: [16] of this block and of the one before (the root key for block 0). A tenant is part of
                the root key, so nothing else names it.
            number: index of the block in its sequence.
            ids: [B].
            payload: one readable buffer a section, or one for the whole; unchanged (pinned) until the ticket is done.
            flags: lineage. An exact block replaces a replayed one, nothing replaces an exact one.
            cls: retention class.
            extra: digest of what else the block holds (images).
        """
        ...

    def pin(self, keys: Keys) -> Pin:
        """Keep what ``lookup`` found in place until ``release``: between a lookup and its fetch."""
        ...

    def metrics(self) -> StoreMetrics:
        """Counters of this tier."""
        ...

    def close(self) -> None:
        """Let queued publishes finish, cancel fetches, seal what is open."""
        ...
