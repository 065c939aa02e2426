"""Building kernels: the same bytes anywhere, the cache, and one sentence when there is no compiler."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import pytest
from conftest import RunPython
from cpu.harness import Writer

from deepinfer.backends.base import Source
from deepinfer.backends.cpu import toolchain
from deepinfer.backends.cpu.backend import BACKEND
from deepinfer.backends.cpu.target import variants
from deepinfer.codegen.cache import Cache
from deepinfer.errors import InternalError, PlanError, ToolchainError
from deepinfer.runtime.native.build import build_runner, run_compiler

PROGRAM = """
import hashlib, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from cpu.test_cpu_toolchain import sources
from deepinfer.backends.cpu.backend import BACKEND
made = BACKEND.compile(sources(), jobs=2)
print(hashlib.sha256(made.files["kernels.so"].read_bytes()).hexdigest(), made.cache_hits, made.cache_misses)
"""


def sources() -> list[Source]:
    """Two small kernels."""
    out = []
    for name in ("exp", "sigmoid"):
        w = Writer()
        w.store(w.op(name, w.load((40,)), dims=(40,)))
        out.append(BACKEND.emit(w.spec()))
    return out


def test_the_library_has_the_same_bytes_from_any_folder_and_hash_seed(run_python: RunPython, repository: Path,
                                                                      tmp_path: Path) -> None:
    digests = set()
    for seed in ("1", "2"):
        env = {"PYTHONHASHSEED": seed, "DEEPINFER_CACHE_DIR": str(tmp_path / f"cache-{seed}" / ("x" * int(seed) * 9))}
        cwd = tmp_path / f"folder-{seed}"
        cwd.mkdir()
        done = run_python("-c", PROGRAM, str(repository / "tests"), env=env, cwd=cwd)
        assert done.returncode == 0, done.stderr
        digest, hits, misses = done.stdout.split()
        assert (hits, int(misses)) == ("0", 2 * len(variants(contracts=False)) + 2)
        digests.add(digest)
    assert len(digests) == 1


def test_a_second_compile_comes_from_the_cache_and_tells_of_each_kernel(tmp_path: Path) -> None:
    ready: list[str] = []
    first = toolchain.compile_sources(sources(), jobs=2, cache=Cache(tmp_path))
    again = toolchain.compile_sources(sources(), jobs=2, cache=Cache(tmp_path), progress=ready.append)
    assert again.cache_misses == 0 and again.cache_hits == first.cache_misses
    assert sorted(ready) == sorted(s.symbol for s in sources())
    digests = [hashlib.sha256(b.files["kernels.so"].read_bytes()).hexdigest() for b in (first, again)]
    assert digests[0] == digests[1]
    assert first.compilers["g++"].startswith("g++")


def test_without_a_compiler_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolchainError, match="install g\\+\\+") as e:
        toolchain.compile_sources(sources(), jobs=1, cache=Cache(tmp_path))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("complaint", [
    "x.cpp:1: fatal error: cannot write PCH file: No space left on device",
    "as: final close failed: File too large",
    "g++: fatal error: File size limit exceeded signal terminated program cc1plus"])
def test_a_compiler_without_room_is_no_compiler_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                complaint: str) -> None:
    compiler = tmp_path / "g++-full"
    compiler.write_text(f"""#!/bin/sh
case "$1" in -dump*) echo 12;; --version) echo g++ 12;; *) echo 'warning: first' >&2; echo '{complaint}' >&2; exit 1;;
esac
""")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    cache = Cache(tmp_path / "cache")
    for build in (lambda: toolchain.compile_sources(sources(), jobs=1, cache=cache), lambda: build_runner(cache)):
        with pytest.raises(PlanError, match="finds no room to build") as e:
            build()
        assert e.value.where == cache.root
        assert e.value.found == complaint
        assert ("ulimit" in str(e.value)) == ("No space" not in complaint)


def test_a_compiler_whose_temporary_folder_is_full_names_that_one(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="TMPDIR") as e:
        run_compiler(["sh", "-c", f"echo {tempfile.gettempdir()}/ccX.s: No space left on device >&2; exit 1"],
                     tmp_path, "x.o", tmp_path / "cache")
    assert e.value.where == tempfile.gettempdir()
    with pytest.raises(PlanError, match="DEEPINFER_CACHE_DIR"):
        run_compiler(["sh", "-c", f"echo {tmp_path}/cache/x.o: No space left on device >&2; exit 1"],
                     tmp_path, "x.o", tmp_path / "cache")


def test_a_compiler_that_fails_is_named_with_its_first_complaint(tmp_path: Path) -> None:
    bad = Source("broken", "int f( {", ".cpp", 1, 1, 0)
    with pytest.raises(ToolchainError, match="broken") as e:
        toolchain.compile_sources([bad], jobs=1, cache=Cache(tmp_path))
    assert "error" in str(e.value)
    assert not list(tmp_path.rglob("broken*"))


def test_equal_specs_give_equal_text_and_every_text_says_what_it_is() -> None:
    for s, t in zip(sources(), sources(), strict=True):
        assert s == t
        assert s.text.startswith("// rowwise test over rows of T, target cpu\n// spec ")


def test_a_target_of_another_backend_is_refused() -> None:
    assert BACKEND.capabilities("cpu").target == "cpu"
    with pytest.raises(InternalError):
        BACKEND.capabilities("sm90")
