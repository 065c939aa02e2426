"""Runs a kernel that was built for another kind of machine, in an emulator: the driver below is linked to the kernel,
reads its operands from a file and writes its outputs to another."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from cpu.harness import Array, Param, zeros

from deepinfer.backends.cpu.backend import BACKEND
from deepinfer.backends.cpu.toolchain import compile_sources
from deepinfer.codegen.cache import Cache
from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.runtime.native.build import SOURCE_FOLDER

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SYSROOT = "/usr/aarch64-linux-gnu"
MACHINE = "aarch64"

DRIVER = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "abi.h"
extern "C" void KERNEL(const DiArgs*);
static int64_t number(FILE* f) { int64_t n = 0; if (fread(&n, 8, 1, f) != 1) exit(3); return n; }
static char* bytes(FILE* f, int64_t n) {
    char* p = (char*)aligned_alloc(64, (size_t)(n + 127) / 64 * 64);
    if (n && fread(p, (size_t)n, 1, f) != 1) exit(3);
    return p;
}
int main(int, char** argv) {
    FILE* f = fopen(argv[1], "rb");
    const int64_t rows = number(f), items = number(f), scratch = number(f), count = number(f);
    int32_t* const zero = (int32_t*)calloc((size_t)rows, 4);
    int32_t* const step_row = (int32_t*)calloc((size_t)rows, 4);
    int64_t* const pos = (int64_t*)calloc((size_t)rows, 8);
    for (int64_t i = 0; i < rows; ++i) { step_row[i] = (int32_t)i; pos[i] = i; }
    const int32_t first[] = {0, (int32_t)rows};
    DiSeq seq;
    memset(&seq, 0, sizeof seq);
    seq.rows = seq.kept = seq.wanted = (int32_t)rows;
    DiStep step;
    memset(&step, 0, sizeof step);
    step.seqs = 1;
    step.block_tokens = 128;
    step.seq = &seq;
    for (int a = 0; a < DI_AXIS_SEQ; ++a) step.axis[a] = DiAxis{rows, zero, pos, step_row, first};
    void* p[64];
    int64_t length[64];
    bool output[64];
    for (int64_t i = 0; i < count; ++i) {
        const int64_t kind = number(f);  // 0 value, 1 parameter, 2 output
        length[i] = number(f);
        output[i] = kind == 2;
        p[i] = bytes(f, length[i]);
        if (kind != 1) continue;
        const int64_t n = number(f);
        p[i] = new DiParam{p[i], bytes(f, n)};
    }
    DiArgs args = {};
    args.step = &step;
    args.p = p;
    args.scratch = (char*)aligned_alloc(64, (size_t)(scratch + 127) / 64 * 64);
    args.hi = items;
    KERNEL(&args);
    FILE* o = fopen(argv[2], "wb");
    for (int64_t i = 0; i < count; ++i) {
        if (output[i]) fwrite(p[i], (size_t)length[i], 1, o);
    }
    return fclose(o);
}
"""


def missing() -> str:
    """Why nothing can be built and run here for the other machine; empty when it can."""
    return next((f"{tool} is not installed" for tool in (COMPILER, EMULATOR) if not shutil.which(tool)), "")


def run_foreign(spec: KernelSpec, rows: int, operands: Sequence[Array | Param | None],
                folder: Path) -> dict[int, Array]:
    """Outputs of a kernel on rows of T of one sequence, by operand number, as ``harness.run`` gives them."""
    source = BACKEND.emit(spec)
    os.environ["CXX"] = COMPILER
    try:
        made = compile_sources([source], jobs=1, cache=Cache(folder / "cache"), machine=MACHINE)
    finally:
        del os.environ["CXX"]
    library, program = made.files["kernels.so"], folder / "driver"
    (folder / "driver.cpp").write_text(DRIVER)
    linked = [str(folder / "driver.cpp"), str(library), f"-Wl,-rpath,{library.parent}", "-o", str(program)]
    subprocess.run([COMPILER, "-std=c++17", "-O1", f"-DKERNEL={source.symbol}", f"-I{SOURCE_FOLDER}", *linked],
                   check=True)
    items = -(-rows // source.rows_per_item) * source.items_per_tile
    outputs: dict[int, Array] = {}
    with (folder / "in").open("wb") as f:
        def numbers(*values: int) -> None:
            f.write(np.array(values, np.int64).tobytes())

        numbers(rows, items, source.scratch_bytes, len(operands))
        for i, (op, x) in enumerate(zip(spec.operands, operands, strict=True)):
            if isinstance(x, Param):
                scale = b"" if x.scale is None else np.asarray(x.scale).tobytes()
                numbers(1, np.asarray(x.data).nbytes)
                f.write(np.asarray(x.data).tobytes())
                numbers(len(scale))
                f.write(scale)
                continue
            if x is None:
                outputs[i] = zeros(op, rows)
            data = np.ascontiguousarray(outputs[i] if x is None else x)
            numbers(2 if x is None else 0, data.nbytes)
            f.write(data.tobytes())
    subprocess.run([EMULATOR, "-L", SYSROOT, str(program), str(folder / "in"), str(folder / "out")], check=True,
                   timeout=300)
    raw, at = (folder / "out").read_bytes(), 0
    for i, out in outputs.items():
        outputs[i] = np.frombuffer(raw[at: at + out.nbytes], out.dtype).reshape(out.shape)
        at += out.nbytes
    return outputs
