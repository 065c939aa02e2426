"""Who writes: each process that stores has a lease in the folder, and a segment whose writer is dead is an orphan."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from deepinfer.runtime.store.files import Files, write_aside
from deepinfer.runtime.store.points import Point
from deepinfer.runtime.store.settings import StoreSettings

FOLDER = "writers"


@dataclass(frozen=True)
class Writer:
    """A process as its lease names it. ``begun``: start time of the process, so that a pid used again is another."""

    name: str
    host: str
    boot: str
    pid: int
    begun: int

    @staticmethod
    def mine() -> Writer:
        pid = os.getpid()
        return Writer(secrets.token_hex(6), socket.gethostname(), boot_id(), pid, process_start(pid))


class Leases:
    """The folder of leases; ``writer`` is ours."""

    def __init__(self, settings: StoreSettings, files: Files, writer: Writer) -> None:
        self.settings, self.files, self.writer = settings, files, writer
        self.folder = settings.folder / FOLDER

    def renew(self, now: float) -> None:
        """Write our lease. OSError when the folder does not let us."""
        self.files.make_folder(self.folder, within=self.settings.folder)
        text = json.dumps(asdict(self.writer) | {"heartbeat": int(now)}, sort_keys=True) + "\n"
        write_aside(self.files, self._path(self.writer.name), text.encode(), Point.LEASE)

    def drop(self) -> None:
        """Take our lease away: everything of ours is sealed."""
        with contextlib.suppress(OSError):
            self.files.unlink(self._path(self.writer.name), Point.LEASE)

    def dead(self, name: str, now: float) -> bool:
        """Whether a writer is gone for good.

        Its heartbeat is old, and it ran on this host before a restart, or its process is no more, or it is of another
        host and silent for an hour. One without a readable lease is judged like one of another host, by the caller's
        patience: its segments' files.
        """
        if name == self.writer.name:
            return False
        try:
            raw = json.loads(self._path(name).read_bytes())
            other = Writer(*(raw[k] for k in ("name", "host", "boot", "pid", "begun")))
            heartbeat = int(raw["heartbeat"])
        except FileNotFoundError:
            return True  # a writer takes its lease before its first segment, and drops it after its last
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return self._age(name, now) > self.settings.foreign_lease_seconds
        if other.host == self.writer.host:
            if other.boot != self.writer.boot:
                return bool(now - heartbeat > self.settings.lease_seconds)
            return bool(process_start(other.pid) != other.begun and now - heartbeat > self.settings.lease_seconds)
        return bool(now - heartbeat > self.settings.foreign_lease_seconds)

    def forget_dead(self, owners: set[str], now: float) -> None:
        """Remove leases of dead writers that own nothing any more."""
        for file in self.files.names(self.folder):
            name = file.removesuffix(".lease")
            if file.endswith(".lease") and name not in owners and name != self.writer.name and self.dead(name, now):
                with contextlib.suppress(OSError):
                    self.files.unlink(self.folder / file, Point.LEASE)

    def _age(self, name: str, now: float) -> float:
        try:
            return now - self.files.stat(self._path(name)).st_mtime
        except OSError:
            return 0.0

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.lease"


def boot_id() -> str:
    """Differs after every start of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def process_start(pid: int) -> int:
    """When a process began, in ticks since the machine's start; 0 when there is none (or it is a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
