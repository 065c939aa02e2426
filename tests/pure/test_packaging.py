"""The package: links, laziness, its own files, and what a wheel of it holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

LINKED = ("dsl", "codegen", "backends", "runtime", "model_specs", "recipe")
NOT_SOURCE = (
    ".git",
    ".venv",
    "build",
    "dist",
    "*.egg-info",
    "__pycache__",
    ".*_cache",
    ".hypothesis",
    "engines",
)

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
import deepinfer
optional = {"triton", "tilelang", "torch_npu", "fastapi", "uvicorn"}
for module in pkgutil.walk_packages(deepinfer.__path__, "deepinfer."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in optional:
            raise
print(*sorted(sys.modules))
"""


@pytest.mark.parametrize("folder", LINKED)
def test_the_package_links_to_the_top_folder(repository: Path, folder: str) -> None:
    link = repository / "deepinfer" / folder
    assert os.readlink(link) == f"../{folder}"
    assert (link / "__init__.py").is_file()


def test_import_deepinfer_loads_nothing_heavy(run_python) -> None:
    done = run_python("-c", "import deepinfer, sys; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"numpy", "torch", "click", "jinja2", "safetensors", "tokenizers", "huggingface_hub"}
    submodules = {name for name in done.stdout.split() if name.startswith("deepinfer.")}
    assert not submodules


def test_an_unknown_name_is_an_attribute_error() -> None:
    import deepinfer

    with pytest.raises(AttributeError, match="LLMM"):
        _ = deepinfer.LLMM


def test_no_folder_is_imported_a_second_time_under_its_own_name(repository: Path, run_python) -> None:
    done = run_python("-c", IMPORT_EVERYTHING, cwd=repository)
    assert done.returncode == 0, done.stderr
    names = set(done.stdout.split())
    assert {f"deepinfer.{folder}" for folder in LINKED} <= names
    assert not {name.partition(".")[0] for name in names} & set(LINKED)


def test_foreign_files_in_our_place_are_named_in_one_sentence(
    repository: Path, tmp_path: Path, run_python
) -> None:
    foreign = tmp_path / "deepinfer"
    foreign.mkdir()
    shutil.copy(repository / "deepinfer" / "__init__.py", foreign)
    done = run_python("-c", "import deepinfer")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert "another project's package `deepinfer`" in last


def test_the_command_says_so_when_another_deepinfer_is_imported(
    repository: Path, tmp_path: Path, run_python
) -> None:
    mixed = tmp_path / "deepinfer"
    shutil.copytree(
        repository / "deepinfer" / "cli", mixed / "cli", ignore=shutil.ignore_patterns("__pycache__")
    )
    (mixed / "__init__.py").write_text("VERSION = '0.1.0'\n")
    done = run_python("-c", "from deepinfer.cli import main")
    assert done.returncode == 1
    assert done.stderr.startswith("error: the package `deepinfer` in this environment is another project's")
    assert "Traceback" not in done.stderr


def test_every_script_of_the_project_file_exists(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    for name in project["scripts"]:
        script = Path(sys.executable).with_name(name)
        done = subprocess.run([script, "--help"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"Usage: {name} ")


def test_every_requirement_has_a_tested_pin(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    lines = (repository / "constraints.txt").read_text().splitlines()
    pinned = {normal(line.partition("==")[0]) for line in lines if "==" in line}
    tested = [*project["dependencies"]]
    for extra in ("torch", "test", "cuda", "ascend"):
        tested += project["optional-dependencies"][extra]
    names = {normal(requirement.partition(">=")[0]) for requirement in tested if "[" not in requirement}
    assert names <= pinned


def normal(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def test_a_wheel_holds_every_source_file_as_a_plain_file(
    repository: Path, tmp_path: Path, run_python
) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(repository, tree, symlinks=True, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(tmp_path))
    done = run_python("-m", "pip", "wheel", "--quiet", *options, str(tree))
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("deepinfer_aot-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("deepinfer/")}
    wanted = {
        f"deepinfer/{path.relative_to(tree)}"
        for folder in LINKED
        for path in (tree / folder).rglob("*")
        if path.suffix in {".py", ".cpp", ".h", ".hpp", ".cu", ".cuh", ".asc", ".jinja", ".json"}
    }
    wanted |= {"deepinfer/py.typed", "deepinfer/distribution.txt", "deepinfer/cli/compile.py"}
    assert not wanted - packed
