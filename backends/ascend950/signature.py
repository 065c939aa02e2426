"""Parameters of a kernel, and row numbers as AscendC scalar expressions."""

from __future__ import annotations

from deepinfer.backends.signature import WIDER, Parameter
from deepinfer.backends.signature import Signature as DeviceSignature
from deepinfer.errors import InternalError

C_TYPES = {"*f32": "float", "*bf16": "bfloat16_t", "*i64": "int64_t", "*i32": "int32_t", "*u8": "uint8_t"}
BYTES = {"*f32": 4, "*bf16": 2, "*i64": 8, "*i32": 4, "*u8": 1}


class Signature(DeviceSignature):
    """Prints row numbers as AscendC; adds the blob of a kernel's constants to the sources of parameters."""

    def constants(self) -> str:
        return self._add("constants", "*u8", ("constants",))

    def row_of(self, operand_rows: str, row: str = "row", seq: str = "seq") -> str:
        """Expression (int64_t) of the row of an operand's axis for row ``row`` of the kernel's axis."""
        rows = self.spec.rows
        if operand_rows == rows:
            return row
        if operand_rows == "T" and rows in WIDER:
            return f"(int64_t)di_gm_load({self.axis('step_row')} + {row})"
        if operand_rows in WIDER.get(rows, ()):
            to, step = self.axis_of(operand_rows, "first"), self.axis_of("T", "first")
            at = f"di_gm_load({self.axis('step_row')} + {row})"
            return f"(int64_t)(di_gm_load({to} + {seq} + 1) - (di_gm_load({step} + {seq} + 1) - {at}))"
        if rows == "S":
            return f"(int64_t)di_gm_load({self.axis_of(operand_rows, 'first')} + {seq})"
        raise InternalError(f"a kernel on {rows} reads rows of {operand_rows}")


def declared(p: Parameter) -> str:
    """A parameter of a kernel function."""
    if p.type.startswith("*"):
        return f"__gm__ {C_TYPES[p.type]}* {p.name}"
    return f"{'int64_t' if p.type == 'i64' else 'int32_t'} {p.name}"
