"""The native runner with hand-written kernels: rows, windows, pages, commits, errors, under any threads and chunks."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from deepinfer.codegen.package.interface import Interface, Value
from deepinfer.dsl.params import ParamDecl
from deepinfer.dsl.types import i64, mxfp8
from deepinfer.errors import ArtifactError, InternalError, PlanError
from deepinfer.machine import cxx_compiler
from deepinfer.runtime.batch import SEQUENCE, Batch
from deepinfer.runtime.native.build import LIBRARY, SOURCE_FOLDER, build_runner, runner_abi
from deepinfer.runtime.native_engine import NativeEngine, Runner

HERE = Path(__file__).parent / "runner"
AXES = ("T", "T_kept", "T_wanted", "S", "T/2")
SUM = Value("T", (), "i64")
OUTPUTS = {"window": SUM, "upper": Value("T_kept", (), "i64"), "pages": Value("T_wanted", (), "i64"),
           "params": Value("S", (), "i64"), "pinned": Value("S", (2,), "i64"), "scratch": SUM, "looped": SUM,
           **{f"rows_{axis}": Value(axis, (5,), "i64") for axis in AXES}}
INTERFACE = Interface(
    params=(ParamDecl("w.weight", (1,), i64), ParamDecl("experts.{e}.weight", (1, 8), mxfp8(1, 8), stack=3)),
    pins=(("chosen", 2),), outputs={"step": OUTPUTS, "draft": {"context": Value("S", (), "i64")}})
LIMITS = SimpleNamespace(limits={"step": 64, "kept": 64, "wanted": 24, "seq": 4}, lookback=2)
WINDOW = 4


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hand-written engine: the runner, the kernels of kernels.cpp, and launch.txt."""
    folder = tmp_path_factory.mktemp("lib")
    shutil.copy(build_runner().files[LIBRARY], folder)
    shutil.copy(HERE / "launch.txt", folder)
    command = [cxx_compiler(), "-std=c++17", "-O1", "-fPIC", "-shared", f"-I{SOURCE_FOLDER}", str(HERE / "kernels.cpp")]
    subprocess.run([*command, "-o", str(folder / "kernels.so")], check=True)
    return folder


class Weights:
    """w = 5; experts 10, 20, 30 with scales 1, 2, 3."""

    def __init__(self) -> None:
        self.data = np.array([5, 10, 20, 30], np.int64)
        self.scale = np.array([0, 1, 2, 3], np.uint8)

    def addresses(self) -> Iterator[list[tuple[int, int]]]:
        base, scale = self.data.ctypes.data, self.scale.ctypes.data
        yield [(base, 0)]
        yield [(base + 8 * e, scale + e) for e in (1, 2, 3)]


def opened(lib: Path, threads: int = 2, slots: int = 5, blocks: int = 40) -> NativeEngine:
    engine = NativeEngine(lib, INTERFACE, slots=slots, blocks=blocks, threads=threads)
    engine.bind(Weights())
    return engine


def tokens(sequence: int, n: int) -> list[int]:
    return [(7 * i + 13 * sequence + 3) % 91 for i in range(n)]


def record(ids: list[int], p: int) -> int:
    return 1000 * ids[p] + p


def expected_window(ids: list[int], p: int, start: int = 0) -> int:
    return sum(record(ids, i) for i in range(max(start, p - WINDOW + 1), p + 1))


def expected_pages(ids: list[int], p: int) -> int:
    return sum((j + 1) * (ids[2 * j + 1] * 100 + ids[2 * j]) for j in range((p + 1) // 2))


def table_of(sequence: int, positions: int) -> np.ndarray:
    """Blocks of a sequence, scattered over the pool."""
    return np.array([(11 * b + 10 * sequence + 3) % 40 for b in range(-(-positions // 8))], np.int32)


def feed(engine: NativeEngine, lengths: list[int], chunk: int) -> list[dict[str, list[int]]]:
    """Runs the sequences in chunks, all together; per sequence what each row gave."""
    batch, results = Batch(LIMITS), [dict[str, list[int]](window=[], pages=[], context=[]) for _ in lengths]
    ids = [tokens(s, n) for s, n in enumerate(lengths)]
    tables = [table_of(s, n) for s, n in enumerate(lengths)]
    for c in range(0, max(lengths), chunk):
        live = [s for s, n in enumerate(lengths) if c < n]
        batch.clear()
        for s in live:
            part = ids[s][c : c + chunk]
            batch.add(part, slot=4 - s, c=c, blocks=tables[s], wanted=min(len(part), 6), before=ids[s][:c])
        out = engine.run("step", batch)
        wanted = batch.sequences["wanted"][: len(live)]
        for key, rows in (("window", batch.sequences["rows"][: len(live)]), ("pages", wanted)):
            for s, part in zip(live, np.split(out[key], np.cumsum(rows)[:-1]), strict=True):
                results[s][key] += part.tolist()
        for s, total in zip(live, engine.run("draft", draft_of(batch))["context"].tolist(), strict=True):
            results[s]["context"].append(total)
    return results


def draft_of(batch: Batch) -> Batch:
    """The same sequences, each with two rows after what has just run."""
    out, nothing = Batch(LIMITS), np.zeros(0, np.int32)
    for s in batch.sequences[: batch.count]:
        out.add([1, 2], slot=s["slot"], c=s["c"] + s["rows"], blocks=nothing)
    return out


@pytest.mark.parametrize(("threads", "chunk"), [(1, 6), (1, 1), (2, 5), (3, 1), (3, 6), (2, 3), (4, 2)])
def test_windows_and_pages_do_not_depend_on_chunks_and_threads(lib: Path, threads: int, chunk: int) -> None:
    lengths = [37, 5, 16, 1]
    engine = opened(lib, threads)
    for s, result in enumerate(feed(engine, lengths, chunk)):
        ids = tokens(s, lengths[s])
        assert result["window"] == [expected_window(ids, p) for p in range(lengths[s])]
        assert result["pages"] == [expected_pages(ids, p) for p in range(lengths[s])]
        ends = [min(c + chunk, lengths[s]) for c in range(0, lengths[s], chunk)]
        assert result["context"] == [sum(record(ids, p) for p in range(max(0, n - WINDOW), n)) for n in ends]
    engine.close()


def test_a_step_ends_without_helpers_that_do_not_come(lib: Path) -> None:
    """A forked process has no thread but the one that forked: helpers are known there and never run."""
    engine, lengths = opened(lib, threads=4), [37, 5, 16, 1]
    expected = feed(opened(lib, threads=1), lengths, 3)
    child = os.fork()
    if not child:
        signal.alarm(120)  # of a step that waits for ever
        os._exit(feed(engine, lengths, 3) != expected)
    assert os.waitpid(child, 0)[1] == 0
    assert feed(engine, lengths, 3) == expected


def test_a_chunk_longer_than_the_ring_reads_old_rows_before_it_overwrites_them(lib: Path) -> None:
    engine, ids = opened(lib), tokens(0, 40)
    batch = Batch(LIMITS)
    for c, stop in ((0, 5), (5, 29), (29, 40)):
        batch.clear()
        batch.add(ids[c:stop], slot=0, c=c, blocks=table_of(0, 40), before=ids[:c])
        assert engine.run("step", batch)["window"].tolist() == [expected_window(ids, p) for p in range(c, stop)]


def test_rows_before_the_start_of_a_window_are_not_read(lib: Path) -> None:
    engine, ids = opened(lib), tokens(0, 20)
    batch = Batch(LIMITS)
    batch.add(ids[:9], slot=0, c=0, blocks=table_of(0, 20), kept=2, start_kept=7)
    assert engine.run("step", batch)["upper"].tolist() == [expected_window(ids, p, start=7) for p in (7, 8)]
    batch.clear()
    batch.add(ids[9:12], slot=0, c=9, blocks=table_of(0, 20), start_kept=7, start_step=8, before=ids[:9])
    out = engine.run("step", batch)
    assert out["upper"].tolist() == [expected_window(ids, p, start=7) for p in (9, 10, 11)]
    assert out["window"].tolist() == [expected_window(ids, p, start=8) for p in (9, 10, 11)]


def test_entries_below_the_floor_are_not_written(lib: Path) -> None:
    engine, ids = opened(lib), tokens(0, 16)
    before = engine.state("pages", 3)
    before[:] = 77
    batch = Batch(LIMITS)
    batch.add(ids[:16], slot=0, c=0, blocks=np.array([3, 14], np.int32), floor=8, wanted=1)
    engine.run("step", batch)
    assert set(engine.state("pages", 3).tolist()) == {77}
    assert engine.state("pages", 14).view(np.int64).tolist() == [ids[2 * j + 1] * 100 + ids[2 * j] for j in range(4, 8)]


def test_row_axes_follow_their_definitions(lib: Path) -> None:
    engine, batch = opened(lib), Batch(LIMITS)
    random = np.random.default_rng(0)
    for _ in range(40):
        batch.clear()
        want: dict[str, list[list[int]]] = {axis: [] for axis in AXES}
        sequences = []
        for s in range(random.integers(1, 5)):
            c, q = int(random.integers(0, 30)), int(random.integers(1, 9))
            kept = int(random.integers(0, q + 1))
            wanted = min(int(random.integers(0, kept + 1)), 6)
            batch.add(tokens(s, q), slot=s, c=c, kept=kept, wanted=wanted, blocks=table_of(s, c + q))
            sequences.append((c, q, kept, wanted))
        first = 0
        for s, (c, q, kept, wanted) in enumerate(sequences):
            for axis, n in (("T", q), ("T_kept", kept), ("T_wanted", wanted)):
                want[axis] += [[s, c + i, first + i] for i in range(q - n, q)]
            want["S"].append([s, c, first])
            want["T/2"] += [[s, 2 * j, first + 2 * j + 1 - c] for j in range(40) if c < 2 * (j + 1) <= c + q]
            first += q
        out = engine.run("step", batch)
        for axis in AXES:
            got = out[f"rows_{axis}"]
            assert got[:, :3].tolist() == want[axis]
            for i, (s, *_) in enumerate(want[axis]):
                assert got[i, 3] <= i < got[i, 4]
                assert {w[0] for w in want[axis][got[i, 3] : got[i, 4]]} == {s}


def test_scratch_is_aligned_and_each_thread_s_own(lib: Path) -> None:
    engine, ids = opened(lib, threads=4), tokens(0, 60)
    batch = Batch(LIMITS)
    batch.add(ids, slot=0, c=0, blocks=table_of(0, 60))
    older = [-1, -1, *ids]
    assert engine.run("step", batch)["scratch"].tolist() == [ids[p] + p + older[p] for p in range(60)]


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 33, 64])
def test_a_row_loop_keeps_its_values_in_one_tile(lib: Path, threads: int, rows: int) -> None:
    engine, ids = opened(lib, threads), tokens(0, rows)
    batch = Batch(LIMITS)
    batch.add(ids, slot=0, c=3, blocks=table_of(0, rows + 3))
    for _ in range(5):
        assert engine.run("step", batch)["looped"].tolist() == [10 * t + i + 3 + 1 for i, t in enumerate(ids)]


def test_parameters_scales_and_pins_reach_kernels(lib: Path) -> None:
    engine, batch = opened(lib), Batch(LIMITS)
    for s in range(2):
        batch.add([1], slot=s, c=0, blocks=table_of(s, 1))
    assert engine.run("step", batch)["params"].tolist() == [5 + 10 + 40 + 90] * 2
    assert engine.run("step", batch)["pinned"].tolist() == [[-1, -1]] * 2
    pins = {"chosen": np.array([[3, 1], [4, 1]], np.int32)}
    assert engine.run("step", batch, pins)["pinned"].tolist() == [[3, 1], [4, 1]]
    assert engine.run("step", batch)["pinned"].tolist() == [[-1, -1]] * 2


def test_kernels_are_told_whether_lookup_tables_lie_in_memory(lib: Path) -> None:
    engine, batch = opened(lib), Batch(LIMITS)
    batch.add([1], slot=0, c=0, blocks=table_of(0, 1))
    for there in (True, False):
        engine.bind(Weights(), tables_in_memory=there)
        assert engine.run("step", batch)["params"].tolist() == [5 + 10 + 40 + 90 + 1000 * there]


def test_memory_is_told_before_it_is_taken(lib: Path) -> None:
    memory = Runner(lib).memory(slots=3, blocks=7, threads=2)
    assert (memory.arena, memory.scratch) == (16384, 2 * 1024)
    assert (memory.rings, memory.pages) == (3 * 2 * 64, 7 * 64)
    assert memory.total == 16384 + 2048 + 384 + 448


def test_profiling_times_every_launch_and_commit(lib: Path) -> None:
    for threads in (1, 2):
        engine, batch = opened(lib, threads), Batch(LIMITS)
        batch.add([1, 2], slot=0, c=0, blocks=table_of(0, 2))
        engine.profile(True)
        engine.run("step", batch)
        times = engine.profile(True)
        steps = [line for line in (HERE / "launch.txt").read_text().split("entry draft")[0].splitlines()
                 if line.startswith(("launch", "commit"))]
        assert len(times) == len(steps)
        assert times.min() >= 0 < times.max()
        assert len(engine.profile(False)) == 0


def test_the_sequence_record_is_the_abi_s() -> None:
    assert (SEQUENCE.itemsize, SEQUENCE.fields["c"][1], SEQUENCE.fields["blocks"][1]) == (64, 16, 48)


def test_the_abi_number_is_the_header_s(lib: Path) -> None:
    assert Runner(lib).abi == runner_abi()


# ---- refusals ----------------------------------------------------------------------------------------------------
def one(lib: Path, **change: object) -> None:
    engine, batch = opened(lib), Batch(LIMITS)
    arguments: dict[str, object] = dict(slot=0, c=0, blocks=table_of(0, 8), wanted=1)
    batch.add([1, 2, 3], **(arguments | change))  # type: ignore[arg-type]
    engine.run("step", batch)


@pytest.mark.parametrize(("change", "sentence"), [
    ({"slot": 5}, "slot is 5, allowed 0..4"),
    ({"slot": -1}, "slot is -1, allowed 0..4"),
    ({"kept": 4}, "kept is 4, allowed 0..3"),
    ({"kept": 1, "wanted": 2}, "wanted is 2, allowed 0..1"),
    ({"c": -1}, "c is -1, allowed 0.."),
    ({"c": 6}, "its block table has 1 blocks, its 9 positions need 2"),
    ({"blocks": np.array([40], np.int32)}, "a block is 40, allowed 0..39"),
])
def test_a_bad_sequence_is_refused_with_value_and_range(lib: Path, change: dict[str, object], sentence: str) -> None:
    with pytest.raises(InternalError, match="sequence 0 of the batch: " + sentence):
        one(lib, **change)


def test_two_sequences_cannot_share_a_slot(lib: Path) -> None:
    engine, batch = opened(lib), Batch(LIMITS)
    for s in range(2):
        batch.add([1], slot=3, c=0, blocks=table_of(s, 1))
    with pytest.raises(InternalError, match="sequence 1 of the batch: slot 3 is another sequence's"):
        engine.run("step", batch)


def test_too_many_rows_name_both_numbers(lib: Path) -> None:
    engine, batch = opened(lib), Batch(LIMITS)
    with pytest.raises(PlanError, match="more rows than the engine was compiled for; found 65; allowed 64"):
        batch.add([0] * 65, slot=0, c=0, blocks=table_of(0, 65))
    batch.add([0] * 30, slot=0, c=0, blocks=table_of(0, 30), wanted=25)
    with pytest.raises(PlanError, match="25 rows with wanted logits, the engine was compiled for at most 24"):
        engine.run("step", batch)


def test_an_output_of_a_failed_or_other_run_is_refused(lib: Path) -> None:
    engine, batch = opened(lib), Batch(LIMITS)
    batch.add([1], slot=0, c=0, blocks=table_of(0, 1))
    engine.run("step", batch)
    with pytest.raises(InternalError, match="last run was not one of the entry draft"):
        engine._output("draft", "context", b"context")
    with pytest.raises(InternalError, match=r"no output nothing, allowed window, upper"):
        engine._output("step", "nothing", b"nothing")


def test_an_unbound_parameter_is_named(lib: Path) -> None:
    engine, batch = NativeEngine(lib, INTERFACE, slots=1, blocks=8, threads=1), Batch(LIMITS)
    batch.add([1], slot=0, c=0, blocks=np.zeros(1, np.int32))
    with pytest.raises(InternalError, match=r"tensor 0 of the parameter w\.weight is not bound"):
        engine.run("step", batch)
    assert "context" in engine.run("draft", draft_of(batch)), "the draft entry reads no parameter"


def test_a_state_unit_out_of_range_is_refused(lib: Path) -> None:
    engine = opened(lib)
    with pytest.raises(InternalError, match="the state win has no slot 5, there are 5"):
        engine.state("win", 5)
    with pytest.raises(InternalError, match="no state other"):
        engine.state("other", 0)


def changed(lib: Path, folder: Path, old: str, new: str) -> Path:
    out = folder / "lib"
    shutil.copytree(lib, out)
    text = (lib / "launch.txt").read_text()
    assert old in text
    (out / "launch.txt").write_text(text.replace(old, new, 1))
    return out


@pytest.mark.parametrize(("old", "new", "sentence"), [
    ("deepinfer-launch 1", "deepinfer-launch 2", "the record has the format 2, allowed 1..1"),
    ("deepinfer-launch 1", "other 1", "the record is not the head of a launch table"),
    ("lookback 2", "lookback two", "the record has lookback two, which is no integer"),
    ("wanted 24 seq", "wanted 24 rows", "the record names an unknown axis 'rows'"),
    ("param 1", "param 2", "the record is number 2 where 1 is due"),
    ("entries 4", "entries 5", "the record has entries x ratio other than block_tokens"),
    ("offset 12000", "offset 16000", "the record ends at byte 16512 of an arena of 16384"),
    ("fresh 0 0", "fresh 0 3", "the record gives win a buffer of another axis or row size"),
    ("args s0 b2", "args s0 b99", "the record has an argument 99, allowed 0..14"),
    ("args s0 b2", "args s0 q1", "the record has an argument 'q1'"),
    ("commit 0", "commit 2", "the record commits a state without fresh rows: pages"),
    ("commit 0", "comit 0", "the record has an unknown kind 'comit'"),
    ("commit 0", "commit 0 1", "the record goes on with '1'"),
    ("commit 0", "commit", "the record ends before a state"),
    ("loop 0 8 2", "loop 0 8 1", "the record has launches 1, allowed 2.."),
    ("launch 9 items 0 2", "launch 9 items 0 3", "the record has rows per item that do not divide"),
    ("output window 2", "output window 15", "the record has an output buffer 15, allowed 0..14"),
])
def test_a_bad_table_is_refused_with_its_line(lib: Path, tmp_path: Path, old: str, new: str, sentence: str) -> None:
    text = (lib / "launch.txt").read_text()
    number = text[: text.index(old)].count("\n") + 1
    with pytest.raises(ArtifactError, match=re.escape(f"launch.txt line {number}: {sentence}")):
        Runner(changed(lib, tmp_path, old, new))


@pytest.mark.parametrize(("old", "new", "sentence"), [
    ("\nend\n", "\n", "ends without its last record 'end'"),
    ("kernel 8 context_sum", "kernel 8 absent", "the kernel absent of the launch table is missing"),
])
def test_a_table_that_is_cut_or_names_an_absent_kernel_is_refused(lib: Path, tmp_path: Path, old: str, new: str,
                                                                  sentence: str) -> None:
    with pytest.raises(ArtifactError, match=sentence):
        Runner(changed(lib, tmp_path, old, new))


def test_an_absent_library_is_named(lib: Path, tmp_path: Path) -> None:
    out = changed(lib, tmp_path, "end", "end")
    (out / "kernels.so").write_bytes(b"\x7fELF")
    with pytest.raises(ArtifactError, match=r"compiled kernels cannot be loaded: .*kernels\.so"):
        Runner(out)
    with pytest.raises(ArtifactError, match="runner of the engine cannot be loaded"):
        Runner(tmp_path)


def test_memory_that_cannot_be_had_is_a_plan_error(lib: Path) -> None:
    with pytest.raises(PlanError, match="137438953408 bytes of memory for the blocks of the cache cannot be had"):
        limit_address_space(lib)


def limit_address_space(lib: Path) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 36, hard))
    try:
        NativeEngine(lib, INTERFACE, slots=1, blocks=2**31 - 1, threads=1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_run_allocates_nothing(lib: Path) -> None:
    """The heap of the process does not grow over many runs of changing shapes."""
    engine, batch = opened(lib, threads=1), Batch(LIMITS)
    libc = ctypes.CDLL(None)
    fields = [(f"f{i}", ctypes.c_size_t) for i in range(10)]
    libc.mallinfo2.restype = type("MallocInfo", (ctypes.Structure,), {"_fields_": fields})
    shapes = list(itertools.islice(itertools.cycle([1, 60, 7, 31]), 400))

    def run_all() -> int:
        for q in shapes:
            batch.clear()
            batch.add(range(q), slot=0, c=0, blocks=table_of(0, 64))
            engine.run("step", batch)
        return int(libc.mallinfo2().f7)

    run_all()
    start = run_all()
    assert run_all() - start < 4096
