"""Narrowing: every node moves to the row axis that liveness found; ``keep`` nodes mark where rows are
dropped.

Axes are types, so one graph, and later one launch table, serves every number of kept rows: K is a number of
a request at run time (all rows, the exact halo, or fewer under the licence), never of the graph.

A value that narrower readers need crosses through a ``keep``. A keep costs no copy (a kernel reads the wider
value through the row map of the step); what counts is the bytes of a row that have to be there on both
sides. So a cut goes above a view (a reshape is taken again on the narrower axis) or below it, whichever
crosses fewer bytes, and position arithmetic that depends on the runner's integers alone (RoPE tables) is
computed again instead of kept.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from deepinfer.codegen.passes.liveness import Bound, Liveness, block_operands, liveness, matmul_work
from deepinfer.dsl import ops
from deepinfer.dsl.graph import Attr, Graph, Node, rebuild
from deepinfer.dsl.model import Model
from deepinfer.dsl.state import Window
from deepinfer.dsl.types import KEPT, STEP, WANTED, Rows, Type
from deepinfer.errors import InternalError, PlanError

_ORDER = (STEP, KEPT, WANTED)


@dataclass(frozen=True)
class Replay:
    """How many rows at the end of a prompt have to be kept, and how far a prefix hit goes back.

    ``exact_keep``: the K whose rows N - K .. N - 1 give the results of a run that keeps all rows, for one
    wanted row; each further wanted row adds one. ``licensed_keep``: rows that the model was trained to make
    do with (None: no such training). ``exact_rerun``, ``licensed_rerun``: rows before a prefix hit that run
    again when their windows are gone.
    """

    exact_keep: int
    licensed_keep: int | None
    exact_rerun: int
    licensed_rerun: int | None

    @property
    def smallest(self) -> int:
        return self.exact_keep if self.licensed_keep is None else self.licensed_keep

    def keep(self, option: str) -> int | None:
        """K of a replay option (``off``, ``exact`` or a number of rows); None: every row.

        Raises PlanError when fewer rows are asked for than the model takes.
        """
        if option == "off":
            return None
        if option == "exact":
            return self.exact_keep
        if int(option) >= self.smallest:
            return int(option)
        why = ("this model was not trained for bounded replay" if self.licensed_keep is None
               else "the model was trained for no fewer rows than its window")
        raise PlanError(f"replay keeps too few rows: {why}", where="option replay", found=option,
                        allowed=f"off, exact (here {self.exact_keep} rows) or a number >= {self.smallest}")


@dataclass(frozen=True)
class ScopeRows:
    """Rows wanted inside one scope of the spec: nodes and multiply-adds per row by axis."""

    scope: str
    nodes: dict[str, int]
    work: dict[str, int]


@dataclass(frozen=True)
class Narrowing:
    """What narrowing found out.

    ``state_axis``: axis whose rows each written state takes; ``bounds``: bound of each node of the graph as
    it was, under the licence if there is one, by id; ``kept``: (value, axis, bytes of a row) of each keep.
    """

    replay: Replay
    state_axis: dict[str, Rows]
    bounds: dict[int, Bound]
    scopes: tuple[ScopeRows, ...]
    kept: tuple[tuple[str, str, int], ...]

    @property
    def step_share(self) -> float:
        """Part of the multiply-adds with weights that every new row takes."""
        total = sum(sum(s.work.values()) for s in self.scopes)
        return sum(s.work.get(str(STEP), 0) for s in self.scopes) / total if total else 1.0

    def table(self) -> str:
        """A line per scope: nodes by row axis; then the cuts."""
        lines = [" ".join([f"{s.scope or '-':24}", *(f"{k} {v}" for k, v in s.nodes.items())])
                 for s in self.scopes]
        lines += [f"keep {name} -> {axis}: {size} bytes a row" for name, axis, size in self.kept]
        r = self.replay
        lines.append(f"kept rows: exact {r.exact_keep}, licensed {r.licensed_keep}")
        lines.append(f"run again at a hit without windows: exact {r.exact_rerun}, else {r.licensed_rerun}")
        return "\n".join([*lines, f"work for every new row: {self.step_share:.1%}"])


def narrow(graph: Graph, trained: bool = True) -> tuple[Graph, Narrowing]:
    """The graph with every node on the narrowest row axis it needs, and what was found.

    ``trained``: the model may use the licences of its windows. Nodes that nothing reads are left out. The
    result verifies, and computes the rows it computes with the same bits.
    """
    windows = [s for s in graph.states.values() if isinstance(s, Window)]
    trained = trained and any(s.absent_before is not None for s in windows)
    exact = liveness(graph, licensed=False)
    live = liveness(graph, licensed=True) if trained else exact
    rewriter = _Rewriter(graph, live)
    narrowed = rewriter.run()
    replay = Replay(exact.keep, live.keep if trained else None, exact.rerun, live.rerun if trained else None)
    return narrowed, Narrowing(replay, rewriter.state_axis, live.bounds, _scopes(graph, live),
                               tuple(rewriter.kept))


def narrow_model(model: Model, graph: Graph) -> tuple[Graph, Narrowing]:
    """``narrow`` under the licence that the model states; checks its ``replay`` option."""
    narrowed, found = narrow(graph, model.replay == "trained")
    found.replay.keep(model.options.replay)
    return narrowed, found


def _scopes(graph: Graph, live: Liveness) -> tuple[ScopeRows, ...]:
    nodes: dict[str, Counter[str]] = {}
    work: dict[str, Counter[str]] = {}
    for n in graph.nodes:
        axis = n.type.rows
        if axis is None or live.axis(n) is None:
            continue
        label = str(live.axis(n) if axis == STEP else axis)
        nodes.setdefault(n.scope, Counter())[label] += 1
        work.setdefault(n.scope, Counter())[label] += matmul_work(n)
    return tuple(ScopeRows(k, dict(v), dict(work[k])) for k, v in nodes.items())


def row_bytes(t: Type) -> int:
    """Bytes of one row of a value as its type stores it."""
    last = t.static_dims[-1] if t.dims else 1
    rows = t.size // last
    return rows * (t.dtype.data_bytes(last) + t.dtype.scale_bytes(last))


class _Rewriter:
    """Copies nodes in order; a node may exist on several axes."""

    def __init__(self, graph: Graph, live: Liveness) -> None:
        self.graph, self.live = graph, live
        self.nodes: list[Node] = []
        self.copies: dict[tuple[int, Rows | None], Node] = {}
        self.home: dict[int, Rows | None] = {}
        self.state_axis: dict[str, Rows] = {}
        self.kept: list[tuple[str, str, int]] = []
        self.readers = graph.readers()
        self.integers_only: set[int] = set()
        self.published = {o.id for o in graph.outputs.values()}

    def run(self) -> Graph:
        for n in self.graph.nodes:
            axis = self.live.axis(n)
            if axis is None:
                continue
            if n.op in ("input", "const") or (n.inputs and ops.OPS[n.op].kind in ("tile", "shape") and all(
                    i.id in self.integers_only for i in n.inputs)):
                self.integers_only.add(n.id)
            if n.op in ("extend", "append"):
                self.state_axis[n.attrs["state"]] = axis
            rows = n.type.rows
            self.home[n.id] = self._lowered(n, axis) if rows == STEP else rows
            self._copy(n, self.home[n.id], axis)
        outputs = {k: self.copies[o.id, self.home[o.id]] for k, o in self.graph.outputs.items()}
        return Graph(self.graph.name, self.nodes, outputs, dict(self.graph.states))

    def _lowered(self, n: Node, axis: Rows) -> Rows:
        """Axis of a node, or that of its source: a view is taken there if that crosses fewer bytes."""
        if n.op == "input":
            return STEP  # the runner makes it for all rows
        for i in n.inputs:
            if any(isinstance(d, str) for d in i.type.dims):  # scores of entries are never stored, nor kept
                home = self.home[i.id]
                assert home is not None
                return home
        if not _is_view(n) or axis == STEP or n.id in self.published:
            return axis
        (source,) = n.inputs
        above = self.home[source.id]
        others = [r for r in self.readers[source.id] if self.live.axis(r) != above]
        if above in _ORDER[: _ORDER.index(axis)] and all(map(_is_view, others)) and (
                sum(row_bytes(r.type) for r in others) < row_bytes(source.type)):
            return above
        return axis

    def _copy(self, n: Node, rows: Rows | None, axis: Rows) -> Node:
        """``n`` on ``rows``, reading its inputs on the axis it has to be computed for."""
        if rows is not None and rows not in _ORDER:
            axis = STEP  # groups and whole sequences are made of all rows
        elif rows is not None:
            axis = rows
        whole = block_operands(n) if n.op == "attend" else set()
        inputs = tuple(self._on(i, STEP if at in whole else axis) for at, i in enumerate(n.inputs))
        attrs: dict[str, Attr] = dict(n.attrs)
        if "body" in attrs:
            attrs["body"] = _moved_body(attrs["body"], rows)
        return self._add(n, n.op, inputs, attrs, (n.id, rows))

    def _add(self, n: Node, op: str, inputs: tuple[Node, ...], attrs: dict[str, Attr],
             key: tuple[int, Rows | None]) -> Node:
        node = Node(len(self.nodes), op, inputs, attrs, ops.infer(op, inputs, attrs), n.loc, n.scope)
        self.nodes.append(node)
        self.copies[key] = node
        return node

    def _on(self, n: Node, axis: Rows) -> Node:
        """An input as a reader on ``axis`` sees it."""
        home = self.home[n.id]
        if home not in _ORDER or home == axis:
            return self.copies[n.id, home]
        if (n.id, axis) in self.copies:
            return self.copies[n.id, axis]
        if _ORDER.index(axis) < _ORDER.index(home):
            raise InternalError(f"{n} = {n.op} lives on {home} and is read on {axis}")
        if self._again(n, axis):
            return self._copy(n, axis, axis)
        self.kept.append((f"{n.scope or '-'} {n.op}", str(axis), row_bytes(n.type)))
        return self._add(n, "keep", (self.copies[n.id, home],), {"rows": str(axis)}, (n.id, axis))

    def _again(self, n: Node, axis: Rows) -> bool:
        """Whether to compute a value again on ``axis`` rather than to keep its rows."""
        if n.op in ("input", "const"):
            return False
        if n.id in self.integers_only:
            return True
        if not _is_view(n):
            return False
        (source,) = n.inputs
        return (source.id, axis) in self.copies or row_bytes(source.type) <= row_bytes(n.type)


def _is_view(n: Node) -> bool:
    """Rearranges the features of one value and computes nothing."""
    return n.op in ("reshape", "slice", "expand") and n.inputs[0].type.rows is not None


def _moved_body(body: Graph, rows: Rows | None) -> Graph:
    """The body of a scan with its row axis changed."""
    moved: dict[int, Node] = {}
    for n in body.nodes:
        attrs = dict(n.attrs)
        if n.op == "carry":
            t = Type.parse(attrs["type"])
            attrs["type"] = str(t if t.rows is None else replace(t, rows=rows))
        if "body" in attrs:
            attrs["body"] = _moved_body(attrs["body"], rows)
        inputs = tuple(moved[i.id] for i in n.inputs)
        moved[n.id] = Node(n.id, n.op, inputs, attrs, ops.infer(n.op, inputs, attrs), n.loc, n.scope)
    return rebuild(body, moved, list(moved.values()))
