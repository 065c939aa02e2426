"""The text of a kernel, and how it is compiled and launched: stages of variants (README.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.backends.base import Source
from deepinfer.backends.cuda_sm100.signature import Parameter, Signature
from deepinfer.backends.grid import Grid
from deepinfer.backends.skeleton import described, templates
from deepinfer.codegen.kernels.spec import KernelSpec

HERE = Path(__file__).parent
SUFFIX = ".py"


@dataclass(frozen=True)
class Stage:
    """One launch: a function of the text with its compile-time arguments.

    ``hot``: it may not spill. ``matrix``: it has to use the tensor cores' asynchronous instructions. ``otherwise``:
    what to try, in this order, as long as it spills: another number of warps, or other ``warps``, ``pipeline`` and
    compile-time arguments by name.
    """

    function: str
    grid: Grid
    warps: int
    constants: tuple[tuple[str, int], ...] = ()
    pipeline: int = 3
    hot: bool = False
    matrix: bool = False
    otherwise: tuple[int | tuple[tuple[str, int], ...], ...] = ()


@dataclass(frozen=True)
class Variant:
    """``rows``: most rows it is for, 0 for any number. ``otherwise``: what takes its place where a stage of it spills
    whatever is tried; it gives the same bits."""

    rows: int
    stages: tuple[Stage, ...]
    otherwise: Variant | None = None


@dataclass(frozen=True)
class CudaSource(Source):
    """A Source whose text is a Python module of Triton functions. ``scratch``: bytes, fixed and a row; ``entries``:
    bytes for each cache entry that a sequence may have, and the positions of one; ``schedule``: where it is from."""

    family: str = ""
    parameters: tuple[Parameter, ...] = ()
    variants: tuple[Variant, ...] = ()
    scratch: tuple[int, int] = (0, 0)
    entries: tuple[int, int] = (0, 1)
    schedule: str = ""

    def scratch_json(self) -> dict[str, int]:
        return {"fixed": self.scratch[0], "row": self.scratch[1], "entry": self.entries[0], "ratio": self.entries[1]}


def text_of(family: str, **slots: Any) -> str:
    """A module of the functions that the skeleton of a family makes."""
    head = ["from __future__ import annotations", "", "import triton", "import triton.language as tl", "",
            "from deepinfer.backends.cuda_sm100.device import *  # noqa: F403", "", ""]
    return "\n".join([*head, templates(HERE / "templates").get_template(f"{family}.py.jinja").render(**slots)])


def render(spec: KernelSpec, signature: Signature, variants: Sequence[Variant], *, scratch: tuple[int, int] = (0, 0),
           entries: tuple[int, int] = (0, 1), template: str = "", **parts: Any) -> CudaSource:
    """Source of a kernel from the skeleton ``template``, by default that of its family."""
    parameters = tuple(signature.parameters())
    text = "\n".join([*described(spec, "#"), text_of(template or spec.family, symbol=spec.symbol, parameters=", ".join(
        p.name for p in parameters), **parts)])
    grid = variants[-1].stages[-1].grid
    return CudaSource(spec.symbol, text, SUFFIX, max(1, grid.per // grid.of), max(1, grid.times), 0,
                      family=spec.family, parameters=parameters, variants=tuple(variants), scratch=scratch,
                      entries=entries)
