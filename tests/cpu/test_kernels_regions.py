"""Every kernel of whole models against the reference interpreter, in each instruction set."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from cpu.harness import available_isas, build_all
from cpu.regions import regions_of
from golden.cases import load_case

# f32 sums of up to a few hundred terms in another order than torch's: 16 units in the last place of the largest value.
# A dot product that almost cancels is held to its own scale, so a few outputs need the terms' size instead.
CLOSE = 1e-5


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


# Prompts longer than every window, so that rings have wrapped; steps shorter and longer than the rings.
SCENES = [Scene("v4_mtp", 20, 9), Scene("v4_mtp", 20, 4, "draft"), Scene("v41_c_quant", 141, 60, keep=40, wanted=3)]
LONG = [Scene("v41_a_f32", 0, 33), Scene("v41_b_bf16", 131, 200), Scene("v41_b_bf16", 77, 1),
        Scene("v4_case_a", 70, 70), Scene("v4_case_b", 131, 133), Scene("v4_case_d", 60, 200),
        Scene("v41_c_quant", 130, 5, "draft")]


def check(scene: Scene) -> None:
    runner, kernels = regions_of(load_case(scene.case), scene.prompt, scene.rows, scene.entry, keep=scene.keep,
                                 wanted=scene.wanted)
    build_all([k.spec for k in kernels])
    for isa in available_isas(kernels[0].spec):
        for k in kernels:
            done = runner.check(k, isa)
            assert all(e <= CLOSE for e in done.errors.values()), (isa, k.spec.symbol, done)


@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_every_kernel_equals_the_interpreter_on_its_region(scene: Scene) -> None:
    check(scene)


@pytest.mark.slow
@pytest.mark.parametrize("scene", LONG, ids=str)
def test_every_kernel_of_more_models_equals_the_interpreter(scene: Scene) -> None:
    check(scene)
