"""The native part of the store: bytes and judgements are record.py's, and memory that was given up is left alone."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from store.witness_store import LAYOUT, PATIENCE, V41_LAYOUT, Chain, Clocks, open_store, ring_of, wait_for

from deepinfer.runtime.store import Flags, Layout, Status
from deepinfer.runtime.store.catalog import Catalog
from deepinfer.runtime.store.index import TOUCHED, hints_of
from deepinfer.runtime.store.layout import HEADER_BYTES
from deepinfer.runtime.store.native import LIBRARY
from deepinfer.runtime.store.native.build import build_store
from deepinfer.runtime.store.native.library import WANT, Ended, NativeRecords, address_of, open_native, parts_of
from deepinfer.runtime.store.publisher import Write
from deepinfer.runtime.store.record import Wanted, id_bytes, prove, seed_of, write_record
from deepinfer.runtime.store.tier import NO_EXTRA, Ticket

UUID, OTHER = bytes(range(16)), bytes(range(1, 17))
SHORT = Layout(LAYOUT.identity, 16, (("a", 1), ("b", 3), ("c", 8), ("d", 16), ("e", 128), ("f", 240), ("g", 241)))
FULL = Layout(LAYOUT.identity, 128, tuple((f"s{i}", 1000 + i) for i in range(16)))


@pytest.fixture(scope="module")
def library() -> Path:
    return build_store().files[LIBRARY]


def writes(chain: Chain, flags: Flags = Flags.NONE, extra: bytes = NO_EXTRA) -> list[Write]:
    return [Write(chain.key(i), chain.parent(i), i, id_bytes(chain.block_ids(i)), [memoryview(chain.payload(i, flags))],
                  flags, "chat", extra, Ticket(1), written=1_800_000_000 + i) for i in range(chain.blocks)]


def wants_of(chain: Chain, slots: list[int], into: NDArray[np.uint8], exact: bool = False) -> tuple[object, ...]:
    """WANTs for blocks 0.. of a chain at slots of UUID's segment; the rest keeps memory alive."""
    wants = np.zeros(len(slots), dtype=WANT)
    parts, first = parts_of([[memoryview(row)] for row in into])
    ids = np.frombuffer(id_bytes(chain.ids), np.uint8)
    wants["slot"], wants["seed"] = slots, [seed_of(UUID, slot) for slot in slots]
    wants["uuid"], wants["key"] = np.void(UUID), chain.keys[: len(slots)]
    wants["ids"] = [ids.ctypes.data + i * chain.layout.ids_bytes for i in range(len(slots))]
    wants["into"], wants["parts"], wants["exact"] = first, 1, exact
    return wants, parts, ids


@pytest.mark.parametrize("layout", [LAYOUT, V41_LAYOUT, SHORT, FULL], ids=["small", "v4.1", "short", "sixteen"])
@pytest.mark.parametrize("flags", [Flags.NONE, Flags.REPLAYED | Flags.IMAGE])
def test_a_record_has_the_bytes_that_python_gives_it(library: Path, layout: Layout, flags: Flags) -> None:
    native, chain = NativeRecords(library, layout), Chain(3, 5, layout)
    slots, memory = [7, 8, 9, 10, 11], np.full((5, layout.stride), 0xEE, dtype=np.uint8)
    views = [memoryview(row) for row in memory]
    sums, _ = native.assemble(UUID, slots, writes(chain, flags, OTHER), views, 0)
    for i, write in enumerate(writes(chain, flags, OTHER)):
        theirs = bytearray(layout.stride)
        total = write_record(layout, memoryview(theirs), uuid=UUID, slot=slots[i], key=write.key, parent=write.parent,
                             number=i, ids=write.ids, payload=write.payload, flags=flags, extra=OTHER,
                             written=1_800_000_000 + i)
        assert bytes(views[i]) == bytes(theirs) and sums[i] == total


def test_records_are_written_while_they_are_assembled(library: Path, tmp_path: Path) -> None:
    native, chain = NativeRecords(library, LAYOUT), Chain(2, 7)
    memory = np.zeros((7, LAYOUT.stride), dtype=np.uint8)
    views, path = [memoryview(row) for row in memory], tmp_path / "segment"
    with path.open("wb") as file:
        written = native.assemble(UUID, list(range(7)), writes(chain), views, 0, file.fileno(), 4096)[1]
    assert written == memory.nbytes and path.read_bytes() == bytes(4096) + memory.tobytes()
    with path.open("rb") as file:
        sums, written = native.assemble(UUID, list(range(7)), writes(chain), views, 0, file.fileno(), 4096)
    assert written == -errno.EBADF and len(sums) == 7


def judged(native: NativeRecords, chain: Chain, data: memoryview, slot: int, exact: bool = False) -> tuple[Ended, bool]:
    """How block 0 of a chain at ``slot`` ends, and whether its buffer was written to."""
    into = np.full((1, chain.layout.payload_bytes), 0xEE, dtype=np.uint8)
    wants, *kept = wants_of(chain, [slot], into, exact)
    native.prove(wants, data)
    del kept
    return Ended(int(wants["status"][0])), not bool((into == 0xEE).all())


def test_every_byte_of_a_record_is_judged_as_python_judges_it(library: Path) -> None:
    native, chain = NativeRecords(library, LAYOUT), Chain(1, 1)
    data = np.zeros(LAYOUT.stride, dtype=np.uint8)
    native.assemble(UUID, [1], writes(chain), [memoryview(data)], 0)
    assert judged(native, chain, memoryview(data), 1) == (Ended.OK, True)
    for at in [*range(HEADER_BYTES + LAYOUT.ids_bytes), *range(HEADER_BYTES, LAYOUT.record_bytes, 13)]:
        data[at] ^= 1 << (at % 8)
        assert judged(native, chain, memoryview(data), 1) == (Ended.DAMAGED, False), at
        data[at] ^= 1 << (at % 8)
    assert judged(native, chain, memoryview(data), 2) == (Ended.DAMAGED, False), "a misdirected read"


def test_a_whole_record_of_something_else_is_a_miss_as_in_python(library: Path) -> None:
    native, chain, other, twin = NativeRecords(library, LAYOUT), Chain(1, 1), Chain(2, 1), Chain(1, 1)
    twin.ids[3] += 1  # other ids with the same key
    data = np.zeros(LAYOUT.stride, dtype=np.uint8)
    for flags, extra in ((Flags.NONE, NO_EXTRA), (Flags.REPLAYED, NO_EXTRA), (Flags.NONE, OTHER)):
        native.assemble(UUID, [1], writes(chain, flags, extra), [memoryview(data)], 0)
        for asked in (chain, other, twin):
            for exact in (False, True):
                status, written = judged(native, asked, memoryview(data), 1, exact)
                wanted = Wanted(asked.key(0), id_bytes(asked.ids), exact=exact)
                expected, _ = prove(LAYOUT, memoryview(data), UUID, 1, wanted)
                assert written == (expected is Status.OK)
                assert (Status.MISS if status is Ended.OTHER else Status[status.name]) is expected
                assert (status is Ended.OTHER) == (asked is other)


def segment_of(tmp_path: Path, native: NativeRecords, chain: Chain) -> int:
    """A file of the chain's records from offset 0 on, opened."""
    memory = np.zeros((chain.blocks, chain.layout.stride), dtype=np.uint8)
    native.assemble(UUID, list(range(chain.blocks)), writes(chain), [memoryview(row) for row in memory], 0)
    (tmp_path / "records").write_bytes(memory.tobytes())
    return os.open(tmp_path / "records", os.O_RDONLY)


def rings() -> set[int]:
    """Descriptors of this process that are rings."""
    names = [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]
    return {int(name) for name in names if "io_uring" in os.readlink(f"/proc/self/fd/{name}")}


def reader_of(native: NativeRecords, how: str) -> Callable[[NDArray[np.void], NDArray[np.uint64]], int]:
    """``native.read``, or the same through a ring; "broken": one that the kernel takes nothing from any more."""
    if how == "calls":
        return native.read
    before = rings()
    ring = ring_of(native)
    if how == "broken":
        with open(os.devnull) as null:
            os.dup2(null.fileno(), *(rings() - before))
    return partial(native.read_ring, ring)


@pytest.mark.parametrize("how", ["calls", "ring", "broken"])
def test_records_are_read_in_any_order_and_a_file_that_ends_loses_what_is_cut(library: Path, tmp_path: Path,
                                                                             how: str) -> None:
    native, chain = NativeRecords(library, LAYOUT), Chain(1, 12)
    read = reader_of(native, how)
    fd = segment_of(tmp_path, native, chain)
    area = np.zeros((5, LAYOUT.stride), dtype=np.uint8)
    slots = np.array([address_of(memoryview(row)) for row in area], dtype=np.uint64)
    into = np.full((12, LAYOUT.payload_bytes), 0xEE, dtype=np.uint8)
    wants, *kept = wants_of(chain, list(range(12)), into)
    wants["fd"], wants["offset"] = fd, wants["slot"].astype(np.uint64) * np.uint64(LAYOUT.stride)
    order = np.array([4, 5, 6, 7, 8, 9, 10, 11, 0, 2, 1, 3])
    wants = wants[order].copy()
    os.truncate(tmp_path / "records", 11 * LAYOUT.stride + 100)
    wants["state"][9] = 3  # given up before it was read
    assert read(wants, slots) >= 10 * LAYOUT.stride
    for block, status in zip(order.tolist(), wants["status"].tolist(), strict=True):
        expected = Ended.DAMAGED if block == 11 else Ended.CANCELLED if block == 2 else Ended.OK
        assert status == expected, block
        assert np.array_equal(into[block], chain.payload(block)) if status == Ended.OK else (into[block] == 0xEE).all()
    os.close(fd)
    wants["state"] = 0
    read(wants, slots)
    assert set(wants["status"].tolist()) == {int(Ended.IO_ERROR)} and set(wants["got"].tolist()) == {-errno.EBADF}
    del kept


def test_a_gate_lets_so_many_reads_pass_and_is_left_by_those_that_failed_too(library: Path, tmp_path: Path) -> None:
    native, chain = NativeRecords(library, LAYOUT), Chain(1, 4)
    area, into = np.zeros((1, LAYOUT.stride), np.uint8), np.zeros((4, LAYOUT.payload_bytes), np.uint8)
    slots, fd = np.array([address_of(memoryview(area[0]))], np.uint64), segment_of(tmp_path, native, chain)
    one, none = native.open_gate(1), native.open_gate(0)
    for gate, file, ended in ((one, -1, Ended.IO_ERROR), (one, fd, Ended.OK), (none, fd, Ended.PENDING)):
        wants, *kept = wants_of(chain, list(range(4)), into)
        wants["fd"], wants["offset"] = file, wants["slot"].astype(np.uint64) * np.uint64(LAYOUT.stride)
        reader = threading.Thread(target=native.read, args=(wants, slots, gate), daemon=True)
        reader.start()
        reader.join(0.2 if gate is none else PATIENCE)
        assert reader.is_alive() == (gate is none) and set(wants["status"].tolist()) == {int(ended)}
        del kept
    one.close()


@pytest.mark.parametrize(("how", "areas"), [("calls", 1), ("calls", 4), ("ring", 3)])
def test_memory_that_was_given_up_is_never_written_again(library: Path, tmp_path: Path, how: str, areas: int) -> None:
    """Blocks are given up before a read begins, after it has ended, and then, while a thread reads, after a wait that
    closes in on the middle of the read by itself; whatever they hold then stays, whichever moment was met."""
    native, chain = NativeRecords(library, V41_LAYOUT), Chain(1, 64, V41_LAYOUT)
    fd = segment_of(tmp_path, native, chain)
    read = reader_of(native, how)
    area = np.zeros((areas, V41_LAYOUT.stride), dtype=np.uint8)
    slots = np.array([address_of(memoryview(row)) for row in area], dtype=np.uint64)
    into = np.zeros((64, V41_LAYOUT.payload_bytes), dtype=np.uint8)
    wait, moments = 1e-4, ["before", "after", *["meanwhile"] * 60]
    for moment in moments:
        into[:] = 0
        wants, *kept = wants_of(chain, list(range(64)), into)
        wants["fd"], wants["offset"] = fd, wants["slot"].astype(np.uint64) * np.uint64(V41_LAYOUT.stride)
        reader = threading.Thread(target=read, args=(wants, slots))
        if moment == "before":
            native.give_up(wants)
        reader.start()
        if moment == "after":
            reader.join()
        elif moment == "meanwhile":
            time.sleep(wait)
        native.give_up(wants)
        held = into.copy()
        reader.join()
        assert np.array_equal(into, held)
        ended = wants["status"].tolist()
        for row, status in zip(held, ended, strict=True):
            assert (row == 0).all() if status == Ended.CANCELLED else status == Ended.OK
        del kept
        assert moment != "before" or set(ended) == {Ended.CANCELLED}
        assert moment != "after" or set(ended) == {Ended.OK}
        wait = wait / 2 if set(ended) == {Ended.OK} else min(wait * 1.5, 0.1) if Ended.OK not in ended else wait
    os.close(fd)


def test_memory_is_given_up_only_when_a_copy_into_it_has_ended(library: Path) -> None:
    native, chain = NativeRecords(library, LAYOUT), Chain(1, 3)
    waiting, copying, ended, given_up = range(4)
    wants, *kept = wants_of(chain, [0, 1, 2], np.zeros((3, LAYOUT.payload_bytes), dtype=np.uint8))
    state = wants["state"]
    state[:] = waiting, copying, waiting
    giving = threading.Thread(target=native.give_up, args=(wants,))
    giving.start()
    assert wait_for(lambda: bool(state[0] == given_up))
    giving.join(0.2)
    assert giving.is_alive() and state.tolist() == [given_up, copying, waiting]
    state[1] = ended
    giving.join(PATIENCE)
    assert not giving.is_alive() and state.tolist() == [given_up, ended, given_up]
    del kept


class Slow:
    """Opening a segment waits while ``answers`` is not set, as on a mount that hangs."""

    def __init__(self, catalog: Catalog) -> None:
        self.answers, self._acquire = threading.Event(), catalog.acquire
        catalog.acquire = self  # type: ignore[assignment, method-assign]

    def __call__(self, segment: object) -> object:
        self.answers.wait(2 * PATIENCE)
        return self._acquire(segment)  # type: ignore[arg-type]


def test_a_fetch_that_was_cancelled_touches_no_memory_when_the_mount_answers(tmp_path: Path) -> None:
    store, chain = open_store(tmp_path, backend="threads", threads=2, background=True, native=True), Chain(1, 8)
    store.ready(PATIENCE)
    assert chain.publish(store) == [Status.OK] * 8
    mount = Slow(store.catalog)
    into = np.full((8, LAYOUT.payload_bytes), 0xEE, dtype=np.uint8)
    ticket = store.fetch(chain.keys, chain.ids, [[row] for row in into])
    assert set(store.poll(ticket, time.monotonic() + 0.05)) == {Status.CANCELLED}
    mount.answers.set()
    read = store.metrics().read_bytes
    assert wait_for(lambda: chain.fetch(store) == [Status.OK] * 8)
    assert (into == 0xEE).all() and read.value == 8 * LAYOUT.stride, "records that nobody waits for were read"
    store.close()


def test_damage_lies_and_use_have_the_same_consequences(tmp_path: Path) -> None:
    """A rotten record, a hint that lies, a late use, and a segment that is gone: through the native part."""
    clocks, chain = Clocks(), Chain(1, 8)
    store = open_store(tmp_path, clocks=clocks, backend="threads", threads=2, background=False, native=True)
    store.upkeep.tick()
    for i in range(8):  # one after another: block i in slot i % 4
        assert chain.publish(store, [i]) == [Status.OK]
    store.writers.rotate(everything=True)
    first = store.catalog.by_number[int(store.index.leading([chain.key(0)])["number"][0])]
    with first.path.open("r+b") as file:
        file.seek(4096 + LAYOUT.stride + 900)
        file.write(b"rotten")
    lie, right = store.index.get(chain.key(2)), store.index.get(chain.key(3))
    assert lie is not None and right is not None
    store.index.replace(chain.key(2), lie, hints_of([chain.key(2)], lie["number"], right["slot"], lie["head"], 0, 0))
    clocks.forward(6.9 * 86_400)
    ok, bad, miss = Status.OK, Status.DAMAGED, Status.MISS
    assert chain.fetch(store) == [ok, bad, miss, ok, ok, ok, ok, ok]
    assert store.metrics().damaged.value == 1 and store.index.get(chain.key(1)) is store.index.get(chain.key(2)) is None
    assert wait_for(lambda: bool(store.index.leading([chain.key(0)])["flags"][0] & TOUCHED)), "the use was not noted"
    first.path.unlink()
    store.catalog._shut(first)
    assert chain.fetch(store, 0, 1) == [miss] and chain.fetch(store, 4, 8) == [ok] * 4
    assert store.metrics().fetched.values["ok"] == 6 + 4
    store.close()


def test_a_library_that_cannot_be_used_means_python(tmp_path: Path, library: Path) -> None:
    (tmp_path / "empty.so").write_bytes(b"no library")
    for path, words in ((tmp_path / "absent.so", "absent"), (tmp_path / "empty.so", "empty"), (None, "no engine")):
        native, reason = open_native(path, LAYOUT)
        assert native is None and words in reason
    assert open_native(library, LAYOUT)[1] == ""
