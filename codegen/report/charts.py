"""Pictures of the report, as SVG text that needs nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from deepinfer.backends.base import Roof
from deepinfer.codegen.plan.table import axis_limits

ROW = 46  # height of one kernel in the picture of a layer, also the style sheet's
_LANE = 7


def links(count: int, edges: Sequence[tuple[int, int]], outside: set[int]) -> str:
    """Data between the kernels of a layer, drawn left of their list: ``edges`` from row to row, a stub from above for
    rows in ``outside``, which read what earlier layers made. Long links run further left."""
    lanes: list[tuple[int, int, int]] = []
    parts = []
    for a, b in sorted(set(edges), key=lambda e: (e[1] - e[0], e)):
        lane = 0
        while any(lane == used and a < y and x < b for used, x, y in lanes):
            lane += 1
        lanes.append((lane, a, b))
    width = (max((lane for lane, *_ in lanes), default=0) + 2) * _LANE + 10
    for lane, a, b in lanes:
        x, top, bottom = width - 12 - (lane + 1) * _LANE, a * ROW + ROW // 2 + 5, b * ROW + ROW // 2 - 5
        parts.append(f'<path d="M{width - 6} {top}H{x + 4}Q{x} {top} {x} {top + 4}V{bottom - 4}Q{x} {bottom} {x + 4} '
                     f'{bottom}H{width - 6}" data-a="{a}" data-b="{b}"/>'
                     f'<path class="tip" d="M{width - 8} {bottom - 3}l6 3l-6 3z"/>')
    for row in sorted(outside):
        y = row * ROW + ROW // 2
        parts.append(f'<circle class="stub" cx="{width - 6}" cy="{y}" r="2.5"/>')
    height = count * ROW
    return (f'<svg class="links" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'aria-hidden="true">{"".join(parts)}</svg>')


@dataclass(frozen=True)
class Point:
    """A kernel in the roofline picture. ``rate``: multiply-adds a second (None: not measured); ``weight``: its part of
    the step's time."""

    name: str
    family: str
    intensity: float
    rate: float | None
    weight: float


def roofline(roof: Roof, points: Sequence[Point]) -> str:
    """Multiply-adds a second over multiply-adds a byte, both logarithmic. Unmeasured points lie on the roof."""
    shown = [p for p in points if p.intensity > 0]
    if not shown:
        return ""
    ridge = roof.multiply / roof.read
    low = min([p.intensity for p in shown] + [ridge]) / 2
    high = max([p.intensity for p in shown] + [ridge]) * 2
    rates = [p.rate for p in shown if p.rate]
    top, bottom = roof.multiply * 2, min([low * roof.read, *rates]) / 2
    w, h, left, under = 640, 300, 64, 34

    def x(v: float) -> float:
        return left + (w - left - 14) * math.log(v / low) / math.log(high / low)

    def y(v: float) -> float:
        return 10 + (h - under - 10) * math.log(top / v) / math.log(top / bottom)

    out = [f'<svg class="roofline" viewBox="0 0 {w} {h}" role="img" aria-label="roofline of {escape(roof.machine)}">']
    for e in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        out.append(f'<path class="grid" d="M{x(10.0**e):.1f} 10V{h - under}"/><text x="{x(10.0**e):.1f}" '
                   f'y="{h - under + 15}" text-anchor="middle">{_power(e)}</text>')
    for e in range(math.ceil(math.log10(bottom)), math.floor(math.log10(top)) + 1):
        out.append(f'<path class="grid" d="M{left} {y(10.0**e):.1f}H{w - 14}"/><text x="{left - 6}" '
                   f'y="{y(10.0**e) + 4:.1f}" text-anchor="end">{_rate(e)}</text>')
    out.append(f'<path class="roof" d="M{x(low):.1f} {y(low * roof.read):.1f}L{x(ridge):.1f} {y(roof.multiply):.1f}'
               f'H{w - 14}"/>')
    for p in sorted(shown, key=lambda p: -p.weight):
        rate = p.rate or min(roof.multiply, p.intensity * roof.read)
        radius = 3 + 14 * math.sqrt(max(p.weight, 0.0))
        share = f"{rate / min(roof.multiply, p.intensity * roof.read):.0%} of the roof, " if p.rate else ""
        out.append(f'<circle class="f-{p.family}" cx="{x(p.intensity):.1f}" cy="{y(rate):.1f}" r="{radius:.1f}"><title>'
                   f'{escape(p.name)}: {p.intensity:.3g} multiply-adds a byte, {share}{p.weight:.1%} of the step'
                   f'</title></circle>')
    out.append(f'<text class="axis" x="{w - 14}" y="{h - 4}" text-anchor="end">multiply-adds a byte</text></svg>')
    return "".join(out)


def _power(e: int) -> str:
    return f"{10.0**e:g}"


def _rate(e: int) -> str:
    for name, at in (("P", 15), ("T", 12), ("G", 9), ("M", 6)):
        if e >= at:
            return f"{10.0 ** (e - at):g} {name}/s"
    return f"{10.0**e:g}/s"


def memory_map(entry: Mapping[str, Any], ratios: Sequence[int]) -> str:
    """Buffers of the arena: launches from left to right, bytes from bottom to top, at the limits of all axes."""
    limits = axis_limits(dict(entry["limits"]), tuple(ratios))
    total, count = max(entry["arena"], 1), max(len(entry["launches"]), 1)
    w, h, left = 1000, 320, 70
    step = (w - left) / (count + 1)
    out = [f'<svg class="map" viewBox="0 0 {w} {h + 26}" preserveAspectRatio="none" role="img" '
           f'aria-label="memory of a step">']
    for part in (0, 0.25, 0.5, 0.75, 1):
        y = 4 + (h - 4) * (1 - part)
        out.append(f'<path class="grid" d="M{left} {y:.1f}H{w}"/><text x="{left - 6}" y="{y + 4:.1f}" '
                   f'text-anchor="end">{size(total * part)}</text>')
    for first, rows_count, *_ in entry["loops"]:
        out.append(f'<rect class="loop" x="{left + first * step:.1f}" y="{h + 4}" width="{rows_count * step:.1f}" '
                   f'height="6"><title>row loop over {rows_count} launches</title></rect>')
    for axis, row_bytes, first, last, offset, rows in entry["buffers"]:
        used = row_bytes * (rows or limits[axis])
        x, wide = left + first * step, max((last - first + 1) * step, 0.8)
        high = (h - 4) * used / total
        y = h - (h - 4) * offset / total - high
        kind = "tile" if rows else axis.split("/")[0].lower().replace("_", "-")
        out.append(f'<rect class="b-{kind}" x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{max(high, 0.4):.2f}">'
                   f'<title>{size(used)}: {row_bytes:,} bytes a row of {axis}, launches {first} to {last}'
                   f'{", one tile of a row loop" if rows else ""}</title></rect>')
    out.append(f'<text class="axis" x="{w}" y="{h + 22}" text-anchor="end">launches of a step →</text></svg>')
    return "".join(out)


def size(count: float) -> str:
    """``1.5 GB``: three digits, decimal."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def number(count: float) -> str:
    """``17.8 G``."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.3g}"


def duration(seconds: float | None) -> str:
    """``1.25 ms``; a dash for what was not measured."""
    if seconds is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0"
