"""Compile the fixed runner once per compiler and kind, through the cache.

A runner is the same for every engine of its kind and of this version; a new model never recompiles it. It is built for
the base instruction set of the machine: kernels choose theirs at run time, the runner has nothing to vectorise. Runners
of devices find the driver when an engine is opened, and need nothing of it to be built.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from deepinfer.codegen.cache import ADVICE, Cache, Entry, file_digest
from deepinfer.disk import no_room_said
from deepinfer.errors import InternalError, PlanError, ToolchainError
from deepinfer.machine import GXX_MINIMUM, cxx_compiler

LIBRARY = "runner.so"
SOURCE_FOLDER = Path(__file__).resolve().parent
# libstdc++ goes into the library, so that an engine runs where no compiler was ever installed.
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra",
         "-static-libstdc++", "-static-libgcc", "-s", "-Wl,--build-id=none", "-Wl,--exclude-libs,ALL")
LIBRARIES = ("-ldl",)
HOST = "host"
# What runs kernels on the threads of this machine; all else in the source folder is part of every runner.
_OF_HOST = ("ahead.cpp", "ahead.h", "host.cpp", "host.h", "probe.cpp", "runner.cpp", "team.cpp", "team.h")
_OF_DEVICES = "device"
# Draws that a device leaves to the host are made by the text of the kernels for hosts.
_DRAWS = "../../backends/cpu/include"
_OF_DRAWS = ("-ffp-contract=off", "-Wno-psabi", "-DDI_ISA=runner", "-I.", f"-I{_DRAWS}")


def runner_sources(kind: str = HOST) -> list[Path]:
    """Sources and headers of a runner. ``kind``: ``host``, or the folder of a device's driver."""
    shared = [p for p in SOURCE_FOLDER.iterdir() if kind == HOST or p.name not in _OF_HOST]
    folders = () if kind == HOST else (_OF_DEVICES, kind)
    found = [*shared, *(p for f in folders for p in (SOURCE_FOLDER / f).iterdir())]
    return sorted(p for p in found if p.suffix in (".cpp", ".h"))


def runner_flags(kind: str = HOST) -> tuple[str, ...]:
    """Flags of the compiler for a runner."""
    if kind == HOST:
        return FLAGS
    return (*FLAGS, *_OF_DRAWS)


@lru_cache(maxsize=1)
def runner_abi() -> int:
    """``DI_ABI`` of abi.h: what a loader must match."""
    header = (SOURCE_FOLDER / "abi.h").read_text(encoding="utf-8")
    match = re.search(r"^#define DI_ABI (\d+)", header, re.MULTILINE)
    if match is None:
        raise InternalError("abi.h defines no DI_ABI")
    return int(match[1])


def compiler_name(path: str) -> str:
    """First line of ``g++ --version``: what goes into keys and manifests, never the path."""
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise ToolchainError("the C++ compiler does not say its version", where=path,
                             next_step="install g++, or point CXX at one")
    return lines[0].strip()


def run_compiler(command: list[str], cwd: Path, what: str, cache: Path, *, who: str = "the C++ compiler",
                 otherwise: str = f"use g++ {GXX_MINIMUM} or newer; if it is, please report this") -> None:
    """Run a compiler whose output goes into the folder ``cache``.

    Raises PlanError when the compiler found no room for its output or its temporary files, else ToolchainError with
    its first complaint. For the message: ``what`` is built by ``who``, and what to do ``otherwise``.
    """
    # Messages in one language: they are searched.
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, errors="replace", check=False,
                              env=environment)
    except OSError as error:  # of another machine, for instance
        raise ToolchainError(f"{who} cannot be started to build {what}", where=command[0],
                             found=error.strerror or str(error), next_step=otherwise) from None
    if done.returncode == 0:
        return
    lines = [*done.stderr.splitlines(), *done.stdout.splitlines()]
    lines = lines or [f"exit status {done.returncode} without a message"]
    temporary = tempfile.gettempdir()
    for line in lines:
        elsewhere = f"{temporary}/" in line and str(cache) not in line
        step = no_room_said(line, "free space there, or set TMPDIR to another folder" if elsewhere else ADVICE)
        if step is not None:
            raise PlanError(f"{who} finds no room to build {what}", where=temporary if elsewhere else cache,
                            found=line[:300], next_step=step)
    first = next((line for line in lines if "error" in line), lines[0])
    raise ToolchainError(f"{who} does not build {what}", where=command[0], found=first[:300], next_step=otherwise)


def build_runner(cache: Cache | None = None, kind: str = HOST) -> Entry:
    """The cached ``runner.so`` of a kind (entry.files[LIBRARY]); compiles it when needed (a few seconds).

    Raises ToolchainError without a usable compiler, and what ``run_compiler`` does.
    """
    compiler, store = cxx_compiler(), cache or Cache()
    sources = {str(p.relative_to(SOURCE_FOLDER)): p for p in runner_sources(kind)}
    key = {"kind": "runner", "compiler": compiler_name(compiler), "flags": [*runner_flags(kind), *LIBRARIES],
           "sources": {name: file_digest(p) for name, p in sources.items()}}
    if kind != HOST:
        key["draws"] = {p.name: file_digest(p) for p in sorted((SOURCE_FOLDER / _DRAWS).glob("*.h"))}
    units = [name for name in sources if name.endswith(".cpp")]

    def make(folder: Path) -> None:
        # Relative names in the source folder: no path of the machine can reach the output.
        command = [compiler, *runner_flags(kind), *units, *LIBRARIES, "-o", str(folder / LIBRARY)]
        run_compiler(command, SOURCE_FOLDER, LIBRARY, store.root)

    return store.fetch(key, make)
