"""The publish log of a segment: 64 bytes for every record that is whole, and for records that were used or damaged.

Only the segment's writer appends, after the write of the record has completed. The first entry that does not prove
itself ends the log.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from deepinfer.runtime.prefix.chain import KEYS
from deepinfer.runtime.store.layout import LOG_ENTRY_BYTES
from deepinfer.runtime.store.record import seed_of
from deepinfer.runtime.store.tier import Flags

PUT, DAMAGED, TOUCH = 1, 2, 3
ENTRY = np.dtype([("key", KEYS), ("parent", KEYS), ("slot", "<u4"), ("kind", "u1"), ("flags", "u1"), ("spare", "<u2"),
                  ("head", "<u8"), ("used", "<u4"), ("spare4", "<u4"), ("sum", "<u8")])
Entries = NDArray[np.void]
_BODY = LOG_ENTRY_BYTES - 8
_MASK = (1 << 64) - 1


def pack_entries(entries: Entries, uuid: bytes, position: int) -> bytes:
    """The bytes of entries at ``position`` (in entries) of the log of segment ``uuid``."""
    seed, data = seed_of(uuid, 0), entries.tobytes()
    sums = [xxhash.xxh3_64_intdigest(data[at : at + _BODY], (seed + position + index) & _MASK)
            for index, at in enumerate(range(0, len(data), LOG_ENTRY_BYTES))]
    summed = entries.copy()
    summed["sum"] = np.array(sums, dtype=np.uint64)
    return summed.tobytes()


def read_entries(data: bytes, uuid: bytes, position: int = 0) -> Entries:
    """The entries of a log's bytes from ``position`` on, up to the first that does not prove itself."""
    count, seed, hashed = len(data) // LOG_ENTRY_BYTES, seed_of(uuid, position), xxhash.xxh3_64_intdigest
    entries = np.frombuffer(data, dtype=ENTRY, count=count)
    whole = count
    for index, total in enumerate(entries["sum"].tolist()):
        at = index * LOG_ENTRY_BYTES
        if hashed(data[at : at + _BODY], (seed + index) & _MASK) != total:
            whole = index
            break
    return entries[:whole]


def put_entry(key: bytes, parent: bytes, slot: int, flags: Flags, head: int, used: int) -> tuple[object, ...]:
    """A record is whole. ``head``: the sum of its header; ``used``: seconds of store time."""
    return key, parent, slot, PUT, int(flags), 0, head, used, 0, 0


def mark_entry(kind: int, key: bytes, slot: int, head: int, used: int) -> tuple[object, ...]:
    """A record, of whatever segment, named by its key and the sum of its header, was used or is damaged."""
    return key, bytes(16), slot, kind, 0, 0, head, used, 0, 0


def entries_of(rows: list[tuple[object, ...]]) -> Entries:
    return np.array(rows, dtype=ENTRY)


def standing(entries: Entries) -> Entries:
    """The puts of a log that no later put of the same slot and no damage mark of its own log takes back."""
    puts = entries[entries["kind"] == PUT]
    gone = set(entries["head"][entries["kind"] == DAMAGED].tolist())
    kept: Entries = puts[[head not in gone for head in puts["head"].tolist()]]
    return kept
