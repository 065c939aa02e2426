"""Row loops: runs of launches that may take a tile of rows at a time, so that what lives only inside them stays small.

A step of thousands of rows would hold queries, expert slots and the like of all its rows at once. Launches on one axis
are run as a loop over tiles of rows instead: values that are made and used inside need memory for one tile only. This
is the same computation as long as no row reads a later one: a row reads windows and entries up to its own position, and
those of its tile and of earlier ones are there when it is reached. An unmasked block of rows ends a run. A step that
fits into one tile runs each launch once, as without the loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.codegen.plan.launch import Buffer, Commit, EntryTable, Launch, Loop
from deepinfer.dsl.types import KEPT, STEP

_TILE = 64  # rows: fewer leave a matrix kernel without reuse of its weights
_AXES = (str(STEP), str(KEPT))


@dataclass
class _Run:
    """Launches that may share a loop, and the commits that wait for its end."""

    launches: list[Launch] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)

    @property
    def steps(self) -> list[Launch | Commit]:
        return [*self.launches, *self.commits]

    def takes(self, launch: Launch, spec: KernelSpec) -> bool:
        if launch.axis not in _AXES or reads_other_rows(spec):
            return False
        return not self.launches or self.launches[0].axis == launch.axis


def reads_other_rows(spec: KernelSpec) -> bool:
    """Whether a row of the kernel reads values of other rows of this step (states apart)."""
    return spec.family == "attend" and any(kind == "block" for kind, *_ in spec.get("sources"))


def lifetimes(entry: EntryTable, fresh: dict[int, int]) -> list[Buffer]:
    """Buffers with the launches between which they live. ``fresh``: ring state -> buffer of its new rows.

    In a loop a buffer from outside lives through the whole loop, for every tile reads or writes its part of it.
    """
    spans: dict[int, tuple[int, int]] = {}

    def touch(buffer: int, first: int, last: int) -> None:
        have = spans.get(buffer, (first, last))
        spans[buffer] = (min(have[0], first), max(have[1], last))

    around = {i: (loop.first, loop.first + loop.count - 1)
              for loop in entry.loops for i in range(loop.first, loop.first + loop.count)}
    for i, step in enumerate(entry.launches):
        used = [fresh[step.state]] if isinstance(step, Commit) else [
            *(a.index for a in step.args if a.kind == "b"),
            *(fresh[a.index] for a in step.args if a.kind == "s" and a.index in fresh)]
        for b in used:
            touch(b, *((i, i) if entry.buffers[b].rows else around.get(i, (i, i))))
    for b in entry.outputs.values():
        touch(b, len(entry.launches), len(entry.launches))
    for i, buffer in enumerate(entry.buffers):
        if buffer.borrowed:
            touch(i, 0, len(entry.launches))
    return [replace(b, first=spans[i][0], last=spans[i][1]) for i, b in enumerate(entry.buffers)]


def add_row_loops(entry: EntryTable, specs: list[KernelSpec], fresh: dict[int, int], limits: dict[str, int],
                  workspace_bytes: int) -> None:
    """Orders the launches of ``entry`` into runs and makes loops of those that have something to gain.

    ``limits``: most rows of each axis. Commits move behind the loop that reads their ring.
    """
    runs: list[_Run] = [_Run()]
    for step in entry.launches:
        if isinstance(step, Commit):
            runs[-1].commits.append(step)
            continue
        if not runs[-1].takes(step, specs[step.kernel]):
            runs.append(_Run())
            if not runs[-1].takes(step, specs[step.kernel]):
                runs[-1].launches.append(step)
                runs.append(_Run())
                continue
        runs[-1].launches.append(step)
    entry.launches = [x for run in runs for x in run.steps]
    plain = lifetimes(entry, fresh)
    at = 0
    for run in runs:
        _loop(entry, plain, run, at, fresh, limits, workspace_bytes)
        at += len(run.steps)


def _loop(entry: EntryTable, plain: list[Buffer], run: _Run, at: int, fresh: dict[int, int], limits: dict[str, int],
          workspace_bytes: int) -> None:
    if len(run.launches) < 2:
        return
    axis, last = run.launches[0].axis, at + len(run.launches) - 1
    local = [i for i, b in enumerate(plain)
             if b.axis == axis and at <= b.first and b.last <= last and i not in fresh.values()]
    peak = max((sum(plain[i].row_bytes for i in local if plain[i].first <= j <= plain[i].last)
                for j in range(at, last + 1)), default=0)
    unit = math.lcm(_TILE, *(x.rows_per_item for x in run.launches))
    rows = max(unit, workspace_bytes // max(peak, 1) // unit * unit)
    if not local or rows >= limits[axis]:
        return
    entry.loops.append(Loop(at, len(run.launches), axis, rows))
    for i in local:
        entry.buffers[i] = replace(entry.buffers[i], rows=rows)
