"""A tier on a Mooncake store: records under their key in the memory and disks of a cluster.

The records are the store's own, so they prove themselves here as well; where they lie and how long is Mooncake's
affair. Tested against a stand-in with the client's call shapes only: no cluster was at hand.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast
from weakref import WeakSet

from deepinfer.errors import PlanError, SpecError, ToolchainError
from deepinfer.runtime.store.arena import Arena
from deepinfer.runtime.store.files import Files
from deepinfer.runtime.store.health import PUBLISHING, READING, Health
from deepinfer.runtime.store.layout import Layout
from deepinfer.runtime.store.metrics import StoreMetrics
from deepinfer.runtime.store.record import Wanted, id_bytes, prove, scatter, write_record
from deepinfer.runtime.store.salts import Salts
from deepinfer.runtime.store.settings import StoreSettings
from deepinfer.runtime.store.tier import NO_EXTRA, Buffer, Flags, Ids, Keys, Status, Ticket, view_of

MODULE = "mooncake.store"
CONFIG = "MOONCAKE_CONFIG_PATH"  # the variable by which other engines find the same file
_NEEDED = ("local_hostname", "metadata_server", "master_server_address")
_USUAL = {"global_segment_size": 3200 << 20, "local_buffer_size": 1 << 30, "protocol": "tcp", "device_name": ""}
_SETUP = ("local_hostname", "metadata_server", "global_segment_size", "local_buffer_size", "protocol", "device_name",
          "master_server_address")  # arguments of ``setup``, in order
_RAISED = -(1 << 31)  # no code of the client's


class Client(Protocol):
    """The calls of ``mooncake.store.MooncakeDistributedStore`` that are used, after its ``setup``. 0 is success."""

    def register_buffer(self, pointer: int, size: int) -> int: ...

    def unregister_buffer(self, pointer: int) -> int: ...

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """1: there; 0: not; below: an error."""
        ...

    def put_from(self, key: str, pointer: int, size: int) -> int: ...

    def get_into(self, key: str, pointer: int, size: int) -> int:
        """Bytes read; below 0: an error."""
        ...

    def remove(self, key: str) -> int: ...


def open_client() -> Client:
    """A client of the cluster that the file named by ``CONFIG`` describes; it lives as long as the process.

    Raises ToolchainError without the package, SpecError for a file that says too little, PlanError where the cluster
    does not take the client.
    """
    try:
        module: Any = importlib.import_module(MODULE)
    except ImportError as failure:
        raise ToolchainError("the client of Mooncake is not installed", where="store: backend", found=failure,
                             next_step="pip install mooncake-transfer-engine") from None
    path = os.environ.get(CONFIG)
    if not path:
        raise SpecError("nothing says where the cluster of Mooncake is", where=CONFIG, found="not set",
                        next_step=f"name a JSON file with {', '.join(_NEEDED)}")
    try:
        given = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as failure:
        raise SpecError("not a configuration of Mooncake", where=path, found=failure, allowed="a JSON file") from None
    missing = [name for name in _NEEDED if not isinstance(given, dict) or not given.get(name)]
    if missing:
        raise SpecError("a configuration of Mooncake says too little", where=path, found=f"no {', '.join(missing)}",
                        allowed=f"an object with {', '.join(_NEEDED)}")
    try:
        client = module.MooncakeDistributedStore()
        code = client.setup(*((_USUAL | given)[name] for name in _SETUP))
    except Exception as failure:  # of the client's own kinds, and TypeError for a value of another type
        raise PlanError("the client of Mooncake does not take this configuration", where=path,
                        found=" ".join(str(failure).split()) or type(failure).__name__,
                        next_step=f"compare {', '.join(_SETUP)} with what its setup takes") from None
    if code != 0:
        raise PlanError("the cluster of Mooncake does not take this client", where=path, found=f"code {code}",
                        next_step="start its master and metadata server, or choose another backend")
    return cast(Client, client)


class MooncakePin:
    """Mooncake keeps leases of its own."""

    def release(self) -> None:
        return


class MooncakeTier:
    """A ``Tier`` on a client that is set up. One uuid and slot for all: a record is found by its name alone.

    Lookups ask the cluster, so they take a round trip; they return 0 while it does not answer.
    """

    def __init__(self, settings: StoreSettings, layout: Layout, client: Client) -> None:
        self.settings, self.layout, self._client = settings, layout, client
        self._metrics = StoreMetrics()
        self.health = Health(settings.folder, settings.retry_seconds, self._metrics)
        self._salts = Salts(settings.folder, Files(), self.health)
        self._arena = Arena(max(settings.arena_bytes, settings.threads * layout.stride), layout.stride)
        self._pointer = ctypes.addressof(ctypes.c_char.from_buffer(self._arena.memory))
        if client.register_buffer(self._pointer, self._arena.bytes) != 0:
            raise PlanError("Mooncake does not take the arena", where="store: arena_bytes", found=self._arena.bytes,
                            next_step="give the client a larger local buffer, or the store a smaller arena")
        self._arena.forget_name()
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._fetches: WeakSet[Ticket] = WeakSet()
        self._threads = [threading.Thread(target=self._work, args=(slot,), daemon=True, name=f"mooncake-{slot}")
                         for slot in self._arena.take(settings.threads)]
        for thread in self._threads:
            thread.start()

    @property
    def block_tokens(self) -> int:
        return self.layout.block_tokens

    @property
    def sections(self) -> tuple[tuple[str, int], ...]:
        return self.layout.sections

    def tenant_salt(self, tenant: str) -> bytes:
        """[32] the secret that goes into a tenant's root key; see ``Salts``."""
        return self._salts.get(tenant)

    def lookup(self, keys: Keys, exact: bool = False) -> int:
        """See ``Tier``. What is exact shows when a record is read."""
        if not self.health.works(READING) or not len(keys):
            return 0
        try:
            found = self._client.batch_is_exist([self._name(key.tobytes()) for key in keys])
        except Exception as failure:
            self.health.failed(READING, failure)
            return 0
        return next((i for i, there in enumerate(found) if there != 1), len(keys))

    def fetch(self, keys: Keys, ids: Ids, into: Sequence[Sequence[Buffer]], *, extra: Sequence[bytes] | None = None,
              exact: bool = False) -> Ticket:
        """See ``Tier``."""
        ticket, raw, width = Ticket(len(keys)), id_bytes(ids), self.layout.ids_bytes
        self._fetches.add(ticket)
        for i, key in enumerate(keys):
            wanted = Wanted(key.tobytes(), raw[i * width : (i + 1) * width], NO_EXTRA if extra is None else extra[i],
                            exact)
            self._queue.put(partial(self._read, ticket, i, wanted, [view_of(part) for part in into[i]]))
        return ticket

    def poll(self, ticket: Ticket, deadline: float | None = None) -> Sequence[Status]:
        """See ``Tier``."""
        if deadline is not None or time.monotonic() - ticket.begun > self.settings.timeout:
            ticket.wait(min(deadline or 0.0, ticket.begun + self.settings.timeout))
        return ticket.statuses

    def publish(self, key: bytes, parent: bytes, number: int, ids: Ids, payload: Sequence[Buffer], *,
                flags: Flags = Flags.NONE, cls: str = "chat", extra: bytes = NO_EXTRA) -> Ticket:
        """See ``Tier``. ``cls`` has no meaning here."""
        ticket, raw = Ticket(1), id_bytes(ids)

        def write(record: memoryview, pointer: int) -> None:
            write_record(self.layout, record, uuid=self.layout.namespace, slot=0, key=key, parent=parent,
                         number=number, ids=raw, payload=payload, flags=flags, extra=extra, written=int(time.time()))
            code = self._asked(PUBLISHING, self._client.put_from, self._name(key), pointer, len(record))
            if code not in (0, _RAISED):
                self.health.failed(PUBLISHING, f"Mooncake says {code}", off=False)
            self._metrics.published.add(label=Status.OK if code == 0 else Status.IO_ERROR)
            ticket.end(0, Status.OK if code == 0 else Status.IO_ERROR)

        if self._queue.qsize() >= self.settings.queue:
            ticket.end(0, Status.FULL)
        else:
            self._queue.put(write)
        return ticket

    def pin(self, keys: Keys) -> MooncakePin:
        return MooncakePin()

    def metrics(self) -> StoreMetrics:
        return self._metrics

    def close(self) -> None:
        for ticket in list(self._fetches):
            ticket.wait(0.0)
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(self.settings.timeout)
        self._client.unregister_buffer(self._pointer)

    def _read(self, ticket: Ticket, i: int, wanted: Wanted, into: list[memoryview], record: memoryview,
              pointer: int) -> None:
        if ticket.statuses[i] is not Status.PENDING:
            return
        got = self._asked(READING, self._client.get_into, self._name(wanted.key), pointer, len(record))
        status, head = Status.MISS, None
        if got == len(record):
            status, head = prove(self.layout, record, self.layout.namespace, 0, wanted)
        if status is Status.DAMAGED:
            self._metrics.damaged.add()
            self._asked(READING, self._client.remove, self._name(wanted.key))
        copy = partial(scatter, self.layout, record, into) if status is Status.OK else None
        if ticket.end(i, status, Flags.NONE if head is None else head.flags, copy):
            self._metrics.fetched.add(label=status)

    def _asked(self, what: str, call: Callable[..., int], *given: object) -> int:
        """What a call of the client says; ``_RAISED`` where it raises, so that no ticket is left open."""
        try:
            return call(*given)
        except Exception as failure:
            self.health.failed(what, failure)
            return _RAISED

    def _work(self, slot: int) -> None:
        record, pointer = self._arena.view(slot), self._pointer + slot * self._arena.stride
        while (job := self._queue.get()) is not None:
            try:
                job(record, pointer)
            except Exception as failure:  # the ticket is cancelled by its deadline
                self.health.failed(READING, failure)

    def _name(self, key: bytes) -> str:
        return f"deepinfer/{self.layout.namespace.hex()}/{key.hex()}"
