"""House rules that a machine can check: types, lint, file sizes, one way to import."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HARD_LINE_LIMIT = 500
FOLDERS = (
    "deepinfer",
    "dsl",
    "codegen",
    "backends",
    "runtime",
    "model_specs",
    "recipe",
    "tools",
    "examples",
    "tests",
)
SUFFIXES = {".py", ".cpp", ".h", ".hpp", ".cu", ".cuh", ".asc", ".jinja", ".sh"}


def source_files(root: Path) -> Iterator[Path]:
    """Every source file once: the links under deepinfer/ are not followed."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file() and "__pycache__" not in path.parts:
                yield path


def run_tool(root: Path, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=root, input=text, capture_output=True, text=True, check=False)


def test_ruff_finds_nothing(repository: Path) -> None:
    done = run_tool(repository, "ruff", "check", ".")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_type_checks_strictly(repository: Path) -> None:
    done = run_tool(repository, "mypy")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("folder", ["dsl", "codegen", "backends", "runtime", "model_specs", "recipe"])
def test_a_top_level_import_of_a_folder_is_refused(repository: Path, folder: str) -> None:
    program = f"import {folder}\n\nprint({folder})\n"
    done = run_tool(repository, "ruff", "check", "--stdin-filename", "probe.py", "-", text=program)
    assert done.returncode == 1
    assert "TID251" in done.stdout


def test_no_file_is_longer_than_the_hard_limit(repository: Path) -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in source_files(repository)}
    assert lengths
    too_long = {str(path.relative_to(repository)): n for path, n in lengths.items() if n > HARD_LINE_LIMIT}
    assert not too_long


def test_no_file_is_named_for_nothing(repository: Path) -> None:
    nameless = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
    assert not [path for path in source_files(repository) if path.name in nameless]
