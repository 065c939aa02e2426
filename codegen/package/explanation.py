"""``explain.json``: every launch of an engine with where it comes from, why it ends where it ends, and what it costs.

    {"roofs": [machine, ...],
     "texts": {"file.py:line": that line of the spec, ...},
     "kernels": [{"symbol", "family", "title", "source", "work" (backends/work.py; where predicted)}, ...],
     "entries": {"step": {"launches": [...], "buffers": [...], "loops": [...], "arena": bytes, "limits": {...}}}}

A launch is ``{"commit": state, "scope"}`` or has ``kernel`` (its number), ``rows`` (axis), ``scope``, ``why``,
``lines`` (chains of spec lines, the entry function first; those of anchors before others), ``ops`` (counts),
``reads`` and ``writes`` (buffer numbers), ``states``, ``params``, ``cost`` (plan/cost.py). A buffer is ``[axis, bytes a
row, first launch, last launch, offset, rows of a loop's tile]``.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepinfer.backends.base import Roof, Source
from deepinfer.codegen.lower import Plan
from deepinfer.codegen.passes.fuse import ANCHORS
from deepinfer.codegen.plan.cost import launch_cost
from deepinfer.codegen.plan.launch import Commit, EntryTable, Launch
from deepinfer.dsl.graph import Node


def explanation(plan: Plan, roofs: Sequence[Roof]) -> dict[str, Any]:
    """The content of ``explain.json``, see the module."""
    lowered = plan.lowered
    kernels = [{"symbol": source.symbol, "family": spec.family, "title": spec.title,
                "source": f"src/{source.symbol}{source.suffix}", **_work(source)}
               for spec, source in zip(lowered.specs, lowered.sources, strict=True)]
    entries = {name: _entry(plan, name, entry) for name, entry in lowered.table.entries.items()}
    places = {place for entry in entries.values() for launch in entry["launches"]
              for chain in launch.get("lines", ()) for place in chain}
    return {"roofs": [asdict(r) for r in roofs], "texts": spec_texts(plan.model.spec, places), "kernels": kernels,
            "entries": entries}


def spec_texts(module: str, places: Iterable[str]) -> dict[str, str]:
    """Text of each ``file:line`` beside a spec's module, as it is while compiling: an engine is explained by the spec
    that it was made from, not by a later one. Places that are not at hand are left out."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None or not found.origin:
        return {}
    texts, files = dict[str, str](), dict[str, list[str]]()
    for place in sorted(places):
        file, _, line = place.rpartition(":")
        if file not in files:
            path = Path(found.origin).with_name(file)
            files[file] = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        if 0 < int(line) <= len(files[file]):
            texts[place] = files[file][int(line) - 1].strip()
    return texts


def _work(source: Source) -> dict[str, Any]:
    work = getattr(source, "work", None)  # of backends that predict cycles
    return {} if work is None else {"work": work.as_dict()}


def _entry(plan: Plan, name: str, entry: EntryTable) -> dict[str, Any]:
    nodes = {n.id: n for n in plan.graphs[name]}
    launches = [{"commit": plan.lowered.table.states[s.state].name, "scope": s.scope} if isinstance(s, Commit) else
                _launch(plan, entry, s, nodes) for s in entry.launches]
    limits = dict(entry.limits or plan.lowered.table.limits)
    return {"launches": launches, "arena": entry.arena_bytes, "limits": limits,
            "buffers": [[b.axis, b.row_bytes, b.first, b.last, b.offset, b.rows] for b in entry.buffers],
            "loops": [[x.first, x.count, x.axis, x.rows] for x in entry.loops]}


def _launch(plan: Plan, entry: EntryTable, launch: Launch, nodes: Mapping[int, Node]) -> dict[str, Any]:
    spec = plan.lowered.specs[launch.kernel]
    inside = [nodes[i] for i in launch.nodes if i in nodes]
    given = list(zip(spec.operands, launch.args, strict=True))
    states = [plan.lowered.table.states[a.index].name for o, a in given if o.role == "state"]
    params = [plan.lowered.params[a.index].name for o, a in given if o.role == "param"]
    return {"kernel": launch.kernel, "rows": launch.axis, "scope": launch.scope, "why": launch.why,
            "lines": _lines(inside),
            "ops": dict(Counter(n.op for n in inside)),
            "reads": [a.index for o, a in given if o.role == "value" and not o.write],
            "writes": [a.index for o, a in given if o.role == "value" and o.write],
            "states": list(dict.fromkeys(states)), "params": list(dict.fromkeys(params)),
            "cost": launch_cost(launch, entry, plan.lowered).as_dict()}


def _lines(nodes: Sequence[Node]) -> list[tuple[str, ...]]:
    """Chains of spec lines, those of the kernel's anchors first."""
    anchors = dict.fromkeys(n.loc.chain for n in nodes if n.op in ANCHORS)
    return [*anchors, *sorted({n.loc.chain for n in nodes} - set(anchors))]
