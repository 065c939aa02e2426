"""The text of a kernel and how it is launched: stages, parameters, constants."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from deepinfer.backends.ascend950.memory import Memory
from deepinfer.backends.ascend950.signature import Signature, declared
from deepinfer.backends.base import Source
from deepinfer.backends.signature import Parameter
from deepinfer.backends.work import Work
from deepinfer.codegen.kernels.spec import KernelSpec

HERE = Path(__file__).parent
SUFFIX = ".asc"
VECTOR, MIX = "vector", "mix_1_2"


@dataclass(frozen=True)
class Grid:
    """Items of a stage for n rows: ``min(n * of, ceil(n * of / per) + plus) * times``; ``fixed`` > 0: that many. Any
    number of blocks from 1 to the items is right: a kernel goes over its items in steps of the blocks."""

    of: int = 1
    per: int = 1
    plus: int = 0
    times: int = 1
    fixed: int = 0

    def items(self, n: int) -> int:
        if self.fixed:
            return self.fixed
        return min(n * self.of, -(-n * self.of // self.per) + self.plus) * self.times

    def as_json(self) -> dict[str, int]:
        if self.fixed:
            return {"fixed": self.fixed}
        return {"of": self.of, "per": self.per, "plus": self.plus, "times": self.times}


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
    parameters points to; ``work``: what reports predict its time with."""

    family: str = ""
    parameters: tuple[Parameter, ...] = ()
    stages: tuple[Stage, ...] = ()
    scratch: tuple[int, int] = (0, 0)
    constants: bytes = b""
    work: Work | None = None


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    env = jinja2.Environment(loader=jinja2.FileSystemLoader(HERE / "templates"), undefined=jinja2.StrictUndefined,
                             trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)
    env.filters["lines"] = lambda lines, depth: textwrap.indent("\n".join(lines), "    " * depth)
    return env


def describe(spec: KernelSpec) -> list[str]:
    """Comment lines: what the kernel reads and writes, and its tile programs."""
    out = [f"{spec.family} {spec.title} over rows of {spec.rows}, target ascend950", f"spec {spec.digest()}"]
    for i, op in enumerate(spec.operands):
        out.append(f"  {'->' if op.write else '<-'} {i} {op.role} {op.rows} {list(op.dims)} {op.dtype}")
    for name, program in spec.slots:
        out.append(f"  {name}:")
        out += [f"    {line}" for line in str(program).splitlines()]
    return [f"// {line[:150]}".rstrip() for line in out]


def text_of(template: str, **parts: Any) -> str:
    """A generated file without a spec behind it."""
    body = _environment().get_template(f"{template}.asc.jinja").render(**parts)
    return f'#include "di_kernel.h"\n\n{body}'


def render(spec: KernelSpec, signature: Signature, stages: Sequence[Stage], memories: Sequence[Memory], *,
           scratch: tuple[int, int] = (0, 0), constants: bytes = b"", work: Work | None = None,
           **parts: Any) -> AscendSource:
    """Source of a kernel from the skeleton of its family."""
    parameters = tuple(signature.parameters())
    body = _environment().get_template(f"{spec.family}.asc.jinja").render(
        symbol=spec.symbol, parameters=", ".join(map(declared, parameters)), **parts)
    plan = [f"// {line}" for m in memories for line in m.table()]
    text = "\n".join([*describe(spec), "//", *plan, '#include "di_kernel.h"', "", body])
    grid = stages[-1].grid
    return AscendSource(spec.symbol, text, SUFFIX, max(1, grid.per // grid.of), max(1, grid.times), 0,
                        family=spec.family, parameters=parameters, stages=tuple(stages), scratch=scratch,
                        constants=constants, work=work)
