"""Kernels for a device where CANN is installed: a stand-in for bisheng records how it is called."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from deepinfer.backends.ascend950 import bisheng
from deepinfer.backends.ascend950.backend import backend
from deepinfer.backends.ascend950.toolchain import compile_sources
from deepinfer.backends.base import Source
from deepinfer.codegen.cache import Cache
from deepinfer.codegen.kernels.spec import KernelSpec, Operand
from deepinfer.errors import PlanError, ToolchainError
from deepinfer.machine import misses


def draw() -> Source:
    """A kernel that takes the largest of eight logits."""
    operands = (Operand("value", "T", (8,), "f32"), Operand("value", "T", (), "i64", write=True))
    return backend("ascend950").emit(KernelSpec("draw", "T", operands, (("ahead", 0), ("logits", 0), ("out", 1))))


TEXTS = {"di_one": "// one\n", "di_two": "// two\n"}


def stand_in(folder: Path, version: str = "bisheng version 9.2.0", refuses: str = "") -> None:
    """``bisheng`` and ``ld.lld`` that write what they are told into their output."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("bisheng", "ld.lld"):
        program = folder / name
        program.write_text(f"""#!/bin/sh
if [ "$1" = --version ]; then echo "{version}"; exit 0; fi
case "$*" in *"{refuses or 'nothing is refused'}"*) echo "di_two.asc:1: error: no such call" >&2; exit 1;; esac
for a in "$@"; do out=$a; done
echo "{name} $*" > "$out"
""", encoding="utf-8")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that comes first on PATH; no other CANN is seen."""
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    for home in bisheng.HOMES:
        monkeypatch.delenv(home, raising=False)
    return folder


def test_without_bisheng_nothing_is_compiled_for_a_device(path: Path) -> None:
    assert bisheng.find() is None


def test_kernels_are_compiled_with_the_pinned_flags_and_linked_into_one_binary(path: Path, tmp_path: Path) -> None:
    stand_in(path)
    tools = bisheng.find()
    assert tools is not None and tools.cann == (9, 2, 0)
    cache = Cache(tmp_path / "cache")
    entry = bisheng.build(tools, TEXTS, jobs=2, cache=cache)
    linked = entry.files[bisheng.BINARY].read_text()
    assert linked.startswith("ld.lld -m aicorelinux -Ttext 0 ")
    assert "di_one.rel.o" in linked and "di_two.rel.o" in linked
    compiled = bisheng._object(tools, "di_one", TEXTS["di_one"], cache).read_text()
    for flag in ("--npu-arch=dav-3510", "--cce-aicore-only", "--cce-simd-vf-fusion=false", "-O2"):
        assert f" {flag} " in compiled
    assert bisheng.build(tools, TEXTS, jobs=2, cache=cache).hit


def test_a_compiler_below_a_toolkit_folder_is_found(path: Path, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "toolkit"
    stand_in(home / "bin", "clang version 15.0.5")
    (home / "version.info").write_text("package_name=toolkit\nVersion=9.2.1\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
    tools = bisheng.find()
    assert tools is not None and tools.cann == (9, 2, 1)


def test_an_older_toolkit_is_refused_in_one_sentence(path: Path) -> None:
    stand_in(path, "bisheng version 8.5.0")
    with pytest.raises(ToolchainError, match=r"too old.*8\.5\.0.*9\.2 or newer"):
        bisheng.find()


def test_a_compiler_of_another_machine_is_refused_in_one_sentence(path: Path) -> None:
    stand_in(path)
    (path / "bisheng").write_text("no program\n")
    with pytest.raises(ToolchainError, match=r"does not say its version; found Exec format error"):
        bisheng.find()


def test_the_version_of_a_clang_is_not_taken_for_that_of_cann(path: Path) -> None:
    stand_in(path, "clang version 15.0.5 (bisheng)")
    with pytest.raises(ToolchainError, match=r"does not say its version; found clang version 15.*version\.info"):
        bisheng.find()


def test_doctor_sees_the_toolkit_that_compiling_takes(path: Path, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("kernels stay sources" in miss.sentence for miss in misses("ascend950"))
    home = tmp_path / "toolkit"
    stand_in(home / "bin")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
    assert not any("bisheng" in miss.sentence for miss in misses("ascend950"))
    stand_in(home / "bin", "bisheng version 8.5.0")
    assert any("too old" in miss.sentence and miss.needed for miss in misses("ascend950"))


def test_a_complaint_of_the_compiler_names_the_kernel(path: Path, tmp_path: Path) -> None:
    stand_in(path, refuses="di_two.asc")
    tools = bisheng.find()
    assert tools is not None
    with pytest.raises(ToolchainError, match=r"does not build di_two.*no such call"):
        bisheng.build(tools, TEXTS, jobs=1, cache=Cache(tmp_path / "cache"))


@pytest.mark.parametrize(("program", "text", "sentence"), [
    ("bisheng", b"exit 0\n", r"CANN makes nothing of di_one; found no di_one\.rel\.o"),
    ("ld.lld", b"exit 0\n", r"CANN makes nothing of kernels\.o"),
    ("bisheng", b"printf 'x.asc: error: \264\355\\n' >&2; exit 1\n", r"does not build di_one; found x\.asc: error: "),
    ("bisheng", b"echo 'error: no licence'; exit 1\n", r"does not build di_one; found error: no licence"),
    ("bisheng", b"echo 'x.asc: error: No space left on device' >&2; exit 1\n", r"CANN finds no room to build di_one"),
    ("ld.lld", b"\x7fELF", r"CANN cannot be started to build kernels\.o; found Exec format error"),
])
def test_what_goes_wrong_in_cann_is_one_sentence_and_nothing_is_kept(
        path: Path, tmp_path: Path, program: str, text: bytes, sentence: str) -> None:
    stand_in(path)
    tools = bisheng.find()
    assert tools is not None
    (path / program).write_bytes(text if text[0] == 0x7F else b"#!/bin/sh\n" + text)
    cache = Cache(tmp_path / "cache")
    with pytest.raises((ToolchainError, PlanError), match=sentence):
        bisheng.build(tools, TEXTS, jobs=1, cache=cache)
    stand_in(path)
    assert bisheng.build(tools, TEXTS, jobs=1, cache=cache).files[bisheng.BINARY].stat().st_size


def test_an_engine_holds_the_device_binary_where_there_is_one(path: Path, tmp_path: Path) -> None:
    kernels = [draw()]
    twin = compile_sources("ascend950", kernels, jobs=2)
    assert not twin.compiled and json.loads(twin.files["kernels.json"].read_text())["compiled"] == 0
    stand_in(path)
    device = compile_sources("ascend950", kernels, jobs=2, cache=Cache(tmp_path / "cache"))
    assert device.compiled and device.compilers["bisheng"] == "bisheng version 9.2.0"
    assert json.loads(device.files["kernels.json"].read_text())["compiled"] == 1
    assert device.files["kernels.bin"].read_text().startswith("ld.lld ")
