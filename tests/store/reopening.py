"""What a process finds in a folder after a crash; run in this process or in two others at once."""

from __future__ import annotations

import random
from pathlib import Path

from store.scenario import CHAINS
from store.witness_store import PATIENCE, Chain, Clocks, open_store

from deepinfer.runtime.store import Status, Store


def reopen(folder: Path, wall: float, fresh: int, start: object = None) -> set[bytes]:
    """Keys that a store opened on ``folder`` serves.

    Every block that it serves is the right one (``Chain.fetch`` asserts it); a block that it does not serve it
    forgets; it stores and serves new blocks (``fresh``: their seed).
    """
    if start is not None:
        start.wait(PATIENCE)  # type: ignore[attr-defined]
    store = open_store(folder, clocks=Clocks(wall), bad_after=100)
    try:
        store.upkeep.everything()
        served = everything(store)
        assert everything(store) >= served, "what was served once is served again"
        new = Chain(1000 + fresh, 5)
        assert new.publish(store) == [Status.OK] * 5
        ended = new.fetch(store)
        assert ended == [Status.OK] * 5, (ended, store.index.leading([new.key(0)]), store.index.segments(),
                                         {n: s.name.file for n, s in store.catalog.by_number.items()})
        store.upkeep.everything()
        assert everything(store) >= served
        return served
    finally:
        store.close()


def everything(store: Store) -> set[bytes]:
    """Keys that are served. Where another process moves records at this moment, they are found at the next look."""
    served: set[bytes] = set()
    for _ in range(3):
        store.upkeep.see()
        served |= {key for chain in CHAINS for key in chain.served(store)}
    return served


def damage_index(folder: Path, seed: int) -> None:
    """Bytes of the index's file change after it was closed; its stamp stays."""
    rng = random.Random(seed)
    for file in folder.rglob("data.mdb"):
        data = bytearray(file.read_bytes())
        for _ in range(rng.randint(1, 40)):
            at = rng.randrange(len(data))
            data[at : at + 8] = rng.randbytes(8)
        file.write_bytes(data[: len(data) if rng.random() < 0.7 else rng.randrange(len(data))])


def worker(connection: object) -> None:
    """A process that reopens folders, one after another."""
    while True:
        task = connection.recv()  # type: ignore[attr-defined]
        if task is None:
            return
        try:
            connection.send(("served", reopen(*task)))  # type: ignore[attr-defined]
        except BaseException as failure:
            import traceback

            connection.send(("failed", f"{failure!r}\n{traceback.format_exc()}"))  # type: ignore[attr-defined]
