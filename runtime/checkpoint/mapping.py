"""Weights in memory: files mapped read-only, parameters pointed at their tensors, nothing copied that lies aligned."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.dsl.params import ParamDecl
from deepinfer.errors import ArtifactError, InternalError
from deepinfer.runtime.checkpoint.headers import Place

ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2}


@dataclass
class Copied:
    """Tensors that lie at an address their elements do not allow, and had to be copied."""

    tensors: int = 0
    bytes: int = 0


class Weights:
    """The parameters of an engine, bound to a checkpoint's files. Fulfils ``native_engine.Binding``.

    Args:
        places: tensors by name, checked against ``params``.
        params: in the order of the launch table.
        derived: values of derived parameters by name, in their parameter's dtype.

    ``tables_in_memory``: whoever started the engine has just read all lookup tables, and they are small.
    """

    def __init__(self, places: Mapping[str, Place], params: Sequence[ParamDecl],
                 derived: Mapping[str, NDArray[Any]]) -> None:
        self.params, self.copied = tuple(params), Copied()
        self.tables_in_memory = False
        self._places = places
        self._derived = {name: np.ascontiguousarray(value) for name, value in derived.items()}
        self._maps: dict[Path, mmap.mmap] = {}
        self._files: dict[Path, NDArray[np.uint8]] = {}
        self._copies: dict[str, NDArray[np.uint8]] = {}
        for p in self.params:
            if p.derive:
                self._check_derived(p)
                continue
            for name in (*p.names, *p.scale_names):
                self._prepare(name, lookup=p.table)

    def addresses(self) -> Iterator[list[tuple[int, int]]]:
        """For each parameter, one (data, scale) address pair per tensor."""
        for p in self.params:
            if p.derive:
                yield [(self._derived[p.name].ctypes.data, 0)]
            else:
                scales = [self._address(n) for n in p.scale_names] or [0] * len(p.names)
                yield list(zip(map(self._address, p.names), scales, strict=True))

    def sizes(self) -> Iterator[list[tuple[int, int]]]:
        """For each parameter, the bytes of (data, scale) of each tensor."""
        for p in self.params:
            if p.derive:
                yield [(self._derived[p.name].nbytes, 0)]
            else:
                scales = [self._places[n].tensor.nbytes for n in p.scale_names] or [0] * len(p.names)
                yield list(zip((self._places[n].tensor.nbytes for n in p.names), scales, strict=True))

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        """Raw bytes of a tensor, read-only."""
        if name in self._copies:
            return self._copies[name]
        place = self._places[name]
        return self._file(place.file)[place.start : place.stop]

    def dtype_of(self, name: str) -> str:
        return self._places[name].tensor.dtype

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._places[name].tensor.shape

    def _address(self, name: str) -> int:
        if name in self._copies:
            return int(self._copies[name].ctypes.data)
        place = self._places[name]
        return int(self._file(place.file).ctypes.data) + place.start

    def _file(self, file: Path) -> NDArray[np.uint8]:
        if file not in self._files:
            with file.open("rb") as f:
                self._maps[file] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
            _advise(self._maps[file], "MADV_HUGEPAGE", 0, len(self._maps[file]))
            self._files[file] = np.frombuffer(self._maps[file], np.uint8)
        return self._files[file]

    def _prepare(self, name: str, lookup: bool) -> None:
        place = self._places[name]
        if place.start % ITEM_BYTES.get(place.tensor.dtype, 1):
            self._copies[name] = self.bytes_of(name).copy()
            self.copied.tensors += 1
            self.copied.bytes += place.tensor.nbytes
        elif lookup:
            self._advise_random(place)

    def _advise_random(self, place: Place) -> None:
        """Rows of a lookup table are read here and there: reading ahead would only push other pages out, and a huge
        page would bring two MiB for a row."""
        self._file(place.file)
        first = -(-place.start // mmap.PAGESIZE) * mmap.PAGESIZE
        if place.stop - first >= mmap.PAGESIZE:
            _advise(self._maps[place.file], "MADV_NOHUGEPAGE", first, place.stop - first)
            _advise(self._maps[place.file], "MADV_RANDOM", first, place.stop - first)

    def _check_derived(self, p: ParamDecl) -> None:
        if p.name not in self._derived:
            raise InternalError(f"the derived parameter {p.name} was not made")
        value = self._derived[p.name]
        want = {"i64": np.int64, "f32": np.float32}.get(p.dtype.name)
        if value.shape != p.shape or value.dtype != want:
            raise ArtifactError("a parameter made at load time has another shape or dtype than the engine reads",
                                where=p.name, found=f"{list(value.shape)} {value.dtype}",
                                allowed=f"{list(p.shape)} {p.dtype}")


def _advise(mapped: mmap.mmap, advice: str, start: int, length: int) -> None:
    """A wish that a kernel may not know: refusal costs speed only. Weights that are read into huge pages of the file's
    cache stream half as fast again as from small ones."""
    try:
        mapped.madvise(getattr(mmap, advice), start, length)
    except (AttributeError, OSError):
        return
