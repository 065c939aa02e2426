"""A CANN that is none: programs named like its compiler and linker, and a libascendcl that claims to be a device.

The compiler leaves the source as its object, behind a line that says how it was called; the linker makes of all
sources the library that the twin would run. That of the runtime launches it, so that an engine which was compiled takes
the whole road: compiled, loaded by ``aclrtBinaryLoadFromFile``, launched by ``aclrtLaunchKernelWithHostArgs``.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import stat
import sys
from pathlib import Path

from deepinfer.backends.ascend950.twin.build import LIBRARY, build_twin
from deepinfer.backends.ascend950.twin.device import LIBRARY as RUNTIME
from deepinfer.backends.ascend950.twin.device import build_runtime

CHIP = "Ascend950PR_9589"
_KERNEL = re.compile(r'extern "C" __global__ (__vector__|__mix__\(1, 2\)) void (\w+)\(')

_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "{version}"; exit 0; fi
called="// $*"
while [ $# -gt 0 ]; do
    case "$1" in -c) source=$2;; -o) out=$2;; esac
    shift
done
{ echo "$called"; cat "$source"; } > "$out"
"""
VERSION = f"bisheng version 9.2.0 of {hashlib.sha256(_COMPILER.encode()).hexdigest()[:12]}"  # caches tell it apart
_LINKER = """#!{python}
import sys
sys.path[:0] = {path!r}
from ascend.cann import link
link(sys.argv[1:])
"""


def link(arguments: list[str]) -> None:
    """``... one.rel.o two.rel.o -o out``."""
    texts = {Path(a).name.removesuffix(".rel.o"): Path(a).read_text(encoding="utf-8").split("\n", 1)[1]
             for a in arguments if a.endswith(".rel.o")}
    stages = {symbol: [(name, "vector" if kind == "__vector__" else "mix_1_2") for kind, name in _KERNEL.findall(text)]
              for symbol, text in texts.items()}
    shutil.copy(build_twin(texts, stages, jobs=2).files[LIBRARY], arguments[arguments.index("-o") + 1])


def install(folder: Path) -> None:
    """``bisheng`` and ``ld.lld`` in ``folder``/bin, ``libascendcl.so`` in ``folder``/lib64."""
    for name in ("bin", "lib64"):
        (folder / name).mkdir(parents=True)
    for name, text in (("bisheng", _COMPILER.replace("{version}", VERSION)),
                       ("ld.lld", _LINKER.format(python=sys.executable, path=sys.path))):
        program = folder / "bin" / name
        program.write_text(text, encoding="utf-8")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    shutil.copy(build_runtime(chip=CHIP).files[RUNTIME], folder / "lib64")
