"""Types of Graph values: row axes, static dims, storage formats.

A value is ``rows x dims`` of one dtype. The row axis is a *type*, not a size: it says which rows of a step
exist (all of them, the kept ones, one per compressed group, ...), so that the same graph serves prefill,
decode and verification. Dims are the feature sizes of one row and are static, except ``entries/r``, the
number of cache entries a row may see.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property

from deepinfer.errors import SpecError

Dim = int | str


@dataclass(frozen=True, order=True)
class Rows:
    """A row axis. ``kind``:

    - ``step``: the rows a step brings for each sequence, at positions ``c .. c + q - 1``;
    - ``kept``: the step's rows at positions ``>= N - K`` (N = end of the prompt, K chosen per request);
    - ``wanted``: the kept rows whose logits were asked for;
    - ``groups`` with ``ratio`` r: groups of r consecutive positions that this step completes;
    - ``seq``: one row per sequence.
    """

    kind: str
    ratio: int = 0

    KINDS = ("step", "kept", "wanted", "groups", "seq")

    def __post_init__(self) -> None:
        if self.kind not in self.KINDS:
            raise SpecError("unknown row axis", found=self.kind, allowed=", ".join(self.KINDS))

    def __str__(self) -> str:
        return {"step": "T", "kept": "T_kept", "wanted": "T_wanted", "seq": "S"}.get(
            self.kind, f"T/{self.ratio}")

    @staticmethod
    def parse(text: str) -> Rows:
        named = {"T": STEP, "T_kept": KEPT, "T_wanted": WANTED, "S": SEQ}
        if text in named:
            return named[text]
        if text.startswith("T/"):
            return groups(int(text[2:]))
        raise SpecError("unknown row axis", found=text, allowed="T, T_kept, T_wanted, S, T/<ratio>")


STEP, KEPT, WANTED, SEQ = Rows("step"), Rows("kept"), Rows("wanted"), Rows("seq")


def groups(ratio: int) -> Rows:
    """The axis of completed groups of ``ratio`` positions."""
    return Rows("groups", ratio)


_PLAIN_BYTES = {"f64": 8, "f32": 4, "bf16": 2, "i64": 8, "i32": 4, "u8": 1, "bool": 1, "state": 0}
# family -> (bits per element, bytes per scale)
_BLOCK_FAMILIES = {"mxfp8": (8, 1), "mxfp4": (4, 1), "fp4_e4m3": (4, 1)}
RECORD_ALIGNMENT = 4


@dataclass(frozen=True)
class DType:
    """An element type, a block-scaled storage format, or a record of such parts.

    ``mxfp8(r,c)`` and ``mxfp4(r,c)``: E4M3 / E2M1 codes, one power-of-two scale (E8M0) per r x c block;
    ``fp4_e4m3(n)``: E2M1 codes, one E4M3 scale per n consecutive features; a record such as
    ``mxfp8(1,64)[448]+bf16[64]`` concatenates parts along the last dim. The scales are part of the type.
    """

    name: str
    block: tuple[int, int] = (1, 1)
    parts: tuple[tuple[DType, int], ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return "+".join(f"{t}[{n}]" for t, n in self.parts)
        if self.name == "fp4_e4m3":
            return f"fp4_e4m3({self.block[1]})"
        return f"{self.name}({self.block[0]},{self.block[1]})" if self.is_block else self.name

    @property
    def is_block(self) -> bool:
        return self.name in _BLOCK_FAMILIES

    @property
    def is_record(self) -> bool:
        return bool(self.parts)

    @property
    def is_float(self) -> bool:
        return self.name in ("f64", "f32", "bf16")

    @property
    def is_int(self) -> bool:
        return self.name in ("i64", "i32", "u8", "bool")

    @property
    def is_encoded(self) -> bool:
        return self.is_block or self.is_record

    def data_bytes(self, features: int) -> int:
        """Bytes of the codes of one row of ``features`` elements, without scales."""
        if self.parts:
            return sum(t.data_bytes(n) for t, n in self.parts)
        if self.is_block:
            return features * _BLOCK_FAMILIES[self.name][0] // 8
        return features * _PLAIN_BYTES[self.name]

    def scale_bytes(self, features: int) -> int:
        """Bytes of the scales of one row (for 1 x n blocks)."""
        if self.parts:
            return sum(t.scale_bytes(n) for t, n in self.parts)
        return -(-features // self.block[1]) if self.is_block else 0

    def row_bytes(self, features: int) -> int:
        """Bytes of one cache record: codes, then scales, padded to ``RECORD_ALIGNMENT``."""
        raw = self.data_bytes(features) + self.scale_bytes(features)
        return -(-raw // RECORD_ALIGNMENT) * RECORD_ALIGNMENT

    def __getitem__(self, features: int) -> DType:
        """``mxfp8(1, 64)[448] + bf16[64]``: a part of a record."""
        return DType("record", parts=((self, features),))

    def __add__(self, other: DType) -> DType:
        return DType("record", parts=self.parts + other.parts)

    @cached_property
    def features(self) -> int:
        """Number of elements a record holds."""
        return sum(n for _, n in self.parts)

    @staticmethod
    @cache
    def parse(text: str) -> DType:
        if "[" in text:
            parts = []
            for piece in text.split("+"):
                m = re.fullmatch(r"(.+)\[(\d+)\]", piece)
                if not m:
                    raise SpecError("unknown dtype", found=text)
                parts.append((DType.parse(m[1]), int(m[2])))
            return DType("record", parts=tuple(parts))
        if text in _PLAIN_BYTES:
            return DType(text)
        m = re.fullmatch(r"(\w+)\((?:(\d+),)?(\d+)\)", text)
        if not m or m[1] not in _BLOCK_FAMILIES:
            raise SpecError("unknown dtype", found=text,
                            allowed=", ".join((*_PLAIN_BYTES, *(f"{k}(r,c)" for k in _BLOCK_FAMILIES))))
        return DType(m[1], (int(m[2] or 1), int(m[3])))


f64, f32, bf16 = DType("f64"), DType("f32"), DType("bf16")
i64, i32, u8, boolean, state_handle = DType("i64"), DType("i32"), DType("u8"), DType("bool"), DType("state")


def mxfp8(rows: int, cols: int) -> DType:
    """E4M3 codes, one power-of-two scale per rows x cols block."""
    return DType("mxfp8", (rows, cols))


def mxfp4(rows: int, cols: int) -> DType:
    """E2M1 codes, two per byte (even feature in the low nibble), one power-of-two scale per block."""
    return DType("mxfp4", (rows, cols))


def fp4_e4m3(cols: int) -> DType:
    """E2M1 codes, one E4M3 scale per ``cols`` features, no global scale."""
    return DType("fp4_e4m3", (1, cols))


@dataclass(frozen=True)
class Type:
    """rows x dims of dtype; ``rows`` is None for parameters and constants."""

    rows: Rows | None
    dims: tuple[Dim, ...]
    dtype: DType

    def __str__(self) -> str:
        head = f"{self.rows}" if self.rows else "-"
        return f"{head} [{', '.join(map(str, self.dims))}] {self.dtype}"

    @staticmethod
    def parse(text: str) -> Type:
        m = re.fullmatch(r"(\S+) \[([^\]]*)\] (.+)", text.strip())
        if not m:
            raise SpecError("unreadable type", found=text, allowed="'T [4, 64] f32'")
        dims: list[Dim] = [int(d) if d.strip().isdigit() else d.strip() for d in m[2].split(",") if d.strip()]
        return Type(None if m[1] == "-" else Rows.parse(m[1]), tuple(dims), DType.parse(m[3]))

    @property
    def static_dims(self) -> tuple[int, ...]:
        for d in self.dims:
            if not isinstance(d, int):
                raise SpecError("a static dim is needed", found=str(self))
        return tuple(d for d in self.dims if isinstance(d, int))

    @property
    def size(self) -> int:
        """Elements of one row."""
        n = 1
        for d in self.static_dims:
            n *= d
        return n


def entries(ratio: int) -> str:
    """Symbolic dim: cache entries of ratio ``ratio`` visible to a row."""
    return f"entries/{ratio}"
