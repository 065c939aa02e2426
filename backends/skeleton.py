"""What the skeletons of all targets share: their templates, and the comment that heads a generated file."""

from __future__ import annotations

import textwrap
from functools import cache
from pathlib import Path

import jinja2

from deepinfer.codegen.kernels.spec import KernelSpec

_WIDTH = 150  # characters of a line of the comment


@cache
def templates(folder: Path) -> jinja2.Environment:
    """The templates of a folder; a name that is not given is an error."""
    env = jinja2.Environment(loader=jinja2.FileSystemLoader(folder), undefined=jinja2.StrictUndefined,
                             trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)
    env.filters["lines"] = lambda lines, depth: textwrap.indent("\n".join(lines), "    " * depth)
    return env


def described(spec: KernelSpec, comment: str, *, target: str = "", operand: str = "") -> list[str]:
    """Comment lines: what the kernel reads and writes, and its tile programs. ``comment``: how a comment begins;
    ``operand``: what stands before the number of an operand."""
    where = f", target {target}" if target else ""
    out = [f"{spec.family} {spec.title} over rows of {spec.rows}{where}", f"spec {spec.digest()}"]
    for i, op in enumerate(spec.operands):
        out.append(f"  {'->' if op.write else '<-'} {operand}{i} {op.role} {op.rows} {list(op.dims)} {op.dtype}")
    for name, program in spec.slots:
        out.append(f"  {name}:")
        out += [f"    {line}" for line in str(program).splitlines()]
    return [f"{comment} {line[:_WIDTH]}".rstrip() for line in out]
