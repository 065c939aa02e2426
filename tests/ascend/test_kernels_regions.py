"""Every kernel of whole models, on the CPU twin, against the reference interpreter on its region."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from ascend.on_twin import prepare, run
from cpu import regions
from cpu.regions import Kernel, RegionRunner, regions_of
from golden.cases import load_case

from deepinfer.backends.ascend950.backend import backend
from deepinfer.backends.ascend950.families import rowwise
from deepinfer.backends.ascend950.tile import pieces
from deepinfer.codegen.kernels.spec import KernelSpec, TileProgram

CLOSE = 1e-5  # as for the kernels of the CPU: f32 sums in another order
STEP = 2.0**-8  # of bf16: where values are rounded, such a sum may fall on the other side of a boundary


@dataclass(frozen=True)
class Scene:
    """A golden case, tokens fed before, rows of the step, entry, numerics."""

    case: str
    prompt: int
    rows: int
    entry: str = "step"
    profile: str = "bf16"
    keep: int | None = None
    wanted: int | None = None
    formats: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.case}-{self.entry}-{self.prompt}+{self.rows}-{self.profile}"


SCENES = [Scene("v41_c_quant", 141, 6, keep=4, wanted=3), Scene("v4_mtp", 20, 4, "draft", "wide")]
LONG = [Scene("v41_c_quant", 141, 6, "step", "wide", 4, 3), Scene("v41_c_quant", 130, 5, "draft"),
        Scene("v4_mtp", 20, 9, profile="wide"), Scene("v41_a_f32", 0, 33, profile="wide"),
        Scene("v41_b_bf16", 131, 40), Scene("v4_case_a", 70, 20, profile="wide"),
        Scene("v4_case_b", 131, 30, profile="wide"), Scene("v4_case_d", 60, 40, profile="wide"),
        Scene("v4_case_d", 29, 8, profile="wide", formats=(("cache_format", "spec"), ("act_format", "spec")))]


@pytest.fixture(autouse=True)
def fused_for_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions as they are cut for this target."""
    class Cut:
        @staticmethod
        def capabilities(_: str) -> object:
            return backend("ascend950").capabilities("ascend950")

    monkeypatch.setattr(regions, "BACKEND", Cut)


def kernels(scene: Scene) -> tuple[RegionRunner, list[Kernel]]:
    """The runner of a scene and its distinct kernels."""
    runner, found = regions_of(load_case(scene.case), scene.prompt, scene.rows, scene.entry, keep=scene.keep,
                               wanted=scene.wanted, options={"profile": scene.profile, **dict(scene.formats)})
    runner.launch = run
    return runner, list({k.spec.digest(): k for k in found}.values())


def check(runner: RegionRunner, found: list[Kernel], profile: str) -> None:
    """``wide``: nothing is rounded between kernels, so every output is close."""
    prepare([k.spec for k in found])
    for k in found:
        done = runner.check(k)
        allowed = {what: STEP if profile == "bf16" and what.endswith(" bf16") else CLOSE for what in done.errors}
        assert done.errors and all(e <= allowed[what] for what, e in done.errors.items()), (k.spec.symbol, done)


@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_every_kernel_equals_the_interpreter_on_its_region(scene: Scene) -> None:
    check(*kernels(scene), scene.profile)


@pytest.mark.slow
@pytest.mark.parametrize("scene", LONG, ids=str)
def test_every_kernel_of_more_models_equals_the_interpreter(scene: Scene) -> None:
    check(*kernels(scene), scene.profile)


@pytest.fixture(params=[False, True], ids=["pieces", "spills"])
def in_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Rows are worked on as if they did not fit: in pieces, or also with what is kept of them in memory."""
    def only_pieces(spec: KernelSpec, program: TileProgram) -> object:
        return rowwise._planned(spec, program, pieces=True, spills=request.param)

    monkeypatch.setattr(rowwise, "_fitting", only_pieces)
    monkeypatch.setattr(pieces, "LEAST", 128 if request.param else 64)
    monkeypatch.setattr(pieces, "PIECE", 128 if request.param else 64)
    monkeypatch.setattr("ascend.on_twin._MADE", {})
    return bool(request.param)


def test_a_row_in_pieces_equals_the_interpreter(in_pieces: bool) -> None:
    runner, found = kernels(SCENES[0])
    widest = [k for k in found if k.spec.family == "rowwise"]
    widest.sort(key=lambda k: -sum(len(p.ops) for _, p in k.spec.slots))
    check(runner, widest[:4], SCENES[0].profile)
