"""A disk that fails at every numbered point: what is served afterwards is right, and what was promised is served."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from store.recording import Fault, Op, Recording, materialise
from store.reopening import damage_index, reopen, worker
from store.scenario import CHAINS, Life, promised
from store.witness_store import Clocks, open_store

from deepinfer.runtime.store import Status
from deepinfer.runtime.store.points import Point

POINTS = [p for p in Point if p is not Point.OTHER]
SHARED = Path("/dev/shm")
AFTER = 2 * 3600.0  # store time that passes before somebody comes back: leases have run out


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where there is such a place: a thousand small files are written and synced."""
    path = Path(tempfile.mkdtemp(prefix="deepinfer-test-", dir=SHARED if SHARED.is_dir() else None))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@cache
def undisturbed() -> tuple[list[Op], Path]:
    """Operations of a life that nothing happens to, and the folder it had."""
    with tempfile.TemporaryDirectory() as name:
        files = Recording(Path(name))
        life = Life(Path(name), files)
        assert life.run()
        return files.ops, Path(name)


class Processes:
    """Two processes that reopen a folder at the same time."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pairs = [context.Pipe() for _ in range(2)]
        self.workers = [context.Process(target=worker, args=(theirs,), daemon=True) for _, theirs in self.pairs]
        for process in self.workers:
            process.start()

    def reopen(self, folder: Path, wall: float) -> list[set[bytes]]:
        for number, (ours, _) in enumerate(self.pairs):
            ours.send((folder, wall, number))
        results: list[Any] = [ours.recv() for ours, _ in self.pairs]
        assert [kind for kind, _ in results] == ["served"] * 2, results
        return [served for _, served in results]

    def close(self) -> None:
        for ours, _ in self.pairs:
            ours.send(None)
        for process in self.workers:
            process.join(10)


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    both = Processes()
    yield both
    both.close()


def test_the_scenario_passes_every_point() -> None:
    assert {op.point for op in undisturbed()[0]} >= set(POINTS)


@pytest.mark.parametrize("power", [False, True], ids=["kill", "power cut"])
def test_after_every_prefix_of_the_write_log_nothing_wrong_is_served(folder: Path, power: bool) -> None:
    """A slice of all prefixes, and all where something is renamed or given up; enumerate_faults.py does them all."""
    ops, root = undisturbed()
    slice_of_all = set(range(7 if power else 3, len(ops) + 1, 11))
    given_up = {i + 1 for i, op in enumerate(ops) if op.point in (Point.SWAPPED, Point.EXPIRE, Point.UNLINK)}
    for count in sorted(slice_of_all | given_up):
        for seed in (count, 1000 + count, 2000 + count) if power and count in given_up else (count,):
            check_prefix(ops[:count], root, folder / f"{count}-{seed}", seed=seed if power else None)


def check_prefix(ops: list[Op], root: Path, target: Path, seed: int | None) -> None:
    target.mkdir()
    materialise(ops, root, target, None if seed is None else random.Random(seed))
    served = reopen(target, max(op.wall for op in ops) + AFTER, fresh=0)
    missing = promised(ops, synced_only=seed is not None) - served
    assert not missing, f"{len(missing)} promised blocks are gone after {len(ops)} operations"
    shutil.rmtree(target)


@pytest.mark.parametrize("fault", list(Fault), ids=str)
@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{int(p)} {p.name}")
def test_a_fault_at_a_point(folder: Path, processes: Processes, point: Point, fault: Fault) -> None:
    """One operation of each point fails; then one process comes back, or two at once."""
    ops = undisturbed()[0]
    places = [i for i, op in enumerate(ops) if op.point is point and op.kind != "note"]
    seed = int(point) * 10 + list(Fault).index(fault)
    check_fault(folder, random.Random(seed).choice(places), fault, seed, processes)


def check_fault(folder: Path, at: int, fault: Fault, seed: int, processes: Processes | None) -> None:
    """Run the life with one fault; reopen a copy by one process, and the folder by two."""
    place = folder / "life"
    place.mkdir()
    files = Recording(place, at=at, fault=fault, seed=seed)
    life = Life(place, files)
    ended = life.run()
    life.vanish()
    assert files.hit
    # A disk that fails goes on; a process that is killed does not, nor does one on a machine without power.
    assert ended == (fault in (Fault.FULL, Fault.IO, Fault.SHORT))
    wall, synced_only = life.clocks.wall + AFTER, fault is Fault.POWER
    if fault is Fault.POWER:
        shutil.rmtree(place)
        place.mkdir()
        materialise(files.ops, place, place, random.Random(seed))
    wanted = promised(files.ops, synced_only)
    if fault in (Fault.FULL, Fault.IO):
        wanted = set()  # what the store said about each block was checked in the life; damage may take segments
    copy = folder / "copy"
    shutil.copytree(place, copy)
    if seed % 2:
        damage_index(copy, seed)
    assert wanted <= reopen(copy, wall, fresh=0)
    if processes is not None:
        for served in processes.reopen(place, wall):
            assert wanted <= served


def test_what_is_sealed_survives_a_power_cut(folder: Path) -> None:
    """Nothing of a sealed segment waits for a sync: nobody has it open any more."""
    place, chain = folder / "life", CHAINS.first
    place.mkdir()
    files, clocks = Recording(place), Clocks()
    store = open_store(place, clocks=clocks, files=files)
    assert chain.publish(store) == [Status.OK] * chain.blocks
    store.writers.rotate(everything=True)
    store.close()
    for seed in range(12):
        target = folder / str(seed)
        target.mkdir()
        materialise(files.ops, place, target, random.Random(seed))
        again = open_store(target, clocks=clocks)
        again.upkeep.everything()
        assert chain.fetch(again) == [Status.OK] * chain.blocks
        again.close()


def test_what_is_served_in_the_scenario_are_blocks_that_were_published() -> None:
    keys = [chain.key(i) for chain in CHAINS for i in range(chain.blocks)]
    assert len(set(keys)) == len(keys)
    assert promised(undisturbed()[0], synced_only=False) <= set(keys)
    assert len(promised(undisturbed()[0], synced_only=False)) == 6 + 3 + 4 + 2
