"""The bytes on disk: every one of them is proved, and a right record in a wrong place is none."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from store.witness_store import LAYOUT, Chain, open_store

from deepinfer.runtime.store import Flags, Status
from deepinfer.runtime.store.files import Files
from deepinfer.runtime.store.index import Index, _sound, hints_of
from deepinfer.runtime.store.layout import HEADER_BYTES, PAGE
from deepinfer.runtime.store.lease import Leases, Writer
from deepinfer.runtime.store.log import entries_of, pack_entries, put_entry, read_entries
from deepinfer.runtime.store.record import Wanted, id_bytes, prove, write_record
from deepinfer.runtime.store.segment import Superblock, pack_footer, parse_name, read_footer, read_superblock
from deepinfer.runtime.store.settings import StoreSettings

UUID, OTHER = bytes(range(16)), bytes(range(1, 17))
CHAIN = Chain(1, 3)
BLOCK = Superblock(LAYOUT, 4, UUID, "0123456789ab", "chat", 1_800_000_000, 500_176)


def record(slot: int = 1, uuid: bytes = UUID, flags: Flags = Flags.REPLAYED) -> bytearray:
    data = bytearray(LAYOUT.stride)
    write_record(LAYOUT, memoryview(data), uuid=uuid, slot=slot, key=CHAIN.key(1), parent=CHAIN.key(0), number=1,
                 ids=id_bytes(CHAIN.block_ids(1)), payload=[CHAIN.payload(1)], flags=flags, extra=bytes(16), written=7)
    return data


def status(data: bytearray, slot: int = 1, uuid: bytes = UUID, key: bytes = CHAIN.key(1)) -> Status:
    return prove(LAYOUT, memoryview(data), uuid, slot, Wanted(key, id_bytes(CHAIN.block_ids(1))))[0]


def test_every_bit_of_a_record_is_proved() -> None:
    data = record()
    assert status(data) is Status.OK
    for at in [*range(HEADER_BYTES + LAYOUT.ids_bytes), *range(HEADER_BYTES, LAYOUT.record_bytes, 37)]:
        for bit in (0, 5):
            data[at] ^= 1 << bit
            assert status(data) is Status.DAMAGED, at
            data[at] ^= 1 << bit
    assert status(data) is Status.OK


def test_a_record_in_another_place_or_under_another_key_is_not_the_one_asked_for() -> None:
    data = record()
    assert status(data, slot=2) is Status.DAMAGED, "a misdirected read"
    assert status(data, uuid=OTHER) is Status.DAMAGED, "what stood there before"
    assert status(data, key=CHAIN.key(2)) is Status.MISS
    wanted = Wanted(CHAIN.key(1), id_bytes(CHAIN.block_ids(1)), exact=True)
    assert prove(LAYOUT, memoryview(data), UUID, 1, wanted)[0] is Status.MISS
    wanted = Wanted(CHAIN.key(1), id_bytes(CHAIN.block_ids(1)), extra=b"image of a horse")
    assert prove(LAYOUT, memoryview(data), UUID, 1, wanted)[0] is Status.MISS


def test_a_hint_that_points_at_another_record_is_a_miss_and_forgotten(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    CHAIN.publish(store)
    hint = store.index.get(CHAIN.key(0))
    assert hint is not None
    wrong = hints_of([CHAIN.key(0)], hint["number"], 1, hint["head"], hint["used"], hint["flags"])
    assert store.index.replace(CHAIN.key(0), hint, wrong)
    assert CHAIN.fetch(store) == [Status.MISS, Status.OK, Status.OK]
    assert store.index.get(CHAIN.key(0)) is None and store.metrics().damaged.value == 0
    store.close()


def test_a_superblock_is_read_from_either_copy() -> None:
    page = BLOCK.pack()
    assert len(page) == PAGE and read_superblock(page) == BLOCK
    for at in (3, 500, 2040):
        for copies in ((0,), (1,), (0, 1)):
            rotten = bytearray(page)
            for copy in copies:
                rotten[copy * PAGE // 2 + at] ^= 1
            assert read_superblock(bytes(rotten)) == (None if len(copies) == 2 else BLOCK)
    assert read_superblock(b"") is None and read_superblock(bytes(PAGE)) is None


def rows() -> list[tuple[object, ...]]:
    return [put_entry(CHAIN.key(i), CHAIN.parent(i), i, Flags.NONE, 1000 + i, 5) for i in range(3)]


def test_a_footer_is_whole_or_none() -> None:
    footer = pack_footer(BLOCK, pack_entries(entries_of(rows()), UUID, 0))
    assert len(footer) == BLOCK.size - BLOCK.footer
    entries = read_footer(BLOCK, footer)
    assert entries is not None and len(read_entries(entries, UUID)) == 3
    for at in [*range(0, 192, 5), *range(PAGE, PAGE + 48)]:
        rotten = bytearray(footer)
        rotten[at] ^= 1
        assert read_footer(BLOCK, bytes(rotten)) is None, at
    assert read_footer(BLOCK, footer[:-PAGE]) is None


def test_a_log_ends_at_the_first_entry_that_does_not_prove_itself() -> None:
    data = pack_entries(entries_of(rows()), UUID, 0)
    assert [e["slot"] for e in read_entries(data, UUID)] == [0, 1, 2]
    for length in range(len(data) + 1):
        assert len(read_entries(data[:length], UUID)) == length // 64
    for at in range(64, 128, 3):
        rotten = bytearray(data)
        rotten[at] ^= 1
        assert len(read_entries(bytes(rotten), UUID)) == 1
    assert len(read_entries(data, OTHER)) == 0, "a log of another segment"
    assert len(read_entries(data[64:] + data[:64], UUID)) == 0, "entries in other places"
    assert len(read_entries(data[64:], UUID, position=1)) == 2


@pytest.mark.parametrize("file", ["00500176-0123456789ab-000003.seg", "00500176-0123456789ab-000003~ba9876543210.open"])
def test_a_name_says_the_same_after_reading(file: str) -> None:
    name = parse_name(file)
    assert name is not None and name.file == file and name.log == "00500176-0123456789ab-000003.log"
    assert name.owner == ("ba9876543210" if "~" in file else "0123456789ab")
    for foreign in (f".{file}", f"{file}.tmp", "lost+found", name.log):
        assert parse_name(foreign) is None


# ---- the index ----
def everything(numbers: np.ndarray) -> np.ndarray:
    return np.ones(len(numbers), dtype=bool)


def keys_of(seed: int, count: int) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [rng.bytes(16) for _ in range(count)]


def filled(folder: Path, keys: list[bytes], size: int = 1 << 24) -> Index:
    index = Index(folder, size)
    number = index.number("stem")
    index.put(keys, hints_of(keys, number, range(len(keys)), range(len(keys)), 0, 0), everything, [("stem", number, 1)])
    return index


def test_an_index_is_used_again_only_as_its_last_user_left_it(tmp_path: Path) -> None:
    keys = keys_of(1, 100)
    filled(tmp_path, keys).close()
    index = Index(tmp_path, 1 << 24)
    assert not index.rebuilt and len(index.leading(keys)) == 100
    index.abandon()  # killed: no stamp
    index = Index(tmp_path, 1 << 24)
    assert index.rebuilt and len(index.leading(keys)) == 0
    index.close()
    filled(tmp_path / "b", keys).close()
    (data,) = (tmp_path / "b").rglob("data.mdb")
    with data.open("r+b") as file:
        file.seek(9000)
        file.write(b"rot")
    index = Index(tmp_path / "b", 1 << 24)
    assert index.rebuilt and index.records == 0, "a stamp that does not fit the file"
    index.close()


def test_a_value_under_another_key_is_no_hint(tmp_path: Path) -> None:
    keys = keys_of(1, 3)
    index = filled(tmp_path, keys)
    hints = index.leading(keys)
    index.put(keys[1:2], hints[:1], lambda numbers: np.zeros(len(numbers), dtype=bool), [])
    assert len(index.leading(keys)) == 1 and index.get(keys[1]) is None
    index.close()


def test_one_hint_is_summed_as_many_are() -> None:
    rng = np.random.default_rng(3)
    keys = keys_of(4, 50)
    hints = hints_of(keys, 7, rng.integers(0, 1 << 32, 50), rng.integers(0, 1 << 63, 50, np.uint64) * np.uint64(2),
                     rng.integers(0, 1 << 32, 50), rng.integers(0, 256, 50))
    for key, hint in zip(keys, hints, strict=True):
        assert _sound(key, hint.tobytes()) == hint and _sound(key[::-1], hint.tobytes()) is None


def test_an_index_that_is_full_moves_to_a_larger_one(tmp_path: Path) -> None:
    keys = keys_of(2, 4000)
    index = filled(tmp_path, keys, size=1 << 16)
    assert index.broken and len(index.leading(keys)) == 0 and index.number("x") == 0
    for _ in range(8):
        assert index.renew() and not index.broken
        number = index.number("stem")
        index.put(keys, hints_of(keys, number, 0, 0, 0, 0), everything, [("stem", number, 1)])
        if not index.broken:
            break
    assert len(index.leading(keys)) == 4000 and not index.renew()
    assert len([p for p in tmp_path.iterdir() if p.is_dir()]) == 1
    index.close()


def test_compare_and_set_changes_only_what_is_still_there(tmp_path: Path) -> None:
    keys = keys_of(1, 2)
    index = filled(tmp_path, keys)
    old = index.get(keys[0])
    assert old is not None
    new = hints_of(keys[:1], 9, 9, 9, 9, 0)
    assert index.replace(keys[0], old, new) and not index.replace(keys[0], old, None)
    now = index.get(keys[0])
    assert now is not None and now["number"] == 9 and index.replace(keys[0], now, None) and index.get(keys[0]) is None
    index.close()


def test_a_sweep_takes_hints_of_segments_that_were_forgotten(tmp_path: Path) -> None:
    keys = keys_of(1, 50)
    index = filled(tmp_path, keys)
    assert index.sweep(b"", 1000) == (0, b"") and index.records == 50
    index.forget("stem")
    deleted, after = index.sweep(b"", 20)
    assert deleted == 20 and index.sweep(after, 1000) == (30, b"") and index.records == 0
    index.close()


# ---- leases ----
def test_who_is_dead(tmp_path: Path) -> None:
    settings, now = StoreSettings(tmp_path, segment_bytes=1 << 20), 1_800_000_000.0
    mine = Writer.mine()
    gone = Writer("0" * 12, mine.host, mine.boot, 2**22 + 1, 5)
    again = Writer("1" * 12, mine.host, mine.boot, os.getpid(), mine.begun + 1)  # the pid is another process's now
    before = Writer("2" * 12, mine.host, "an earlier boot", os.getpid(), mine.begun)
    far = Writer("3" * 12, "another host", "boot", 1, 1)
    twin = Writer("4" * 12, mine.host, mine.boot, os.getpid(), mine.begun)
    for writer in (mine, gone, again, before, far, twin):
        Leases(settings, Files(), writer).renew(now)
    ours = Leases(settings, Files(), mine)

    def dead(after: float) -> set[str]:
        return {w.name[0] for w in (gone, again, before, far, twin) if ours.dead(w.name, now + after)}

    assert dead(60) == set() and dead(599) == set()
    assert dead(601) == {"0", "1", "2"} and dead(3601) == {"0", "1", "2", "3"}
    assert not ours.dead(mine.name, now + 1e9) and ours.dead("nobody000000", now)
    (tmp_path / "writers" / "333333333333.lease").write_text("{torn")
    assert "3" not in {w.name[0] for w in (far,) if ours.dead(w.name, os.stat(tmp_path).st_mtime)}
    ours.forget_dead({gone.name}, now + 3601)
    left = {p.name.removesuffix(".lease") for p in (tmp_path / "writers").iterdir()}
    assert left == {gone.name, twin.name, mine.name}
