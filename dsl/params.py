"""Checkpoint tensors: names by path, shapes by use, storage by what the checkpoint holds.

A spec never lists its tensors. It names them where it uses them, ``p.attn.wq_a`` with a shape, and the table of
all declared parameters is what the loader checks a checkpoint's headers against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deepinfer.dsl.build import current
from deepinfer.dsl.graph import Node
from deepinfer.dsl.types import DType, Type, bf16, f32, i64
from deepinfer.errors import ArtifactError, SpecError


@dataclass(frozen=True)
class StoredTensor:
    """What a safetensors header says: dtype in safetensors' spelling (F8_E4M3, F8_E8M0, I8, BF16, F32, I64) and
    shape as stored."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        bits = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "BF16": 16, "F16": 16,
                "F4": 4}.get(self.dtype, 8)
        n = 1
        for d in self.shape:
            n *= d
        return n * bits // 8


@dataclass(frozen=True)
class Storage:
    """Official storage formats of a model: of weight matrices, of experts, of lookup tables, and of the rest."""

    matrix: DType = bf16
    expert: DType = bf16
    table: DType = bf16
    plain: DType = bf16


@dataclass(frozen=True)
class ParamDecl:
    """One declared parameter.

    ``name`` holds ``{e}`` when ``stack`` > 0: one checkpoint tensor per e < stack. ``shape`` is the logical shape of
    one tensor. ``derive`` names a function of the spec that makes the values at load time (no checkpoint tensor).
    ``below``: integers of the tensor must lie in 0 .. below - 1 (0: any); the loader checks it, for kernels index by
    them.
    ``table``: single rows are looked up and nothing else, so it may stay in host memory or mapped on disk.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    stack: int = 0
    derive: str = ""
    below: int = 0
    table: bool = False

    @property
    def names(self) -> list[str]:
        return [self.name.replace("{e}", str(e)) for e in range(self.stack)] if self.stack else [self.name]

    @property
    def scale_names(self) -> list[str]:
        if not self.dtype.is_block:
            return []
        return [n.removesuffix(".weight") + ".scale" for n in self.names]

    def stored(self) -> StoredTensor:
        """How the official checkpoint stores one tensor."""
        if self.dtype.name == "mxfp4":
            return StoredTensor("I8", (*self.shape[:-1], self.shape[-1] // 2))
        kind = {"mxfp8": "F8_E4M3", "bf16": "BF16", "f32": "F32", "i64": "I64"}[self.dtype.name]
        return StoredTensor(kind, self.shape)

    def stored_scale(self) -> StoredTensor:
        r, c = self.dtype.block
        return StoredTensor("F8_E8M0", (-(-self.shape[0] // r), -(-self.shape[1] // c)))

    @property
    def type(self) -> Type:
        return Type(None, ((self.stack, *self.shape) if self.stack else self.shape), self.dtype)


# Storage dtypes a checkpoint may use for a kind instead of the official one.
_PLAIN_DTYPES = {"BF16": bf16, "F32": f32}
_FP4_DTYPES = ("I8", "U8", "F4")


@dataclass
class Params:
    """All parameters of a model; ``headers`` (name -> StoredTensor) decide the storage when they are known."""

    storage: Storage = field(default_factory=Storage)
    headers: Mapping[str, StoredTensor] | None = None
    declared: dict[str, ParamDecl] = field(default_factory=dict)

    def root(self) -> Path:
        return Path(self, "")

    def declare(self, name: str, shape: tuple[int, ...], kind: str, stack: int = 0, derive: str = "",
                below: int = 0) -> Node:
        """Value of a parameter. ``kind``: matrix, expert, table, plain, f32, i64 (the official storage)."""
        official = {"matrix": self.storage.matrix, "expert": self.storage.expert, "table": self.storage.table,
                    "plain": self.storage.plain, "f32": f32, "i64": i64}[kind]
        dtype = official if derive else self._actual(name.replace("{e}", "0"), official, kind)
        decl = ParamDecl(name, shape, dtype, stack, derive, below, kind == "table")
        known = self.declared.setdefault(name, decl)
        if known != decl:
            raise SpecError(f"parameter {name} is used with two shapes", found=f"{shape} and {known.shape}")
        return current().add("param", name=name, type=str(decl.type), stack=stack, derive=derive)

    def _actual(self, name: str, official: DType, kind: str) -> DType:
        if self.headers is None or name not in self.headers or kind == "i64":
            return official  # a missing tensor is reported by the loader, with all others
        have = self.headers[name].dtype
        if have in _PLAIN_DTYPES:
            return _PLAIN_DTYPES[have]
        if have == "F8_E4M3" and official.name == "mxfp8":
            return official
        if have in _FP4_DTYPES and official.name == "mxfp4":
            return official
        raise ArtifactError("a tensor has a storage format that this model does not take", where=name, found=have,
                            allowed=f"{official}, BF16, F32",
                            next_step="use a checkpoint whose config.json describes its storage")


@dataclass(frozen=True)
class Path:
    """``p.layers[3].attn.wq_a``: a dotted checkpoint name under construction."""

    params: Params
    name: str

    def __getattr__(self, part: str) -> Path:
        if part.startswith("__"):
            raise AttributeError(part)
        return Path(self.params, f"{self.name}.{part}" if self.name else part)

    def __getitem__(self, part: int | str) -> Path:
        return Path(self.params, f"{self.name}.{part}")

    def matrix(self, out: int, in_: int) -> Node:
        """Weight matrix [out, in] ``name.weight``, in the model's matrix format."""
        return self.params.declare(f"{self.name}.weight", (out, in_), "matrix")

    def plain_matrix(self, out: int, in_: int) -> Node:
        """Weight matrix that the official checkpoint keeps unquantised."""
        return self.params.declare(f"{self.name}.weight", (out, in_), "plain")

    def stacked(self, count: int, out: int, in_: int) -> Node:
        """Stack [count, out, in] of ``<path>.{e}.<leaf>.weight``; write the path with ``each``."""
        return self.params.declare(f"{self.name}.weight", (out, in_), "expert", stack=count)

    @property
    def each(self) -> Path:
        return Path(self.params, f"{self.name}.{{e}}")

    def table(self, rows: int, cols: int) -> Node:
        """Lookup table [rows, cols] ``name.weight``, one scale per row and block of columns."""
        return self.params.declare(f"{self.name}.weight", (rows, cols), "table")

    def vector(self, *shape: int, suffix: str = ".weight") -> Node:
        return self.params.declare(self.name + suffix, shape, "plain")

    def f32(self, *shape: int) -> Node:
        """A tensor the official checkpoint keeps in f32, under the bare name."""
        return self.params.declare(self.name, shape, "f32")

    def integers(self, *shape: int, below: int = 0) -> Node:
        """Stored integers, each in 0 .. below - 1."""
        return self.params.declare(self.name, shape, "i64", below=below)

    def derived(self, how: str, *shape: int) -> Node:
        """Integers that the spec's function ``how`` makes at load time."""
        return self.params.declare(self.name, shape, "i64", derive=how)
