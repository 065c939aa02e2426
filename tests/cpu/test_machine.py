"""What the machine lacks is told in one sentence each, by the same code that the compiler asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer import machine
from deepinfer.errors import ToolchainError


def stand_in(folder: Path, name: str, prints: str) -> str:
    """An executable called `name` that prints one line; returns a PATH on which it is all there is."""
    program = folder / name
    program.write_text(f"#!/bin/sh\necho '{prints}'\n")
    program.chmod(0o755)
    return str(folder)


def test_a_missing_compiler_is_a_toolchain_error_that_says_what_to_install(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        ToolchainError, match=r"g\+\+: no C\+\+ compiler; .*allowed g\+\+ 12 or newer; install g\+\+"
    ):
        machine.cxx_compiler()


@pytest.mark.parametrize("version", ["11.4.0", "9", "no version at all"])
def test_an_old_compiler_is_named_with_its_version(monkeypatch, tmp_path, version) -> None:
    monkeypatch.setenv("PATH", f"{stand_in(tmp_path, 'g++', version)}:/bin")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ToolchainError, match="too old"):
        machine.cxx_compiler()


def test_cxx_names_the_compiler(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", f"{stand_in(tmp_path, 'my-g++', '14.1.0')}:/bin")
    monkeypatch.setenv("CXX", "my-g++")
    assert machine.cxx_compiler() == str(tmp_path / "my-g++")


def test_only_the_host_compiler_stands_in_the_way(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", f"{stand_in(tmp_path, 'g++', '12.2.0')}:/bin")
    monkeypatch.delenv("CXX", raising=False)
    assert machine.misses("cpu") == []
    for target in ("sm100", "ascend950"):
        assert machine.misses(target)
        assert not any(miss.needed for miss in machine.misses(target))
