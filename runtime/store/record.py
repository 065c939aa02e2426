"""A record: writing one so that it proves itself, and the proof.

Every sum is seeded with the segment's uuid and the slot: a record of another segment, or of another slot, is no
record here, whatever a disk or an index says.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash

from deepinfer.runtime.store.layout import FORMAT, HEADER_BYTES, ID_BYTES, MOST_SECTIONS, Layout
from deepinfer.runtime.store.tier import NO_EXTRA, Buffer, Flags, Ids, Status, view_of

MAGIC = b"DIrc"
_FIXED = struct.Struct("<4sHH16s16sIIII16s16s16sQ")  # magic .. written; 112 bytes
_SUMS = struct.Struct(f"<{MOST_SECTIONS}Q")
_IDS_SUM, _HEADER_SUM = HEADER_BYTES - 16, HEADER_BYTES - 8
_MASK = (1 << 64) - 1
_U64 = struct.Struct("<Q")


def seed_of(uuid: bytes, position: int) -> int:
    """Seed of the sums of slot or log entry ``position`` of a segment."""
    return (xxhash.xxh3_64_intdigest(uuid) + position) & _MASK


@dataclass(frozen=True)
class Head:
    """What a header says, once its sum is right."""

    key: bytes
    parent: bytes
    number: int
    flags: Flags
    extra: bytes
    written: int
    sum: int


@dataclass(frozen=True)
class Wanted:
    """The block that a read is to prove. ``ids``: its [B] ids as little-endian int32 bytes; None: not compared."""

    key: bytes
    ids: bytes | None = None
    extra: bytes = NO_EXTRA
    exact: bool = False


def id_bytes(ids: Ids) -> bytes:
    return np.ascontiguousarray(ids, dtype="<i4").tobytes()


def write_record(layout: Layout, record: memoryview, *, uuid: bytes, slot: int, key: bytes, parent: bytes, number: int,
                 ids: bytes, payload: Sequence[Buffer], flags: Flags, extra: bytes, written: int) -> int:
    """Fill ``record`` ([stride] bytes); returns the header's sum, which names this very record.

    ``payload``: one buffer a section, or one for all; ``written``: seconds of store time.
    """
    seed, at = seed_of(uuid, slot), HEADER_BYTES + layout.ids_bytes
    record[HEADER_BYTES:at] = ids
    for part in payload:
        view = view_of(part)
        record[at : at + len(view)] = view
        at += len(view)
    if at != layout.record_bytes:
        raise ValueError(f"a payload of {at - layout.offsets[0]} bytes where {layout.payload_bytes} belong")
    record[at:] = bytes(layout.stride - at)
    sums = section_sums(layout, record, seed)
    _FIXED.pack_into(record, 0, MAGIC, FORMAT, int(flags), key, parent, number, layout.block_tokens, slot, 0, uuid,
                     layout.namespace, extra, written)
    _SUMS.pack_into(record, _FIXED.size, *sums)
    _U64.pack_into(record, _IDS_SUM, xxhash.xxh3_64_intdigest(ids, seed))
    total: int = xxhash.xxh3_64_intdigest(record[:_HEADER_SUM], seed)
    _U64.pack_into(record, _HEADER_SUM, total)
    return total


def section_sums(layout: Layout, record: memoryview, seed: int) -> list[int]:
    """xxh3-64 of each section, then zeros."""
    at, hashed = layout.offsets, xxhash.xxh3_64_intdigest
    sums = [hashed(record[a:b], seed) for a, b in pairwise(at)]
    return sums + [0] * (MOST_SECTIONS - len(sums))


def read_head(layout: Layout, record: memoryview, uuid: bytes, slot: int) -> Head | None:
    """The header, or None when it is not a whole header of this slot of this segment."""
    seed = seed_of(uuid, slot)
    total = _U64.unpack_from(record, _HEADER_SUM)[0]
    if xxhash.xxh3_64_intdigest(record[:_HEADER_SUM], seed) != total:
        return None
    magic, version, flags, key, parent, number, tokens, here, _, owner, namespace, extra, written = (
        _FIXED.unpack_from(record))
    if (magic, version, tokens, here, owner, namespace) != (MAGIC, FORMAT, layout.block_tokens, slot, uuid,
                                                            layout.namespace):
        return None
    return Head(key, parent, number, Flags(flags), extra, written, total)


def whole(layout: Layout, record: memoryview, uuid: bytes, slot: int) -> bool:
    """Whether ids and sections are those that the (proved) header was written with."""
    seed, ids_end = seed_of(uuid, slot), HEADER_BYTES + layout.ids_bytes
    if xxhash.xxh3_64_intdigest(record[HEADER_BYTES:ids_end], seed) != _U64.unpack_from(record, _IDS_SUM)[0]:
        return False
    return list(_SUMS.unpack_from(record, _FIXED.size)) == section_sums(layout, record, seed)


def prove(layout: Layout, record: memoryview, uuid: bytes, slot: int, wanted: Wanted) -> tuple[Status, Head | None]:
    """OK: this is the wanted block, undamaged. MISS: a whole record of something else. DAMAGED: no whole record."""
    head = read_head(layout, record, uuid, slot)
    if head is None:
        return Status.DAMAGED, None
    if head.key != wanted.key or head.extra != wanted.extra or (wanted.exact and Flags.REPLAYED in head.flags):
        return Status.MISS, head
    if not whole(layout, record, uuid, slot):
        return Status.DAMAGED, head
    if wanted.ids is not None and record[HEADER_BYTES : HEADER_BYTES + len(wanted.ids)] != wanted.ids:
        return Status.MISS, head
    return Status.OK, head


def scatter(layout: Layout, record: memoryview, into: Sequence[memoryview]) -> None:
    """Copy the payload into the caller's buffers, in order; together they hold exactly the payload."""
    at = layout.offsets[0]
    for view in into:
        view[:] = record[at : at + len(view)]
        at += len(view)


def ids_of(layout: Layout, record: memoryview) -> np.ndarray:
    """[B] int32 ids of a record."""
    return np.frombuffer(record, dtype="<i4", count=layout.ids_bytes // ID_BYTES, offset=HEADER_BYTES)
