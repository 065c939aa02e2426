"""Every kernel of whole models, in Triton's interpreter, against the reference interpreter on its region."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from cpu.regions import regions_of
from cuda.interpreted import run, source_of
from golden.cases import load_case

from deepinfer.backends.cuda_sm100.target import built

CLOSE = 1e-5  # as for the kernels of the CPU: f32 sums in another order


@dataclass(frozen=True)
class Scene:
    """A golden case, tokens fed before, rows of the step, entry."""

    case: str
    prompt: int
    rows: int
    entry: str = "step"
    keep: int | None = None
    wanted: int | None = None

    def __str__(self) -> str:
        return f"{self.case}-{self.entry}-{self.prompt}+{self.rows}"


SCENES = [Scene("v41_c_quant", 141, 6, keep=4, wanted=3), Scene("v4_mtp", 20, 4, "draft")]
LONG = [Scene("v4_mtp", 20, 9), Scene("v41_a_f32", 0, 33), Scene("v41_b_bf16", 131, 40), Scene("v4_case_a", 70, 20),
        Scene("v4_case_b", 131, 30), Scene("v4_case_d", 60, 40), Scene("v41_c_quant", 130, 5, "draft")]


def check(scene: Scene) -> None:
    runner, kernels = regions_of(load_case(scene.case), scene.prompt, scene.rows, scene.entry, keep=scene.keep,
                                 wanted=scene.wanted, caps=built("sm90"))
    runner.launch = run
    for k in {k.spec.digest(): k for k in kernels}.values():
        done = runner.check(k)
        assert all(e <= CLOSE for e in done.errors.values()), (k.spec.symbol, done)


@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_every_kernel_equals_the_interpreter_on_its_region(scene: Scene) -> None:
    check(scene)


@pytest.mark.slow
@pytest.mark.parametrize("scene", LONG, ids=str)
def test_every_kernel_of_more_models_equals_the_interpreter(scene: Scene) -> None:
    check(scene)


def test_every_variant_of_a_kernel_equals_the_interpreter() -> None:
    runner, kernels = regions_of(load_case("v41_c_quant"), 141, 3, caps=built("sm90"))
    seen = set()
    for k in kernels:
        if len(source_of(k.spec).variants) < 2 or k.spec.digest() in seen:
            continue
        seen.add(k.spec.digest())
        for n in range(1, len(source_of(k.spec).variants)):
            runner.launch = lambda *a, n=n, **kw: run(*a, **kw, variant=n)
            done = runner.check(k)
            assert all(e <= CLOSE for e in done.errors.values()), (n, k.spec.symbol, done)
    assert len(seen) > 10
