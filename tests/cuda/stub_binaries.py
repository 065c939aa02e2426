"""Engines for NVIDIA devices without a compiler: binaries that hold a list of parameters and nothing else.

What a runner does with an engine (memory, launches, values of parameters, graphs) needs no instructions. The list has
the form that the real compiler writes, from the types in the kernel's source.
"""

from __future__ import annotations

import base64
import io
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console

from deepinfer.backends.cuda_sm100 import toolchain
from deepinfer.codegen.cache import Cache
from deepinfer.codegen.compile import Compiled, compile_engine

_PARAMETER_INFO = 0x17


def stub(function: str, sizes: list[int], mark: bytes) -> bytes:
    """An ELF file with the parameters of ``function``; ``mark`` sets equal lists apart."""
    info, at = b"", 0
    for i, size in enumerate(sizes):
        at += -at % size
        info += struct.pack("<BBHIHHI", 4, _PARAMETER_INFO, 12, 0, i, at, size << 18)
        at += size
    names = b"\0.shstrtab\0.nv.info." + function.encode() + b"\0.text\0"
    parts = [(1, 3, names), (names.index(b".nv"), 1, info), (names.index(b".text"), 1, mark)]
    body, headers = b"", [struct.pack("<IIQQQQIIQQ", *[0] * 10)]
    for name, kind, data in parts:
        headers.append(struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, 64 + len(body), len(data), 0, 0, 1, 0))
        body += data
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64 + len(body), 0, 64, 56,
                                                           0, 64, len(headers), 1)
    return head + body + b"".join(headers)


def _stage(self: toolchain.Toolchain, request: dict[str, Any]) -> dict[str, Any]:
    sizes = [8 if kind[0] == "*" or kind == "i64" else 4 for _, kind, _ in request["parameters"]] + [8, 8]
    binary = stub(request["function"], sizes, json.dumps([request["symbol"], request["constants"]]).encode())
    return {"cubin": base64.b64encode(binary).decode(), "function": request["function"], "warps": request["warps"],
            "shared": 0, "tensor_memory": 0, "pipeline": request["pipeline"], "spills": 0, "registers": 0, "stack": 0,
            "matrix": 1, "fallback": 0}


@contextmanager
def stubbed(folder: Path) -> Iterator[None]:
    """Compiles for NVIDIA devices make stubs, kept in a cache of their own below ``folder``."""
    with patch.object(toolchain.Toolchain, "_compiled", _stage), patch.object(
            toolchain, "compile_sources", partial(toolchain.compile_sources, cache=Cache(folder / "stubs"))):
        yield


def stub_engine(folder: Path, model: Path, target: str = "sm90", **how: Any) -> Compiled:
    """``folder``/engine, with stubs for kernels."""
    with stubbed(folder):
        return compile_engine(model=str(model), out=folder / "engine", target=target,
                              console=Console(file=io.StringIO()), **how)
