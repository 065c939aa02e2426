"""What an engine for the Ascend 950 holds: one binary of all kernels, their constants, and the table of kernels.

Without CANN the binary is the library of the CPU twin, and the table says that nothing was compiled for a device.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deepinfer.backends.ascend950 import bisheng
from deepinfer.backends.ascend950.families import commit
from deepinfer.backends.ascend950.source import AscendSource
from deepinfer.backends.ascend950.target import ARCH
from deepinfer.backends.ascend950.twin.build import LIBRARY, TwinBuild, build_twin
from deepinfer.backends.base import ALL, Binary, Source
from deepinfer.codegen.cache import Cache, Entry, file_digest
from deepinfer.errors import InternalError

KERNELS, CONSTANTS, TABLE = "kernels.bin", "constants.bin", "kernels.json"
FORMAT = 1
_BOUNDARY = 256  # of the constants of a kernel


def compile_sources(target: str, sources: Sequence[Source], *, jobs: int, isa: str = ALL,
                    progress: Callable[[str], None] | None = None, cache: Cache | None = None) -> Binary:
    """``kernels.bin``, ``kernels.json`` and, where kernels have any, ``constants.bin``. ``progress`` is told each
    symbol that is ready."""
    kernels = [s for s in sources if isinstance(s, AscendSource)]
    if len(kernels) != len(sources):
        raise InternalError("a source of another backend")
    store = cache or Cache()
    asked = {s.symbol for s in kernels}
    kernels.append(commit.source())
    texts, tools, compilers = {s.symbol: s.text for s in kernels}, bisheng.find(), {"g++": TwinBuild(store).version}

    def ready(symbol: str) -> None:
        if progress is not None and symbol in asked:
            progress(symbol)

    if tools is None:
        stages = {s.symbol: [(t.function, t.kind) for t in s.stages] for s in kernels}
        made = build_twin(texts, stages, jobs=jobs, cache=store, progress=ready)
    else:
        made = bisheng.build(tools, texts, jobs=jobs, cache=store, progress=ready)
        compilers["bisheng"] = tools.version
    binary = made.files[LIBRARY if tools is None else bisheng.BINARY]
    packed = _pack(store, target, kernels, binary, compiled=tools is not None)
    hits = int(made.hit) + int(packed.hit)
    return Binary(packed.files, compilers, hits, 2 - hits, isa, (ARCH,), compiled=tools is not None)


def _pack(store: Cache, target: str, kernels: Sequence[AscendSource], binary: Path, *, compiled: bool) -> Entry:
    size = binary.stat().st_size
    constants = bytearray()
    table: dict[str, Any] = {}
    for source in sorted(kernels, key=lambda s: s.symbol):
        stages = [{**stage.as_json(), "offset": 0, "bytes": size} for stage in source.stages]
        table[source.symbol] = {
            "family": source.family, "parameters": [p.as_json() for p in source.parameters],
            "scratch": {"fixed": source.scratch[0], "row": source.scratch[1]},
            "variants": [{"rows": 0, "stages": stages}]}
        if source.constants:
            constants += b"\0" * (-len(constants) % _BOUNDARY)
            table[source.symbol]["constants"] = len(constants)
            constants += source.constants
    text = json.dumps({"format": FORMAT, "target": target, "arch": ARCH, "compiled": int(compiled), "kernels": table},
                      indent=1, sort_keys=True) + "\n"
    key = {"kind": "ascend kernels", "table": hashlib.sha256(text.encode()).hexdigest(), "binary": file_digest(binary),
           "constants": hashlib.sha256(constants).hexdigest()}

    def make(folder: Path) -> None:
        (folder / KERNELS).write_bytes(binary.read_bytes())
        (folder / TABLE).write_text(text, encoding="utf-8")
        if constants:
            (folder / CONSTANTS).write_bytes(constants)

    return store.fetch(key, make)
