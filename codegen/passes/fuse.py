"""Fusion: a graph becomes regions, one kernel each.

Every value gets a *level*: anchors (contractions, attention, selection, draws) sit on odd levels, row-local work on
even
ones, each as early as its inputs allow. Two nodes of one level never depend on each other through an anchor, so nodes
of
one level and row axis may share a kernel; what a target lets them share is data (``Capabilities``):

1. contractions of the same rows, or any of one level (``mixed_tiles``), become one kernel;
2. row-local nodes after an anchor move into its epilogue as far as the slot's granularity reaches;
3. the remaining row-local nodes of a level and axis become one ``rowwise`` kernel.

``keep``, ``reshape`` and ``by_sequence`` are views of the buffer they read, never kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from deepinfer.backends.base import GRANULARITIES, Capabilities
from deepinfer.codegen.passes.fetch import delay_lookups
from deepinfer.dsl.graph import Graph, Node
from deepinfer.dsl.ops import BINARY, COMPARE, INTEGER, UNARY
from deepinfer.dsl.types import Rows
from deepinfer.errors import InternalError

FREE = ("param", "const", "state")
VIEWS = ("keep", "reshape", "by_sequence")
ANCHORS = {"contract": "gemm", "grouped_contract": "grouped_gemm", "attend": "attend", "index_score": "score_select",
           "draw": "draw"}
ELEMENTWISE = {*UNARY, *BINARY, *COMPARE, *INTEGER, "where", "to_float", "round"}
_GROUP = {"encode", "pair_rotate"}
_ROW_LOCAL = "all work inside single rows that is possible here; then comes a product, an attention or a selection"
_REACH = {"none": "nothing", "element": "single elements", "group": "groups of elements", "row": "single rows"}
_AXIS_ORDER = {"step": 0, "groups": 1, "kept": 2, "wanted": 3, "seq": 4}


@dataclass(eq=False)
class Region:
    """Nodes of one kernel in graph order. ``anchors`` is empty for a rowwise region; ``epilogue`` are the row-local
    nodes
    that run in the anchors' kernel. ``why`` says what ended the region."""

    family: str
    rows: Rows
    level: int
    anchors: list[Node] = field(default_factory=list)
    members: list[Node] = field(default_factory=list)
    epilogue: list[Node] = field(default_factory=list)
    why: str = ""

    @property
    def nodes(self) -> list[Node]:
        return sorted({n.id: n for n in (*self.anchors, *self.members, *self.epilogue)}.values(), key=lambda n: n.id)

    @property
    def scope(self) -> str:
        """Place in the model of the node that ends the region (its anchor when it has one)."""
        return (self.anchors or self.nodes)[-1].scope


def owner(n: Node) -> Node:
    """The node whose buffer a view reads."""
    while n.op in VIEWS:
        n = n.inputs[0]
    return n


def granularity(n: Node) -> str:
    """How much of a row the op needs at once."""
    if n.op in ELEMENTWISE:
        return "element"
    return "group" if n.op in _GROUP else "row"


def _same_size(region: Region, n: Node) -> bool:
    """Whether a node has as many elements as one of the region's results."""
    return any(n.type.size == a.type.size for a in region.anchors)


def _widest_group(n: Node) -> int:
    """Most elements that share a scale in an encoded value."""
    t = n.type.dtype
    return max(part.block[1] for part, _ in t.parts or ((t, 0),))


def _reaches(limit: str, need: str) -> bool:
    return GRANULARITIES.index(need) <= GRANULARITIES.index(limit)


class Levels:
    """Level of every computing node; the nodes of one selection (score, block maxima, top-k) are one unit."""

    def __init__(self, graph: Graph, narrow: Collection[int] = ()) -> None:
        """``narrow``: contractions that are row-local work."""
        self.graph, self.narrow = graph, set(narrow)
        self.unit: dict[int, int] = {}
        self.units: dict[int, list[Node]] = defaultdict(list)
        for n in graph.nodes:
            if n.op in FREE or n.op in VIEWS:
                continue
            root = n.id
            if n.op in ("block_max", "within_blocks", "topk") and self._symbolic(n.inputs[0]):
                root = self.unit[n.inputs[0].id]
            self.unit[n.id] = root
            self.units[root].append(n)
        self.level: dict[int, int] = {}
        self.order = self._order()
        for root in self.order:
            self.level[root] = self._level(root)
        self.readers: dict[int, list[int]] = defaultdict(list)
        for root in self.order:
            for d in set(self.inputs(root)):
                self.readers[d].append(root)
        outputs = {self.unit[owner(v).id] for v in graph.outputs.values()}
        delay_lookups(self, outputs)
        for root in reversed(self.order):
            if root not in outputs:
                self._sink(root)

    def move(self, units: Iterable[int], down: int) -> None:
        """Moves units down by so many levels, less one if odd: anchors stay on odd levels."""
        for u in units:
            self.level[u] += max(0, down) // 2 * 2

    # ---- sinking: what is small to make again stays small until it is read ---------------------------------------
    def _sink(self, root: int) -> None:
        """Moves row-local work, with all that only it needs, down to its first reader, when less has to be kept in
        between. Anchors stay: they share kernels with their neighbours."""
        readers = self.readers[root]
        if not readers or not self._moves(root):
            return
        room = min(self.level[r] - int(self.is_anchor(r)) for r in readers) - self.level[root]
        down = room // 2 * 2
        if down <= 0:
            return
        cone = self._cone(root)
        stop = self.level[root] + down
        cut = {d for u in cone for d in self.inputs(u)} - cone
        longer = [d for d in cut if all(self.level[r] < stop for r in self.readers[d] if r not in cone)]
        if sum(self._unit_bytes(d) for d in longer) < self._unit_bytes(root):
            for u in cone:
                self.level[u] += down

    def _moves(self, root: int) -> bool:
        """Anchors, what is written into a state and narrow contractions stay; and with these, loops over their results,
        which a kernel in parts would repeat in every part."""
        op = self.units[root][0].op
        return not (self.is_anchor(root) or root in self.narrow or op in ("extend", "append")
                    or (op == "scan" and self.narrow))

    def _cone(self, root: int) -> set[int]:
        """The unit and all row-local work that only it needs."""
        cone, stack = {root}, [root]
        while stack:
            for d in self.inputs(stack.pop()):
                if d in cone or self.units[d][0].op == "topk" or not self._moves(d):
                    continue
                if any(r not in cone for r in self.readers[d]):
                    continue
                cone.add(d)
                stack.append(d)
        return cone

    def _unit_bytes(self, root: int) -> int:
        return max(map(_bytes, self.units[root]))

    @staticmethod
    def _symbolic(n: Node) -> bool:
        return any(isinstance(d, str) for d in n.type.dims)

    def is_anchor(self, root: int) -> bool:
        return root not in self.narrow and self.units[root][0].op in ANCHORS

    def inputs(self, root: int) -> Iterable[int]:
        """Units this unit reads, through views and row-less arithmetic."""
        stack = [i for n in self.units[root] for i in n.inputs]
        while stack:
            i = owner(stack.pop())
            if i.id in self.unit and self.unit[i.id] != root:
                yield self.unit[i.id]

    def _order(self) -> list[int]:
        deps = {u: set(self.inputs(u)) for u in self.units}
        readers: dict[int, list[int]] = defaultdict(list)
        for u, ds in deps.items():
            for d in ds:
                readers[d].append(u)
        ready = [u for u, ds in deps.items() if not ds]
        waiting = {u: len(ds) for u, ds in deps.items()}
        out: list[int] = []
        while ready:
            u = ready.pop()
            out.append(u)
            for r in readers[u]:
                waiting[r] -= 1
                if not waiting[r]:
                    ready.append(r)
        if len(out) != len(deps):
            raise InternalError(f"graph {self.graph.name} has a cycle between selections")
        return out

    def _level(self, root: int) -> int:
        return max((self.level[d] + self.distance(d, root) for d in self.inputs(root)),
                   default=int(self.is_anchor(root)))

    def distance(self, unit: int, reader: int) -> int:
        """Levels between a unit and one that reads it, at least."""
        if self.is_anchor(reader):
            return 2 if self.is_anchor(unit) else 1
        if self.units[unit][0].op in ("extend", "append"):
            return 2  # it reads rows that other items of the writing kernel make
        return int(self.is_anchor(unit))


def _levels(graph: Graph, caps: Capabilities) -> Levels:
    """Levels in which contractions with few results run beside the work that makes their rows, where every part of a
    row can be contracted as soon as it is made."""
    narrow = {n.id for n in graph.of("contract") if caps.row_columns and _is_narrow(n, caps.row_columns)}
    while True:
        levels = Levels(graph, narrow)
        late = {c for c in narrow if _needs_whole_row(levels, c)}
        if not late:
            return levels
        narrow -= late


def _is_narrow(n: Node, columns: int) -> bool:
    x, weight = n.inputs[0], n.inputs[1]
    return (weight.op == "param" and weight.type.dtype.name == "f32" and n.attrs.get("groups", 1) == 1
            and len(x.dims) == len(n.dims) == 1 and n.dims[0] <= columns < 256 <= x.dims[0] and x.dims[0] % 16 == 0)


def _needs_whole_row(levels: Levels, root: int) -> bool:
    """Whether work of the contraction's level that makes its rows needs whole rows of something; then, or where it
    makes nothing, a kernel of its own serves as well."""
    level, seen, stack = levels.level[root], set[int](), list(levels.inputs(root))
    features = owner(levels.units[root][0].inputs[0]).dims[-1]
    while stack:
        d = stack.pop()
        if d in seen or levels.level[d] != level:
            continue
        seen.add(d)
        for n in levels.units[d]:
            if n.op in ("pool", "previous", "topk", "argmax", "concat", "extend", "append", *ANCHORS):
                return True
            dims = n.inputs[0].dims if n.op == "reduce" else ()
            if dims and len(dims) - 1 in n.attrs["dims"] and dims[-1] >= features:
                return True
        stack += levels.inputs(d)
    return not seen


def _bytes(n: Node) -> int:
    """Bytes of one row as its dtype lies in memory, scales left out."""
    return n.type.dtype.data_bytes(n.type.size) if n.type.rows is not None else 0


def _rows(n: Node) -> Rows | None:
    if n.op in ("extend", "append"):
        return n.inputs[1].type.rows
    return n.type.rows


def _anchor_regions(levels: Levels, caps: Capabilities) -> dict[int, Region]:
    """Node id of each anchor-unit node -> its region."""
    out: dict[int, Region] = {}
    merged: dict[object, Region] = {}
    for root, nodes in levels.units.items():
        head = nodes[0]
        if not levels.is_anchor(root):
            continue
        family, level, rows = ANCHORS[head.op], levels.level[root], _rows(head)
        assert rows is not None
        key: object = root
        if family in ("gemm", "grouped_gemm"):
            if caps.mixed_tiles:
                key = ("mixed", level, rows)
            elif caps.shared_input:
                shared = (head.inputs[0].type.dims, *(i.id for i in map(owner, head.inputs[1:-1])))
                key = (family, level, rows, owner(head.inputs[0]).id, shared)
        region = merged.setdefault(key, Region(family, rows, level))
        region.anchors.append(head)
        region.members += nodes[1:]
        for n in nodes:
            out[n.id] = region
    return out


@dataclass
class _Slot:
    """The epilogue of a region as it fills up."""

    region: Region
    limit: str
    group: int
    levels: Levels
    taken: dict[int, Region]
    inside: set[int]

    def takes(self, n: Node) -> list[Node]:
        """``n`` and what has to come along, in order; [] when it may not run here."""
        along: list[Node] = []
        return along if self._fits(n, along) and any(owner(i).id in self.inside for i in n.inputs) else []

    def _fits(self, n: Node, along: list[Node]) -> bool:
        r = self.region
        if n.type.rows is None or not _reaches(self.limit, granularity(n)) or _rows(n) != r.rows:
            return False
        if self.limit == "group" and (not _same_size(r, n) or self._is_record(n)):
            return False
        if n.op == "encode" and self.limit == "group" and 0 < self.group < _widest_group(n):
            return False
        for raw in n.inputs:
            i = owner(raw)
            if i.op in FREE or i.type.rows is None:
                if self.limit == "element" and raw.op == "param" and raw.type.size != 1:
                    return False
            elif i.id in self.inside:
                if self.limit == "element" and (raw.op in VIEWS or i.type.dims != n.type.dims):
                    return False  # it sees the columns of one tile of one result only
            elif i not in along and self.levels.level.get(self.levels.unit[i.id], -1) >= r.level:
                # Made after the anchor without need of it: it can be made here as well.
                if i.id in self.taken or self.levels.level[self.levels.unit[i.id]] > r.level + 1:
                    return False
                if not self._fits(i, along):
                    return False
        along.append(n)
        return True

    def _is_record(self, n: Node) -> bool:
        """Whether a state is written from it: records are encoded where they are stored."""
        readers = (self.levels.units[u] for u in self.levels.readers[self.levels.unit[n.id]])
        return n.op == "encode" and any(x.op in ("extend", "append") for unit in readers for x in unit)


def _epilogues(graph: Graph, levels: Levels, regions: dict[int, Region], caps: Capabilities) -> None:
    """Moves row-local nodes into anchor regions."""
    slots: dict[int, _Slot] = {}
    for n in graph.nodes:
        if n.id not in levels.unit or n.id in regions:
            continue
        candidates = {id(r): r for i in n.inputs if (r := regions.get(owner(i).id)) is not None}
        for region in candidates.values():
            if levels.level[n.id] != region.level + 1:
                continue
            slot = slots.setdefault(id(region), _Slot(region, _limit(region, caps), caps.group, levels, regions,
                                                      {a.id for a in (*region.anchors, *region.members)}))
            if found := slot.takes(n):
                region.epilogue += found
                regions.update((x.id, region) for x in found)
                slot.inside |= {x.id for x in found}
                break


def _limit(region: Region, caps: Capabilities) -> str:
    limit = caps.epilogue.get(region.family, "none")
    return "group" if limit == "row" and not caps.ticket else limit


def _trim(graph: Graph, regions: dict[int, Region], outputs: set[int], caps: Capabilities) -> None:
    """Gives back the last nodes of epilogues that make a kernel write more than it would without them (the squares of a
    norm beside the values themselves). Where a slot reaches whole rows, the nodes would need a kernel of their own."""
    readers: dict[int, list[int]] = defaultdict(list)
    for n in graph.nodes:
        if n.op not in VIEWS:
            for i in {owner(i).id for i in n.inputs}:
                readers[i].append(n.id)

    def written(i: Node, region: Region) -> bool:
        return i.id in outputs or any(regions.get(r) is not region for r in readers[i.id])

    for region in {id(r): r for r in regions.values() if _limit(r, caps) in ("element", "group")}.values():
        for n in reversed(list(region.epilogue)):
            if n.id in outputs or any(regions.get(r) is region for r in readers[n.id]):
                continue
            inputs = {owner(i).id: owner(i) for i in n.inputs if regions.get(owner(i).id) is region}
            extra = sum(_bytes(i) for i in inputs.values() if not written(i, region))
            if extra < _bytes(n):
                region.epilogue.remove(n)
                del regions[n.id]


def fuse(graph: Graph, caps: Capabilities) -> list[Region]:
    """Regions in launch order. The graph must be narrowed (each computing node has its final row axis).

    Row-less arithmetic (parameters combined with constants) belongs to no region: it is repeated where it is read.
    """
    levels = _levels(graph, caps)
    of_node = _anchor_regions(levels, caps)
    _epilogues(graph, levels, of_node, caps)
    _trim(graph, of_node, {owner(v).id for v in graph.outputs.values()}, caps)
    rowwise: dict[tuple[int, Rows], Region] = {}
    for n in graph.nodes:
        rows = _rows(n)
        if n.id not in levels.unit or n.id in of_node or rows is None:
            continue
        level = levels.level[n.id]
        region = rowwise.setdefault((level, rows), Region("rowwise", rows, level, why=_ROW_LOCAL))
        region.members.append(n)
        of_node[n.id] = region
    regions = list({id(r): r for r in of_node.values()}.values())
    regions = [r for r in regions if not _only_loads(r)]
    for r in regions:
        r.why = r.why or _why(r, caps)
    return sorted(regions, key=lambda r: (r.level, _AXIS_ORDER[r.rows.kind], r.rows.ratio, r.nodes[0].id))


def _only_loads(r: Region) -> bool:
    return all(n.op in ("input", "group_positions") for n in r.nodes)


def _why(r: Region, caps: Capabilities) -> str:
    reach = _REACH[caps.epilogue.get(r.family, "none")]
    return f"a {r.family} kernel on {caps.target} goes on with {reach} of its result, no further"
