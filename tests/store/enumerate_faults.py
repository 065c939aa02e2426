"""Break the store at every operation of the scenario, in every way, until the budget is spent.

    python tests/store/enumerate_faults.py --budget 60
    python tests/store/enumerate_faults.py --budget 60 --kill     # real processes on a real disk, ended by SIGKILL
    python tests/store/enumerate_faults.py --budget 60 --engine   # a compiled engine answers on what is left

``--engine`` begins with every fault at every numbered point and goes on at random. The last results are in faults.json;
``--write`` replaces that of the kind that ran.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from store.recording import Fault, Op
from store.test_faults import AFTER, SHARED, check_fault, check_prefix, undisturbed
from store.witness_store import NOW, Chain, Clocks, open_store, wait_for

from deepinfer.runtime.store import Status
from deepinfer.runtime.store.points import Point

RESULTS = Path(__file__).with_name("faults.json")


def enumerate_all(budget: float, seed: int) -> Counter[str]:
    """All prefixes of the write log with some power cuts each, and all faults at all operations; in random order."""
    ops, root = undisturbed()
    places = [i for i, op in enumerate(ops) if op.kind != "note" and not _rot(op)]
    cases = [("prefix", n, power) for n in range(3, len(ops) + 1) for power in (None, 1, 2, 3)]
    cases += [("fault", at, fault) for at, fault in itertools.product(places, Fault)]
    random.Random(seed).shuffle(cases)
    until, done = time.monotonic() + budget, Counter[str]()
    for kind, at, what in cases:
        if time.monotonic() > until:
            break
        folder = Path(tempfile.mkdtemp(prefix="deepinfer-test-", dir=SHARED if SHARED.is_dir() else None))
        try:
            if kind == "prefix":
                check_prefix(ops[:at], root, folder / "copy", None if what is None else at * 10 + int(what))
                done["prefixes, cut by kill" if what is None else "prefixes, cut by power"] += 1
            else:
                check_fault(folder, at, Fault(what), at, None)
                done[f"operations hit by {what}"] += 1
        except BaseException:
            print(f"failed: {kind} {at} {what}", file=sys.stderr)
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{sum(done.values())} of {len(cases)} cases")
    return done


def _rot(op: Op) -> bool:
    return op.data == b"rot" * 100 or (op.kind == "sync" and op.point is Point.OTHER)


def writes(folder: Path, seed: int, wall: float) -> None:
    """A process that stores and reads until it is killed, with threads, direct I/O and the native part."""
    store = open_store(folder, clocks=Clocks(wall), backend="threads", threads=2, background=True, tick_seconds=0.01,
                       sync_seconds=0.02, native=True)
    store.ready(10)
    for number in itertools.count():
        chain = Chain(seed + number % 40, 8)
        chain.publish(store, cls="agent" if number % 3 else "chat")
        chain.fetch(store)


def kill_processes(budget: float, seed: int) -> Counter[str]:
    """Two writers on one folder are killed after a random time; then what is there is read."""
    rng, done = random.Random(seed), Counter[str]()
    until, context = time.monotonic() + budget, multiprocessing.get_context("spawn")
    folder = Path(tempfile.mkdtemp(prefix="deepinfer-kill-"))
    try:
        for turn in itertools.count():
            if time.monotonic() > until:
                break
            wall = NOW + turn * 2 * AFTER
            seeds = [1000 * turn + 100 * i for i in range(2)]  # chains that are not there yet
            workers = [context.Process(target=writes, args=(folder, seed, wall)) for seed in seeds]
            for process in workers:
                process.start()
            logs = len(list((folder / "store").rglob("*.log")))
            wait_for(lambda logs=logs: len(list((folder / "store").rglob("*.log"))) > logs + 4)
            time.sleep(rng.random())
            for process in workers:
                assert process.is_alive(), "a writer ended by itself"
                process.kill()
                process.join()
                assert process.exitcode == -signal.SIGKILL
            done["writers killed"] += 2
            store = open_store(folder, clocks=Clocks(wall + AFTER))
            store.upkeep.everything()
            for start in seeds:
                for number in range(40):
                    ended = Chain(start + number, 8).fetch(store)
                    done["blocks served"] += ended.count(Status.OK)
                    done["blocks damaged"] += ended.count(Status.DAMAGED)
            foreign = [s.name for s in store.catalog.by_stem.values() if s.name.owner != store.leases.writer.name]
            assert all(name.state == "seg" for name in foreign), "an orphan was not adopted"
            store.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return done


def ask_an_engine(budget: float, seed: int, skipped: int) -> Counter[str]:
    """Faults in a life with an engine's blocks, one of each kind at each point first, then at random operations; the
    engine's tokens are those of the replay log. ``skipped``: cases in front, which another run has done."""
    from store.test_end_to_end import trial_of

    rng, done = random.Random(seed), Counter[str]()
    with trial_of() as trial:
        ops = trial.undisturbed[0]
        cases = [(at, fault) for at, op in enumerate(ops) for fault in Fault if op.kind != "note" and not _rot(op)]
        rng.shuffle(cases)
        numbered = [(at, fault) for at, fault in cases if ops[at].point is not Point.OTHER]
        first = {(ops[at].point, fault): (at, fault) for at, fault in reversed(numbered)}
        chosen, covered = set(first.values()), set[tuple[Point, Fault]]()
        order = [*first.values(), *(case for case in cases if case not in chosen)]
        until = time.monotonic() + budget
        for at, fault in order[skipped:]:
            if time.monotonic() > until:
                break
            try:
                done["blocks adopted"] += trial.check(at, fault, at * 10 + list(Fault).index(fault))
            except BaseException:
                print(f"failed: {at} {fault}", file=sys.stderr)
                raise
            done[f"operations hit by {fault}"] += 1
            covered.add((ops[at].point, fault))
        done["pairs of point and fault"] = sum(point is not Point.OTHER for point, _ in covered)
        done["points"] = len({point for point, _ in covered} - {Point.OTHER})
        count = sum(count for what, count in done.items() if "hit by" in what)
        print(f"{count} of {len(cases)} cases, from number {skipped} on")
    return done


def keep(kind: str, budget: float, seed: int, seconds: float, done: Counter[str]) -> None:
    """The result of a kind, beside the last ones of the others."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[kind] = {"budget": budget, "seed": seed, "seconds": round(seconds), **dict(sorted(done.items()))}
    RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill", action="store_true", help="kill real processes on the disk of the temporary folder")
    parser.add_argument("--engine", action="store_true", help="the demonstration model answers on what is left")
    parser.add_argument("--write", action="store_true", help=f"keep the result in {RESULTS.name}")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="with --engine: go on behind N cases")
    given = parser.parse_args()
    begun = time.monotonic()
    if given.engine:
        done = ask_an_engine(given.budget, given.seed, given.skip)
    else:
        done = (kill_processes if given.kill else enumerate_all)(given.budget, given.seed)
    for what, count in sorted(done.items()):
        print(f"{count:7,} {what}")
    seconds = time.monotonic() - begun
    print(f"nothing wrong was served; {seconds:.0f} s, seed {given.seed}")
    if given.write:
        keep("kill" if given.kill else "engine" if given.engine else "disk", given.budget, given.seed, seconds, done)


if __name__ == "__main__":
    main()
