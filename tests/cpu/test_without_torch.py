"""An environment that holds the base dependencies and nothing else is enough."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
from compiled import checkpoint_of
from golden.cases import load_case
from golden.engines import LIMITS
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


GENERATE = """
import json, sys
from pathlib import Path
from deepinfer.codegen.compile import compile_engine
from deepinfer.dsl.model import EngineOptions
given = json.loads(sys.argv[1])
compile_engine(model=given["checkpoint"], out=Path("engine"), target="cpu", isa="host", jobs=2,
               options=EngineOptions(**given["options"]))
from deepinfer import LLM, SamplingParams
llm = LLM("engine", given["checkpoint"], threads=1, progress=False)
params = SamplingParams(temperature=0, max_tokens=len(given["tokens"]), ignore_eos=True)
output = llm.generate(given["ids"], params, progress=False)[0]
assert output.outputs[0].token_ids == given["tokens"], output.outputs[0].token_ids
with llm.session() as session:
    session.feed(given["ids"])
    assert session.draft(given["tokens"][0]).tokens.tolist() == given["draft"]
assert "torch" not in sys.modules
print(output.text)
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


def run(python: Path, program: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-I", "-c", program, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)


def test_every_package_imports_with_the_base_dependencies_alone(bare_python: Path, tmp_path: Path) -> None:
    done = run(bare_python, IMPORT, tmp_path)
    assert done.returncode == 0, done.stderr


def test_an_engine_is_compiled_and_run_with_the_base_dependencies_alone(bare_python: Path, tmp_path: Path) -> None:
    case = load_case("v41_a_f32")
    g = case.golden
    given = {"checkpoint": str(checkpoint_of(case.name)), "options": case.formats | LIMITS | {"profile": "wide"},
             "ids": case.ids, "tokens": g["greedy.tokens"].tolist(), "draft": g["draft.tokens"][0].tolist()}
    done = run(bare_python, GENERATE, tmp_path, json.dumps(given))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_bare_environment_really_lacks_torch(bare_python: Path, tmp_path: Path) -> None:
    done = run(bare_python, "import torch", tmp_path)
    assert "No module named 'torch'" in done.stderr


@pytest.mark.parametrize("module", ["deepinfer.accelerator", "deepinfer.machine"])
def test_build_sh_can_ask_before_anything_is_installed(repository: Path, tmp_path: Path, module: str) -> None:
    arguments = ["cpu"] if module.endswith("machine") else []
    command = [sys.executable, "-S", "-E", "-m", module, *arguments]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
