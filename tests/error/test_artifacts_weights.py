"""Weights that are damaged, foreign or incomplete, as a user meets them when an engine starts: one sentence each."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from deepinfer.backends.base import Binary
from deepinfer.backends.cpu.backend import BACKEND
from deepinfer.codegen.lower import lower
from deepinfer.codegen.package import EngineContents, EnginePackage, load_engine, write_engine
from deepinfer.dsl import Config, EngineOptions
from deepinfer.dsl.params import ParamDecl
from deepinfer.dsl.types import f32
from deepinfer.errors import ArtifactError, PlanError
from deepinfer.model_specs.registry import build_model
from deepinfer.runtime.checkpoint import fetch_weights, open_checkpoint, room
from deepinfer.runtime.checkpoint.bind import bind_weights
from deepinfer.runtime.checkpoint.mapping import Weights
from deepinfer.runtime.native_engine import Memory

CASE = Path(__file__).parents[1] / "golden" / "cases" / "v41_a_f32"
OPTIONS = EngineOptions(cache_format="f32", act_format="f32", max_num_seqs=2, max_num_batched_tokens=32)
NORM = "norm.weight"
Tensors = dict[str, np.ndarray]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    config = json.loads((CASE / "config.json").read_text())
    config.pop("oracle")
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json"):
        shutil.copy(CASE / name, tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EnginePackage:
    made = tmp_path_factory.mktemp("made")
    config = json.loads((CASE / "config.json").read_text())
    config.pop("oracle")
    (made / "config.json").write_text(json.dumps(config))
    shutil.copy(CASE / "model.safetensors", made)
    checkpoint = open_checkpoint(made)
    plan = lower(build_model(Config(checkpoint.config), OPTIONS, checkpoint.headers), BACKEND, "cpu")
    (made / "kernels.so").write_bytes(b"kernels")
    binary = Binary({"kernels.so": made / "kernels.so"}, {"g++": "g++ 12"}, 0, 0)
    return load_engine(write_engine(EngineContents(plan, binary, checkpoint), made / "engine")[0])


def bound(engine: EnginePackage, folder: Path) -> Weights:
    checkpoint = fetch_weights(engine.checkpoint(folder))
    return bind_weights(checkpoint, engine.interface.params, engine.manifest["model"], threads=2)


def change(folder: Path, what: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    what(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_whole_checkpoint_binds_without_a_copy(engine: EnginePackage, folder: Path) -> None:
    weights = bound(engine, folder)
    assert weights.copied.tensors == 0
    counts = [len(tensors) for tensors in weights.addresses()]
    assert counts == [max(p.stack, 1) for p in engine.interface.params]
    assert all(data for tensors in weights.addresses() for data, _ in tensors)


def rename(t: Tensors) -> None:
    t["layers.0.attn.wq_aa.weight"] = t.pop("layers.0.attn.wq_a.weight")


def poison(t: Tensors) -> None:
    t["layers.3.attn.wq_a.weight"] = t["layers.3.attn.wq_a.weight"].copy()
    t["layers.3.attn.wq_a.weight"][5, 3] = np.nan


@pytest.mark.parametrize(("what", "sentence"), [
    (lambda t: t.pop(NORM), "1 missing: norm.weight"),
    (rename, "1 missing: layers.0.attn.wq_a.weight; 1 unexpected: layers.0.attn.wq_aa.weight"),
    (lambda t: t.update(extra=np.zeros(3, np.float32)), "1 unexpected: extra"),
    (lambda t: t.update({NORM: t[NORM][:-1].copy()}), "1 of another shape: norm.weight [63] for [64]"),
    (lambda t: t.update({NORM: t[NORM].astype(np.float64)}), "1 of another dtype: norm.weight F64 for F32"),
    (poison, "layers.3.attn.wq_a.weight: the tensor holds a NaN"),
])
def test_wrong_tensors_are_named(engine: EnginePackage, folder: Path, what: Callable[[Tensors], None],
                                 sentence: str) -> None:
    change(folder, what)
    with pytest.raises(ArtifactError) as caught:
        bound(engine, folder)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_lookup_tables_too_large_to_be_looked_at_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                               caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"table": np.full((4, 8), np.nan, np.float32)}, tmp_path / "model.safetensors")
    params = [ParamDecl("table", (4, 8), f32, table=True)]
    model = {"config": {}, "ignored": [], "derive": {}}
    with pytest.raises(ArtifactError, match="table: the tensor holds a NaN"):
        bind_weights(open_checkpoint(tmp_path), params, model)
    for module in ("bind", "scan"):
        monkeypatch.setattr(f"deepinfer.runtime.checkpoint.{module}.SMALL_TABLES", 127)
    with caplog.at_level(logging.INFO, "deepinfer"):
        bind_weights(open_checkpoint(tmp_path), params, model)
    assert [m for m in caplog.messages if m.startswith("tables")] == ["tables_not_scanned bytes=128 limit=127"]


def test_a_truncated_file_is_named(engine: EnginePackage, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ArtifactError, match=r"model\.safetensors: the file is truncated; found 4345016 bytes; allowed"):
        bound(engine, folder)


def test_a_tokenizer_of_another_checkpoint_is_refused(engine: EnginePackage, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"].pop(next(w for w, i in tokenizer["model"]["vocab"].items() if i == 320))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ArtifactError, match="another number of token classes"):
        bound(engine, folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ArtifactError, match=r"has no tokenizer\.json"):
        bound(engine, folder)


def test_an_engine_that_does_not_fit_says_what_it_needs(engine: EnginePackage, folder: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EnginePackage, "memory", lambda *_: Memory(0, 0, 0, 10**9, 0))
    monkeypatch.setattr(room, "available_memory", lambda: 5 * 10**8)
    needed = r"found 4\.\d MB of weights, 1\.0 GB for the engine.*allowed 500\.0 MB available"
    with pytest.raises(PlanError, match=needed):
        engine.start(folder, slots=2, blocks=8)


RSS = """
import json, resource, sys
from pathlib import Path
from deepinfer.dsl.params import ParamDecl
from deepinfer.dsl.types import DType
from deepinfer.runtime.checkpoint import open_checkpoint
from deepinfer.runtime.checkpoint.bind import bind_weights
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
checkpoint = open_checkpoint(sys.argv[1])
params = [ParamDecl(n, t.shape, DType.parse("f32")) for n, t in checkpoint.headers.items()]
before = peak()
weights = bind_weights(checkpoint, params, {"config": {}, "ignored": [], "derive": {}}, threads=2)
total = sum(t.nbytes for t in checkpoint.headers.values())
print(total, peak() - before, weights.copied.bytes)
"""


def test_loading_takes_little_more_memory_than_the_weights(tmp_path: Path, run_python: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({f"w{i}": np.ones((1 << 20, 8), np.float32) for i in range(8)}, tmp_path / "model.safetensors")
    done = run_python("-c", RSS, str(tmp_path))
    assert done.returncode == 0, done.stderr
    total, grown, copied = map(int, done.stdout.split())
    assert (total, copied) == (8 << 25, 0)
    assert grown <= 1.15 * total
