"""Kernels for a device by bisheng, the compiler of CANN, where it is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from deepinfer.backends.ascend950.target import ARCH
from deepinfer.codegen.cache import Cache, Entry, file_digest
from deepinfer.errors import ToolchainError
from deepinfer.runtime.native.build import run_compiler

OLDEST = (9, 2)  # CANN whose C API the kernels are written in
BINARY = "kernels.o"
HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_VERSION = r"(\d+)\.(\d+)(?:\.(\d+))?"
HERE = Path(__file__).resolve().parent
INCLUDES = (HERE / "include" / "device", HERE / "include")
# The fusion of vector functions reorders stores and loads of kernels like these: it stays off.
FLAGS = ("-x", "asc", "-std=c++17", "-O2", f"--npu-arch={ARCH}", "--cce-aicore-only", "--cce-simd-vf-fusion=false")
LINK_FLAGS = ("-m", "aicorelinux", "-Ttext", "0")
_OTHERWISE = f"use CANN {'.'.join(map(str, OLDEST))}; if it is, please report this"


@dataclass(frozen=True)
class Toolchain:
    """``version``: what bisheng calls itself; ``cann``: version of the toolkit around it."""

    bisheng: str
    linker: str
    version: str
    cann: tuple[int, ...]


def find() -> Toolchain | None:
    """The toolchain on PATH or below one of ``HOMES``; None where there is no bisheng.

    Raises ToolchainError when there is one that cannot be used.
    """
    compiler = _program("bisheng")
    if compiler is None:
        return None
    linker = _program("ld.lld", beside=compiler)
    if linker is None:
        raise ToolchainError("bisheng has no linker", where=compiler, found="no ld.lld beside it or on PATH",
                             next_step="put CANN's compiler folder on PATH")
    said = _asked(compiler)
    # What a compiler calls itself may be the version of the clang that it was made from.
    found = re.search(_VERSION, _toolkit(compiler)) or re.search(r"(?i)(?:bisheng|cann)\D*" + _VERSION, said)
    if found is None:
        raise ToolchainError("the CANN around bisheng does not say its version", where=compiler, found=said[:200],
                             allowed="a version.info beside the compiler or in ASCEND_HOME_PATH",
                             next_step="source CANN's set_env.sh, or take bisheng off PATH to keep to sources")
    cann = tuple(int(x) for x in found.groups(default="0"))
    if cann[:2] < OLDEST:
        raise ToolchainError("CANN is too old for these kernels", where=compiler, found=".".join(map(str, cann)),
                             allowed=f"{'.'.join(map(str, OLDEST))} or newer",
                             next_step="install a newer CANN, or take bisheng off PATH to keep to sources")
    return Toolchain(compiler, linker, said, cann)


def _program(name: str, beside: str | None = None) -> str | None:
    places = [str(Path(beside).parent)] if beside else []
    for home in HOMES:
        if os.environ.get(home):
            places += [str(Path(os.environ[home]) / part) for part in ("bin", "compiler/ccec_compiler/bin")]
    return next((p for p in (shutil.which(name, path=place) for place in places) if p), None) or shutil.which(name)


def _asked(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, errors="replace", check=False)
        lines, failed = [*done.stdout.splitlines(), *done.stderr.splitlines()], bool(done.returncode)
    except OSError as error:  # of another machine, for instance
        lines, failed = [error.strerror or str(error)], True
    if failed or not lines:
        raise ToolchainError("bisheng does not say its version", where=compiler, found=(lines or ["nothing"])[0][:200],
                             next_step="mend the CANN installation, or take bisheng off PATH to keep to sources")
    return lines[0].strip()


def _toolkit(compiler: str) -> str:
    """The line of the toolkit's own files that names its version; empty where there is none."""
    homes = [Path(os.environ[home]) for home in HOMES if os.environ.get(home)]
    for folder in (*Path(compiler).resolve().parents[:4], *homes):
        for name in ("version.info", "version.cfg"):
            try:
                text = (folder / name).read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            line = next((x for x in text.splitlines() if re.search(r"version", x, re.IGNORECASE)), "")
            if re.search(r"\d+\.\d+", line):
                return line
    return ""


def build(tools: Toolchain, texts: Mapping[str, str], *, jobs: int, cache: Cache,
          progress: Callable[[str], None] = lambda _: None) -> Entry:
    """One binary of all kernels (entry.files[BINARY]); ``texts``: by symbol; ``progress`` is told each that is ready.
    Raises ToolchainError with the compiler's first complaint."""
    def one(symbol: str) -> Path:
        made = _object(tools, symbol, texts[symbol], cache)
        progress(symbol)
        return made

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        objects = list(pool.map(one, sorted(texts)))
    key = {"kind": "ascend binary", "linker": tools.version, "flags": LINK_FLAGS,
           "objects": [file_digest(p) for p in objects]}

    def make(folder: Path) -> None:
        _run([tools.linker, *LINK_FLAGS, *map(str, objects), "-o", str(folder / BINARY)], folder, BINARY, cache)

    return cache.fetch(key, make)


def _object(tools: Toolchain, symbol: str, text: str, cache: Cache) -> Path:
    headers = {f"{p.name}/{f.name}": file_digest(f) for p in INCLUDES for f in sorted(p.glob("*.h"))}
    key = {"kind": "ascend object", "compiler": tools.version, "flags": FLAGS, "name": symbol, "source": text,
           "headers": headers}
    name = f"{symbol}.rel.o"

    def make(folder: Path) -> None:
        (folder / f"{symbol}.asc").write_text(text, encoding="utf-8")
        includes = [f"-I{p}" for p in INCLUDES]
        _run([tools.bisheng, *FLAGS, *includes, "-c", f"{symbol}.asc", "-o", name], folder, symbol, cache)

    return cache.fetch(key, make).files[name]


def _run(command: list[str], folder: Path, what: str, cache: Cache) -> None:
    """``command`` ends with its output. A compiler that is content and writes nothing is taken for one that failed."""
    run_compiler(command, folder, what, cache.root, who="CANN", otherwise=_OTHERWISE)
    out = folder / command[-1]
    if not out.is_file() or not out.stat().st_size:
        raise ToolchainError(f"CANN makes nothing of {what}", where=command[0], found=f"no {out.name} or an empty one",
                             next_step=_OTHERWISE)
