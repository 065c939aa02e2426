"""The tracer: while an entry of a model runs, ops called on values become nodes of one graph.

Equal pure nodes are merged on the way in (structural CSE): RoPE tables, casts and position arithmetic that every
layer asks for exist once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from deepinfer.dsl import ops
from deepinfer.dsl.graph import Attr, Graph, Loc, Node
from deepinfer.errors import SpecError

if TYPE_CHECKING:
    from deepinfer.dsl.state import State

_HERE = str(Path(__file__).parent)  # as code objects name it: deepinfer/dsl is a link
_stack: list[Builder] = []
_MOST_CALLERS = 6  # a spec is not nested deeper than this


class Builder:
    """Collects the nodes of one graph."""

    def __init__(self, name: str) -> None:
        self.graph = Graph(name)
        self._cse: dict[object, Node] = {}
        self._handles: dict[str, Node] = {}
        self._scopes: list[str] = []

    def add(self, op: str, inputs: Sequence[Node] = (), **attrs: Attr) -> Node:
        """Append a node, or return the equal one that exists."""
        key = (op, tuple(n.id for n in inputs), tuple(sorted((k, _frozen(v)) for k, v in attrs.items())))
        if (hit := self._cse.get(key)) is not None:
            return hit
        loc = _spec_location()
        try:
            type_ = ops.infer(op, inputs, attrs)
        except SpecError as e:
            raise SpecError(f"{'.'.join(self._scopes) or self.graph.name}: op {op}: {e.what}", where=loc,
                            found=e.found, allowed=e.allowed, next_step=e.next_step) from None
        node = Node(len(self.graph.nodes), op, tuple(inputs), attrs, type_, loc, ".".join(self._scopes))
        self.graph.nodes.append(node)
        self._cse[key] = node
        return node

    def handle(self, state: State) -> Node:
        if state.name not in self._handles:
            self.graph.states[state.name] = state
            self._handles[state.name] = self.add("state", name=state.name)
        return self._handles[state.name]

    def write(self, state: State, handle: Node) -> Node:
        self._handles[state.name] = handle
        return handle

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()


def _frozen(v: Attr) -> object:
    return v.digest() if isinstance(v, Graph) else (type(v).__name__, v)


def _spec_location() -> Loc:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    if frame is None:
        return Loc()
    folder, _, name = frame.f_code.co_filename.rpartition(os.sep)
    callers: list[Loc] = []
    outer = frame.f_back
    while outer is not None and len(callers) < _MOST_CALLERS:
        file = outer.f_code.co_filename
        of, _, its_name = file.rpartition(os.sep)
        if of == folder:
            callers.append(Loc(its_name, outer.f_lineno))
        elif not file.startswith(_HERE):  # an op of the DSL may call back into the spec
            break
        outer = outer.f_back
    return Loc(name, frame.f_lineno, tuple(callers))


def current() -> Builder:
    """The builder of the entry being traced."""
    if not _stack:
        raise SpecError("a DSL op was called outside of trace()", next_step="call it from an entry function of a Model")
    return _stack[-1]


@contextmanager
def tracing(name: str) -> Iterator[Builder]:
    """Trace into a new graph; may nest (the body of a scan)."""
    _stack.append(Builder(name))
    try:
        yield _stack[-1]
    finally:
        _stack.pop()


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Names the nodes made inside, for reports and errors."""
    with current().scope(name):
        yield
