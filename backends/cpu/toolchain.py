"""g++ ahead of time: each kernel once per instruction set, through the cache, then one shared library.

Equal sources give equal bytes in any folder: names inside the build folder are relative, seeds are the kernel's symbol,
inputs are sorted, and neither build ids nor times are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock

from deepinfer.backends.base import ALL, Binary, Source
from deepinfer.backends.cpu.source import dispatcher
from deepinfer.backends.cpu.target import PORTABLE, Variant, variants
from deepinfer.codegen.cache import Cache, Entry, file_digest
from deepinfer.machine import cxx_compiler
from deepinfer.runtime.native.build import SOURCE_FOLDER, compiler_name, run_compiler

LIBRARY = "kernels.so"
PRELUDE = "di_all.h"
INCLUDE = Path(__file__).resolve().parent / "include"
# gcc 12 warns about iterations of unrolled remainder loops that cannot run: no -Waggressive-loop-optimizations.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-g0", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
         "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-Wno-psabi",
         "-Wno-aggressive-loop-optimizations")
LINK_FLAGS = ("-shared", "-s", "-Wl,--build-id=none", "-Wl,-z,now", "-static-libgcc")
LIBRARIES = ("-lm",)
# In the text of kernels that have a use for bf16 dots.
DOTS = ('#include "di_gemm.h"', '#include "di_attend_bf16.h"', '#include "di_score.h"')


@lru_cache(maxsize=1)
def headers() -> dict[str, str]:
    """Digest of every header that a kernel may include."""
    found = [*INCLUDE.glob("*.h"), SOURCE_FOLDER / "abi.h"]
    return {p.name: file_digest(p) for p in sorted(found, key=lambda p: p.name)}


@dataclass(frozen=True)
class Unit:
    """One translation unit. ``kernel``: it uses the kernel headers."""

    name: str
    text: str
    variant: Variant
    kernel: bool = True


class Toolchain:
    """A compiler that was asked for its version once, and the cache."""

    def __init__(self, cache: Cache | None = None) -> None:
        self.compiler = cxx_compiler()
        self.version = compiler_name(self.compiler)
        self.cache = cache or Cache()
        self._preludes: dict[str, Entry] = {}
        self._lock = Lock()

    def prelude(self, variant: Variant) -> Entry:
        """All kernel headers, compiled once for a variant. It changes no object, it only spares reading them again,
        which is more than half of the time of a small kernel."""
        with self._lock:
            if variant.name not in self._preludes:
                flags = [*FLAGS, *variant.flags, f"-DDI_ISA={variant.name}"]
                key = {"kind": "cpu prelude", "compiler": self.version, "flags": flags, "headers": headers()}

                def make(folder: Path) -> None:
                    names = [n for n in headers() if (INCLUDE / n).exists()]
                    (folder / PRELUDE).write_text("".join(f'#include "{n}"\n' for n in names), encoding="utf-8")
                    places = [f"-I{INCLUDE}", f"-I{SOURCE_FOLDER}"]
                    self._run(folder, [*flags, *places, "-x", "c++-header", PRELUDE, "-o", f"{PRELUDE}.gch"], PRELUDE)

                self._preludes[variant.name] = self.cache.fetch(key, make)
            return self._preludes[variant.name]

    def object(self, unit: Unit) -> Entry:
        """Object file of a unit."""
        flags = [*FLAGS, *unit.variant.flags, f"-DDI_ISA={unit.variant.name}", f"-frandom-seed={unit.name}"]
        key = {"kind": "cpu object", "compiler": self.version, "flags": flags, "headers": headers(),
               "name": unit.name, "source": unit.text}

        def make(folder: Path) -> None:
            (folder / f"{unit.name}.cpp").write_text(unit.text, encoding="utf-8")
            includes = [f"-I{INCLUDE}", f"-I{SOURCE_FOLDER}", f"-ffile-prefix-map={folder}=."]
            if unit.kernel:
                includes += ["-include", str(self.prelude(unit.variant).folder / PRELUDE)]
            self._run(folder, [*flags, *includes, "-c", f"{unit.name}.cpp", "-o", f"{unit.name}.o"], unit.name)

        return self.cache.fetch(key, make)

    def library(self, objects: Sequence[tuple[str, Entry]]) -> Entry:
        """One shared library of all objects."""
        ordered = sorted(objects)
        key = {"kind": "cpu kernels", "compiler": self.version, "flags": [*LINK_FLAGS, *LIBRARIES],
               "objects": {name: file_digest(e.files[f"{name}.o"]) for name, e in ordered}}

        def make(folder: Path) -> None:
            files = [str(e.files[f"{name}.o"]) for name, e in ordered]
            self._run(folder, [*LINK_FLAGS, *files, *LIBRARIES, "-o", LIBRARY], LIBRARY)

        return self.cache.fetch(key, make)

    def _run(self, folder: Path, arguments: Sequence[str], what: str) -> None:
        run_compiler([self.compiler, *arguments], folder, what, self.cache.root)


def compile_sources(sources: Sequence[Source], *, jobs: int, isa: str = ALL,
                    progress: Callable[[str], None] | None = None, cache: Cache | None = None,
                    machine: str | None = None) -> Binary:
    """``kernels.so`` of the sources (distinct symbols). ``progress`` is told each symbol that is ready. ``machine``:
    kind of machine that the compiler builds for, default this one."""
    tools = Toolchain(cache)
    forms = {s.symbol: variants(any(x in s.text for x in DOTS), isa, machine) for s in sources}
    units = [Unit(f"{s.symbol}_{v.name}", s.text, v) for s in sources for v in forms[s.symbol]]
    units.append(Unit("dispatch", dispatcher(forms, variants(True, isa, machine)), PORTABLE, kernel=False))
    left = {symbol: len(kinds) for symbol, kinds in forms.items()}
    objects: list[tuple[str, Entry]] = []
    # The longest texts first: the last job to end should be a short one.
    queue = sorted(units, key=lambda u: (-len(u.text), u.name))
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        for unit, entry in zip(queue, pool.map(tools.object, queue), strict=True):
            objects.append((unit.name, entry))
            symbol = unit.name.removesuffix(f"_{unit.variant.name}")
            if symbol in left:
                left[symbol] -= 1
                if not left[symbol] and progress is not None:
                    progress(symbol)
    library = tools.library(objects)
    hits = sum(e.hit for _, e in objects) + library.hit
    return Binary({LIBRARY: library.files[LIBRARY]}, {"g++": tools.version}, hits, len(objects) + 1 - hits, isa,
                  tuple(sorted({v.name for kinds in forms.values() for v in kinds})))

