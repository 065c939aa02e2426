"""A segment file: its name, its superblock, its footer."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import xxhash

from deepinfer.runtime.store.layout import (
    FORMAT,
    LOG_ENTRY_BYTES,
    MOST_SECTIONS,
    NAME_BYTES,
    PAGE,
    Layout,
    aligned,
    footer_offset,
    record_offset,
    segment_size,
)
from deepinfer.runtime.store.record import seed_of

OPEN, SEALED, BAD, DEAD, LOG = "open", "seg", "bad", "dead", "log"
_NAME = re.compile(r"(?P<hour>\d{8})-(?P<writer>[0-9a-f]{12})-(?P<seq>\d{6})(?:~(?P<adopter>[0-9a-f]{12}))?"
                   r"\.(?P<state>open|seg|bad|dead)")
_COPY = PAGE // 2  # the superblock stands twice in its page
_MAGIC, _FOOTER_MAGIC = b"DISEGMNT", b"DIFOOTER"
_ENDIAN = 0x01020304
_SUPER = struct.Struct("<8sIIIIIII16s16s16s16s16s16sQQ")
_SECTION = struct.Struct(f"<{NAME_BYTES}sII")
_FOOTER = struct.Struct("<8sI16sIQ")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class SegmentName:
    """``<expiry hour>-<writer>-<seq>[~<adopter>].<state>``; what is before ``~`` never changes and names the log."""

    hour: int
    writer: str
    seq: int
    state: str = OPEN
    adopter: str = ""

    @property
    def stem(self) -> str:
        return f"{self.hour:08d}-{self.writer}-{self.seq:06d}"

    @property
    def file(self) -> str:
        return f"{self.stem}{'~' if self.adopter else ''}{self.adopter}.{self.state}"

    @property
    def log(self) -> str:
        return f"{self.stem}.{LOG}"

    @property
    def owner(self) -> str:
        """Writer that may change the segment while it is open."""
        return self.adopter or self.writer

    def having(self, state: str, adopter: str | None = None) -> SegmentName:
        return replace(self, state=state, adopter=self.adopter if adopter is None else adopter)


def parse_name(file: str) -> SegmentName | None:
    """The name of a segment file; None for a log and for what is none of ours."""
    found = _NAME.fullmatch(file)
    if found is None:
        return None
    return SegmentName(int(found["hour"]), found["writer"], int(found["seq"]), found["state"], found["adopter"] or "")


@dataclass(frozen=True)
class Superblock:
    """The first page of a segment. ``created``: seconds, ``expires``: hours of store time."""

    layout: Layout
    capacity: int
    uuid: bytes
    writer: str
    cls: str
    created: int
    expires: int

    def offset(self, slot: int) -> int:
        return record_offset(self.layout.stride, slot)

    @property
    def footer(self) -> int:
        return footer_offset(self.layout.stride, self.capacity)

    @property
    def size(self) -> int:
        return segment_size(self.layout.stride, self.capacity)

    @property
    def segment_bytes(self) -> int:
        """Least setting of a segment's size that gives this capacity."""
        return aligned(self.capacity * (self.layout.stride + LOG_ENTRY_BYTES)) + 3 * PAGE

    def pack(self) -> bytes:
        """The page: two equal copies, each with its sum."""
        at, table = self.layout.offsets, b""
        for (name, size), offset in zip(self.layout.sections, at, strict=False):
            table += _SECTION.pack(name.encode(), offset, size)
        table = table.ljust(_SECTION.size * MOST_SECTIONS, b"\0")
        fixed = _SUPER.pack(_MAGIC, FORMAT, _ENDIAN, self.layout.stride, self.layout.payload_bytes,
                            self.layout.block_tokens, self.capacity, len(self.layout.sections), self.uuid,
                            self.writer.encode(), self.layout.namespace, self.layout.identity,
                            self.layout.kind.encode(), self.cls.encode(), self.created, self.expires)
        copy = (fixed + table).ljust(_COPY - 8, b"\0")
        copy += _U64.pack(xxhash.xxh3_64_intdigest(copy))
        return copy + copy


def read_superblock(page: bytes) -> Superblock | None:
    """The superblock of a page, from whichever copy is whole; None when neither is, or it is of another format."""
    for copy in (page[:_COPY], page[_COPY : 2 * _COPY]):
        if len(copy) == _COPY and xxhash.xxh3_64_intdigest(copy[:-8]) == _U64.unpack_from(copy, _COPY - 8)[0]:
            return _unpacked(copy)
    return None


def _unpacked(copy: bytes) -> Superblock | None:
    (magic, version, endian, stride, _, tokens, capacity, count, uuid, writer, namespace, identity, kind, cls, created,
     expires) = _SUPER.unpack_from(copy)
    if (magic, version, endian) != (_MAGIC, FORMAT, _ENDIAN):
        return None
    sections = []
    for index in range(count):
        name, _, size = _SECTION.unpack_from(copy, _SUPER.size + index * _SECTION.size)
        sections.append((_text(name), size))
    layout = Layout(identity, tokens, tuple(sections), _text(kind))
    if layout.stride != stride or layout.namespace != namespace:
        return None
    return Superblock(layout, capacity, uuid, _text(writer), _text(cls), created, expires)


def pack_footer(block: Superblock, entries: bytes) -> bytes:
    """The footer: log entries of the records, and a page that counts and sums them."""
    count, body = len(entries) // LOG_ENTRY_BYTES, entries.ljust(aligned(LOG_ENTRY_BYTES * block.capacity), b"\0")
    tail = _FOOTER.pack(_FOOTER_MAGIC, FORMAT, block.uuid, count, _footer_sum(block, entries))
    tail += _U64.pack(xxhash.xxh3_64_intdigest(tail))
    return body + tail.ljust(PAGE, b"\0")


def read_footer(block: Superblock, data: bytes) -> bytes | None:
    """The log entries of a footer; None where it is not whole."""
    at = aligned(LOG_ENTRY_BYTES * block.capacity)
    tail = data[at : at + _FOOTER.size + 8]
    if len(tail) < _FOOTER.size + 8:
        return None
    magic, version, uuid, count, total = _FOOTER.unpack_from(tail)
    if xxhash.xxh3_64_intdigest(tail[: _FOOTER.size]) != _U64.unpack_from(tail, _FOOTER.size)[0]:
        return None
    entries = data[: count * LOG_ENTRY_BYTES]
    right = (magic, version, uuid, total) == (_FOOTER_MAGIC, FORMAT, block.uuid, _footer_sum(block, entries))
    return entries if right and len(entries) == count * LOG_ENTRY_BYTES else None


def _footer_sum(block: Superblock, entries: bytes) -> int:
    total: int = xxhash.xxh3_64_intdigest(entries, seed_of(block.uuid, block.capacity))
    return total


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def in_order(names: Sequence[SegmentName]) -> list[SegmentName]:
    """By expiry, then as they were written."""
    return sorted(names, key=lambda n: (n.hour, n.writer, n.seq))
