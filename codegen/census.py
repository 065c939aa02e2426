"""Kernels per layer kind: layers whose launches are the same sequence of kernels are one kind."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deepinfer.codegen.plan.launch import Commit, LaunchTable

_LAYER = re.compile(r"^([A-Za-z_]+)\.(\d+)(?:\.|$)")


@dataclass(frozen=True)
class LayerKind:
    """``layers``: as printed, ``layers.3-7``; ``launches``: kernels of one such layer, ring commits apart."""

    layers: str
    count: int
    launches: int
    families: dict[str, int]


def layer_kinds(table: LaunchTable, families: list[str], entry: str) -> list[LayerKind]:
    """Kinds of one entry in order of first appearance. ``families``: of each kernel of the table.

    A kernel belongs to the layer of the node that ends it; one that serves several layers counts where it ends.
    """
    per_layer: dict[tuple[str, int], list[int]] = {}
    for step in table.entries[entry].launches:
        if isinstance(step, Commit):
            continue
        m = _LAYER.match(step.scope)
        key = (m[1], int(m[2])) if m else (step.scope.split(".")[0] or "start", -1)
        per_layer.setdefault(key, []).append(step.kernel)
    kinds: dict[tuple[str, tuple[int, ...]], list[tuple[str, int]]] = {}
    for key, kernels in sorted(per_layer.items(), key=lambda kv: (kv[0][1] >= 0, kv[0])):
        kinds.setdefault((key[0], tuple(sorted(kernels))), []).append(key)
    out = []
    for members in kinds.values():
        kernels = per_layer[members[0]]
        counts: dict[str, int] = {}
        for k in kernels:
            counts[families[k]] = counts.get(families[k], 0) + 1
        out.append(LayerKind(_printed(members), len(members), len(kernels), dict(sorted(counts.items()))))
    return out


def _printed(members: list[tuple[str, int]]) -> str:
    name, numbers = members[0][0], [n for _, n in members]
    if numbers[0] < 0:
        return name
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return name + "." + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
