"""The portable form of the kernels on another kind of machine: built by a cross compiler, run in an emulator."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from cpu.foreign import COMPILER, missing, run_foreign
from cpu.harness import Writer, held, rows_step, run
from cpu.test_kernels_gemm import gemm, values, weight

from deepinfer.runtime.native.build import FLAGS, LIBRARIES, SOURCE_FOLDER, runner_sources
from deepinfer.runtime.store.native import build as store_build

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.mark.parametrize("dtype", ["bf16", "mxfp8(32,32)", "mxfp4(1,32)"])
def test_contractions_give_the_bits_of_the_portable_form_here(dtype: str, tmp_path: Path) -> None:
    spec = gemm([(36, dtype)], 192)
    p, _ = weight(36, 192, dtype)
    x = held(values(7, 192), "bf16")
    there = run_foreign(spec, 7, [p, x, None], tmp_path)[2]
    assert np.array_equal(there, run(spec, rows_step(7), [p, x, None], isa="portable")[2])


def test_row_local_work_gives_the_bits_of_the_portable_form_here(tmp_path: Path) -> None:
    w = Writer()
    x = w.load((70,))
    w.store(w.op("mul", w.op("sigmoid", x, dims=(70,)), w.op("exp", x, dims=(70,)), dims=(70,)))
    spec = w.spec()
    rows = values(5, 70)
    there = run_foreign(spec, 5, [rows, None], tmp_path)[1]
    assert np.array_equal(there, run(spec, rows_step(5), [rows, None], isa="portable")[1])


def test_the_runner_builds_without_a_warning(tmp_path: Path) -> None:
    units = [p.name for p in runner_sources() if p.suffix == ".cpp"]
    done = subprocess.run([COMPILER, *FLAGS, "-Werror", *units, *LIBRARIES, "-o", str(tmp_path / "runner.so")],
                          cwd=SOURCE_FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]


def test_the_native_part_of_the_store_builds_without_a_warning(tmp_path: Path) -> None:
    command = [COMPILER, *store_build.FLAGS, "-Werror", str(store_build.SOURCE), "-o", str(tmp_path / "store.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]
