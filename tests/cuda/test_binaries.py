"""Cubins made on a machine without a GPU: instruction classes, parameters, equal bytes anywhere, refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from cpu.harness import Writer
from cuda.interpreted import source_of
from cuda.test_kernels_edges import attend, gemm, store_acc

from deepinfer.backends.cuda_sm100 import toolchain
from deepinfer.backends.cuda_sm100.cubin import parameter_sizes
from deepinfer.backends.cuda_sm100.source import CudaSource, Variant
from deepinfer.backends.cuda_sm100.target import ARCHS
from deepinfer.backends.cuda_sm100.toolchain import Toolchain, compile_sources
from deepinfer.backends.grid import Grid
from deepinfer.codegen.cache import Cache
from deepinfer.codegen.kernels.spec import KernelSpec, Operand
from deepinfer.errors import ToolchainError


def norm() -> KernelSpec:
    w = Writer()
    x = w.load((96,), "bf16")
    total = w.op("reduce", w.op("mul", x, x, dims=(96,)), dims=(1,), how="mean")
    w.ops[-1] = dataclasses.replace(w.ops[-1], attrs=(("dims", (0,)), ("how", "mean")))
    w.store(w.op("mul", x, w.op("rsqrt", total, dims=(1,)), dims=(96,)))
    return w.spec()


def experts() -> KernelSpec:
    operands = (Operand("value", "T", (64,), "bf16"), Operand("value", "T", (2,), "i32"),
                Operand("param", "-", (5, 64, 64), "mxfp4(1,32)", detail=(("stack", 5),)),
                Operand("value", "T", (2, 64), "f32", True))
    attrs = (("experts", 1), ("results", ((2, 64),)), ("weights", (2,)), ("x", 0))
    return KernelSpec("grouped_gemm", "T", operands, attrs, store_acc((2, 64), 3), title="test")


SPECS = {"rowwise": norm(), "gemm": gemm(64, 64), "grouped_gemm": experts(), "attend": attend(4)}


@pytest.fixture(scope="module")
def sources() -> list[CudaSource]:
    return [source_of(s) for s in SPECS.values()]


@pytest.mark.parametrize("target", ["sm90", "sm100"])
def test_products_use_the_tensor_cores_of_their_architecture(
        target: str, sources: list[CudaSource], tmp_path: Path) -> None:
    binary = compile_sources(target, sources, jobs=2, cache=Cache(tmp_path))
    table = json.loads(binary.files["kernels.json"].read_text())
    blob = binary.files["kernels.bin"].read_bytes()
    assert table["arch"] == ARCHS[target].suffix
    for source in sources:
        kernel = table["kernels"][source.symbol]
        sizes = [8 if kind[0] == "*" or kind == "i64" else 4 for _, kind, _ in kernel["parameters"]] + [8, 8]
        for v, made in zip(source.variants, kernel["variants"], strict=True):
            for stage, s in zip(v.stages, made["stages"], strict=True):
                cubin = blob[s["offset"]: s["offset"] + s["bytes"]]
                assert parameter_sizes(cubin, s["function"]) == sizes
                assert bool(s["matrix"]) == stage.matrix
                assert not (stage.matrix and s["fallback"])
                assert not s["spills"]
                assert s["shared"] <= ARCHS[target].shared


def test_equal_sources_give_equal_bytes_in_any_folder(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for folder in ("here", "a/longer/path"):
        (tmp_path / folder / "tmp").mkdir(parents=True)
        monkeypatch.setenv("TMPDIR", str(tmp_path / folder / "tmp"))
        monkeypatch.chdir(tmp_path / folder)
        some = [source_of(SPECS["rowwise"]), source_of(SPECS["gemm"])]
        binary = compile_sources("sm90", some, jobs=1, cache=Cache(tmp_path / folder / "cache"))
        found.append({name: file.read_bytes() for name, file in binary.files.items()})
        assert str(tmp_path).encode() not in found[-1]["kernels.bin"]
    assert found[0] == found[1]


def test_a_product_that_falls_back_to_plain_tensor_cores_is_refused(tmp_path: Path) -> None:
    source = source_of(gemm(16, 64))
    stage = source.variants[0].stages[0]
    few = tuple((name, 16 if name == "BN" else value) for name, value in stage.constants)
    stage = dataclasses.replace(stage, constants=few)  # too few columns for the asynchronous ones
    with Toolchain(ARCHS["sm90"], 1, Cache(tmp_path)) as tools, pytest.raises(
            ToolchainError, match=r"does not use the tensor cores.*found 0 of HGMMA/QGMMA, \d+ of HMMA"):
        tools.stage(source, stage)


def test_a_variant_that_spills_gives_its_place_to_the_next_and_the_last_is_refused(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def compiled(tools: Toolchain, request: dict[str, Any]) -> dict[str, Any]:
        keys = dict(request["constants"]).get("KEYS", 0)
        asked.append(keys)
        return {"cubin": "", "spills": 8 * (keys in spilling), "matrix": 1, "fallback": 0}

    monkeypatch.setattr(Toolchain, "_compiled", compiled)
    source = source_of(SPECS["attend"])
    stage = source.variants[-1].stages[0]
    wide, narrow = (Variant(0, (dataclasses.replace(stage, constants=(("KEYS", n),), otherwise=()),)) for n in (64, 32))
    wide = dataclasses.replace(wide, otherwise=narrow)
    for spilling in ((64,), (32, 64)):
        with Toolchain(ARCHS["sm100"], 1, Cache(tmp_path / str(len(spilling)))) as tools:
            if len(spilling) == 1:
                stages, made = tools.variant(source, wide)
                assert stages == narrow.stages and len(made) == len(stages)
                assert 64 in asked
            else:
                with pytest.raises(ToolchainError, match="keeps registers in memory; found 8 bytes"):
                    tools.variant(source, wide)


def test_a_kernel_that_does_not_compile_is_one_sentence_that_names_it(tmp_path: Path) -> None:
    source = source_of(SPECS["rowwise"])
    broken = dataclasses.replace(source, text=source.text.replace("tl.sum", "tl.some"))
    assert broken.text != source.text
    with Toolchain(ARCHS["sm90"], 1, Cache(tmp_path)) as tools, pytest.raises(
            ToolchainError, match=f"{source.symbol}: Triton does not compile a kernel.*has no attribute"):
        tools.stage(broken, broken.variants[0].stages[0])


def test_without_triton_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise toolchain.PackageNotFoundError(name)

    toolchain.triton_version.cache_clear()
    monkeypatch.setattr(toolchain, "version", absent)
    with pytest.raises(ToolchainError, match=r"not installed.*deepinfer-aot\[cuda\]"):
        compile_sources("sm90", [source_of(SPECS["rowwise"])], jobs=1)
    toolchain.triton_version.cache_clear()


@pytest.mark.parametrize(("grid", "blocks"), [
    (Grid(1, 16, 0, 5), {0: 0, 1: 5, 16: 5, 17: 10}), (Grid(6, 16, 8, 3), {0: 0, 1: 18, 2: 27, 100: 138}),
    (Grid(fixed=7), {0: 7, 3: 7})])
def test_a_grid_counts_blocks_by_rows(grid: Grid, blocks: dict[int, int]) -> None:
    assert {n: grid.blocks(n) for n in blocks} == blocks
