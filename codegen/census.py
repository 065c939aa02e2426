"""Kernels per layer kind: layers whose launches are the same sequence of kernels are one kind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.codegen.plan.launch import Commit, LaunchTable

_LAYER = re.compile(r"^([A-Za-z_]+)\.(\d+)(?:\.|$)")


@dataclass(frozen=True)
class LayerKind:
    """``layers``: as printed, ``layers.3-7``; ``launches``: kernels of one such layer, ring commits apart; ``members``:
    launch numbers of each layer of the kind."""

    layers: str
    count: int
    launches: int
    families: dict[str, int]
    members: tuple[tuple[int, ...], ...] = ()


def layer_kinds(table: LaunchTable, families: Sequence[str], entry: str) -> list[LayerKind]:
    """Kinds of one entry of a launch table; ``families``: of each kernel of the table."""
    steps = [None if isinstance(s, Commit) else (s.scope, s.kernel) for s in table.entries[entry].launches]
    return kinds_of(steps, families)


def kinds_of(steps: Sequence[tuple[str, int] | None], families: Sequence[str]) -> list[LayerKind]:
    """Kinds in order of first appearance. ``steps``: (scope, kernel) of each launch, None for what is no kernel;
    ``families``: by kernel.

    A kernel belongs to the layer of the node that ends it; one that serves several layers counts where it ends.
    """
    per_layer: dict[tuple[str, int], list[int]] = {}
    for i, step in enumerate(steps):
        if step is not None:
            per_layer.setdefault(layer_of(step[0]), []).append(i)
    kernel = [step[1] if step else -1 for step in steps]
    kinds: dict[tuple[str, tuple[int, ...]], list[tuple[str, int]]] = {}
    for key, launches in sorted(per_layer.items(), key=lambda kv: (kv[0][1] >= 0, kv[0])):
        kinds.setdefault((key[0], tuple(sorted(kernel[i] for i in launches))), []).append(key)
    out = []
    for members in kinds.values():
        launches = per_layer[members[0]]
        counts: dict[str, int] = {}
        for i in launches:
            counts[families[kernel[i]]] = counts.get(families[kernel[i]], 0) + 1
        out.append(LayerKind(_printed(members), len(members), len(launches), dict(sorted(counts.items())),
                             tuple(tuple(per_layer[m]) for m in members)))
    return out


def layer_of(scope: str) -> tuple[str, int]:
    """``layers.3.attn`` -> ("layers", 3); a scope outside of numbered layers has number -1."""
    m = _LAYER.match(scope)
    return (m[1], int(m[2])) if m else (scope.split(".")[0] or "start", -1)


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
