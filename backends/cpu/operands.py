"""C declarations of a kernel's operands: base pointers once a call, row pointers once a row."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer.backends.cpu.storage import C_TYPES, Place, c_type
from deepinfer.codegen.kernels.spec import KernelSpec, Operand
from deepinfer.errors import InternalError

FIXED = {"T": "DI_AXIS_STEP", "T_kept": "DI_AXIS_KEPT", "T_wanted": "DI_AXIS_WANTED", "S": "DI_AXIS_SEQ"}
_WIDER = {"T_kept": ("T",), "T_wanted": ("T", "T_kept")}


def row_of(rows: str, operand_rows: str) -> str:
    """C expression of the row of an operand's axis for row ``row`` of the kernel's axis; on S the first row of the
    sequence."""
    if operand_rows == rows:
        return "row"
    if operand_rows == "T" and rows in _WIDER:
        return "(int64_t)axis->step_row[row]"
    if operand_rows in _WIDER.get(rows, ()):
        return f"di_wider_row(step, args->axis, row, {FIXED[operand_rows]})"
    if rows == "S" and operand_rows in FIXED:
        return f"(int64_t)step->axis[{FIXED[operand_rows]}].first[seq]"
    raise InternalError(f"a kernel on {rows} reads rows of {operand_rows}")


@dataclass
class Operands:
    """Pointers by operand number: ``b<i>`` base of a value, ``p<i>`` its row or a parameter's data, ``w<i>`` a
    parameter, ``s<i>`` a state. Only what was asked for is declared."""

    spec: KernelSpec
    used: set[int] = field(default_factory=set)
    rows: set[int] = field(default_factory=set)

    def __getitem__(self, i: int) -> Operand:
        return self.spec.operands[i]

    def place(self, i: int) -> Place:
        """This row of a value or input, or a whole parameter."""
        self.used.add(i)
        self.rows.add(i)
        return Place(f"p{i}", self.kind(i))

    def base(self, i: int) -> str:
        """All rows of a value, as a typed pointer."""
        self.used.add(i)
        return f"b{i}"

    def state(self, i: int) -> str:
        self.used.add(i)
        return f"s{i}"

    def param(self, i: int) -> str:
        self.used.add(i)
        return f"w{i}"

    def kind(self, i: int) -> str:
        """C type of the elements."""
        op = self[i]
        if op.role == "input":
            return "int64_t"
        if op.role == "param":
            return "uint8_t" if op.type.is_block else C_TYPES[op.type.name]
        return c_type(op.type)

    def elements(self, i: int) -> int:
        """Elements of one row; of one step row for a value that a kernel on S sees as [n, ...]."""
        op = self[i]
        return op.size // int(op.get("by_sequence", 1))

    # ---- text ------------------------------------------------------------------------------------------------------
    def call_lines(self) -> list[str]:
        """Declarations once a call."""
        out = []
        for i in sorted(self.used):
            op = self[i]
            if op.role in ("value", "pin"):
                const = "" if op.write else "const "
                out.append(f"{const}{self.kind(i)}* const b{i} = ({const}{self.kind(i)}*)args->p[{i}];")
            elif op.role == "param":
                out.append(f"const DiParam* const w{i} = (const DiParam*)args->p[{i}];")
                if i in self.rows:
                    out.append(f"const {self.kind(i)}* const p{i} = (const {self.kind(i)}*)w{i}->data;")
                    if op.type.is_block:
                        out.append(f"const uint8_t* const p{i}_scale = (const uint8_t*)w{i}->scale;")
            elif op.role == "state":
                out.append(f"const DiState* const s{i} = (const DiState*)args->p[{i}];")
        return out

    def row_lines(self) -> list[str]:
        """Declarations once a row; ``row``, ``seq`` and ``axis`` are known."""
        out = []
        for i in sorted(self.rows):
            op = self[i]
            if op.role == "input":
                out.append(f"[[maybe_unused]] const int64_t* const p{i} = {self._input(op)};")
            elif op.role in ("value", "pin"):
                const, size = "" if op.write else "const ", self.elements(i)
                at = row_of(self.spec.rows, op.rows)
                pointer = f"b{i} + {at} * {size}" if size != 1 else f"b{i} + {at}"
                if op.role == "pin":
                    pointer = f"b{i} ? {pointer} : nullptr"
                out.append(f"[[maybe_unused]] {const}{self.kind(i)}* const p{i} = {pointer};")
        return out

    def _input(self, op: Operand) -> str:
        name = op.get("name")
        row = row_of(self.spec.rows, op.rows)
        if name == "positions":
            return "axis->pos + row" if op.rows == self.spec.rows else f"step->axis[{FIXED[op.rows]}].pos + {row}"
        if name == "token_ids":
            return f"step->token_ids + {row}"
        if name == "lookback":
            return f"step->lookback + {row} * step->lookback_width"
        raise InternalError(f"the runner makes no input {name}")
