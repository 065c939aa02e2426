"""How values and parameters lie in memory on the CPU, and the C that reads and writes one element."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.dsl.types import DType, bf16, f32
from deepinfer.errors import InternalError

# dtype name -> C type of its elements
C_TYPES = {"f32": "float", "bf16": "uint16_t", "i64": "int64_t", "i32": "int32_t", "u8": "uint8_t", "bool": "uint8_t"}
C_BYTES = {"float": 4, "uint16_t": 2, "int64_t": 8, "int32_t": 4, "uint8_t": 1}
FORMATS = {"mxfp8": "DiMxfp8", "mxfp4": "DiMxfp4", "fp4_e4m3": "DiFp4E4m3"}


def stored(dtype: DType) -> DType:
    """Plain dtype of a value in the arena. bf16 holds every product of a 4-bit significand and its scale exactly."""
    if dtype.is_record:
        return f32 if any(t.name == "f32" for t, _ in dtype.parts) else bf16
    return bf16 if dtype.is_block else dtype


def c_type(dtype: DType) -> str:
    plain = stored(dtype).name
    if plain not in C_TYPES:
        raise InternalError(f"the CPU stores no values of {dtype}")
    return C_TYPES[plain]


def holds(kind: str, dtype: str) -> bool:
    """Whether an element of C type ``kind`` holds every value of a value dtype."""
    return kind != "uint16_t" or stored(DType.parse(dtype)).name == "bf16"


@dataclass(frozen=True)
class Place:
    """Elements in memory: a C pointer and the type it points to."""

    pointer: str
    kind: str

    def read(self, at: str) -> str:
        """C expression (float or int64_t) of the element at an index."""
        element = f"{self.pointer}[{at}]"
        if self.kind == "uint16_t":
            return f"di_bf({element})"
        return element if self.kind in ("float", "int64_t") else f"(int64_t){element}"

    def write(self, at: str, value: str, exact: bool = False) -> str:
        """C statement that stores a float or int64_t; ``exact``: the element type is known to hold the value."""
        if self.kind == "uint16_t":
            value = f"di_bf_exact({value})" if exact else f"di_to_bf({value})"
        elif self.kind in ("int32_t", "uint8_t"):
            value = f"({self.kind})({value})"
        return f"{self.pointer}[{at}] = {value};"


@dataclass(frozen=True)
class Part:
    """One part of a stored record: ``first`` of ``count`` features, byte offsets of its codes and scales."""

    dtype: DType
    first: int
    count: int
    codes: int
    scales: int


def record_parts(record: DType) -> list[Part]:
    """Layout of a record: the codes of all parts, then their scales (dsl DType.row_bytes)."""
    parts = record.parts or ((record, record.features),)
    codes, scales, first = 0, sum(t.data_bytes(n) for t, n in parts), 0
    out = []
    for t, n in parts:
        out.append(Part(t, first, n, codes, scales))
        codes, scales, first = codes + t.data_bytes(n), scales + t.scale_bytes(n), first + n
    return out


def format_arguments(dtype: DType) -> str:
    """Template arguments of the header functions for a block format: its codec and its group."""
    if dtype.block[0] != 1:
        raise InternalError(f"rows are encoded in groups of one row, not {dtype}")
    return f"{FORMATS[dtype.name]}, {dtype.block[1]}"


def decode_lines(record: DType, source: str, out: str) -> list[str]:
    """C statements that decode the record at ``source`` (const char*) into f32 ``out``."""
    lines = []
    for p in record_parts(record):
        target = f"{out} + {p.first}" if p.first else out
        at = f"{source} + {p.codes}"
        if p.dtype.is_block:
            lines.append(f"di_decode<{format_arguments(p.dtype)}>((const uint8_t*)({at}), "
                         f"(const uint8_t*)({source} + {p.scales}), {p.count}, {target});")
        else:
            lines.append(f"di_decode_plain((const {C_TYPES[p.dtype.name]}*)({at}), {p.count}, {target});")
    return lines


def encode_lines(record: DType, source: str, target: str) -> list[str]:
    """C statements that encode f32 ``source`` into the record at ``target`` (char*)."""
    lines = []
    for p in record_parts(record):
        x = f"{source} + {p.first}" if p.first else source
        at = f"{target} + {p.codes}"
        if p.dtype.is_block:
            lines.append(f"di_encode<{format_arguments(p.dtype)}>({x}, {p.count}, (uint8_t*)({at}), "
                         f"(uint8_t*)({target} + {p.scales}));")
        else:
            lines.append(f"di_encode_plain({x}, {p.count}, ({C_TYPES[p.dtype.name]}*)({at}));")
    return lines
