"""TileProgram -> C++17 of one row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deepinfer.backends.cpu.storage import C_BYTES, Place
from deepinfer.backends.cpu.tile.body import Body, Env, Index, shared_shapes
from deepinfer.backends.cpu.tile.index import Ix, Space, linear, merged, refined, strides
from deepinfer.backends.cpu.tile.program import Analysis, analyse, size
from deepinfer.backends.cpu.tile.scalar import ELEMENTWISE, is_integer, literal
from deepinfer.backends.cpu.tile.scratch import Scratch
from deepinfer.codegen.kernels.spec import Operand, TileOp, TileProgram

IVDEP = "#pragma GCC ivdep"


def indented(lines: Sequence[str], by: int = 1) -> list[str]:
    return [line if line.startswith("#") else "    " * by + line for line in lines]


@dataclass
class Printer:
    """Prints one program. ``place(i)``: where operand i's row lies; ``scratch`` and ``statics`` (constant arrays)
    collect what the kernel must declare; ``carries``: places of the carries of a scan body."""

    analysis: Analysis
    place: Callable[[int], Place]
    scratch: Scratch = field(default_factory=Scratch)
    statics: list[str] = field(default_factory=list)
    carries: dict[str, Place] = field(default_factory=dict)
    prefix: str = "t"
    fixed_time: int | None = None
    state: Callable[[int], str] | None = None

    def __post_init__(self) -> None:
        self.env = Env(self.analysis, self.memory, prefix=self.prefix)
        self._buffers: dict[int, Place] = {}
        self._constants: dict[int, Place] = {}
        self._outputs: set[int] = set()  # kept in an output of the kernel

    # ---- memory ----------------------------------------------------------------------------------------------------
    def memory(self, i: int) -> Place:
        o = self.analysis.ops[i]
        if o.op == "load":
            return self.place(o.get("operand"))
        if o.op == "carry":
            return self.carries[o.get("name")]
        return self._constant(i, o) if o.op == "const" else self._buffers[i]

    def _constant(self, i: int, o: TileOp) -> Place:
        if i not in self._constants:
            kind, name = ("int64_t", f"{self.prefix}c{i}") if is_integer(o.dtype) else ("float", f"{self.prefix}c{i}")
            values = ", ".join(literal(v, is_integer(o.dtype)) for v in o.get("values"))
            self.statics.append(f"static const {kind} {name}[] = {{{values}}};")
            self._constants[i] = Place(name, kind)
        return self._constants[i]

    def time(self, i: int) -> int:
        return self.analysis.emit_at.get(i, i) if self.fixed_time is None else self.fixed_time

    def last_use(self, i: int) -> int:
        """Place in the program of the last loop that reads the op's buffer."""
        a, last, stack = self.analysis, self.time(i), list(self.analysis.readers[i])
        while stack:
            r = stack.pop()
            if r in a.roots:
                last = max(last, self.time(r))
            else:
                stack += a.readers[r]
        return last

    def buffer(self, i: int) -> Place:
        """Memory of a kept op: the output that its loop writes, when that holds its values exactly, else scratch."""
        o = self.analysis.ops[i]
        if (out := self._written(i)) is not None:
            self._buffers[i] = out
            self._outputs.add(i)
            return out
        kind = "int64_t" if is_integer(o.dtype) else "float"
        name = self.scratch.add(f"{self.prefix}b{i}", kind, size(o) * C_BYTES[kind], self.time(i), self.last_use(i))
        self._buffers[i] = Place(name, kind)
        return self._buffers[i]

    def _written(self, i: int) -> Place | None:
        a = self.analysis
        for r in a.absorbed.get(i, ()):
            source = a.ops[r].args[0]
            while a.ops[source].op == "reshape":
                (source,) = a.ops[source].args
            if a.ops[r].op == "store" and source == i:
                operand = a.operands[a.ops[r].get("operand")]
                if operand.dtype == a.ops[i].dtype and operand.dtype in ("f32", "bf16", "i64"):
                    return self.place(a.ops[r].get("operand"))
        return None

    def temporary(self, i: int, kind: str, count: int, nbytes: int) -> Place:
        name, now = f"{self.prefix}w{i}_{len(self.scratch.slots)}", self.time(i)
        return Place(self.scratch.add(name, kind, count * nbytes, now, now), kind)

    # ---- loops -----------------------------------------------------------------------------------------------------
    def loop(self, dims: Sequence[int], shapes: Sequence[Sequence[int]],
             build: Callable[[Body, Index], None]) -> list[str]:
        """A loop nest over ``dims``; ``build`` writes the body for an index. Loops that need not be apart run as
        one."""
        extents = refined(dims, shapes)
        space = Space({f"i{n}": e for n, e in enumerate(extents)})
        position = Ix()
        for n, s in enumerate(strides(extents)):
            position = position + Ix.var(f"i{n}") * s
        body = Body(self.env, space)
        build(body, tuple(space.split(position, dims)))
        names = [f"i{n}" for n in range(len(extents))]
        joined = merged(names, space, body.used)
        count = dict(zip(names, extents, strict=True))
        for outer in names:
            if outer in joined:
                inner = joined[outer][0]
                count[inner] *= count.pop(outer)
        lines = body.text(body.lines, joined)
        for depth, name in enumerate(reversed(list(count))):
            head = f"for (int {name} = 0; {name} < {count[name]}; ++{name}) {{"
            lines = [*([IVDEP] if depth == 0 else []), head, *indented(lines), "}"]
        return lines if count else ["{", *indented(lines), "}"]

    def finish(self, body: Body, i: int, index: Index, value: str | None = None) -> None:
        """Element ``index`` of root ``i`` is ``value`` (None: computed from its arguments): keep it, and finish the
        readers that this loop absorbs."""
        a = self.analysis
        if value is None:
            name = body.memo[i, index] = body.compute(i, index)
        else:
            name = body.know(i, index, value)
        if i in a.kept and i not in self._outputs:
            body.write(self._buffers[i], linear(a.ops[i].dims, index), name)
        for r in a.absorbed.get(i, ()):
            o = a.ops[r]
            at = index if o.dims == a.ops[i].dims else tuple(body.space.split(linear(a.ops[i].dims, index), o.dims))
            self.finish_reader(body, r, at)

    def finish_reader(self, body: Body, r: int, at: Index) -> None:
        o = self.analysis.ops[r]
        if o.op == "store":
            body.write(self.place(o.get("operand")), linear(o.dims, at), body.value(o.args[0], at), o.args[0])
        else:
            self.finish(body, r, at)

    # ---- the program -----------------------------------------------------------------------------------------------
    def lines(self) -> list[str]:
        """Statements for one row."""
        from deepinfer.backends.cpu.tile import roots

        a, out = self.analysis, []
        for i, o in enumerate(a.ops):
            if i not in a.roots or a.emit_at[i] != i:
                continue
            for k in self._finished_here(i):
                if k in a.kept:
                    self.buffer(k)
            out.append(f"// {self._comment(i, o)}")
            if o.op in roots.TABLE:
                out += roots.TABLE[o.op](self, i, o)
            else:
                out += self.loop(o.dims, shared_shapes(a, i), lambda b, at, i=i: self.finish(b, i, at))  # type: ignore[misc]
        return out

    def _finished_here(self, i: int) -> list[int]:
        found = [i]
        for r in self.analysis.absorbed.get(i, ()):
            found += self._finished_here(r)
        return found

    def _comment(self, i: int, o: TileOp) -> str:
        ops = [f"{self.prefix}{k} {self.analysis.ops[k].op}" for k in self._finished_here(i)]
        what = o.op if o.op in ELEMENTWISE else ""
        return f"{', '.join(ops)} {list(o.dims)} {o.dtype}{' loop' if what else ''}"


def row_printer(program: TileProgram, operands: Sequence[Operand], place: Callable[[int], Place]) -> Printer:
    """Printer of a rowwise body."""
    return Printer(analyse(program, operands), place)
