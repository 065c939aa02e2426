"""``--dump-ir``: one text file a pass, each of which opens with how to read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from deepinfer.codegen.passes.fuse import Region
from deepinfer.codegen.plan.launch import Commit, EntryTable, Launch
from deepinfer.codegen.plan.table import Lowered
from deepinfer.dsl.graph import Graph
from deepinfer.dsl.printer import print_graph

_GRAPHS = """\
A graph is one entry of the model: what a call of the engine computes. A line is a value:

  %7 = contract(%5, %6) {groups=1} : T [1280] f32  @layers.0.attn  my_spec.py:41

  its number, the op with the values it reads, the op's attributes, row axis, dims and dtype of the result, the place in
  the model, the line of the spec. Ops are described in dsl/ops.py. Row axes: T rows of this step, T_kept those whose
  upper layers run, T_wanted those whose logits are asked for, T/r groups of r tokens that end in this step, S
  sequences; none: a parameter or constant. `state` lines declare what is remembered between steps."""

LEGENDS = {
    "trace": f"The model as its spec describes it, traced once.\n\n{_GRAPHS}",
    "drop-rounding": f"The same without the places where the reference rounds to bf16 (profile wide).\n\n{_GRAPHS}",
    "narrow-rows": f"""\
Every value on the fewest rows that anybody reads. First a table: nodes of each place in the model by row axis, what is
cut (`keep`: a value of many rows is read on few), and how far a hit in the prefix cache has to go back. Then graphs.

{_GRAPHS}""",
    "fuse": """\
Regions: nodes that become one kernel, in the order of launches. A line is: place, level (contractions, attention and
selections on odd ones, row-local work on even ones), family of the kernel, row axis, place in the model, its nodes by
number as in the pass before, and behind # why the region ends there.""",
    "plan": """\
First the launches of each entry, readable: what runs, on which row axis, in which part of the model, what it reads and
what it writes (b buffer, p parameter, s state, i input, n pinned selection). Then the launch table as the engine has it
(codegen/plan/launch.py describes each line), then the program of each kernel's slots: t3 = mul(t1, t2) is a value of
one row, load and store move rows from and to operands of the kernel.""",
}


@dataclass(frozen=True)
class PassTime:
    name: str
    seconds: float
    note: str


class PassLog:
    """Times each pass, and writes what it made to ``<dump>/NN-name.txt`` when a folder is given."""

    def __init__(self, dump: Path | None, on_pass: Callable[[str], None] | None) -> None:
        self.dump, self.on_pass = dump, on_pass
        self.times: list[PassTime] = []
        if dump is not None:
            dump.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def run(self, name: str) -> Iterator[list[str]]:
        """Yields a list; its first entry becomes the note of the pass, all entries go into the dump."""
        if self.on_pass:
            self.on_pass(name)
        start, text = perf_counter(), list[str]()
        yield text
        self.times.append(PassTime(name, perf_counter() - start, text[0].splitlines()[0] if text else ""))
        if self.dump is not None:
            legend = "\n".join(f"# {line}".rstrip() for line in LEGENDS[name].splitlines())
            parts = [legend, *text]
            (self.dump / f"{len(self.times):02d}-{name}.txt").write_text("\n\n".join(parts) + "\n")


def printed(graphs: dict[str, Graph]) -> list[str]:
    """How many nodes there are, then each graph."""
    counts = ", ".join(f"{name} {len(g)} nodes" for name, g in graphs.items())
    return [counts, *(print_graph(g) for g in graphs.values())]


def regions_text(regions: list[Region]) -> str:
    """A line for each region."""
    return "\n".join(f"{i:4d} level {r.level:4d} {r.family:12s} {r.rows!s:9s} {r.scope or '-':28s} "
                     f"{' '.join(f'%{n.id}:{n.op}' for n in r.nodes)}   # {r.why}" for i, r in enumerate(regions))


def plan_texts(lowered: Lowered) -> list[str]:
    """Launches, launch table, programs."""
    programs = [f"kernel {s.symbol}\n" + "\n".join(f"{name}:\n{program}" for name, program in s.slots)
                for s in lowered.specs]
    return [*(_launches(e, lowered) for e in lowered.table.entries.values()), lowered.table.text(), *programs]


def _launches(entry: EntryTable, lowered: Lowered) -> str:
    lines = [f"entry {entry.name}: {len(entry.launches)} launches and commits"]
    for i, x in enumerate(entry.launches):
        if isinstance(x, Commit):
            state = lowered.table.states[x.state]
            what, axis, effect = "commit", state.axis, f"new rows of {state.name} -> its ring"
        else:
            what, axis, effect = lowered.specs[x.kernel].symbol, x.axis, _effect(x, lowered)
        lines.append(f"{i:4d} {what:50s} {axis:9s} {x.scope or '-':24s} {effect}")
    return "\n".join(lines)


def _effect(x: Launch, lowered: Lowered) -> str:
    names: dict[bool, list[str]] = {False: [], True: []}
    for operand, arg in zip(lowered.specs[x.kernel].operands, x.args, strict=True):
        named = {"p": [p.name for p in lowered.params], "s": [s.name for s in lowered.table.states]}.get(arg.kind)
        if arg.kind != "z":
            names[operand.write].append(str(arg) if named is None else named[arg.index])
    return f"{' '.join(names[False])} -> {' '.join(names[True])}"
