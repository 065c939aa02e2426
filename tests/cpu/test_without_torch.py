"""An environment that holds the base dependencies and nothing else is enough."""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

IMPORT = """
import importlib.util
import deepinfer.accelerator, deepinfer.cli, deepinfer.errors, deepinfer.machine
import deepinfer.backends, deepinfer.backends.cpu, deepinfer.codegen, deepinfer.dsl
import deepinfer.model_specs, deepinfer.recipe, deepinfer.runtime
assert importlib.util.find_spec("torch") is None
assert importlib.util.find_spec("pytest") is None
print(deepinfer.__file__)
"""


def base_distributions() -> list[metadata.Distribution]:
    """The distributions that `pip install deepinfer-aot` brings without an extra, found transitively."""
    found: dict[str, metadata.Distribution] = {}
    queue = [("deepinfer-aot", frozenset[str]())]
    while queue:
        name, extras = queue.pop()
        distribution = metadata.distribution(name)
        for text in distribution.requires or []:
            requirement = Requirement(text)
            wanted = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in (extras or {""})
            )
            if wanted and requirement.name.lower() not in found:
                found[requirement.name.lower()] = metadata.distribution(requirement.name)
                queue.append((requirement.name, frozenset(requirement.extras)))
    return list(found.values())


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """The Python of a new environment into which only the base dependencies are linked, file by file."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    for distribution in base_distributions():
        for file in distribution.files or []:
            top = file.parts[0]
            source = Path(str(distribution.locate_file(top)))
            if top not in ("..", "__pycache__") and source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    (site / "deepinfer_aot.pth").write_text(f"{repository}\n")
    return folder / "bin" / "python"


def run(python: Path, program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-I", "-c", program]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)


def test_every_package_imports_with_the_base_dependencies_alone(bare_python: Path, tmp_path: Path) -> None:
    done = run(bare_python, IMPORT, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_bare_environment_really_lacks_torch(bare_python: Path, tmp_path: Path) -> None:
    done = run(bare_python, "import torch", tmp_path)
    assert "No module named 'torch'" in done.stderr


@pytest.mark.parametrize("module", ["deepinfer.accelerator", "deepinfer.machine"])
def test_build_sh_can_ask_before_anything_is_installed(repository: Path, tmp_path: Path, module: str) -> None:
    arguments = ["cpu"] if module.endswith("machine") else []
    command = [sys.executable, "-S", "-E", "-m", module, *arguments]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
