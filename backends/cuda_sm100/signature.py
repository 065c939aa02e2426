"""Parameters of a kernel for NVIDIA devices (README.md)."""

from __future__ import annotations

from deepinfer.backends.signature import WIDER, Parameter, Where
from deepinfer.backends.signature import Signature as DeviceSignature
from deepinfer.errors import InternalError

__all__ = ["Parameter", "Signature", "Where"]


class Signature(DeviceSignature):
    """Prints row numbers as Triton."""

    def row_of(self, operand_rows: str, row: str = "row", seq: str = "seq") -> str:
        """Expression (int64) of the row of an operand's axis for row ``row`` of the kernel's axis."""
        rows = self.spec.rows
        if operand_rows == rows:
            return row
        if operand_rows == "T" and rows in WIDER:
            return f"tl.load({self.axis('step_row')} + {row}).to(tl.int64)"
        if operand_rows in WIDER.get(rows, ()):
            to, step = self.axis_of(operand_rows, "first"), self.axis_of("T", "first")
            at = f"tl.load({self.axis('step_row')} + {row})"
            return f"(tl.load({to} + {seq} + 1) - (tl.load({step} + {seq} + 1) - {at})).to(tl.int64)"
        if rows == "S":
            return f"tl.load({self.axis_of(operand_rows, 'first')} + {seq}).to(tl.int64)"
        raise InternalError(f"a kernel on {rows} reads rows of {operand_rows}")
