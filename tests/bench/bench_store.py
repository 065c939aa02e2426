"""The prefix store: disk bandwidth, lookup, hit rate of an agent trace, rebuild of the index.

    python tests/bench/bench_store.py io        # direct I/O beside bare preadv and pwritev of as many threads
    python tests/bench/bench_store.py lookup    # a prompt of 100,000 ids
    python tests/bench/bench_store.py trace     # agent sessions beside the longest common block
    python tests/bench/bench_store.py prefill   # such sessions, shorter, on a compiled engine: with and without
    python tests/bench/bench_store.py rebuild   # an index of 1,000,000 records from its logs, while lookups run

Each takes less than two minutes. ``--folder`` names a disk other than that of the temporary folder.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import mmap
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from deepinfer.backends.base import HOST
from deepinfer.codegen.compile import compile_engine
from deepinfer.dsl.model import EngineOptions
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.prefix.chain import chain_keys, root_key
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.store import Layout, Status, Store, StoreSettings, Ticket
from deepinfer.runtime.store.log import entries_of, pack_entries, put_entry
from deepinfer.runtime.store.native import LIBRARY as NAME
from deepinfer.runtime.store.native.build import build_store
from deepinfer.runtime.store.points import Point
from deepinfer.runtime.store.segment import SegmentName, Superblock, pack_footer
from deepinfer.runtime.store.tier import Flags

# Four sources of 128 positions: keys of 1,512 bytes and 268 of an index each, as the plan of V4.1-Flash has them.
V41 = Layout(bytes(16), 128, tuple((f"layer{i}.{part}", size) for i in range(4)
                                   for part, size in (("keys", 24_192), ("index", 4_288))))
LIBRARY = build_store().files[NAME]  # what engines carry
ROOT = root_key(b"weights", b"numerics", b"plan")
_SYNC_BYTES = StoreSettings(Path()).sync_bytes


@contextmanager
def opened(folder: Path, layout: Layout, **given: object) -> Iterator[Store]:
    settings = StoreSettings(folder / "store", index=folder / "index", **given)  # type: ignore[arg-type]
    store = Store(settings, layout, library=LIBRARY)
    store.ready(60)
    try:
        yield store
    finally:
        store.close()


def timed(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def waited() -> int:
    """Nanoseconds that the threads of this process were ready and had no processor, as Linux counts them."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that ended meanwhile
            total += int(path.read_text().split()[1])
    return total


def worked(act: Callable[[], object]) -> tuple[float, float, float]:
    """(seconds, seconds of processor time of all threads, seconds they waited for a processor: of those that stay)"""
    begun, before = time.process_time(), waited()
    seconds = timed(act)
    return seconds, time.process_time() - begun, (waited() - before) / 1e9


# ---- direct I/O ----
class Bare:
    """The other side: as many threads with preadv and pwritev, each with one aligned record of its own, into space that
    is reserved and not yet written, as the store's. Synced beside the writing as often as the store, and at the end."""

    def __init__(self, path: Path, count: int, threads: int) -> None:
        self.path, self.count, self.fd = path, count, -1
        self.records = [memoryview(mmap.mmap(-1, V41.stride)) for _ in range(threads)]
        for record in self.records:
            record[:] = os.urandom(V41.stride)
        self.syncs = 0

    def renew(self, turn: int) -> None:
        """A new file, for the next turn."""
        if self.fd >= 0:
            os.close(self.fd)
            self.path.unlink()
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.fd, 0, self.count * V41.stride)
        os.fsync(self.fd)

    def _together(self, works: list[Callable[[], None]]) -> None:
        workers = [threading.Thread(target=work) for work in works]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def _sync(self) -> None:
        os.fdatasync(self.fd)
        self.syncs += 1

    def write(self) -> None:
        due, left = threading.Semaphore(0), self.count * V41.stride // _SYNC_BYTES

        def work(t: int) -> None:
            for n in range(t, self.count, len(self.records)):
                assert os.pwritev(self.fd, [self.records[t]], n * V41.stride) == V41.stride
                if (n + 1) * V41.stride // _SYNC_BYTES > n * V41.stride // _SYNC_BYTES:
                    due.release()

        def keep_up() -> None:
            for _ in range(left):
                due.acquire()
                self._sync()

        self._together([*(lambda t=t: work(t) for t in range(len(self.records))), keep_up])  # type: ignore[misc]
        self._sync()

    def read(self, order: list[int]) -> None:
        def work(t: int) -> None:
            for n in range(t, len(order), len(self.records)):
                assert os.preadv(self.fd, [self.records[t]], order[n] * V41.stride) == V41.stride

        self._together([lambda t=t: work(t) for t in range(len(self.records))])  # type: ignore[misc]


class Ours:
    """The store, which has been running: its segment is open. ``blocks``: of a fetch, a request's; two are under way at
    a time, so that no thread waits for the next one."""

    def __init__(self, store: Store, blocks: int, count: int) -> None:
        self.store, self.blocks, self.count = store, blocks, count
        self.payload = np.random.default_rng(2).integers(0, 256, V41.payload_bytes + 4096, dtype=np.uint8)
        self.into = np.zeros((3 * blocks, V41.payload_bytes), dtype=np.uint8)
        self.syncs, sync = 0, store.files.sync

        def counted(fd: int, point: Point) -> None:
            self.syncs += 1
            sync(fd, point)

        vars(store.files)["sync"] = counted
        self.renew(0)
        self._publish(min(64, count))
        self.syncs = 0

    def renew(self, turn: int) -> None:
        """Other blocks, for the next turn."""
        self.ids = np.random.default_rng(turn).integers(0, 129_280, self.count * 128)
        self.keys = chain_keys(root_key(b"weights", b"numerics", str(turn).encode()), self.ids, 128)

    def _publish(self, count: int) -> None:
        ids = self.ids.reshape(-1, 128)
        tickets = [self.store.publish(self.keys[i].tobytes(), ROOT, i, ids[i],
                                      [self.payload[i % 4096 : i % 4096 + V41.payload_bytes]]) for i in range(count)]
        for ticket in tickets:
            ticket.wait(time.monotonic() + 60)
        assert all(t.statuses[0] is Status.OK for t in tickets)

    def write(self) -> None:
        self._publish(self.count)
        self.store.writers.sync(now=True)

    def read(self, order: list[int]) -> None:
        under_way: list[Ticket] = []
        for at in range(0, len(order), self.blocks):
            some = np.array(order[at : at + self.blocks])
            under_way.append(self.store.fetch(self.keys[some], self.ids.reshape(-1, 128)[some].ravel(), [
                [self.into[n % len(self.into)]] for n in range(at, at + len(some))]))
            if len(under_way) > 2:
                assert set(self.store.poll(under_way.pop(0), time.monotonic() + 60)) == {Status.OK}
        for ticket in under_way:
            assert set(self.store.poll(ticket, time.monotonic() + 60)) == {Status.OK}


def bench_io(folder: Path, memory: int, threads: int, turns: int, backends: list[str], blocks: int) -> None:
    """Random 112 KiB records, a working set of twice the memory tier. In every turn all sides write and read as much,
    one after the other, and who begins changes: what the disk does meanwhile meets all. A turn gives one ratio.
    ``again`` is a second bare side: what its ratios spread is the machine's doing."""
    count, rng = 2 * memory // V41.stride, random.Random(3)
    taken: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    bare, sides = Bare(folder / "bare", count, threads), dict[str, Bare | Ours]()
    sides["again"] = Bare(folder / "again", count, threads)
    with ExitStack() as stack:
        for backend in backends:
            place = folder / backend
            place.mkdir()
            store = stack.enter_context(opened(place, V41, threads=threads, backend=backend, quota=8 << 30))
            sides[store.mover.name] = Ours(store, blocks, count)
        everybody: list[tuple[str, Bare | Ours]] = [("bare", bare), *sides.items()]
        for turn in range(turns):
            for _, side in everybody:
                side.renew(turn + 1)
            order = list(range(count))
            rng.shuffle(order)
            first = turn % len(everybody)
            for what in ("write", "read"):
                for name, side in everybody[first:] + everybody[:first]:
                    act = side.write if what == "write" else partial(side.read, order)
                    taken.setdefault((what, name), []).append(worked(act))
    print(f"{count} records of {V41.stride:,} bytes in random order, {blocks} a fetch, {threads} threads, {turns} "
          f"turns; syncs {bare.syncs} bare, " + ", ".join(f"{side.syncs} {name}" for name, side in sides.items()))
    for what in ("read", "write"):
        for name in sides:
            report(what, name, count * V41.stride, count, taken[what, name], taken[what, "bare"])


def report(what: str, name: str, size: int, count: int, mine: list[tuple[float, float, float]],
           theirs: list[tuple[float, float, float]]) -> None:
    """One line: rates and processor time of both sides at their median turn, and the ratios of the turns."""
    ratios = [100 * b[0] / a[0] for a, b in zip(mine, theirs, strict=True)]
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    rates = [size / 1e9 / statistics.median(t[0] for t in side) for side in (mine, theirs)]
    work = [statistics.median(t[1] for t in side) / count * 1e6 for side in (mine, theirs)]
    print(f"  {what:5}  {name:8}  {rates[0]:.2f} GB/s beside {rates[1]:.2f} bare; ratio of a turn {middle:.0f} % "
          f"(median; quartiles {low:.0f} and {high:.0f}, all {min(ratios):.0f} to {max(ratios):.0f}); "
          f"processor time a record {work[0]:.0f} and {work[1]:.0f} us, "
          f"{statistics.median(t[2] for t in mine) / count * 1e6:.0f} us waiting for one")


# ---- lookup ----
def bench_lookup(folder: Path) -> None:
    """Hashing and index of a prompt of 100,000 ids that is all there, among 100,000 other records."""
    layout = Layout(bytes(16), 128, (("state", 64),))
    make_segments(folder, layout, 100_000, 2_000)
    ids = np.random.default_rng(1).integers(0, 129_280, 100_000).astype(np.int32)
    with opened(folder, layout, quota=8 << 30) as store:
        keys = chain_keys(ROOT, ids, 128)
        tickets = [store.publish(keys[i].tobytes(), ROOT, i, ids[i * 128 : i * 128 + 128], [bytes(64)])
                   for i in range(len(keys))]
        while not all(t.done for t in tickets):
            time.sleep(0.01)
        hashing = [timed(lambda: chain_keys(ROOT, ids, 128)) for _ in range(200)]
        both = [timed(lambda: store.lookup(chain_keys(ROOT, ids, 128))) for _ in range(200)]
        found = store.lookup(keys)
        assert found == len(keys) == 781
        print(f"lookup of 100,000 ids, {found} blocks found among {store.index.records:,} records: hashing and index "
              f"{min(both) * 1e3:.2f} ms at best, {statistics.median(both) * 1e3:.2f} ms median; "
              f"hashing alone {min(hashing) * 1e3:.2f} ms")


def make_segments(folder: Path, layout: Layout, records: int, each: int) -> None:
    """Sealed segments without payloads: footers, logs and holes."""
    place = folder / "store" / layout.namespace.hex() / "chat"
    place.mkdir(parents=True)
    hour, rng = int(time.time() // 3600) + 170, np.random.default_rng(9)
    for seq in range(-(-records // each)):
        count = min(each, records - seq * each)
        block = Superblock(layout, each, rng.bytes(16), "0" * 12, "chat", int(time.time()), hour)
        raw = rng.bytes(16 * count)
        rows = [put_entry(raw[16 * i : 16 * i + 16], bytes(16), i, Flags.NONE, i, 1) for i in range(count)]
        entries = pack_entries(entries_of(rows), block.uuid, 0)
        name = SegmentName(hour, "0" * 12, seq, "seg")
        with (place / name.file).open("wb") as file:
            file.write(block.pack())
            file.seek(block.footer)
            file.write(pack_footer(block, entries))
        (place / name.log).write_bytes(entries)


# ---- agent trace ----
def bench_trace(folder: Path, sessions: int, turns: int, growth: int) -> None:
    """Sessions with a common system prompt; every turn's prompt is the last one's and ``growth`` ids more.

    The oracle knows every prompt before and finds the longest common prefix in whole blocks. Payloads are small: hits
    hang on keys. ``bench_prefill`` measures times.
    """
    block, rng = 128, np.random.default_rng(5)
    layout = Layout(bytes(16), block, (("state", 64),))
    system = rng.integers(0, 129_280, 11_000)
    histories = [system.copy() for _ in range(sessions)]
    seen: set[bytes] = set()
    total = hits = attainable = 0
    order = [s for _ in range(turns) for s in random.Random(6).sample(range(sessions), sessions)]
    with opened(folder, layout, quota=8 << 30) as store:
        def run() -> None:
            nonlocal total, hits, attainable
            for s in order:
                histories[s] = ids = np.concatenate([histories[s], rng.integers(0, 129_280, growth)])
                keys = chain_keys(ROOT, ids, block)
                best = next((i for i, key in enumerate(keys) if key.tobytes() not in seen), len(keys))
                best = min(best, (len(ids) - 1) // block)
                found = min(store.lookup(keys), (len(ids) - 1) // block)
                into = np.zeros((found, 64), dtype=np.uint8)
                ticket = store.fetch(keys[:found], ids[: found * block], [[row] for row in into])
                store.poll(ticket, time.monotonic() + 60)
                total, hits, attainable = total + len(ids), hits + ticket.leading * block, attainable + best * block
                new = [store.publish(keys[i].tobytes(), keys[i - 1].tobytes() if i else ROOT, i,
                                     ids[i * block : (i + 1) * block], [bytes(64)])
                       for i in range(ticket.leading, len(keys))]
                while not all(t.done for t in new):
                    time.sleep(0.0005)
                seen.update(key.tobytes() for key in keys)

        seconds = timed(run)
    rate, oracle = hits / total, attainable / total
    print(f"{sessions} sessions of {turns} turns, {growth:,} ids more each turn, {len(system):,} of a common system "
          f"prompt: {total:,} ids in {seconds:.0f} s")
    print(f"  hit rate {100 * rate:.3f} %, longest common block {100 * oracle:.3f} %: "
          f"{100 * rate / oracle:.2f} % of it")
    print(f"  1 / (1 - hit) = {1 / (1 - rate):.2f}: so many times fewer rows are computed")


# ---- prefill of the same trace on an engine ----
def bench_prefill(folder: Path, sessions: int, turns: int, growth: int, divide: int) -> None:
    """The trace on the demonstration model, with a memory tier that holds one session: prefill with and without.

    All lengths are divided by ``divide``: a cold prompt of 85,000 ids takes this engine minutes. Cold prompts are
    measured at five turns of the first session, by an engine of the same folder without a cache.
    """
    growth, system, rng = growth // divide, 11_000 // divide, np.random.default_rng(5)
    longest = system + turns * growth + 128
    engine, checkpoint = demonstration(folder, longest)
    shared = rng.integers(3, 4_000, system)
    histories = [shared.copy() for _ in range(sessions)]
    sampled = sorted({round(i * (turns - 1) / 4) for i in range(5)})
    seen: set[bytes] = set()
    took: dict[int, list[float]] = {}
    total = hits = attainable = 0
    with LLM(engine, checkpoint, num_blocks=longest // 128 + 2, progress=False,
             prefix_store=StoreSettings(folder / "store", index=folder / "index")) as warm, \
            LLM(engine, checkpoint, progress=False, prefix_cache=False) as cold:
        # Rows in front of a hit run again as far as the model was trained for; its own default is all that count.
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, replay=warm.plan.least_keep)
        for turn in range(turns):
            for s in range(sessions):
                histories[s] = ids = np.concatenate([histories[s], rng.integers(3, 4_000, growth)])
                keys = [key.tobytes() for key in chain_keys(ROOT, ids, 128)]
                best = next((i for i, key in enumerate(keys) if key not in seen), len(keys))
                begun = time.perf_counter()
                found = warm.generate([ids.tolist()], params, progress=False)[0]
                took.setdefault(turn, []).append(time.perf_counter() - begun)
                total, hits = total + len(ids), hits + found.num_cached_tokens
                attainable += min(best, (len(ids) - 1) // 128) * 128
                seen.update(keys)
        print(f"{sessions} sessions of {turns} turns, {growth:,} ids more each turn, {system:,} of a common system "
              f"prompt (lengths of the trace / {divide}); a memory tier of {longest // 128 + 2} blocks")
        print(f"  hit rate {100 * hits / total:.2f} %, longest common block {100 * attainable / total:.2f} %: "
              f"{100 * hits / attainable:.2f} % of it; 1 / (1 - hit) = {1 / (1 - hits / total):.2f}")
        for line in warm.metrics.text().splitlines():
            if line.startswith("deepinfer:prefix_hit_tokens_total"):
                print(f"  {line}")
        for turn in sampled:
            ids = histories[0][: system + (turn + 1) * growth]
            without = timed(lambda ids=ids: cold.generate([ids.tolist()], params, progress=False))
            mine = statistics.median(took[turn])
            print(f"  turn {turn + 1:2}, {len(ids):6,} ids: prefill {without:.2f} s without, {mine:.2f} s with the "
                  f"store: {without / mine:.1f} x")


def demonstration(folder: Path, longest: int) -> tuple[Path, Path]:
    """The demonstration model with room for ``longest`` positions, compiled; (engine, checkpoint)."""
    source = Path(__file__).parents[2] / "assets" / "tiny"
    checkpoint = folder / "checkpoint"
    shutil.copytree(source, checkpoint)
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 2 * longest
    (checkpoint / "config.json").write_text(json.dumps(config))
    options = EngineOptions(max_model_len=longest, max_num_batched_tokens=1024, max_num_seqs=1)
    compile_engine(model=str(checkpoint), out=folder / "engine", target="cpu", isa=HOST, options=options,
                   console=Console(file=io.StringIO()))
    return folder / "engine", checkpoint


# ---- rebuild ----
def bench_rebuild(folder: Path, records: int) -> None:
    """A store of V4.1's segment size opens without an index; lookups run meanwhile."""
    layout = Layout(bytes(16), 128, (("state", 64),))
    make_segments(folder, layout, records, 2_339)
    ids = np.random.default_rng(1).integers(0, 129_280, 100_000).astype(np.int32)
    keys = chain_keys(ROOT, ids, 128)
    settings = StoreSettings(folder / "store", index=folder / "index", quota=2 << 30)
    begun, slow = time.perf_counter(), []
    store = Store(settings, layout)
    while not store.ready(0):
        slow.append(timed(lambda: store.lookup(keys)))
        time.sleep(0.005)
    seconds, count = time.perf_counter() - begun, store.index.records
    store.close()
    assert count == records
    print(f"index of {count:,} records from {-(-records // 2_339)} footers in {seconds:.1f} s; {len(slow)} lookups "
          f"meanwhile took {statistics.median(slow) * 1e3:.2f} ms (median), {max(slow) * 1e3:.1f} ms (longest)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["io", "lookup", "trace", "prefill", "rebuild"])
    parser.add_argument("--folder", type=Path, help="where to measure")
    parser.add_argument("--memory", type=int, default=128, metavar="MIB", help="of io: half the working set")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=10, help="of io: turns")
    parser.add_argument("--blocks", type=int, default=128, help="of io: blocks of a fetch; 128 are 16,384 ids")
    parser.add_argument("--backend", default="threads,io_uring", help="of io: one or several")
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--turns", type=int, default=33)
    parser.add_argument("--growth", type=int, default=2_242)
    parser.add_argument("--divide", type=int, default=8, metavar="N", help="of prefill: lengths are divided by N")
    parser.add_argument("--records", type=int, default=1_000_000)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-store-", dir=given.folder))
    try:
        print("python tests/bench/bench_store.py " + " ".join(sys.argv[1:]))
        gc.collect()
        gc.freeze()  # as a server does once it is started
        if given.what == "io":
            bench_io(folder, given.memory << 20, given.threads, given.repeats, given.backend.split(","), given.blocks)
        elif given.what == "lookup":
            bench_lookup(folder)
        elif given.what == "trace":
            bench_trace(folder, given.sessions, given.turns, given.growth)
        elif given.what == "prefill":
            bench_prefill(folder, min(given.sessions, 3), given.turns, given.growth, given.divide)
        else:
            bench_rebuild(folder, given.records)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
