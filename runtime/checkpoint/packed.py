"""Weights packed for one engine: ``ENGINE/weights``, a checkpoint folder of its own.

It holds the engine's tensors and nothing else in one safetensors file, in the order in which a step reads them and on
boundaries that vector loads want, lookup tables last; what the spec makes from a checkpoint at load time; and the texts
of the checkpoint. ``pack.json`` has a sum of every piece of the files. Numbers were looked at when they were packed, so
a load compares sums, at the speed of reading, and nothing else. Processes that map the file share its pages.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from deepinfer.dsl.params import ParamDecl
from deepinfer.errors import ArtifactError
from deepinfer.runtime.checkpoint.headers import LENGTH_BYTES, read_file
from deepinfer.runtime.checkpoint.mapping import Weights

FOLDER, INDEX, KIND, FORMAT = "weights", "pack.json", "deepinfer-weights", 1
_TENSORS, _DERIVED = "model.safetensors", "derived.safetensors"
_PIECE = 64 << 20
_LINE = 64
_TEXTS = (".json", ".txt", ".jinja", ".model")
_NUMPY = {"F32": np.float32, "I64": np.int64}
_AGAIN = "compile again with --pack-weights, or name the checkpoint itself"


@dataclass(frozen=True)
class Pack:
    """``pack.json`` of a folder. ``files``: name -> (bytes, sums of its pieces); ``source``: what was packed."""

    folder: Path
    files: Mapping[str, tuple[int, tuple[str, ...]]]
    source: str

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(size for size, _ in self.files.values())


def write_pack(folder: Path, weights: Weights, derived: Mapping[str, NDArray[Any]], texts: Path, source: str,
               advance: Callable[[int], None] = lambda _: None) -> Pack:
    """Fill ``folder``, which is there and empty. ``texts``: folder of the checkpoint; ``advance`` is told the bytes
    done."""
    for text in sorted(p for p in texts.iterdir() if p.suffix in _TEXTS and p.is_file()):
        if not text.name.endswith(".safetensors.index.json"):
            shutil.copyfile(text, folder / text.name)
    tensors = [(name, weights.dtype_of(name), weights.shape_of(name), weights.bytes_of(name))
               for name in _order(weights)]
    made = [(name, {np.dtype(np.float32): "F32", np.dtype(np.int64): "I64"}[value.dtype], value.shape,
             np.ascontiguousarray(value).view(np.uint8).reshape(-1)) for name, value in derived.items()]
    files = {_TENSORS: _write(folder / _TENSORS, tensors, advance), _DERIVED: _write(folder / _DERIVED, made, advance)}
    pack = Pack(folder, files, source)
    whole = {"kind": KIND, "format": FORMAT, "piece": _PIECE, "source": source,
             "files": {name: {"bytes": size, "xxh3": list(sums)} for name, (size, sums) in files.items()}}
    (folder / INDEX).write_text(json.dumps(whole | {"digest": _digest(whole)}) + "\n", encoding="utf-8")
    return pack


def read_pack(folder: Path) -> Pack | None:
    """The pack of a folder, None for a checkpoint as others write it; ArtifactError for a damaged or foreign one."""
    file = folder / INDEX
    if not file.is_file():
        return None
    try:
        raw = json.loads(file.read_bytes())
        whole = {k: v for k, v in raw.items() if k != "digest"}
        if raw["kind"] != KIND or raw["digest"] != _digest(whole):
            raise ValueError("another content than was written")
        files = {n: (int(e["bytes"]), tuple(e["xxh3"])) for n, e in raw["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError("the index of the packed weights is damaged", where=str(file), found=error,
                            next_step=_AGAIN) from None
    if raw["format"] != FORMAT or raw["piece"] != _PIECE:
        raise ArtifactError("the packed weights have another format than this version reads", where=str(file),
                            found=raw["format"], allowed=FORMAT, next_step=_AGAIN)
    for name, (size, _) in files.items():
        have = (folder / name).stat().st_size if (folder / name).is_file() else None
        if have != size:
            raise ArtifactError("a file of the packed weights is damaged", where=str(folder / name),
                                found="no file" if have is None else f"{have} bytes", allowed=f"{size} bytes",
                                next_step=_AGAIN)
    return Pack(folder, files, str(raw["source"]))


def check_pack(pack: Pack, *, threads: int, advance: Callable[[int], None] = lambda _: None) -> None:
    """Compare every piece of the files with its sum, which also brings them into memory; ArtifactError names the first
    that differs."""
    with ExitStack() as stack:
        maps = {name: stack.enter_context(_mapped(pack.folder / name)) for name in pack.files}

        def look(work: tuple[str, int, int, str]) -> int:
            name, start, size, want = work
            with memoryview(maps[name])[start:start + size] as piece:
                if xxhash.xxh3_64_hexdigest(piece) != want:
                    raise ArtifactError("the packed weights are damaged", where=str(pack.folder / name),
                                        found=f"another sum of the {size} bytes from {start}", next_step=_AGAIN)
            return size

        pool = ThreadPoolExecutor(threads)
        try:
            for done in pool.map(look, _pieces(pack)):
                advance(done)
        finally:
            pool.shutdown(cancel_futures=True)


def _mapped(file: Path) -> mmap.mmap:
    with file.open("rb") as f:
        return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)


def packed_values(pack: Pack) -> dict[str, NDArray[Any]]:
    """The derived parameters that were packed, by name."""
    data = (pack.folder / _DERIVED).read_bytes()
    return {name: np.frombuffer(data, _NUMPY[p.tensor.dtype], offset=p.start,
                                count=p.tensor.nbytes // np.dtype(_NUMPY[p.tensor.dtype]).itemsize)
            .reshape(p.tensor.shape) for name, p in read_file(pack.folder / _DERIVED).items()}


def _pieces(pack: Pack) -> Iterator[tuple[str, int, int, str]]:
    for name, (size, sums) in pack.files.items():
        for i, want in enumerate(sums):
            yield name, i * _PIECE, min(_PIECE, size - i * _PIECE), want


def _order(weights: Weights) -> list[str]:
    """Tensors as parameters come in the launch table, lookup tables after them; those whose length would push others
    off their boundary come last of each."""
    def names(params: Sequence[ParamDecl]) -> list[str]:
        found = [n for p in params if not p.derive for n in (*p.names, *p.scale_names)]
        return sorted(dict.fromkeys(found), key=lambda n: len(weights.bytes_of(n)) % _LINE != 0)

    plain = names([p for p in weights.params if not p.table])
    return [*plain, *(n for n in names([p for p in weights.params if p.table]) if n not in set(plain))]


def _write(file: Path, tensors: Sequence[tuple[str, str, Sequence[int], NDArray[np.uint8]]],
           advance: Callable[[int], None]) -> tuple[int, tuple[str, ...]]:
    """One safetensors file, synced; its length and the sums of its pieces."""
    header: dict[str, Any] = {}
    at = 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + LENGTH_BYTES) % _LINE)
    sums: list[str] = []
    piece, filled = xxhash.xxh3_64(), 0
    with file.open("wb") as out:
        for data in (np.frombuffer(len(text).to_bytes(LENGTH_BYTES, "little") + text, np.uint8),
                     *(d for *_, d in tensors)):
            start = 0
            while start < len(data):
                part = data[start:start + _PIECE - filled].data
                out.write(part)
                piece.update(part)
                start, filled = start + len(part), filled + len(part)
                advance(len(part))
                if filled == _PIECE:
                    sums.append(piece.hexdigest())
                    piece, filled = xxhash.xxh3_64(), 0
        if filled:
            sums.append(piece.hexdigest())
        out.flush()
        os.fsync(out.fileno())
        return out.tell(), tuple(sums)


def _digest(whole: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(whole, sort_keys=True).encode())
