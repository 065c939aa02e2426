"""Kernels as a library of the twin: g++ compiles the machine once and each generated file once, through the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from deepinfer.codegen.cache import Cache, Entry, file_digest
from deepinfer.machine import cxx_compiler
from deepinfer.runtime.native.build import compiler_name, run_compiler

LIBRARY = "kernels_twin.so"
HERE = Path(__file__).resolve().parent
INCLUDES = (HERE.parent / "include", HERE / "include")
FLAGS = ("-std=c++17", "-fPIC", "-g0", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wall",
         "-Wextra", "-Werror")
MACHINE_FLAGS = (*FLAGS, "-O2")
# Kernels call into the machine for every instruction: optimising them buys little and takes most of the time.
KERNEL_FLAGS = (*FLAGS, "-O1", "-Wno-unused-parameter", "-Wno-unused-function", "-Wno-unused-variable",
                "-Wno-unused-but-set-variable", "-Wno-comment")
LINK_FLAGS = ("-shared", "-s", "-Wl,--build-id=none", "-Wl,-z,now", "-static-libgcc", "-static-libstdc++",
              "-Wl,--exclude-libs,ALL")
KINDS = {"vector": "vector", "cube": "cube", "mix_1_2": "mix"}

Stages = Sequence[tuple[str, str]]  # (function, kind)


@lru_cache(maxsize=1)
def machine_sources() -> dict[str, str]:
    """Digest of every source and header of the machine."""
    found = [p for p in HERE.iterdir() if p.suffix in (".cpp", ".h")]
    return {p.name: file_digest(p) for p in sorted(found)} | _headers(HERE / "include")


def _headers(folder: Path) -> dict[str, str]:
    return {f"include/{p.name}": file_digest(p) for p in sorted(folder.glob("*.h"))}


class TwinBuild:
    """A compiler that was asked for its version once, and the cache."""

    def __init__(self, cache: Cache | None = None, quick: bool = False) -> None:
        self.flags = tuple("-O0" if quick and f == "-O1" else f for f in KERNEL_FLAGS)
        self.compiler = cxx_compiler()
        self.version = compiler_name(self.compiler)
        self.cache = cache or Cache()

    def machine(self, unit: str) -> Entry:
        """Object of one source file of the machine."""
        key = {"kind": "ascend twin", "compiler": self.version, "flags": MACHINE_FLAGS, "unit": unit,
               "sources": machine_sources()}

        def make(folder: Path) -> None:
            self._run(HERE, [*MACHINE_FLAGS, "-c", f"{unit}.cpp", "-o", str(folder / f"{unit}.o")], unit)

        return self.cache.fetch(key, make)

    def kernel(self, symbol: str, text: str, stages: Stages) -> Entry:
        """Object of one generated file, unchanged but for the exports behind it."""
        exports = "".join(f"DI_EXPORT({function}, {KINDS[kind]})\n" for function, kind in stages)
        key = {"kind": "ascend twin kernel", "compiler": self.version, "flags": self.flags, "name": symbol,
               "source": text, "exports": exports, "headers": [_headers(p) for p in INCLUDES]}

        def make(folder: Path) -> None:
            (folder / f"{symbol}.asc").write_text(text, encoding="utf-8")
            (folder / f"{symbol}.cpp").write_text(f'#include "{symbol}.asc"\n{exports}', encoding="utf-8")
            flags = [*self.flags, *(f"-I{p}" for p in INCLUDES), f"-ffile-prefix-map={folder}=.",
                     f"-frandom-seed={symbol}"]
            self._run(folder, [*flags, "-c", f"{symbol}.cpp", "-o", f"{symbol}.o"], symbol)

        return self.cache.fetch(key, make)

    def library(self, objects: Sequence[Path]) -> Entry:
        key = {"kind": "ascend twin library", "compiler": self.version, "flags": LINK_FLAGS,
               "objects": [file_digest(p) for p in objects]}

        def make(folder: Path) -> None:
            self._run(folder, [*LINK_FLAGS, *map(str, objects), "-lm", "-o", LIBRARY], LIBRARY)

        return self.cache.fetch(key, make)

    def _run(self, folder: Path, arguments: Sequence[str], what: str) -> None:
        run_compiler([self.compiler, *arguments], folder, what, self.cache.root)


def build_twin(texts: Mapping[str, str], stages: Mapping[str, Stages], *, jobs: int = 1, cache: Cache | None = None,
               progress: Callable[[str], None] | None = None, quick: bool = False,
               throw_away: Path | None = None) -> Entry:
    """``kernels_twin.so`` (entry.files[LIBRARY]): the generated files ``texts`` and the machine that runs them.

    ``texts``: file by symbol; ``stages``: (function, kind) of each of its kernels, kind vector, cube or mix_1_2.
    ``quick``: kernels that run once; ``throw_away``: folder for all but the machine, which is kept. Raises
    ToolchainError, naming the kernel, where g++ refuses one.
    """
    kept = TwinBuild(cache, quick)
    tools = TwinBuild(Cache(throw_away), quick) if throw_away else kept
    units = sorted(name.removesuffix(".cpp") for name in machine_sources() if name.endswith(".cpp"))

    def one(symbol: str) -> Path:
        entry = tools.kernel(symbol, texts[symbol], stages[symbol])
        if progress is not None:
            progress(symbol)
        return entry.files[f"{symbol}.o"]

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        machine = list(pool.map(lambda u: kept.machine(u).files[f"{u}.o"], units))
        kernels = list(pool.map(one, sorted(texts)))
    return tools.library([*machine, *kernels])
