"""The figures of the report, from an engine's manifest and explanation, and from a measured profile if there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from deepinfer.backends.base import Roof
from deepinfer.backends.work import Work
from deepinfer.codegen.census import LayerKind, kinds_of, layer_of
from deepinfer.codegen.plan.cost import LaunchCost, StepShape

STEP_ENTRY = "step"


@dataclass(frozen=True)
class Step:
    """One launch or ring commit of an entry, as the explanation has it. ``number``: its place in the entry."""

    number: int
    raw: Mapping[str, Any]

    @property
    def is_kernel(self) -> bool:
        return "kernel" in self.raw

    @property
    def scope(self) -> str:
        return str(self.raw["scope"])

    @property
    def layer(self) -> tuple[str, int]:
        return layer_of(self.scope)

    @cached_property
    def cost(self) -> LaunchCost:
        return LaunchCost.from_dict(self.raw["cost"])


@dataclass(frozen=True)
class Shape:
    """A step that the report counts: its name for people, and what it is."""

    name: str
    step: StepShape


@dataclass(frozen=True)
class Measured:
    """Microseconds of every launch of an entry in a step of that shape, the median of several; ``roof``: limits of the
    machine, measured in the same run."""

    shape: Shape
    entry: str
    microseconds: tuple[float, ...]
    roof: Roof


@dataclass(frozen=True)
class Account:
    """A sum over launches: how many, bytes, multiply-adds, least seconds on a roof, measured seconds (None: not), and
    seconds that the backend predicts (None: it does not)."""

    name: str
    launches: int
    bytes: float
    macs: float
    least: float
    measured: float | None = None
    predicted: float | None = None

    @property
    def share(self) -> float | None:
        """Of the roof, of what was measured, else of what is predicted."""
        taken = self.measured or self.predicted
        return self.least / taken if taken else None


@dataclass(frozen=True)
class EngineFacts:
    """``manifest`` and ``explanation`` of an engine; ``measured``: profiles."""

    manifest: Mapping[str, Any]
    explanation: Mapping[str, Any]
    measured: tuple[Measured, ...] = field(default=())

    @property
    def entries(self) -> Mapping[str, Any]:
        entries: Mapping[str, Any] = self.explanation["entries"]
        return entries

    @property
    def kernels(self) -> Sequence[Mapping[str, Any]]:
        kernels: Sequence[Mapping[str, Any]] = self.explanation["kernels"]
        return kernels

    @cached_property
    def roofs(self) -> tuple[Roof, ...]:
        return tuple(Roof(**{**r, "units": tuple(map(tuple, r.get("units", ())))}) for r in self.explanation["roofs"])

    @cached_property
    def works(self) -> tuple[Work | None, ...]:
        """What the backend predicts of each kernel."""
        return tuple(Work.from_dict(k["work"]) if "work" in k else None for k in self.kernels)

    def _asked(self, s: Step, shape: Shape) -> tuple[float, float, float]:
        """Rows of a launch, keys that each meets, bytes."""
        rows = shape.step.on(s.cost.axis)
        return (rows, s.cost.met(shape.step), s.cost.bytes(shape.step)) if rows else (0.0, 0.0, 0.0)

    def _work(self, s: Step, roof: Roof) -> Work | None:
        return self.works[s.raw["kernel"]] if s.is_kernel and roof.units else None

    def predicted(self, steps: Sequence[Step], shape: Shape, roof: Roof) -> float | None:
        """Seconds of launches as the backend predicts them; None where it has no figures of one of them."""
        works = [(self._work(s, roof), s) for s in steps if s.is_kernel]
        if any(w is None for w, _ in works):
            return None
        return sum(w.seconds(roof, *self._asked(s, shape)) for w, s in works if w is not None)

    def pipes(self, steps: Sequence[Step], shape: Shape, roof: Roof) -> dict[str, float]:
        """Cycles that pipes of the busiest unit work in launches, the sum of all; {} where nothing is predicted."""
        total: dict[str, float] = {}
        for s in steps:
            work = self._work(s, roof)
            for pipe, cycles in (work.cycles(roof, *self._asked(s, shape)) if work else {}).items():
                total[pipe] = total.get(pipe, 0.0) + cycles
        return total

    def bounds(self, steps: Sequence[Step], shape: Shape, roof: Roof) -> dict[str, float]:
        """Parts of the predicted time by the pipe that is busiest in each launch, the largest first; ``launch``: what
        launches take by themselves."""
        parts: dict[str, float] = {}
        for s in steps:
            work, busy = self._work(s, roof), self.pipes([s], shape, roof)
            if work is None or not busy:
                continue
            start, pipe = work.launches * roof.launch, max(busy, key=lambda p: busy[p])
            parts[pipe] = parts.get(pipe, 0.0) + work.seconds(roof, *self._asked(s, shape)) - start
            parts["launch"] = parts.get("launch", 0.0) + start
        whole = sum(parts.values())
        return {pipe: t / whole for pipe, t in sorted(parts.items(), key=lambda x: -x[1])}

    def steps(self, entry: str = STEP_ENTRY) -> list[Step]:
        """Launches and commits of an entry in order."""
        return [Step(i, raw) for i, raw in enumerate(self.entries[entry]["launches"])]

    def kinds(self, entry: str = STEP_ENTRY) -> list[LayerKind]:
        """Layers that are the same sequence of kernels."""
        steps = [(s.scope, int(s.raw["kernel"])) if s.is_kernel else None for s in self.steps(entry)]
        return kinds_of(steps, [str(k["family"]) for k in self.kernels])

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Steps that the report counts: decoding alone, with eight sequences and with all; one whole chunk."""
        plan = self.manifest["plan"]
        limits = plan["limits"]
        context = min(4096, plan["max_model_len"] // 2)
        found = [decoding(n, context) for n in sorted({1, min(8, limits["seq"]), limits["seq"]})]
        rows = min(limits["step"], plan["max_model_len"])
        kept = min(rows, self.manifest["footprint"]["cache"]["clock"]["keep"] or rows)
        return *found, prefilling(rows, kept)

    def accounts(self, shape: Shape, groups: Mapping[str, Sequence[Step]], roof: Roof,
                 measured: Measured | None = None) -> list[Account]:
        """One account for each group of launches."""
        out = []
        for name, steps in groups.items():
            costs = [s.cost for s in steps if s.is_kernel]
            sizes = [(c.bytes(shape.step), c.macs(shape.step)) for c in costs]
            time = sum(measured.microseconds[s.number] for s in steps) / 1e6 if measured else None
            out.append(Account(name, len(costs), sum(b for b, _ in sizes), sum(m for _, m in sizes),
                               sum(roof.seconds(b, m) for b, m in sizes), time,
                               None if measured else self.predicted(steps, shape, roof)))
        return out

    def by_family(self, entry: str = STEP_ENTRY) -> dict[str, list[Step]]:
        """Launches by kernel family; ring commits are a group of their own."""
        groups: dict[str, list[Step]] = {}
        for s in self.steps(entry):
            name = str(self.kernels[s.raw["kernel"]]["family"]) if s.is_kernel else "ring commit"
            groups.setdefault(name, []).append(s)
        return groups

    def by_kind(self, entry: str = STEP_ENTRY) -> dict[str, list[Step]]:
        """Launches by layer kind."""
        steps = self.steps(entry)
        groups = {k.layers: [steps[i] for m in k.members for i in m] for k in self.kinds(entry)}
        owner = {steps[i].layer: k.layers for k in self.kinds(entry) for m in k.members for i in m}
        for s in steps:
            if not s.is_kernel:
                groups[owner.get(s.layer, next(iter(groups)))].append(s)
        return groups


def decoding(sequences: int, context: int) -> Shape:
    """A step of one new row for each sequence."""
    word = "sequence" if sequences == 1 else "sequences"
    return Shape(f"decode, {sequences} {word} at {context:,} tokens", StepShape(sequences, 1, context, 1))


def prefilling(rows: int, kept: int) -> Shape:
    """A step of the first ``rows`` rows of one prompt, of which the last ``kept`` are kept."""
    return Shape(f"prefill, {rows:,} rows of one prompt", StepShape(1, rows, 0, kept))
