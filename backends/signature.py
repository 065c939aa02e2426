"""Parameters of a device kernel: which arguments it takes, in which order, and where a runner finds them.

The sources are those of backends/cuda_sm100/README.md; they hold for every target whose runner launches kernels on a
device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deepinfer.backends.cpu.storage import stored
from deepinfer.codegen.kernels.spec import KernelSpec, Operand
from deepinfer.errors import InternalError

Where = tuple[str | int, ...]
_POINTERS = {"f32": "*f32", "bf16": "*bf16", "i64": "*i64", "i32": "*i32", "u8": "*u8", "bool": "*u8"}
WIDER = {"T_kept": ("T",), "T_wanted": ("T", "T_kept")}


@dataclass(frozen=True)
class Parameter:
    """``type``: ``*f32`` and the like, ``i32``, ``i64``; ``where``: what to pass."""

    name: str
    type: str
    where: Where

    def as_json(self) -> list[Any]:
        return [self.name, self.type, list(self.where)]


# The kernel that the commits of rings are: the same for every engine, its state is operand 0.
COMMIT = "di_commit"
COMMIT_PARAMETERS = (
    Parameter("row_first", "i32", ("launch", "row_first")), Parameter("row_stop", "i32", ("launch", "row_stop")),
    Parameter("axis_rows", "*i32", ("axis", "rows")), Parameter("axis_seq", "*i32", ("axis", "seq")),
    Parameter("axis_first", "*i32", ("axis", "first")), Parameter("axis_pos", "*i64", ("axis", "pos")),
    Parameter("seq_slot", "*i32", ("seq", "slot")), Parameter("base", "*u8", ("state", 0, "base")),
    Parameter("stride", "i64", ("state", 0, "stride")), Parameter("fresh", "*u8", ("state", 0, "fresh")),
    Parameter("ring", "i32", ("state", 0, "ring")), Parameter("record", "i32", ("state", 0, "record")))


@dataclass
class Signature:
    """Collects the parameters that the text of a kernel asks for; every method returns a name."""

    spec: KernelSpec
    _made: dict[Where, Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("row_first", "row_stop"):
            self._add(name, "i32", ("launch", name))
        self._add("axis_rows", "*i32", ("axis", "rows"))

    def parameters(self) -> list[Parameter]:
        """Launch and axis first, then by operand."""
        return list(self._made.values())

    def _add(self, name: str, kind: str, where: Where) -> str:
        self._made.setdefault(where, Parameter(name, kind, where))
        return name

    # ---- the step ----------------------------------------------------------------------------------------------
    def axis(self, what: str) -> str:
        return self._add(f"axis_{what}", "*i64" if what == "pos" else "*i32", ("axis", what))

    def axis_of(self, rows: str, what: str) -> str:
        safe = rows.replace("/", "_")
        return self._add(f"{safe}_{what}", "*i64" if what == "pos" else "*i32", ("axis_of", rows, what))

    def seq(self, what: str) -> str:
        kind = {"slot": "*i32", "blocks": "*i32", "width": "i32"}.get(what, "*i64")
        return self._add(f"seq_{what}", kind, ("seq", what))

    def step(self, what: str) -> str:
        return self._add(what, "i32", ("step", what))

    def draws(self) -> str:
        return self._add("draw_rows", "*i64", ("draw", "rows"))

    def scratch(self) -> str:
        return self._add("scratch", "*u8", ("scratch",))

    # ---- operands ----------------------------------------------------------------------------------------------
    def operand(self, i: int) -> Operand:
        return self.spec.operands[i]

    def value(self, i: int) -> str:
        return self._add(f"p{i}", self.element(i), ("value", i))

    def input(self, name: str) -> str:
        return self._add(f"in_{name}", "*i64", ("input", name))

    def param(self, i: int, what: str = "data") -> str:
        kind = "*u8" if what == "scale" else self.element(i)
        return self._add(f"w{i}" if what == "data" else f"w{i}_scale", kind, ("param", i, what))

    def state(self, i: int, what: str) -> str:
        kind = {"base": "*u8", "fresh": "*u8", "stride": "i64", "has_fresh": "i32", "first": "*i32"}.get(what, "*i64")
        return self._add(f"s{i}_{what}", kind, ("state", i, what))

    def pin(self, i: int, what: str = "") -> str:
        return self._add(f"n{i}_{what}", "i32", ("pin", i, what)) if what else self._add(f"n{i}", "*i32", ("pin", i))

    def element(self, i: int) -> str:
        """Type of a pointer to the elements of a value or parameter."""
        op = self.operand(i)
        plain = op.type.name if op.role == "param" else stored(op.type).name
        if op.role == "param" and op.type.is_block:
            return "*u8"
        if plain not in _POINTERS:
            raise InternalError(f"a device stores no values of {op.dtype}")
        return _POINTERS[plain]

    def elements(self, i: int) -> int:
        """Elements of one row; of one step row for a value that a kernel on S sees as [n, ...]."""
        op = self.operand(i)
        return op.size // int(op.get("by_sequence", 1))
