"""From printed parts to the text of a kernel: one Jinja skeleton per family, under a header that says what it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer.backends.base import Source
from deepinfer.backends.cpu.target import Variant
from deepinfer.backends.skeleton import described, templates
from deepinfer.codegen.kernels.spec import KernelSpec

HERE = Path(__file__).parent
SUFFIX = ".cpp"


def render(spec: KernelSpec, *, rows_per_item: int, items_per_tile: int, scratch_bytes: int, exchange_bytes: int = 0,
           **parts: Any) -> Source:
    """Source of a kernel from the skeleton of its family."""
    text = templates(HERE / "templates").get_template(f"{spec.family}.cpp.jinja").render(
        symbol=spec.symbol, header=described(spec, "//", target="cpu", operand="p"),
        rows_per_item=rows_per_item, items_per_tile=items_per_tile, **parts)
    return Source(spec.symbol, text, SUFFIX, rows_per_item, items_per_tile, scratch_bytes, exchange_bytes)


def dispatcher(forms: Mapping[str, Sequence[Variant]], kinds: Sequence[Variant]) -> str:
    """Text of the unit that exports the kernels and forwards to the variant that this machine runs best.

    ``forms``: variants that each symbol is built in, plainest first; ``kinds``: those to choose from, plainest first. A
    symbol runs the last of its variants that the one chosen includes.
    """
    rows = {symbol: [[v.name for v in forms[symbol] if kind.includes(v)][-1] for kind in kinds]
            for symbol in sorted(forms)}
    return templates(HERE / "templates").get_template("dispatch.cpp.jinja").render(
        forms=rows, built={s: [v.name for v in forms[s]] for s in rows}, variants=[v.name for v in kinds],
        tests=[(v.name, v.test) for v in kinds])
