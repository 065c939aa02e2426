"""Text -> Graph: the inverse of ``printer.print_graph``. Errors carry the line number."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from deepinfer.dsl import state as states
from deepinfer.dsl.graph import Attr, Graph, Loc, Node
from deepinfer.dsl.types import DType, Type
from deepinfer.errors import SpecError

_NODE = re.compile(r"\s*%(\d+) = (\w+)\(([^)]*)\) \{(.*)\} : (.+?)(?:  @(\S+)  (\S+):(\d+))?$")
_STATE = re.compile(r"\s*state (\S+) (\w+) (\S+) \{(.*)\}$")


class _Lines:
    def __init__(self, text: str) -> None:
        self.items = text.splitlines()
        self.at = 0

    def __iter__(self) -> Iterator[str]:
        while self.at < len(self.items):
            self.at += 1
            yield self.items[self.at - 1]

    def fail(self, what: str) -> SpecError:
        return SpecError(what, where=f"line {self.at}", found=self.items[self.at - 1].strip()[:120])


def parse_graph(text: str) -> Graph:
    """Read one printed graph; raises SpecError with the line of the first text that does not parse."""
    lines = _Lines(text)
    for line in lines:
        if line.strip():
            if m := re.fullmatch(r"\s*graph (\S+) \{", line):
                return _body(m[1], lines)
            raise lines.fail("a graph starts with 'graph <name> {'")
    raise SpecError("there is no graph in this text")


def _body(name: str, lines: _Lines) -> Graph:
    graph, by_id = Graph(name), dict[int, Node]()
    for line in lines:
        text = line.strip()
        if text == "}" or text.startswith("}}") or text.startswith("}, "):
            return graph
        if m := re.fullmatch(r"out (\S+) = %(\d+)", text):
            if int(m[2]) not in by_id:
                raise lines.fail(f"output %{m[2]} is not defined")
            graph.outputs[m[1]] = by_id[int(m[2])]
        elif m := _STATE.match(line):
            graph.states[m[1]] = _state(m, lines)
        else:
            node = _node(line, by_id, lines)
            if node.id in by_id:
                raise lines.fail(f"%{node.id} is defined twice")
            by_id[node.id] = node
            graph.nodes.append(node)
    raise lines.fail("the text ends inside a graph")


def _state(m: re.Match[str], lines: _Lines) -> states.State:
    kinds: dict[str, type[states.State]] = {k.__name__: k for k in (states.Window, states.Paged, states.GroupTail)}
    cls = kinds.get(m[2])
    if cls is None:
        raise lines.fail("unknown state kind")
    try:
        return cls(m[1], DType.parse(m[3]), **_attrs(m[4], lines))
    except TypeError:
        raise lines.fail("unknown attribute of a state") from None


def _attrs(text: str, lines: _Lines) -> dict[str, Attr]:
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        return {str(k.arg): _value(k.value) for k in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        raise lines.fail("unreadable attributes") from None


def _value(node: ast.expr) -> Attr:
    if isinstance(node, ast.Name) and node.id in ("inf", "nan"):
        return float(node.id)
    if isinstance(node, ast.Tuple):
        return tuple(_value(v) for v in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Name):
        return -float(node.operand.id)
    return ast.literal_eval(node)


def _node(line: str, by_id: dict[int, Node], lines: _Lines) -> Node:
    body: Graph | None = None
    if m := re.match(r"(.*)body=graph (\S+) \{$", line):  # a scan: its body follows, then the rest of the line
        body = _body(m[2], lines)
        line = m[1] + "body=None" + lines.items[lines.at - 1].strip()[1:]
    m2 = _NODE.match(line)
    if not m2:
        raise lines.fail("unreadable node")
    attrs = _attrs(m2[4], lines)
    if body is not None:
        attrs["body"] = body
    try:
        inputs = tuple(by_id[int(i)] for i in re.findall(r"%(\d+)", m2[3]))
    except KeyError as e:
        raise lines.fail(f"value %{e} is used before it is defined") from None
    try:
        type_ = Type.parse(m2[5])
    except SpecError as e:
        raise lines.fail(e.what) from None
    loc = Loc(m2[7], int(m2[8])) if m2[7] else Loc()
    return Node(int(m2[1]), m2[2], inputs, attrs, type_, loc, "" if m2[6] in (None, "-") else m2[6])
