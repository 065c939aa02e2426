"""Compaction: what is wanted lives on, what is not ends, nothing that could not be copied goes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from store.scenario import DEAD, vanished
from store.witness_store import DAY, LAYOUT, PATIENCE, Chain, Clocks, open_store

from deepinfer.runtime.store import Flags, Status, Store
from deepinfer.runtime.store.arena import SHARED, Arena
from deepinfer.runtime.store.log import DAMAGED


def compact(store: Store) -> None:
    store.upkeep.compaction.plan(now_due=True)
    for _ in range(4):
        store.upkeep.compaction.work(PATIENCE)


def hollow(store: Store, chain: Chain) -> None:
    """A sealed segment of which one record is still found."""
    chain.publish(store, flags=Flags.REPLAYED)
    store.writers.rotate(everything=True)
    chain.publish(store, [0, 1, 2])


def test_a_hollow_segment_is_emptied_and_goes(tmp_path: Path) -> None:
    store, chain = open_store(tmp_path), Chain(1, 4)
    hollow(store, chain)
    compact(store)
    assert not list(tmp_path.rglob("*.seg")) and len(list(tmp_path.rglob("*.dead"))) == 1
    assert store.metrics().carried.value == 1
    assert chain.fetch(store) == [Status.OK] * 4 and store.lookup(chain.keys, exact=True) == 3
    store.close()


def test_a_segment_that_was_closed_early_is_not_hollow(tmp_path: Path) -> None:
    """One small record, a large footer, and holes."""
    store, chain = open_store(tmp_path, segment_bytes=1 << 24), Chain(1, 1)
    chain.publish(store)
    store.writers.rotate(everything=True)
    compact(store)
    assert store.metrics().carried.value == 0 and len(list(tmp_path.rglob("*.seg"))) == 1
    store.close()


def test_a_segment_whose_records_cannot_be_copied_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, chain = open_store(tmp_path, retry_seconds=0.0), Chain(1, 4)
    hollow(store, chain)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store.publisher.mover, "write", full)
        compact(store)
    assert len(list(tmp_path.rglob("*.seg"))) == 1
    assert chain.fetch(store) == [Status.OK] * 4
    store.close()


def test_a_damaged_record_is_not_copied(tmp_path: Path) -> None:
    store, chain = open_store(tmp_path), Chain(1, 4)
    hollow(store, chain)
    (path,) = tmp_path.rglob("*.seg")
    with path.open("r+b") as file:
        file.seek(4096 + 3 * store.layout.stride + 1000)
        file.write(b"rot")
    compact(store)
    assert store.metrics().carried.value == 0
    assert chain.fetch(store) == [Status.OK] * 3 + [Status.MISS]
    store.close()


def test_what_is_used_late_lives_on_and_what_is_not_ends(tmp_path: Path) -> None:
    clocks = Clocks()
    store, chain = open_store(tmp_path, clocks=clocks), Chain(1, 4)
    chain.publish(store)
    store.writers.rotate(everything=True)
    clocks.forward(3 * DAY)
    assert chain.fetch(store) == [Status.OK] * 4  # early: no reason to keep them longer
    clocks.forward(3 * DAY)
    Chain(2, 1).publish(store)  # marks go into an open log
    assert chain.fetch(store, 0, 2) == [Status.OK] * 2
    compact(store)
    assert store.metrics().carried.value == 0, "moved long before its end"
    clocks.forward(0.9 * DAY)
    compact(store)
    assert store.metrics().carried.value == 2
    clocks.forward(1.5 * DAY)
    store.upkeep.expire()
    assert [chain.fetch(store, i, i + 1)[0] for i in range(4)] == [Status.OK] * 2 + [Status.MISS] * 2
    store.close()


def test_marks_survive_an_index_that_is_lost(tmp_path: Path) -> None:
    clocks = Clocks()
    store, chain = open_store(tmp_path, clocks=clocks, bad_after=100), Chain(1, 4)
    chain.publish(store)
    store.writers.rotate(everything=True)
    clocks.forward(6 * DAY)
    Chain(2, 1).publish(store)
    chain.fetch(store, 0, 2)
    (path,) = tmp_path.rglob("*.seg")
    with path.open("r+b") as file:
        file.seek(4096 + 3 * store.layout.stride + 1000)
        file.write(b"rot")
    assert chain.fetch(store, 3, 4) == [Status.DAMAGED]
    store.close()
    other = open_store(tmp_path, clocks=clocks, index=tmp_path / "another host")
    assert other.lookup(chain.keys) == 3, "the damaged one is known to be"
    clocks.forward(0.9 * DAY)
    compact(other)
    assert other.metrics().carried.value == 2, "the used ones are known to be"
    assert DAMAGED == 2
    other.close()


def test_nothing_lives_for_ever_by_being_moved(tmp_path: Path) -> None:
    clocks = Clocks()
    store, chain = open_store(tmp_path, clocks=clocks), Chain(1, 4)
    hollow(store, chain)
    clocks.forward(6 * DAY)
    store.writers.rotate()
    compact(store)
    assert store.metrics().carried.value == 1
    clocks.forward(1.5 * DAY)
    store.writers.rotate(everything=True)
    assert chain.fetch(store, 3, 4) == [Status.OK]
    store.settings.__dict__["compact_below"] = 2.0  # every segment is hollow
    compact(store)
    assert store.metrics().carried.value == 1, "written more than a retention ago and not used since"
    assert chain.fetch(store, 3, 4) == [Status.MISS]
    store.close()


def test_shared_memory_is_the_owners_alone_while_it_has_a_name() -> None:
    arena = Arena(1 << 16, 4096)
    assert (SHARED / arena.name).stat().st_mode & 0o777 == 0o600
    assert arena.bytes == 1 << 16 and arena.free == 16
    arena.close()
    assert arena.name == ""


def test_an_orphan_is_sealed_with_the_records_that_prove_themselves(tmp_path: Path) -> None:
    """After a power cut a log may know more than the disk: what never got there is not promised again."""
    clocks, chain = Clocks(), Chain(1, 3)
    other = open_store(tmp_path, clocks=clocks, writer=DEAD)
    chain.publish(other)
    vanished(other)
    (path,) = tmp_path.rglob("*.open")
    with path.open("r+b") as file:
        file.seek(4096 + LAYOUT.stride + 700)
        file.write(bytes(1000))
    clocks.forward(2 * 3600)
    store = open_store(tmp_path, clocks=clocks)
    store.upkeep.adopt()
    (segment,) = store.catalog.by_stem.values()
    assert segment.name.state == "seg" and segment.block is not None
    assert store.catalog.sealed_puts(segment, segment.block)["slot"].tolist() == [0, 2]
    store.close()
    shutil.rmtree(tmp_path / "index")
    store = open_store(tmp_path, clocks=clocks)
    assert store.lookup(chain.keys) == 1 and chain.served(store) == {chain.key(0), chain.key(2)}
    store.close()


def test_a_writer_that_lives_keeps_its_open_segment(tmp_path: Path) -> None:
    """However long it was silent: its process is there."""
    clocks = Clocks()
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    a = open_store(tmp_path / "a", shared=tmp_path / "shared", clocks=clocks)
    b = open_store(tmp_path / "b", shared=tmp_path / "shared", clocks=clocks)
    chain = Chain(1, 3)
    chain.publish(a, [0, 1])
    clocks.forward(2 * 3600)
    b.upkeep.see()
    b.upkeep.adopt()
    (path,) = (tmp_path / "shared").rglob("*.open")
    assert a.leases.writer.name in path.name and "~" not in path.name
    assert chain.publish(a, [2]) == [Status.OK]
    a.writers.rotate(everything=True)
    b.upkeep.see()
    assert chain.fetch(b) == [Status.OK] * 3
    a.close()
    b.close()
