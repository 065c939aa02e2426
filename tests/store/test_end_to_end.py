"""The demonstration model with a store: a process that is killed, a disk that fails, and the same tokens as ever.

Whatever happened to the store, an answer's tokens are those of a run without one that replays where the answer's log
says.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from cpu.test_prefix_engine import by_log
from rich.console import Console
from store.engine_life import Trial
from store.mooncake_cluster import install
from store.recording import Fault
from store.reopening import damage_index

from deepinfer.backends.base import HOST
from deepinfer.codegen.compile import compile_engine
from deepinfer.dsl.model import EngineOptions
from deepinfer.errors import RequestError
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.outputs import RequestOutput
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.store import StoreSettings
from deepinfer.runtime.store.native import LIBRARY
from deepinfer.runtime.store.points import Point
from deepinfer.runtime.store.segment import read_superblock
from deepinfer.runtime.store.settings import parse_retention

FOLDER = Path(__file__).parents[2] / "assets" / "tiny"
ANSWER = 8

# Stores a prompt's blocks, waits until their log entries are written, and is killed.
KILLED = """
import glob, os, signal, sys, time
from pathlib import Path
import numpy as np
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.store import StoreSettings
engine, checkpoint, place, blocks = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
llm = LLM(engine, checkpoint, threads=1, progress=False,
          prefix_store=StoreSettings(place / "store", index=place / "index", segment_bytes=1 << 24))
prompt = [int(x) for x in sys.argv[5].split(",")]
llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2, replay=int(sys.argv[6])), progress=False)
until = time.monotonic() + 200
while sum(os.path.getsize(f) for f in glob.glob(str(place / "store/*/*/*.log"))) < 64 * blocks:
    assert time.monotonic() < until, "the blocks were not stored"
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def compiled(folder: Path) -> Path:
    options = EngineOptions(profile="wide", max_model_len=1024, max_num_batched_tokens=256)
    compile_engine(model=str(FOLDER), out=folder, target="cpu", isa=HOST, options=options,
                   console=Console(file=io.StringIO()))
    return folder


@contextmanager
def trial_of(engine: Path | None = None, cold: LLM | None = None) -> Iterator[Trial]:
    """The life of scenario.py for the demonstration model, in memory where there is such a place."""
    with ExitStack() as stack:
        memory = Path("/dev/shm")
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deepinfer-test-",
                                                                     dir=memory if memory.is_dir() else None)))
        engine = engine or compiled(place / "tiny")
        cold = cold or stack.enter_context(LLM(engine, FOLDER, threads=1, progress=False, prefix_cache=False))

        def start(settings: StoreSettings) -> LLM:
            return LLM(engine, FOLDER, threads=1, progress=False, prefix_store=settings)

        yield Trial(start, cold, place)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("engine") / "tiny")


@pytest.fixture(scope="module")
def cold(engine: Path) -> Iterator[LLM]:
    with LLM(engine, FOLDER, threads=1, progress=False, prefix_cache=False) as running:
        yield running


@pytest.fixture(scope="module")
def prompt(cold: LLM) -> list[int]:
    """Three full blocks and a bit."""
    length = 3 * cold.plan.block_tokens + 20
    made: list[int] = np.random.default_rng(4).integers(3, cold.plan.vocab_size - 3, length).tolist()
    return made


@pytest.fixture(scope="module")
def stored(engine: Path, cold: LLM, prompt: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that a killed process left behind."""
    import subprocess

    place = tmp_path_factory.mktemp("killed")
    arguments = [str(engine), str(FOLDER), str(place), "3", ",".join(map(str, prompt)), str(cold.plan.least_keep)]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True, timeout=300,
                          check=False, env={k: v for k, v in os.environ.items() if not k.startswith("DEEPINFER_")})
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(place.rglob("*.open")) and (engine / "lib" / LIBRARY).is_file()
    return place


@pytest.fixture(scope="module")
def trial(engine: Path, cold: LLM) -> Iterator[Trial]:
    with trial_of(engine, cold) as made:
        yield made


def segment_of(place: Path) -> Path:
    (path,) = (place / "store").rglob("*.open")
    return path


def change(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def rot(place: Path, slot: int) -> None:
    path = segment_of(place)
    with path.open("rb") as file:
        block = read_superblock(file.read(4096))
    assert block is not None
    change(path, block.offset(slot) + block.layout.offsets[1] - 40, b"rot")


def cut(place: Path) -> None:
    path = segment_of(place)
    with path.open("rb") as file:
        block = read_superblock(file.read(4096))
    assert block is not None
    os.truncate(path, block.offset(1) + 5000)


def log_of(place: Path) -> Path:
    (path,) = (place / "store").rglob("*.log")
    return path


def in_the_way(place: Path) -> None:
    """A file where the store's folder should be."""
    shutil.rmtree(place / "store")
    (place / "store").write_text("no folder")


# What happens to the folder, and the blocks that are adopted afterwards.
FAULTS: dict[str, tuple[Callable[[Path], object], int]] = {
    "nothing": (lambda place: None, 3),
    "the first record rots": (lambda place: rot(place, 0), 0),
    "the third record rots": (lambda place: rot(place, 2), 2),
    "the segment is cut": (cut, 1),
    "the log is cut in an entry": (lambda place: os.truncate(log_of(place), 150), 2),
    "an entry of the log rots": (lambda place: change(log_of(place), 70, b"rot"), 1),
    "half of the superblock rots": (lambda place: change(segment_of(place), 100, b"rot"), 3),
    "the superblock rots": (lambda place: [change(segment_of(place), at, b"rot") for at in (100, 2148)], 0),
    "the index rots": (lambda place: damage_index(place / "index", 3), 3),
    "the index is gone": (lambda place: shutil.rmtree(place / "index"), 3),
    "a file is in the folder's place": (in_the_way, 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_kill_and_a_fault_the_tokens_are_those_of_the_replay_log(
        engine: Path, cold: LLM, prompt: list[int], stored: Path, tmp_path: Path, fault: str) -> None:
    act, blocks = FAULTS[fault]
    place = tmp_path / "copy"
    shutil.copytree(stored, place)
    act(place)
    settings = StoreSettings(place / "store", index=place / "index", segment_bytes=1 << 24)
    with LLM(engine, FOLDER, threads=1, progress=False, prefix_store=settings) as llm:
        for turn in range(2):  # the second finds in memory what the first adopted or computed
            found = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True,
                                                          replay=llm.plan.least_keep), progress=False)[0]
            assert found.token_ids == reference(cold, prompt, found)
            if not turn:
                floor = blocks * llm.plan.block_tokens
                # A hit that is no longer than what would run again is not adopted.
                assert found.num_cached_tokens == (floor if floor > llm.plan.rerun else 0)


def test_a_class_of_the_users_own_is_kept_as_one_and_another_is_refused(engine: Path, prompt: list[int],
                                                                        tmp_path: Path) -> None:
    settings = StoreSettings(tmp_path / "store", index=tmp_path / "index", segment_bytes=1 << 24,
                             retention=parse_retention("batch=30d", "x"))
    with LLM(engine, FOLDER, threads=1, progress=False, prefix_store=settings) as llm:
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, cache_class="batch"), progress=False)
        with pytest.raises(RequestError, match="no such class; found btach; allowed agent, chat, batch"):
            llm.generate([prompt], SamplingParams(cache_class="btach"), progress=False)
    assert {path.parent.name for path in settings.folder.rglob("*.seg")} == {"batch"}


def test_blocks_go_to_the_cluster_of_mooncake_and_come_back(engine: Path, cold: LLM, prompt: list[int], tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    mooncake = install(tmp_path, monkeypatch)
    for turn in range(2):
        settings = StoreSettings(tmp_path / "store", backend="mooncake", threads=1, arena_bytes=1 << 20)
        with LLM(engine, FOLDER, threads=1, progress=False, prefix_store=settings) as llm:
            found = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True,
                                                          replay=llm.plan.least_keep), progress=False)[0]
        assert found.token_ids == reference(cold, prompt, found)
        assert found.num_cached_tokens == turn * 3 * llm.plan.block_tokens
    assert len(mooncake.objects) == 3 and not mooncake.memory


def reference(cold: LLM, prompt: list[int], found: RequestOutput) -> list[int]:
    return by_log(cold, prompt, found.replay_log, cold.plan.least_keep, len(found.token_ids))


@pytest.mark.parametrize("point", [p for p in Point if p is not Point.OTHER], ids=lambda p: f"{int(p)} {p.name}")
def test_after_a_fault_at_a_point_the_tokens_are_those_of_the_replay_log(trial: Trial, point: Point) -> None:
    """The life of scenario.py with this engine's blocks, broken once; enumerate_faults.py --engine tries the rest."""
    fault = list(Fault)[point % len(Fault)]
    seed = int(point)
    trial.check(random.Random(seed).choice(trial.places(point)), fault, seed)
