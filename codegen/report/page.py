"""``render_report``: the figures of an engine as one HTML page without any reference to another file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from deepinfer.backends.base import Roof
from deepinfer.codegen.census import LayerKind
from deepinfer.codegen.plan.memory_plan import Footprint
from deepinfer.codegen.report.charts import ROW, Point, duration, links, memory_map, number, roofline, size
from deepinfer.codegen.report.model import STEP_ENTRY, Account, EngineFacts, Measured, Shape, Step

_TEMPLATE = Path(__file__).with_name("page.html.jinja")


def render_report(manifest: Mapping[str, Any], explanation: Mapping[str, Any],
                  measured: Sequence[Measured] = ()) -> str:
    """The page.

    ``manifest``, ``explanation``: of an engine; ``measured``: profiles of it, whose shapes are shown first. Equal
    arguments give equal text.
    """
    facts = EngineFacts(manifest, explanation, tuple(measured))
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True,
                                     undefined=jinja2.StrictUndefined)
    environment.filters |= {"size": size, "number": number, "duration": duration}
    page = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    details: list[dict[str, Any]] = []
    layers = [_layer(facts, entry, kind, details) for entry in facts.entries for kind in facts.kinds(entry)]
    return page.render(
        manifest=manifest, facts=facts, footprint=Footprint.from_dict(manifest["footprint"]), row=ROW,
        entries=[_entry(facts, name) for name in facts.entries], layers=layers, views=_views(facts),
        first=max(range(len(layers)), key=lambda i: (layers[i]["entry"] == STEP_ENTRY, _weight(layers[i])), default=0),
        details=Markup(json.dumps(details, separators=(",", ":")).replace("<", "\\u003c")))


def _entry(facts: EngineFacts, name: str) -> dict[str, Any]:
    raw = facts.entries[name]
    ratios = sorted({int(b[0].split("/")[1]) for b in raw["buffers"] if "/" in b[0]})
    steps = facts.steps(name)
    kernels = sum(s.is_kernel for s in steps)
    return {"name": name, "kernels": kernels, "commits": len(steps) - kernels, "arena": raw["arena"],
            "loops": len(raw["loops"]), "limits": raw["limits"], "map": Markup(memory_map(raw, ratios)),
            "kinds": facts.kinds(name)}


def _layer(facts: EngineFacts, entry: str, kind: LayerKind, details: list[dict[str, Any]]) -> dict[str, Any]:
    """One layer of a kind as a list of kernels with the data between them; what a click shows goes to ``details``."""
    steps = facts.steps(entry)
    members = [steps[i] for i in kind.members[0]]
    made = {b: row for row, s in enumerate(members) for b in s.raw["writes"]}
    edges = [(made[b], row) for row, s in enumerate(members) for b in s.raw["reads"] if made.get(b, row) < row]
    outside = {row for row, s in enumerate(members) if any(b not in made for b in s.raw["reads"])}
    shape, roof = facts.shapes[0], facts.roofs[0] if facts.roofs else None
    rows = []
    for s in members:
        kernel = facts.kernels[s.raw["kernel"]]
        moved, macs = s.cost.bytes(shape.step), s.cost.macs(shape.step)
        rows.append({"detail": len(details), "family": kernel["family"], "title": _words(s), "axis": s.raw["rows"],
                     "where": ".".join(s.scope.split(".")[2:]) if s.layer[1] >= 0 else s.scope, "bytes": moved})
        least = f", {duration(roof.seconds(moved, macs))} at least on {roof.machine}" if roof else ""
        details.append({"symbol": kernel["symbol"], "source": kernel["source"], "family": kernel["family"],
                        "why": s.raw["why"], "lines": [" → ".join(chain) for chain in s.raw["lines"]],
                        "ops": ", ".join(f"{op} ({n})" if n > 1 else op for op, n in s.raw["ops"].items()),
                        "states": ", ".join(s.raw["states"]), "params": ", ".join(s.raw["params"]),
                        "cost": f"{size(moved)}, {number(macs)} multiply-adds{least} ({shape.name})"})
    return {"entry": entry, "kind": kind, "rows": rows, "links": Markup(links(len(rows), edges, outside))}


def _weight(layer: Mapping[str, Any]) -> tuple[int, int]:
    """Layers of a kind, then kernels of one: what is shown first."""
    return layer["kind"].count, layer["kind"].launches


def _words(step: Step) -> str:
    """The ops of a kernel that say most about it."""
    common = {"add", "mul", "sub", "div", "slice", "reshape", "concat", "cast", "const", "expand", "broadcast", "param"}
    ops = [op for op in step.raw["ops"] if op not in common] or list(step.raw["ops"])
    return ", ".join(ops[:5]) + (" …" if len(ops) > 5 else "")


def _views(facts: EngineFacts) -> list[dict[str, Any]]:
    """Figures of each shape: sums by family and by layer kind, kernels that take most, the roofline."""
    measured = {m.shape: m for m in facts.measured if m.entry == STEP_ENTRY}
    shapes = [*measured, *(s for s in facts.shapes if s not in measured)]
    views: list[dict[str, Any]] = []
    for shape in shapes:
        profile = measured.get(shape)
        roofs = (profile.roof,) if profile else facts.roofs
        views += [_view(facts, shape, roof, profile) for roof in roofs]
    return views


def _view(facts: EngineFacts, shape: Shape, roof: Roof, profile: Measured | None) -> dict[str, Any]:
    def accounts(groups: Mapping[str, Sequence[Step]]) -> list[Account]:
        return facts.accounts(shape, groups, roof, profile)

    kernels: dict[str, list[Step]] = {}
    for s in facts.steps():
        if s.is_kernel:
            kernels.setdefault(str(facts.kernels[s.raw["kernel"]]["symbol"]), []).append(s)
    family = {str(k["symbol"]): str(k["family"]) for k in facts.kernels}
    each = accounts(kernels)
    total = accounts({"all": facts.steps()})[0]
    whole = total.measured or total.predicted or total.least
    timed = "measured" if profile is not None else "predicted" if total.predicted else ""

    def taken(a: Account) -> float:
        seconds = a.measured if timed == "measured" else a.predicted if timed == "predicted" else a.least
        return (seconds or 0.0) / whole if whole else 0.0

    points = [Point(a.name, family[a.name], a.macs / a.bytes if a.bytes else 0,
                    a.macs / a.measured if a.measured else None, taken(a)) for a in each]
    tokens = shape.step.sequences * shape.step.rows
    most = sorted(each, key=lambda a: -taken(a))[:12]
    groups = facts.by_kind()
    pipes = [(a, facts.pipes(kernels[a.name], shape, roof), facts.bounds(kernels[a.name], shape, roof))
             for a in most] if timed == "predicted" else []
    return {"name": shape.name, "roof": roof, "measured": profile is not None, "timed": timed,
            "total": total,
            "rate": tokens / whole if whole else 0.0,
            "families": [(a, taken(a)) for a in accounts(facts.by_family())],
            "kinds": [(a, taken(a), facts.bounds(groups[a.name], shape, roof)) for a in accounts(groups)],
            "pipes": pipes, "columns": list(dict.fromkeys(pipe for _, busy, _ in pipes for pipe in busy)),
            "top": [(a, taken(a), family[a.name]) for a in most], "roofline": Markup(roofline(roof, points))}
