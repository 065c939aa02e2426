"""From printed parts to the text of a kernel: one Jinja skeleton per family, under a header that says what it is."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from deepinfer.backends.base import Source
from deepinfer.backends.cpu.target import Variant
from deepinfer.codegen.kernels.spec import KernelSpec

HERE = Path(__file__).parent
SUFFIX = ".cpp"


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    env = jinja2.Environment(loader=jinja2.FileSystemLoader(HERE / "templates"), undefined=jinja2.StrictUndefined,
                             trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)
    env.filters["lines"] = lambda lines, depth: textwrap.indent("\n".join(lines), "    " * depth)
    return env


def describe(spec: KernelSpec) -> list[str]:
    """Comment lines: what the kernel reads and writes, and its tile programs."""
    out = [f"{spec.family} {spec.title} over rows of {spec.rows}, target cpu", f"spec {spec.digest()}"]
    for i, op in enumerate(spec.operands):
        arrow = "->" if op.write else "<-"
        out.append(f"  {arrow} p{i} {op.role} {op.rows} {list(op.dims)} {op.dtype}")
    for name, program in spec.slots:
        out.append(f"  {name}:")
        out += [f"    {line}" for line in str(program).splitlines()]
    return [f"// {line[:150]}" for line in out]


def render(spec: KernelSpec, *, rows_per_item: int, items_per_tile: int, scratch_bytes: int, exchange_bytes: int = 0,
           **parts: Any) -> Source:
    """Source of a kernel from the skeleton of its family."""
    text = _environment().get_template(f"{spec.family}.cpp.jinja").render(
        symbol=spec.symbol, header=describe(spec), rows_per_item=rows_per_item, items_per_tile=items_per_tile, **parts)
    return Source(spec.symbol, text, SUFFIX, rows_per_item, items_per_tile, scratch_bytes, exchange_bytes)


def dispatcher(forms: Mapping[str, Sequence[Variant]], kinds: Sequence[Variant]) -> str:
    """Text of the unit that exports the kernels and forwards to the variant that this machine runs best.

    ``forms``: variants that each symbol is built in, plainest first; ``kinds``: those to choose from, plainest first. A
    symbol runs the last of its variants that the one chosen includes.
    """
    rows = {symbol: [[v.name for v in forms[symbol] if kind.includes(v)][-1] for kind in kinds]
            for symbol in sorted(forms)}
    return _environment().get_template("dispatch.cpp.jinja").render(
        forms=rows, built={s: [v.name for v in forms[s]] for s in rows}, variants=[v.name for v in kinds],
        tests=[(v.name, v.test) for v in kinds])
