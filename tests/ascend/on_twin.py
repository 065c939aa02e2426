"""Runs kernels of the Ascend backend on the CPU twin, on steps and operands made as for a CPU kernel."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import numpy as np
from cpu.harness import Array, Param, State, Step
from cuda.arguments import Arguments, arguments

from deepinfer.backends.ascend950.source import AscendSource
from deepinfer.backends.ascend950.twin.build import LIBRARY, build_twin
from deepinfer.backends.ascend950.twin.run import Twin
from deepinfer.codegen.kernels.spec import KernelSpec

_MADE: dict[str, tuple[AscendSource, Twin]] = {}
LARGEST = [4, 0, 0, 0, 0, 0, 0, 0]  # words of a row that draws: nothing is known of it
BLOCKS = 3  # fewer than items as a rule, so that blocks take several


def source_of(spec: KernelSpec) -> AscendSource:
    source: AscendSource = import_module(f"deepinfer.backends.ascend950.families.{spec.family}").emit(spec)
    return source


def twin_of(sources: Sequence[AscendSource]) -> Twin:
    """One library of several kernels."""
    texts = {s.symbol: s.text for s in sources}
    stages = {s.symbol: [(t.function, t.kind) for t in s.stages] for s in sources}
    return Twin(build_twin(texts, stages, jobs=2).files[LIBRARY])


def prepare(specs: Sequence[KernelSpec]) -> None:
    """Builds many kernels at once."""
    new = {s.digest(): source_of(s) for s in specs if s.digest() not in _MADE}
    if new:
        twin = twin_of(list(new.values()))
        _MADE.update({digest: (source, twin) for digest, source in new.items()})


def launch(source: AscendSource, twin: Twin, made: Arguments, blocks: int = BLOCKS) -> str:
    """All stages on one step; what is wrong, "" if nothing."""
    values = [(p.type, v) for p, v in zip(source.parameters, made.values, strict=True)]
    for stage in source.stages:
        items = stage.grid.blocks(made.rows)
        wrong = twin.complaints(stage.function, min(items, blocks), values) if items else ""
        if wrong:
            return wrong
    return ""


def run(spec: KernelSpec, step: Step, operands: Sequence[Array | Param | State | None], *, isa: str = "",
        rows: str = "", blocks: int = BLOCKS) -> dict[int, Array]:
    """As ``cpu.harness.run``; fails with the twin's sentences."""
    prepare([spec])
    source, twin = _MADE[spec.digest()]
    made = arguments(spec, source, step, operands, rows, np.array(LARGEST * max(step.axis_rows)))
    wrong = launch(source, twin, made, blocks)
    assert not wrong, wrong
    return made.outputs
