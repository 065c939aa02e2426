"""The numbered places where a crash is enumerated. Every change of the folder names its place; docs/store.md tells
what each leaves behind, and the tests break the store at each."""

from __future__ import annotations

from enum import IntEnum


class Point(IntEnum):
    """Where in a store's life a change of the disk belongs."""

    ALLOCATE = 1  # a segment's file is made and its space reserved
    SUPERBLOCK = 2
    RECORD = 3
    BETWEEN = 4  # the record is written, its log entry is not
    LOG = 5
    REORDERED = 6  # syncs of record and log: one may be durable without the other
    INDEX = 7
    FOOTER = 8
    SEALED = 9  # the footer is written, the name is still .open
    RENAMED = 10  # the name is .seg, the folder is not synced
    COPIED = 11  # compaction copied, the index still points at the old record
    SWAPPED = 12  # the index points at the copy, the old segment is still there
    UNLINK = 13
    ADOPT = 14
    LEASE = 15
    STAMP = 16  # the index's clean stamp
    EXPIRE = 17
    BAD = 18  # a segment with too much damage is set aside
    OTHER = 19  # folders, salts, the clock: nothing that a record hangs on
