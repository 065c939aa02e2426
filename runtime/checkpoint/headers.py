"""Safetensors headers: names, shapes and places of tensors without reading a byte of them.

A file is an 8-byte little-endian length, a JSON object of that length, then the data; the object maps each name to
``dtype``, ``shape`` and ``data_offsets`` inside the data. Everything a header can get wrong is an ArtifactError that
names file and tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.dsl.params import StoredTensor
from deepinfer.errors import ArtifactError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = frozenset({"BOOL", "F4", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I16", "U16", "F16", "BF16", "I32",
                    "U32", "F32", "I64", "U64", "F64"})
LENGTH_BYTES = 8
_HEADER_LIMIT = 256 << 20  # bytes; a million tensors need about half of it
_NAMED = 10  # names in a message; the rest is counted
_FETCH = "fetch the file again"


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: bytes ``start .. stop - 1`` of ``file``."""

    tensor: StoredTensor
    file: Path
    start: int
    stop: int


def some(names: list[str]) -> str:
    """The first ten names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Name -> dtype and shape of every tensor of a checkpoint folder; {} when it holds no weights."""
    return {name: place.tensor for name, place in read_places(folder).items()}


def read_places(folder: Path) -> dict[str, Place]:
    """Name -> place of every tensor of ``model.safetensors``, or of the shards that the index names.

    Raises ArtifactError for a damaged or missing file, for a name in two files, and where index and shards disagree.
    """
    index = folder / INDEX
    if not index.is_file():
        return read_file(folder / SINGLE) if (folder / SINGLE).is_file() else {}
    named = _read_index(index)
    places: dict[str, Place] = {}
    for shard in sorted(set(named.values())):
        file = folder / shard
        if not file.is_file():
            raise ArtifactError("a shard that the index names is missing", where=str(file), next_step=_FETCH)
        for name, place in read_file(file).items():
            if name in places:
                raise ArtifactError("a tensor lies in two shards", where=name, next_step="fetch the checkpoint again",
                                    found=f"{places[name].file.name} and {shard}")
            places[name] = place
    _compare(index, named, places)
    return places


def _read_index(index: Path) -> dict[str, str]:
    try:
        named = json.loads(index.read_bytes())["weight_map"]
        good = isinstance(named, dict) and all(isinstance(s, str) and Path(s).name == s for s in named.values())
    except (ValueError, KeyError, TypeError):
        good = False
    if not good:
        raise ArtifactError("the index is not a JSON object with a weight_map from tensors to files of this folder",
                            where=str(index), next_step=_FETCH)
    return dict(named)


def _compare(index: Path, named: Mapping[str, str], places: Mapping[str, Place]) -> None:
    wrong = [n for n, shard in named.items() if n not in places or places[n].file.name != shard]
    wrong += sorted(set(places) - set(named))
    if wrong:
        raise ArtifactError("the index and the shards disagree about where tensors lie", where=str(index),
                            found=some(wrong), next_step="fetch the checkpoint again")


def read_file(file: Path) -> dict[str, Place]:
    """Places of one file, checked against its length."""
    size = file.stat().st_size
    with file.open("rb") as f:
        head = f.read(LENGTH_BYTES)
        length = int.from_bytes(head, "little")
        if len(head) < LENGTH_BYTES or length > max(0, size - LENGTH_BYTES):
            raise ArtifactError("the file is truncated inside its header or is no safetensors file", where=str(file),
                                found=f"{size} bytes", next_step=_FETCH)
        if length > _HEADER_LIMIT:
            raise ArtifactError("the file is no safetensors file", where=str(file), found=f"a header of {length} bytes",
                                allowed=f"<= {_HEADER_LIMIT}", next_step=_FETCH)
        text = f.read(length)
    return parse_header(text, file, size)


def parse_header(text: bytes, file: Path, file_bytes: int) -> dict[str, Place]:
    """Places from a header's JSON; ``file_bytes`` is the length of the whole file."""
    first = LENGTH_BYTES + len(text)
    try:
        entries = json.loads(text, object_pairs_hook=_unique)
    except ValueError as error:
        raise ArtifactError(f"the header of the file cannot be read: {error}", where=str(file),
                            next_step=_FETCH) from None
    if not isinstance(entries, dict):
        raise ArtifactError("the header of the file is not an object", where=str(file), next_step=_FETCH)
    places = {name: _place(name, entry, file, first) for name, entry in entries.items() if name != "__metadata__"}
    promised = max((p.stop for p in places.values()), default=first)
    if promised != file_bytes:
        what = "the file is truncated" if promised > file_bytes else "the file is longer than its header says"
        raise ArtifactError(what, where=str(file), found=f"{file_bytes} bytes", allowed=f"{promised} bytes",
                            next_step=_FETCH)
    _require_no_overlap(places, file, first)
    return places


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError("it names twice: " + some(sorted({n for n in names if names.count(n) > 1})))
    return out


def _place(name: str, entry: Any, file: Path, first: int) -> Place:
    def bad(found: object, allowed: object) -> ArtifactError:
        return ArtifactError(f"the header entry of the tensor {name} is damaged", where=str(file), found=found,
                             allowed=allowed, next_step=_FETCH)

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise bad(entry, "dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise bad(f"dtype {dtype}", sorted(DTYPES))
    if not _whole_numbers(shape) or not _whole_numbers(offsets) or len(offsets) != 2:
        raise bad(f"shape {shape} at {offsets}", "lists of whole numbers")
    tensor = StoredTensor(dtype, tuple(shape))
    if offsets[1] - offsets[0] != tensor.nbytes:
        raise bad(f"{offsets[1] - offsets[0]} bytes for {dtype} {shape}", f"{tensor.nbytes} bytes")
    return Place(tensor, file, first + offsets[0], first + offsets[1])


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in values)


def _require_no_overlap(places: Mapping[str, Place], file: Path, first: int) -> None:
    end, last = first, "the header"
    for name, p in sorted(places.items(), key=lambda item: (item[1].start, item[1].stop)):
        if p.start != end:
            what = "overlap" if p.start < end else "leave a hole"
            raise ArtifactError(f"two neighbours in the file {what}: {last} and {name}", where=str(file),
                                found=f"{name} from byte {p.start}", allowed=f"from byte {end}", next_step=_FETCH)
        end, last = p.stop, name
