"""Safetensors files written as their tensors are made: headers first, from shapes alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepinfer.codegen.cache import sync
from deepinfer.dsl.params import StoredTensor
from deepinfer.errors import InternalError
from deepinfer.runtime.checkpoint.headers import INDEX, SINGLE
from deepinfer.runtime.checkpoint.mapping import ITEM_BYTES

_DATA_ALIGNMENT = 64


@dataclass(frozen=True)
class Shard:
    """A file and its tensors, in the order of their bytes."""

    file: str
    tensors: Mapping[str, StoredTensor]


def plan_shards(tensors: Mapping[str, StoredTensor], shard_bytes: int) -> list[Shard]:
    """Tensors in order, packed into files of at most ``shard_bytes`` (a larger tensor has a file to itself). Inside a
    file those with the widest elements come first, so that all lie aligned."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, t in tensors.items():
        if groups[-1] and size + t.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += t.nbytes
    shards = []
    for i, names in enumerate(groups):
        file = SINGLE if len(groups) == 1 else f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        names.sort(key=lambda n: -ITEM_BYTES.get(tensors[n].dtype, 1))
        shards.append(Shard(file, {n: tensors[n] for n in names}))
    return shards


def write_shards(folder: Path, shards: Sequence[Shard], make: Callable[[str], Iterator[NDArray[np.uint8]]],
                 advance: Callable[[int], None]) -> None:
    """Write all files and, for more than one, the index. ``advance`` is told the bytes written."""
    for shard in shards:
        with (folder / shard.file).open("wb") as f:
            f.write(header_bytes(shard))
            for name, t in shard.tensors.items():
                written = 0
                for piece in make(name):
                    f.write(piece.data)
                    written += piece.nbytes
                    advance(piece.nbytes)
                if written != t.nbytes:
                    raise InternalError(f"{name}: made {written} bytes, its shape takes {t.nbytes}")
        sync(folder / shard.file)
    if len(shards) > 1:
        total = sum(t.nbytes for s in shards for t in s.tensors.values())
        weight_map = {name: s.file for s in shards for name in s.tensors}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def header_bytes(shard: Shard) -> bytes:
    """All of a file before its data, padded so that the data starts aligned."""
    entries, at = {}, 0
    for name, t in shard.tensors.items():
        entries[name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _DATA_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
