"""What a user may set of a store; every default has its place here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from deepinfer.codegen.cache import cache_root
from deepinfer.errors import SpecError
from deepinfer.runtime.prefix.chain import digest
from deepinfer.runtime.sampling_params import CACHE_CLASS, is_whole
from deepinfer.runtime.store.layout import PAGE

HOUR = 3600
_LONGEST = 36_500 * 24 * HOUR  # hours of an end fit 32 bits
_LARGEST = 1 << 60
AGENT, CHAT = "agent", "chat"
AUTO, THREADS, URING, USRBIO, MOONCAKE, INLINE = "auto", "threads", "io_uring", "usrbio", "mooncake", "inline"
BACKENDS = (AUTO, THREADS, URING, USRBIO, MOONCAKE, INLINE)
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
          "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_TIMES = {"s": 1, "m": 60, "h": HOUR, "d": 24 * HOUR}


def default_retention() -> dict[str, int]:
    """Seconds that a record is kept at least, by class: requests with tools come back for days."""
    return {AGENT: 3 * 24 * HOUR, CHAT: 7 * 24 * HOUR}


@dataclass(frozen=True)
class StoreSettings:
    """Args:
        folder: of the store; may lie on a shared mount.
        quota: bytes of all segments in the folder.
        retention: seconds that records are kept at least, by class.
        segment_bytes: size of a segment, reserved when it is opened. On 3FS a multiple of the chunk.
        backend: what moves bytes; ``auto``: the ring of 3FS on a 3FS mount, else io_uring where it may be opened, else
            threads; ``mooncake``: records lie in the cluster of a Mooncake store, and the folder holds the tenants'
            salts alone.
        threads: of the reads, and as many of the writes. 0 with ``inline``: everything happens in the calls.
        arena_bytes: aligned memory for records on their way; counted in the memory plan.
        queue: blocks that may wait to be written; more are not stored.
        timeout: seconds that a fetch may take before it counts against the folder.
        durable: sync every record before it is announced, instead of every ``sync_seconds`` or ``sync_bytes``.
        index: folder of the index, on a local disk; None: in the cache folder of the user.
        background: whether the store looks after itself; else ``upkeep`` does when it is called.
    """

    folder: Path
    quota: int = 64 << 30
    retention: Mapping[str, int] = field(default_factory=default_retention)
    segment_bytes: int = 256 << 20
    backend: str = AUTO
    threads: int = 4
    arena_bytes: int = 16 << 20
    queue: int = 8192
    timeout: float = 10.0
    durable: bool = False
    index: Path | None = None
    background: bool = True
    sync_seconds: float = 5.0
    sync_bytes: int = 64 << 20
    tick_seconds: float = 0.25
    heartbeat_seconds: float = 60.0
    lease_seconds: float = 600.0
    foreign_lease_seconds: float = float(HOUR)
    grace_seconds: float = 600.0
    retry_seconds: float = 60.0
    bad_after: int = 8
    compact_below: float = 0.4
    compact_share: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        for name in ("quota", "segment_bytes", "threads", "arena_bytes", "queue", "sync_bytes", "bad_after"):
            _check(is_whole(getattr(self, name)) and getattr(self, name) >= 0, name, repr(getattr(self, name)),
                   "a whole number")
        _check(self.timeout > 0, "timeout", self.timeout, "more than 0 seconds")
        for name in ("timeout", "sync_seconds", "tick_seconds", "heartbeat_seconds", "lease_seconds",
                     "foreign_lease_seconds", "grace_seconds", "retry_seconds"):
            _check(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "seconds, 0 or more")
        for name in ("compact_below", "compact_share"):
            _check(0 <= getattr(self, name) <= 1, name, getattr(self, name), "a share from 0 to 1")
        _check(self.backend in BACKENDS, "backend", self.backend, BACKENDS)
        _check(self.segment_bytes <= self.quota <= _LARGEST, "quota", self.quota,
               f"at least one segment, {self.segment_bytes}, at most 1 EiB")
        _check(self.segment_bytes % PAGE == 0, "segment_bytes", self.segment_bytes, f"a multiple of {PAGE}")
        _check(self.threads >= 1, "threads", self.threads, "at least 1")
        _check({AGENT, CHAT} <= self.retention.keys(), "retention", ", ".join(self.retention) or "no class",
               f"{AGENT}, {CHAT} and classes of your own")
        for cls, seconds in self.retention.items():
            _check(CACHE_CLASS.fullmatch(cls) is not None, "retention", cls, "1 to 15 of a-z, 0-9 and _")
            _check(is_whole(seconds) and HOUR <= seconds <= _LONGEST, f"retention of {cls}", repr(seconds),
                   "at least an hour, at most 100 years, in seconds")

    @property
    def index_folder(self) -> Path:
        """Where the index of this folder lies when the settings do not say."""
        if self.index is not None:
            return self.index
        return cache_root() / "store-index" / digest(str(self.folder.absolute()).encode()).hex()

    def on(self, folder: Path) -> StoreSettings:
        return replace(self, folder=folder)


def parse_size(text: str, where: str) -> int:
    """``64GiB``, ``500MB`` or a number of bytes."""
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([a-zA-Z]*)\s*", text)
    unit = None if found is None else _UNITS.get(found[2].lower())
    if found is None or unit is None:
        raise SpecError("not a size", where=where, found=text, allowed="a number with B, KB, KiB .. TB, TiB")
    return int(float(found[1]) * unit)


def parse_retention(text: str, where: str) -> dict[str, int]:
    """``agent=3d,chat=7d``: the classes named there beside the usual ones."""
    found = default_retention()
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = re.fullmatch(r"([a-z0-9_]{1,15})=(\d{1,18})([smhd])", part)
        if match is None:
            raise SpecError("not a retention", where=where, found=part, allowed="CLASS=NUMBER with s, m, h or d")
        found[match[1]] = int(match[2]) * _TIMES[match[3]]
    return found


def class_of(tools: bool, header: str | None, retention: Mapping[str, int]) -> str:
    """Retention class of a request: what its header says, else ``agent`` when it declares tools, else ``chat``.

    An unknown class of a header falls back likewise: a cache is no reason to refuse a request.
    """
    if header in retention:
        return str(header)
    return AGENT if tools else CHAT


def _check(right: bool, name: str, found: object, allowed: object) -> None:
    if not right:
        raise SpecError("a setting of the store is out of range", where=f"store: {name}", found=found, allowed=allowed)
