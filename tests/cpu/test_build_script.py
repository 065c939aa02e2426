"""build.sh stops before it installs when it should, with one sentence and the right exit code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NEEDED = ("build.sh", "pyproject.toml", "constraints.txt", "deepinfer", "backends")


@pytest.fixture
def tree(tmp_path: Path, repository: Path) -> Path:
    """What build.sh reads before it installs, with an environment already in place."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in NEEDED:
        source = repository / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True)
        else:
            shutil.copy2(source, tree / name)
    (tree / ".venv").symlink_to(sys.prefix)
    return tree


def build(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run build.sh on a machine without a C++ compiler: it gets no further than the checks."""
    hidden = ("VIRTUAL_ENV", "DEEPINFER_ACCELERATOR", "PYTHON")
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        [tree / "build.sh", *arguments],
        env=inherited | {"CXX": "no-such-compiler"} | environment,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_missing_compiler_ends_it_with_the_toolchain_code(tree: Path) -> None:
    done = build(tree)
    assert done.returncode == 4
    assert "error: no-such-compiler: no C++ compiler; found nothing on PATH; allowed g++ 12" in done.stderr


def test_the_accelerator_is_judged_by_the_one_function(tree: Path) -> None:
    done = build(tree, "run", DEEPINFER_ACCELERATOR="gpu")
    assert done.returncode == 2
    assert done.stderr.startswith("error: DEEPINFER_ACCELERATOR: unknown accelerator; found gpu;")


def test_an_unknown_command_names_the_known_ones(tree: Path) -> None:
    done = build(tree, "tset")
    assert done.returncode == 2
    assert "unknown command 'tset'; allowed setup, run, test" in done.stderr


def test_no_python_is_one_sentence(tree: Path) -> None:
    (tree / ".venv").unlink()
    done = build(tree, PYTHON="/no/such/python")
    assert done.returncode == 4
    assert done.stderr.startswith("error: no Python 3.11 or newer")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("foreign", [False, True])
def test_the_active_environment_is_used_unless_it_holds_another_deepinfer(tree: Path, foreign: bool) -> None:
    active = tree.parent / "active"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(active)], check=True)
    if foreign:
        site = next((active / "lib").glob("python*")) / "site-packages"
        (site / "deepinfer").mkdir()
        (site / "deepinfer" / "__init__.py").touch()
    done = build(tree, VIRTUAL_ENV=str(active))
    assert done.returncode == 4
    assert ("holds another project's package `deepinfer`; using .venv instead" in done.stderr) == foreign
