"""A type check of generated AscendC with clang: every memory is an address space there, so that a pointer into the
wrong one, a missing overload or a wrong number of arguments is an error. Nothing is run."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from deepinfer.backends.ascend950.twin.build import INCLUDES

# Warnings that say nothing of generated text.
_FLAGS = ("-std=c++17", "-DDI_CHECK", "-Wall", "-Werror", "-Wno-unused", "-Wno-undefined-inline", "-Wno-comment")


@cache
def clang() -> tuple[str, ...]:
    """Command of a clang: of the system, or of the package ziglang; () where there is none."""
    for name in ("clang++", "clang++-19", "clang++-16", "clang++-14"):
        if found := shutil.which(name):
            return (found,)
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "c++")
    return ()


def complaints(text: str) -> str:
    """What clang says of a generated file, "" if nothing."""
    with tempfile.TemporaryDirectory(prefix="di-check-") as folder:
        file = Path(folder) / "kernel.asc"
        file.write_text(text, encoding="utf-8")
        command = [*clang(), *_FLAGS, *(f"-I{p}" for p in INCLUDES), "-x", "c++", "-c", str(file), "-o",
                   str(Path(folder) / "kernel.o")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.replace(folder, "") if done.returncode else ""
