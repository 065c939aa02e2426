"""The text of a kernel and how it is launched: stages, parameters, constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.backends.ascend950.cost import Question
from deepinfer.backends.ascend950.memory import Memory
from deepinfer.backends.ascend950.signature import Signature, declared
from deepinfer.backends.base import Source
from deepinfer.backends.grid import Grid
from deepinfer.backends.signature import Parameter
from deepinfer.backends.skeleton import described, templates
from deepinfer.backends.work import Work
from deepinfer.codegen.kernels.spec import KernelSpec

HERE = Path(__file__).parent
SUFFIX = ".asc"
VECTOR, MIX = "vector", "mix_1_2"


@dataclass(frozen=True)
class Stage:
    """One launch. ``kind``: ``vector`` (blocks are vector cores) or ``mix_1_2`` (blocks are AI cores). ``used``: bytes
    of each memory."""

    function: str
    kind: str
    grid: Grid
    used: tuple[tuple[str, int], ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {"function": self.function, "kind": self.kind, "grid": self.grid.as_json(), "used": dict(self.used)}


@dataclass(frozen=True)
class AscendSource(Source):
    """A Source whose text is AscendC. ``scratch``: bytes, fixed and a row; ``constants``: what ``constants`` of the
    parameters points to; ``question``: how its text is asked
    for its work."""

    family: str = ""
    parameters: tuple[Parameter, ...] = ()
    stages: tuple[Stage, ...] = ()
    scratch: tuple[int, int] = (0, 0)
    constants: bytes = b""
    question: Question | None = None

    @property
    def work(self) -> Work | None:
        """What its text takes; None: nobody asks."""
        return None if self.question is None else self.question.work(self.text)


def text_of(template: str, **parts: Any) -> str:
    """A generated file without a spec behind it."""
    body = templates(HERE / "templates").get_template(f"{template}.asc.jinja").render(**parts)
    return f'#include "di_kernel.h"\n\n{body}'


def render(spec: KernelSpec, signature: Signature, stages: Sequence[Stage], memories: Sequence[Memory], *,
           scratch: tuple[int, int] = (0, 0), constants: bytes = b"", question: Question | None = None,
           **parts: Any) -> AscendSource:
    """Source of a kernel from the skeleton of its family."""
    parameters = tuple(signature.parameters())
    body = templates(HERE / "templates").get_template(f"{spec.family}.asc.jinja").render(
        symbol=spec.symbol, parameters=", ".join(map(declared, parameters)), **parts)
    plan = [f"// {line}" for m in memories for line in m.table()]
    text = "\n".join([*described(spec, "//", target="ascend950"), "//", *plan, '#include "di_kernel.h"', "", body])
    grid = stages[-1].grid
    return AscendSource(spec.symbol, text, SUFFIX, max(1, grid.per // grid.of), max(1, grid.times), 0,
                        family=spec.family, parameters=parameters, stages=tuple(stages), scratch=scratch,
                        constants=constants, question=question)
