"""A libascendcl that runs kernels on the twin: loaded once, it is what the runner of engines finds in this process."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from deepinfer.codegen.cache import Cache, Entry, file_digest
from deepinfer.machine import cxx_compiler
from deepinfer.runtime.native.build import compiler_name, run_compiler

LIBRARY = "libascendcl.so"
_HERE = Path(__file__).resolve().parent / "acl"
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-s",
          "-Wl,--build-id=none", f"-Wl,-soname,{LIBRARY}")


def build_runtime(store: Cache | None = None, chip: str = "") -> Entry:
    """The stand-in for ``libascendcl.so`` (entry.files[LIBRARY]). ``chip``: name of the device that it claims to be."""
    compiler, store = cxx_compiler(), store or Cache()
    source = _HERE / "acl.cpp"
    flags = (*_FLAGS, *((f'-DDI_SOC="{chip}"',) if chip else ()))
    key = {"kind": "ascend twin runtime", "compiler": compiler_name(compiler), "flags": flags,
           "source": file_digest(source)}

    def make(folder: Path) -> None:
        command = [compiler, *flags, source.name, "-ldl", "-o", str(folder / LIBRARY)]
        run_compiler(command, _HERE, LIBRARY, store.root)

    return store.fetch(key, make)


@cache
def use_twin() -> ctypes.CDLL:
    """Loads the stand-in under the name of the real library. Whoever opens ``libascendcl.so`` in this process
    afterwards gets it, so it has to be called before an engine or a look for devices does."""
    return ctypes.CDLL(str(build_runtime().files[LIBRARY]), mode=ctypes.RTLD_GLOBAL)

