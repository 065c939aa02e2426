"""Compile the store's native part once per compiler, through the cache; engines carry it as ``lib/store.so``."""

from __future__ import annotations

from pathlib import Path

from deepinfer.codegen.cache import Cache, Entry, file_digest
from deepinfer.machine import cxx_compiler
from deepinfer.runtime.native.build import compiler_name, run_compiler
from deepinfer.runtime.store.native import LIBRARY

SOURCE = Path(__file__).resolve().parent / "records.cpp"
HEADERS = [SOURCE.parent / name for name in ("gate.h", "ring.h")]
FLAGS = ("-std=c++17", "-O2", "-pthread", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra",
         "-static-libstdc++", "-static-libgcc", "-s", "-Wl,--build-id=none")


def build_store(cache: Cache | None = None) -> Entry:
    """The cached ``store.so`` (entry.files[LIBRARY]); compiles it when needed (about a second).

    Raises ToolchainError without a usable compiler, PlanError without room for its output.
    """
    compiler, store = cxx_compiler(), cache or Cache()
    key = {"kind": "store", "compiler": compiler_name(compiler), "flags": list(FLAGS),
           "source": [*map(file_digest, (SOURCE, *HEADERS))]}

    def make(folder: Path) -> None:
        run_compiler([compiler, *FLAGS, SOURCE.name, "-o", str(folder / LIBRARY)], SOURCE.parent, LIBRARY, store.root)

    return store.fetch(key, make)
