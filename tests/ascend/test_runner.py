"""The runner of Ascend engines on the CPU twin, with hand-written kernels: values, rings, commits, errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from deepinfer.backends.ascend950.source import VECTOR, AscendSource, Stage
from deepinfer.backends.ascend950.toolchain import compile_sources
from deepinfer.backends.ascend950.twin.device import use_twin
from deepinfer.backends.grid import Grid
from deepinfer.backends.signature import Parameter
from deepinfer.codegen.package.interface import Interface, Value
from deepinfer.dsl.params import ParamDecl
from deepinfer.dsl.types import i64
from deepinfer.errors import DeepInferError
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.native.build import LIBRARY, build_runner
from deepinfer.runtime.native_engine import NativeEngine

HERE = Path(__file__).parent / "runner"
INTERFACE = Interface(params=(ParamDecl("w.weight", (1,), i64),), pins=(),
                      outputs={"step": {"sums": Value("T", (), "i64")}})
SIZES = SimpleNamespace(limits={"step": 16, "kept": 16, "wanted": 16, "seq": 2}, lookback=0)
FIRST, STOP, ROWS = (Parameter("row_first", "i32", ("launch", "row_first")),
                     Parameter("row_stop", "i32", ("launch", "row_stop")),
                     Parameter("axis_rows", "*i32", ("axis", "rows")))
POS = Parameter("axis_pos", "*i64", ("axis", "pos"))
KERNELS = {
    "extend": (FIRST, STOP, ROWS, POS, Parameter("token_ids", "*i64", ("input", "token_ids")),
               Parameter("w", "*i64", ("param", 1, "data")), Parameter("fresh", "*u8", ("state", 0, "fresh"))),
    "window_sum": (FIRST, STOP, ROWS, POS, Parameter("axis_seq", "*i32", ("axis", "seq")),
                   Parameter("slot", "*i32", ("seq", "slot")), Parameter("base", "*u8", ("state", 0, "base")),
                   Parameter("stride", "i64", ("state", 0, "stride")), Parameter("fresh", "*u8", ("state", 0, "fresh")),
                   Parameter("has_fresh", "i32", ("state", 0, "has_fresh")),
                   Parameter("first", "*i32", ("state", 0, "first")), Parameter("from", "*i64", ("state", 0, "from")),
                   Parameter("valid", "*i64", ("state", 0, "valid")),
                   Parameter("ring", "i32", ("state", 0, "ring")), Parameter("out", "*i64", ("value", 1)))}


def sources(text: str) -> list[AscendSource]:
    """Each of the two kernels, both from the same text."""
    parts = text.split('extern "C"')
    texts = dict(zip(KERNELS, (f'{parts[0]}extern "C"{p}' for p in parts[1:]), strict=True))
    return [AscendSource(s, texts[s], ".asc", 1, 1, 0, family="rowwise", parameters=KERNELS[s],
                         stages=(Stage(s, VECTOR, Grid()),)) for s in KERNELS]


def library(folder: Path, text: str) -> Path:
    use_twin()
    for name, file in compile_sources("ascend950", sources(text), jobs=2).files.items():
        shutil.copy(file, folder / name)
    shutil.copy(build_runner(kind="ascend").files[LIBRARY], folder / LIBRARY)
    shutil.copy(HERE / "launch.txt", folder)
    return folder


class Weights:
    """w = 100."""

    def __init__(self) -> None:
        self.w = np.array([100], np.int64)

    def addresses(self) -> Iterator[list[tuple[int, int]]]:
        yield [(self.w.ctypes.data, 0)]

    def sizes(self) -> Iterator[list[tuple[int, int]]]:
        yield [(8, 0)]


def engine(lib: Path) -> NativeEngine:
    made = NativeEngine(lib, INTERFACE, slots=2, blocks=4, threads=1)
    made.bind(Weights())
    return made


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library(tmp_path_factory.mktemp("lib"), (HERE / "kernels.asc").read_text())


def fed(made: NativeEngine, lengths: list[int], chunk: int) -> list[list[int]]:
    """Runs sequences of tokens 1, 2, .. in chunks, all together; sums of each one's rows."""
    batch, results = Batch(SIZES), [[] for _ in lengths]
    for c in range(0, max(lengths), chunk):
        live = [s for s, n in enumerate(lengths) if c < n]
        batch.clear()
        for s in live:
            stop = min(c + chunk, lengths[s])
            batch.add(list(range(c + 1, stop + 1)), slot=1 - s, c=c, blocks=np.arange(4, dtype=np.int32))
        out = made.run("step", batch)["sums"]
        for s, part in zip(live, np.split(out, np.cumsum(batch.sequences["rows"][: len(live)])[:-1]), strict=True):
            results[s] += part.tolist()
    return results


def expected(n: int) -> list[int]:
    return [sum(100 * (p + 1) + p for p in range(max(0, q - 3), q + 1)) for q in range(n)]


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_a_window_does_not_depend_on_chunks(lib: Path, chunk: int) -> None:
    made = engine(lib)
    lengths = [13, 6]
    assert fed(made, lengths, chunk) == [expected(n) for n in lengths]
    made.close()


def test_what_the_twin_complains_of_is_an_error_of_the_step(tmp_path: Path) -> None:
    text = (HERE / "kernels.asc").read_text().replace("di_out(out + row, ", "di_out(out + row + 1000, ")
    made = engine(library(tmp_path, text))
    with pytest.raises(DeepInferError, match=r"window_sum, line .* outside of every tensor"):
        fed(made, [3], 3)
    made.close()


def test_an_engine_of_sources_says_so(lib: Path, tmp_path: Path) -> None:
    for file in lib.iterdir():
        shutil.copy(file, tmp_path)
    table = json.loads((tmp_path / "kernels.json").read_text())
    assert table["compiled"] == 0
    (tmp_path / "kernels.json").write_text(json.dumps(table | {"compiled": 1}))
    with pytest.raises(DeepInferError, match="were compiled for a device, the CPU twin runs their sources"):
        engine(tmp_path)
