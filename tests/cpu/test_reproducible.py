"""Equal inputs give an equal engine, byte by byte, and a compile does no work again whose inputs did not change."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from compiled import checkpoint_of
from conftest import RunPython
from safetensors.numpy import load_file, save_file

from deepinfer.codegen.cache import VARIABLE, cache_root
from deepinfer.codegen.package.manifest import NAME

DENSE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 90, "hidden_size": 32,
         "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 500.0, "hidden_act": "silu", "tie_word_embeddings": True,
         "max_position_embeddings": 512}
OPTIONS = {"profile": "wide", "cache_format": "f32", "act_format": "f32", "max_model_len": 256}
PROGRAM = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from deepinfer.codegen.compile import compile_engine
from deepinfer.dsl.model import EngineOptions
given = json.loads(sys.argv[2])
options = EngineOptions(**given.pop("options"))
done = compile_engine(out=Path(given.pop("out")), target="cpu", isa="host", options=options, **given)
print(done.cache_hits, done.cache_misses)
"""


@dataclass(frozen=True)
class Made:
    """An engine, and how many of its parts came from the cache or had to be made."""

    folder: Path
    hits: int
    misses: int

    @property
    def digests(self) -> dict[str, str]:
        return {str(p.relative_to(self.folder)): hashlib.sha256(p.read_bytes()).hexdigest()
                for p in sorted(self.folder.rglob("*")) if p.is_file()}

    def different(self, other: Made) -> set[str]:
        mine, theirs = self.digests, other.digests
        return {name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)}


@dataclass(frozen=True)
class Compiler:
    """Compiles in processes of their own with one cache."""

    run_python: RunPython
    cache: Path

    def __call__(self, place: Path, *, seed: int = 0, path: Path | str = "", **given: Any) -> Made:
        """The engine in ``place``, compiled from there with the hash seed ``seed``; ``path``: where specs are found."""
        place.mkdir(parents=True)
        given = {"out": "engine", "options": OPTIONS, "jobs": 2} | given
        done = self.run_python("-c", PROGRAM, str(path), json.dumps(given), cwd=place,
                               env={"PYTHONHASHSEED": str(seed), VARIABLE: str(self.cache)})
        assert done.returncode == 0, done.stderr
        hits, misses = map(int, done.stdout.split())
        return Made(place / "engine", hits, misses)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Apart from the one that all other compiles use."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def compiler(run_python: RunPython, cache: Path) -> Compiler:
    return Compiler(run_python, cache)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """A folder with a config for the dense spec of the tests."""
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "config.json").write_text(json.dumps(DENSE))
    return tmp_path / "dense"


@pytest.mark.parametrize("name", ["v41_a_f32", "v4_mtp"])
def test_folders_hash_seeds_and_weights_leave_no_trace_and_a_second_run_compiles_nothing(
        name: str, run_python: RunPython, tmp_path: Path) -> None:
    compiler, model = Compiler(run_python, cache_root()), checkpoint_of(name)
    other = shutil.copytree(model, tmp_path / "a checkpoint elsewhere")
    tensors = load_file(other / "model.safetensors")
    save_file({name: t + 1 for name, t in tensors.items()}, other / "model.safetensors")
    first = compiler(tmp_path / "first", seed=1, model=str(model))
    again = compiler(tmp_path / "deeper" / "again", seed=2, model=str(other), jobs=1)
    assert (again.hits, again.misses) == (first.hits + first.misses, 0)
    assert first.digests == again.digests
    text = (again.folder / NAME).read_text()
    assert "elsewhere" not in text and str(tmp_path) not in text


def test_compilers_that_share_nothing_write_equal_bytes(compiler: Compiler, dense: Path, run_python: RunPython,
                                                        repository: Path, tmp_path: Path) -> None:
    how = {"path": repository / "tests", "model": str(dense), "spec": "specs.dense_gqa"}
    first = Compiler(run_python, cache_root())(tmp_path / "first", seed=1, **how)
    anew = compiler(tmp_path / "deeper" / "anew", seed=2, **how)
    assert first.digests == anew.digests


def test_a_comment_in_a_spec_rebuilds_nothing(compiler: Compiler, dense: Path, repository: Path,
                                              tmp_path: Path) -> None:
    text = (repository / "tests" / "specs" / "dense_gqa.py").read_text()
    made = []
    remarked = "# A remark that moves every line.\n\n" + text.replace("    def ", "    # and one\n    def ")
    for i, spec in enumerate((text, remarked)):
        folder = tmp_path / f"specs-{i}"
        folder.mkdir()
        (folder / "my_dense.py").write_text(spec)
        made.append(compiler(tmp_path / f"run-{i}", path=folder, model=str(dense), spec="my_dense"))
    assert (made[1].hits, made[1].misses) == (made[0].hits + made[0].misses, 0)
    assert made[0].different(made[1]) == {NAME, "explain.json", "report.html"}  # these name lines of the spec


def test_another_epsilon_rebuilds_the_kernels_that_hold_it(compiler: Compiler, dense: Path, repository: Path,
                                                           tmp_path: Path) -> None:
    how = {"path": repository / "tests", "model": str(dense), "spec": "specs.dense_gqa"}
    first = compiler(tmp_path / "first", **how)
    (dense / "config.json").write_text(json.dumps(DENSE | {"rms_norm_eps": 1e-6}))
    second = compiler(tmp_path / "second", **how)
    renamed = {n for n in first.different(second) if n.startswith("src/")}
    kept = {n for n in first.digests if n.startswith("src/")} - renamed
    assert renamed and kept
    for name in renamed:  # what a norm consists of
        made = first if name in first.digests else second
        assert "rsqrt" in (made.folder / name).read_text().splitlines()[0]
    assert second.hits > len(kept) - 1 and second.misses == len(renamed) // 2 + 2  # dispatcher and library besides
    assert {NAME, "lib/kernels.so", "lib/launch.txt"} <= first.different(second)
