"""Engine folders: written aside, synced, renamed; an engine is there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import keyword
import os
import shutil
from pathlib import Path

import deepinfer
from deepinfer.accelerator import backend_of
from deepinfer.codegen.cache import Cache, sync
from deepinfer.codegen.package.aside import aside_of
from deepinfer.codegen.package.contents import EngineContents
from deepinfer.codegen.package.manifest import EXPLANATION, NAME, is_replaceable, seal
from deepinfer.codegen.package.wheel import write_wheel
from deepinfer.codegen.report.page import render_report
from deepinfer.disk import room_in
from deepinfer.errors import ArtifactError, InternalError, SpecError
from deepinfer.machine import cxx_compiler
from deepinfer.runtime.checkpoint.packed import FOLDER
from deepinfer.runtime.native.build import LIBRARY, build_runner, compiler_name
from deepinfer.runtime.store.native import LIBRARY as STORE
from deepinfer.runtime.store.native.build import build_store

_ATTEMPTS = 16  # to take a place that other compiles take as well
_INIT = Path(__file__).with_name("engine_init.py")
_THIRD_PARTY = """\
lib/runner.so and lib/store.so contain parts of libstdc++ and libgcc, which are distributed under the GNU General
Public License, version 3, with the GCC Runtime Library Exception, version 3.1: https://www.gnu.org/licenses/gcc-exception-3.1.html
"""


def check_out(out: Path) -> None:
    """Raises SpecError when ``out`` could not be imported, ArtifactError when it holds anything but an engine.

    Worth asking before a long compile; ``write_engine`` asks again.
    """
    name = out.absolute().name
    if not name.isidentifier() or keyword.iskeyword(name) or name == "deepinfer":
        raise SpecError("the engine folder's name is what users import, so it has to be a free Python identifier",
                        where="--out", found=name, allowed="letters, digits and _, not beginning with a digit",
                        next_step=f"for example {out.with_name('my_engine')}")
    above = next(p for p in out.absolute().parents if p.exists())
    blocking = next((p for p in (above, out) if p.is_file()), None)
    if blocking is not None:
        raise ArtifactError("there is a file where a folder has to be", where=str(out), found=blocking,
                            next_step="name another folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ArtifactError("the path may not be used", where=str(out), found=f"{above} may not be written",
                            next_step="name another folder")
    if _is_foreign(out):
        raise _foreign(out)


def _is_foreign(folder: Path) -> bool:
    """Whether something is there that no compile may replace; judged again when another compile has exchanged it."""
    while True:
        try:
            seen = folder.stat().st_ino
            foreign = any(folder.iterdir()) and not is_replaceable(folder)
            if not foreign or folder.stat().st_ino == seen:
                return foreign
        except FileNotFoundError:
            return False


def _foreign(folder: Path) -> ArtifactError:
    return ArtifactError("the folder holds something that is no engine, and is not overwritten", where=str(folder),
                         next_step="name another folder")


def write_engine(contents: EngineContents, out: Path, *, wheel: bool = False,
                 cache: Cache | None = None) -> tuple[Path, Path | None]:
    """Write the engine folder ``out`` (replacing an engine that is there) and with ``wheel`` a wheel beside it.

    Returns both paths. Raises SpecError, ArtifactError as ``check_out`` does, PlanError when the disk is full; any
    failure leaves the engine that was there and nothing else.
    """
    check_out(out)
    place = out.absolute()
    with room_in(out, "free space there or name another folder"):
        _write_whole(contents, place, cache or Cache())
        return out, write_wheel(place, place.parent) if wheel else None


def _write_whole(contents: EngineContents, place: Path, cache: Cache) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with aside_of(place.name, place.parent) as aside:
        _fill(aside, contents, cache)
        for path in sorted(aside.rglob("*"), reverse=True):
            sync(path)
        sync(aside)
        _exchange(aside, place)


def _fill(folder: Path, contents: EngineContents, cache: Cache) -> None:
    runner = build_runner(cache, backend_of(contents.plan.target).runner).files[LIBRARY]
    store = build_store(cache).files[STORE]
    lib, src, licenses = folder / "lib", folder / "src", folder / "licenses"
    for made in (lib, src, licenses):
        made.mkdir()
    for name, file in {**contents.binary.files, LIBRARY: runner, STORE: store}.items():
        shutil.copyfile(file, lib / name)
        (lib / name).chmod(0o755)
    _write(lib / "launch.txt", contents.plan.lowered.table.text())
    for name, text in contents.sources().items():
        _write(src / name, text)
    for name, text in _licences().items():
        _write(licenses / name, text)
    manifest = json.loads(json.dumps(contents.manifest(compiler_name(cxx_compiler()))))
    explanation = json.loads(json.dumps(contents.explanation()))
    _write(folder / EXPLANATION, json.dumps(explanation) + "\n")
    _write(folder / "report.html", render_report(manifest, explanation))
    _write(folder / "__init__.py", _INIT.read_text(encoding="utf-8"))
    (folder / NAME).write_bytes(seal(manifest, folder))


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8", newline="\n")


def _licences() -> dict[str, str]:
    """Texts of this project's licence and notice, from its source tree or its installation."""
    root = Path(deepinfer.__file__).parent.parent
    try:
        installed = importlib.metadata.files(deepinfer.DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        installed = []
    found = {}
    for name in ("LICENSE", "NOTICE"):
        places = [root / name, *(Path(str(f.locate())) for f in installed if f.name == name)]
        file = next((p for p in places if p.is_file()), None)
        if file is None:
            raise InternalError(f"this installation of {deepinfer.DISTRIBUTION} lacks its {name}")
        found[name] = file.read_text(encoding="utf-8")
    return found | {"THIRD_PARTY": _THIRD_PARTY}


def _exchange(aside: Path, place: Path) -> None:
    """The new folder takes the place; an old engine is moved away first and removed after.

    Another compile may do the same at any moment: the last one to come has the place, each engine stays whole.
    """
    old = aside.with_name(aside.name + ".old")
    for _ in range(_ATTEMPTS):
        try:
            with contextlib.suppress(FileNotFoundError):  # none is there, or another compile has it in hand
                os.rename(place, old)
                if _is_foreign(old):
                    os.rename(old, place)
                    raise _foreign(place)
            os.rename(aside, place)
            with contextlib.suppress(OSError):  # packed weights outlive a compile; whether they fit, a load checks
                os.rename(old / FOLDER, place / FOLDER)
            sync(place.parent)
            return
        except OSError as failure:
            if old.exists():
                with contextlib.suppress(OSError):  # another engine has the place: that one stays
                    os.rename(old, place)
            if failure.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            shutil.rmtree(old, ignore_errors=True)
    raise ArtifactError("other compiles write the same folder all the time", where=str(place),
                        next_step="let them end, or name another folder")
