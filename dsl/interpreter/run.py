"""Runs Graph IR on one sequence: whole entries against a state, or any region of nodes on given values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer.dsl.graph import Graph, Node
from deepinfer.dsl.interpreter import attention, routing, rows, tile
from deepinfer.dsl.interpreter.context import TABLE, Context, Draw, Value, greedy, tensor
from deepinfer.dsl.interpreter.frame import Frame, StepRows
from deepinfer.dsl.interpreter.state import SequenceState, StateValue, empty
from deepinfer.dsl.interpreter.weights import Weights
from deepinfer.dsl.model import Program
from deepinfer.dsl.state import State
from deepinfer.dsl.types import state_handle
from deepinfer.errors import InternalError

IMPLEMENTED_IN = (attention, routing, rows, tile)  # imported for what they register
Watch = Callable[[Node], bool]


def evaluate(ctx: Context, nodes: Iterable[Node], values: Mapping[int, Value],
             drop: Mapping[int, Sequence[int]] | None = None, seen: Callable[[Node, Value], None] | None = None,
             ) -> dict[int, Value]:
    """Values by node id of ``nodes`` in order, on top of the given ``values`` (a node with a given value is not run).

    ``drop``: node id -> ids of the values that nothing reads after it. ``seen`` is told each value.
    """
    env = dict(values)
    for n in nodes:
        if n.id not in env:
            env[n.id] = TABLE[n.op](ctx, n, [env[i.id] for i in n.inputs])
        if seen is not None:
            seen(n, env[n.id])
        for i in drop.get(n.id, ()) if drop else ():
            del env[i]
    return env


@dataclass
class Result:
    """What an entry published: ``outputs`` by name, and the values of watched nodes."""

    outputs: dict[str, Tensor]
    watched: list[tuple[Node, Value]] = field(default_factory=list)

    def at(self, *, pin: str | None = None, scope: str | None = None, op: str | None = None) -> Tensor:
        """The one watched tensor of a node with this selection name, scope and op."""
        found = [tensor(v) for n, v in self.watched
                 if pin in (None, n.attrs.get("pin")) and scope in (None, n.scope) and op in (None, n.op)]
        if len(found) != 1:
            raise InternalError(f"{len(found)} watched values match pin={pin} scope={scope} op={op}")
        return found[0]


class _Prepared:
    """What is known about a graph before it runs: values that no step changes, when a value is last read, and the
    last handle of each state."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        fixed: set[int] = set()
        for n in graph.nodes:
            if n.type.rows is None and n.type.dtype != state_handle and all(i.id in fixed for i in n.inputs):
                fixed.add(n.id)
        self.fixed = [n for n in graph.nodes if n.id in fixed]
        self.moving = [n for n in graph.nodes if n.id not in fixed]
        self.written: dict[str, int] = {}
        for n in graph.of("extend", "append"):
            self.written[n.attrs["state"]] = n.id
        kept = {o.id for o in graph.outputs.values()} | set(self.written.values())
        last_reader = {i.id: n.id for n in self.moving for i in n.inputs if i.id not in kept}
        self.drop: dict[int, list[int]] = {}
        for i, reader in last_reader.items():
            self.drop.setdefault(reader, []).append(i)
        self.values: dict[int, Value] | None = None


class Interpreter:
    """The reference meaning of a program.

    Args:
        program: a traced model, or graphs by entry name (also after compiler passes).
        weights: checkpoint tensors by name, in their storage dtypes.
        dtype: compute dtype, float64 or float32. Quantisers and bf16 rounding read the f32 image of a value.
        derived: values of parameters that the spec makes at load time, by parameter name.
        draw: token choice of ``draw`` nodes, (logits [rows, V], positions [rows]) -> [rows] i64.
    """

    def __init__(self, program: Program | Mapping[str, Graph], weights: Mapping[str, Tensor],
                 dtype: torch.dtype = torch.float64, derived: Mapping[str, Tensor] | None = None,
                 draw: Draw = greedy) -> None:
        self.graphs = dict(program.graphs if isinstance(program, Program) else program)
        self.dtype = dtype
        self.states: dict[str, State] = {k: s for g in self.graphs.values() for k, s in g.states.items()}
        self._weights = Weights(weights, derived or {}, dtype)
        self._draw = draw
        self._prepared = {name: _Prepared(g) for name, g in self.graphs.items()}

    def new_state(self) -> SequenceState:
        """State of a sequence that has no rows yet."""
        return SequenceState()

    def step(self, state: SequenceState, step: StepRows, pins: Mapping[str, Tensor] | None = None,
             watch: Watch | None = None) -> Result:
        """Run the entry ``step`` on one sequence's rows; ``state`` moves to the rows after it."""
        return self.run("step", state, step, pins, watch)

    def draft(self, state: SequenceState, ids: Sequence[int], start: int, pins: Mapping[str, Tensor] | None = None,
              watch: Watch | None = None, window_start: Mapping[str, int] | None = None) -> Result:
        """Run the entry ``draft`` on the block ``ids`` at positions from ``start``, the rows processed so far."""
        return self.run("draft", state, StepRows(ids, start, window_start=window_start or {}), pins, watch)

    def run(self, entry: str, state: SequenceState, step: StepRows, pins: Mapping[str, Tensor] | None = None,
            watch: Watch | None = None) -> Result:
        """Run any entry. ``watch`` chooses nodes whose values come back in ``Result.watched``."""
        if entry not in self._prepared:
            raise InternalError(f"the program has no entry {entry}, only {', '.join(self._prepared)}")
        p = self._prepared[entry]
        ctx = self.context(step, state, pins)
        if p.values is None:
            p.values = evaluate(ctx, p.fixed, {})
        watched: list[tuple[Node, Value]] = []

        def seen(n: Node, v: Value) -> None:
            if watch is not None and watch(n):
                watched.append((n, v))

        values = evaluate(ctx, p.moving, p.values, p.drop, seen)
        for name, node in p.written.items():
            value = values[node]
            if isinstance(value, Tensor):
                raise InternalError(f"the write of {name} left no state")
            state.values[name] = value
        return Result({k: tensor(values[n.id]) for k, n in p.graph.outputs.items()}, watched)

    def run_region(self, nodes: Sequence[Node], values: Mapping[int, Value], step: StepRows,
                   pins: Mapping[str, Tensor] | None = None, state: SequenceState | None = None) -> dict[int, Value]:
        """Values by node id of any region: ``values`` gives every input that the region does not compute itself.

        ``step`` says which rows the row axes have; ``state`` gives the initial state handles.
        """
        return evaluate(self.context(step, state or SequenceState(), pins), nodes, values)

    def context(self, step: StepRows, state: SequenceState, pins: Mapping[str, Tensor] | None = None) -> Context:
        """Everything an op may look at in one step of one sequence."""
        held: dict[str, StateValue] = {
            name: state.values[name] if name in state.values else empty(s, self.dtype)
            for name, s in self.states.items()}
        return Context(Frame(step), self.dtype, self._weights, held, pins or {}, self._draw, evaluate,
                       self.states)
