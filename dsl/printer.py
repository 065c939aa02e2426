"""Graph -> text that ``parser.parse_graph`` reads back.

    graph step {
      state win.0 Window mxfp8(1,32)[512] {rows=128, slack=5, absent_before=128}
      %7 = contract(%5, %6) {groups=1} : T [1280] f32  @layers.0.attn  deepseek.py:41
      out logits = %99
    }
"""

from __future__ import annotations

from dataclasses import fields

from deepinfer.dsl.graph import Attr, Graph
from deepinfer.dsl.state import State


def _attr(v: Attr, places: bool, indent: str) -> str:
    if isinstance(v, Graph):
        return print_graph(v, places, indent + "    ").lstrip()
    return repr(v)


def _state(s: State) -> str:
    extra = ", ".join(f"{f.name}={getattr(s, f.name)!r}" for f in fields(s) if f.name not in ("name", "record"))
    return f"state {s.name} {type(s).__name__} {s.record} {{{extra}}}"


def print_graph(graph: Graph, places: bool = True, indent: str = "") -> str:
    """Text of a graph; ``places=False`` leaves out scopes and source lines (for hashing)."""
    out = [f"{indent}graph {graph.name} {{"]
    out += [f"{indent}  {_state(s)}" for s in graph.states.values()]
    for n in graph.nodes:
        args = ", ".join(map(str, n.inputs))
        attrs = ", ".join(f"{k}={_attr(v, places, indent)}" for k, v in sorted(n.attrs.items()))
        line = f"{indent}  {n} = {n.op}({args}) {{{attrs}}} : {n.type}"
        out.append(f"{line}  @{n.scope or '-'}  {n.loc}" if places else line)
    out += [f"{indent}  out {k} = {v}" for k, v in sorted(graph.outputs.items())]
    return "\n".join([*out, f"{indent}}}"])
