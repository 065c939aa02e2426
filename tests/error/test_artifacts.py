"""Engine folders: written whole, equal for equal inputs, refused in one sentence when anything about them is wrong."""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import deepinfer
from deepinfer import accelerator
from deepinfer.backends.base import Binary
from deepinfer.backends.cpu.backend import BACKEND
from deepinfer.cli import main
from deepinfer.codegen.lower import Plan, lower
from deepinfer.codegen.package import EngineContents, check_out, load_engine, write_engine
from deepinfer.codegen.package import write as writing
from deepinfer.codegen.package.manifest import FORMAT, NAME, seal
from deepinfer.dsl import Config, EngineOptions
from deepinfer.errors import ArtifactError, PlanError, SpecError
from deepinfer.model_specs.engram import token_classes
from deepinfer.model_specs.registry import build_model
from deepinfer.runtime.checkpoint import Checkpoint, open_checkpoint
from deepinfer.runtime.checkpoint.bind import require_same_config

CASE = Path(__file__).parents[1] / "golden" / "cases" / "v41_a_f32"
OPTIONS = EngineOptions(cache_format="f32", act_format="f32", max_num_seqs=2, max_num_batched_tokens=32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("checkpoint")
    config = json.loads((CASE / "config.json").read_text())
    config.pop("oracle")
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json"):
        shutil.copy(CASE / name, folder)
    return open_checkpoint(folder)


@pytest.fixture(scope="module")
def plan(checkpoint: Checkpoint) -> Plan:
    return lower(build_model(Config(checkpoint.config), OPTIONS, checkpoint.headers), BACKEND, "cpu")


@pytest.fixture(scope="module")
def contents(plan: Plan, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> EngineContents:
    """Everything of an engine but kernels that run: packaging does not look into them."""
    kernels = tmp_path_factory.mktemp("binary") / "kernels.so"
    kernels.write_bytes(b"kernels")
    return EngineContents(plan, Binary({"kernels.so": kernels}, {"g++": "g++ 12"}, 0, 0), checkpoint)


@pytest.fixture(scope="module")
def written(contents: EngineContents, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine(contents, tmp_path_factory.mktemp("out") / "engine")[0]


@pytest.fixture
def engine(written: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(written, tmp_path / "engine"))


def tree(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(folder.rglob("*")) if p.is_file()}


# ---- writing -----------------------------------------------------------------------------------------------------
def test_an_engine_says_what_it_is_and_what_made_it(written: Path, plan: Plan) -> None:
    manifest = json.loads((written / NAME).read_text())
    assert manifest["format"] == FORMAT
    assert manifest["target"] == "cpu"
    assert manifest["version"] == deepinfer.__version__
    assert manifest["model"]["config"]["text_config"]["hidden_size"] == 64
    assert manifest["model"]["derive"] == {"token_classes": "deepinfer.model_specs.engram:token_classes"}
    assert manifest["options"] == OPTIONS.as_dict()
    assert set(manifest["compilers"]) == {"g++", "runner"}
    assert len(manifest["kernels"]) == len(plan.lowered.specs)
    assert set(manifest["files"]) == set(tree(written)) - {NAME}
    assert [p["name"] for p in manifest["interface"]["params"]] == [p.name for p in plan.lowered.table.params]
    assert (written / "lib" / "launch.txt").read_text() == plan.lowered.table.text()
    assert {f"src/{s.symbol}.cpp" for s in plan.lowered.sources} <= set(manifest["files"])


def test_each_source_says_which_region_it_computes_and_where(written: Path) -> None:
    for kernel in json.loads((written / NAME).read_text())["kernels"]:
        head = (written / kernel["source"]).read_text()[:2000]
        assert kernel["digest"] in head
        assert "target cpu" in head
        assert head.startswith("// region: ")
        assert "\n// launched for: " in head


def test_the_explanation_leads_from_a_layer_to_spec_lines_and_kernels(written: Path, plan: Plan) -> None:
    steps = json.loads((written / "explain.json").read_text())["entries"]["step"]["launches"]
    assert len(steps) == len(plan.lowered.table.entries["step"].launches)
    layer = [s for s in steps if s["scope"].startswith("layers.5.attn") and "kernel" in s]
    assert layer
    assert all(s["why"] and s["lines"] for s in layer)
    assert all("_layer" not in line and ":" in line for s in layer for chain in s["lines"] for line in chain)
    entry = Path(plan.model.spec.replace(".", "/")).name  # the chain starts where the spec describes the step
    assert all(chain[0].startswith(entry) for s in layer for chain in s["lines"])
    assert {"commit": "win.5", "scope": "layers.5.attn"} in steps


def test_equal_inputs_give_equal_bytes_in_any_folder(contents: EngineContents, written: Path, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    again, wheel = write_engine(contents, Path("elsewhere") / "other_name", wheel=True)
    assert tree(again) == tree(written)
    assert str(tmp_path) not in "".join(p.read_text(errors="replace") for p in again.rglob("*") if p.is_file())
    assert wheel is not None
    first = wheel.read_bytes()
    os.utime(again / NAME, (1, 1))
    assert write_engine(contents, again, wheel=True)[1].read_bytes() == first  # type: ignore[union-attr]


def test_an_engine_is_replaced_and_anything_else_is_not(contents: EngineContents, engine: Path) -> None:
    (engine / "lib" / "stale.so").write_bytes(b"old")
    write_engine(contents, engine)
    assert not (engine / "lib" / "stale.so").exists()
    precious = engine.with_name("precious")
    precious.mkdir()
    (precious / "thesis.tex").write_text("years")
    with pytest.raises(ArtifactError, match="holds something that is no engine, and is not overwritten"):
        write_engine(contents, precious)
    assert (precious / "thesis.tex").read_text() == "years"
    assert sorted(p.name for p in engine.parent.iterdir()) == ["engine", "precious"]


@pytest.mark.parametrize("there", [True, False])
def test_of_two_compiles_into_one_folder_both_end_and_a_whole_engine_is_left(
        contents: EngineContents, engine: Path, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, rename, others = tree(engine), os.rename, []
    rival = Path(shutil.copytree(engine, engine.with_name("rival")))
    if not there:
        shutil.rmtree(engine)

    def late(source: str | Path, target: str | Path) -> None:
        if Path(target) == engine and not others:  # the other compile is done just before
            others.append(rename(rival, engine))
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    write_engine(contents, engine)
    assert others and tree(engine) == expected
    assert [p.name for p in engine.parent.iterdir()] == ["engine"]


def test_a_folder_that_others_take_all_the_time_is_one_sentence(contents: EngineContents, engine: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    before, rename = tree(engine), os.rename

    def refuse(source: str | Path, target: str | Path) -> None:
        if Path(target) == engine and ".old" not in Path(source).name:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(source), None, str(target))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(ArtifactError, match="other compiles write the same folder"):
        write_engine(contents, engine)
    assert tree(engine) == before
    assert [p.name for p in engine.parent.iterdir()] == ["engine"]


@pytest.mark.parametrize("place", ["q1.log", "q1.log/x", "q1.log/x/y"])
def test_an_engine_inside_a_file_is_refused_before_anything_is_compiled(tmp_path: Path, place: str) -> None:
    (tmp_path / "q1.log").write_text("a log")
    out = tmp_path / place if "/" in place else (tmp_path / "q1.log").rename(tmp_path / "q1")
    with pytest.raises(ArtifactError, match=f"{out}: there is a file where a folder has to be; found {tmp_path}/q1"):
        check_out(out)


@pytest.mark.parametrize("left", ["", "half", "{}"])
def test_a_damaged_manifest_is_damage_and_the_advice_replaces_the_engine(contents: EngineContents, engine: Path,
                                                                         left: str) -> None:
    before, file = tree(engine), engine / NAME
    file.write_text(file.read_text()[:2000] if left == "half" else left)
    for message in (refused(engine), str(CliRunner().invoke(main, ["info", str(engine)]).stderr)):
        assert f"{file}: the engine is damaged" in message
        assert f"compile again: deepinfer-compile --model CHECKPOINT --out {engine}" in message
    file.unlink()
    assert f"{file}: the engine is damaged; found no file" in refused(engine)
    (engine / "thesis.tex").write_text("years")
    with pytest.raises(ArtifactError, match="is not overwritten"):
        check_out(engine)
    (engine / "thesis.tex").unlink()
    write_engine(contents, engine)
    assert tree(engine) == before


@pytest.mark.parametrize("name", ["my-engine", "1st", "class", "deepinfer", "a b"])
def test_a_name_that_cannot_be_imported_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"--out: .*free Python identifier; found .*my_engine"):
        check_out(tmp_path / name)


@pytest.mark.parametrize("point", ["sync", "_exchange", "seal"])
def test_a_crash_leaves_the_old_engine_and_nothing_else(contents: EngineContents, engine: Path, point: str,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = tree(engine)
    monkeypatch.setattr(writing, point, crash)
    with pytest.raises(PlanError, match=f"{engine}: no space is left"):
        write_engine(contents, engine)
    assert tree(engine) == before
    assert [p.name for p in engine.parent.iterdir()] == ["engine"]


def test_a_wheel_installs_an_importable_engine(contents: EngineContents, tmp_path: Path, run_python) -> None:
    _, wheel = write_engine(contents, tmp_path / "made" / "toy_engine", wheel=True)
    assert wheel is not None
    target = tmp_path / "site"
    done = run_python("-m", "pip", "--version")
    if done.returncode == 0:
        done = run_python("-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel))
        assert done.returncode == 0, done.stderr
    else:
        zipfile.ZipFile(wheel).extractall(target)
    program = ("import toy_engine, deepinfer; print(toy_engine.LLM is deepinfer.LLM, toy_engine.FOLDER);"
               "print(deepinfer.load_engine(toy_engine.__file__).plan.model)")
    done = run_python("-c", program, env={"PYTHONPATH": str(target)})
    assert done.stdout.splitlines() == [f"True {target / 'toy_engine'}", "deepseek_v41_flash"], done.stderr


def test_the_wheel_s_record_covers_every_file(contents: EngineContents, tmp_path: Path) -> None:
    _, wheel = write_engine(contents, tmp_path / "toy_engine", wheel=True)
    with zipfile.ZipFile(wheel) as z:  # type: ignore[arg-type]
        names = z.namelist()
        record = next(n for n in names if n.endswith(".dist-info/RECORD"))
        rows = list(csv.reader(z.read(record).decode().splitlines()))
        assert sorted(r[0] for r in rows) == sorted(names)
        assert {n.partition("/")[0] for n in names} == {"toy_engine", f"toy_engine-{deepinfer.__version__}.dist-info"}
        assert "Requires-Dist: deepinfer-aot" in z.read(record.replace("RECORD", "METADATA")).decode()


# ---- loading -----------------------------------------------------------------------------------------------------
def test_a_loaded_engine_knows_its_plan_interface_and_memory(written: Path, plan: Plan) -> None:
    loaded = load_engine(written)
    assert loaded.plan.limits == plan.lowered.table.limits
    assert loaded.interface.params == tuple(plan.lowered.params)
    assert loaded.interface.outputs["step"]["logits"].dims == (336,)
    assert loaded.footprint.sizes.weight_bytes > 0
    with pytest.raises(ArtifactError, match="compiled kernels cannot be loaded"):
        loaded.memory(2, 8)


def refused(folder: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        load_engine(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["lib/kernels.so", "lib/launch.txt", "lib/runner.so", "__init__.py", "explain.json",
                                  "licenses/LICENSE", "report.html"])
def test_a_damaged_or_missing_file_is_named(engine: Path, name: str) -> None:
    file = engine / name
    raw = file.read_bytes()
    flipped = raw[:-1] + bytes([raw[-1] ^ 1])
    for damaged, found in ((raw[:-1], "bytes for"), (flipped, "another content than was written")):
        file.write_bytes(damaged)
        message = refused(engine)
        assert message.startswith(f"{file}: the engine is damaged; found")
        assert found in message
        assert f"deepinfer-compile --target cpu --model CHECKPOINT --out {engine} --cache-format f32" in message
    file.unlink()
    assert "the engine is damaged; found no file" in refused(engine)


def reseal(engine: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Another manifest that is whole in itself."""
    manifest = json.loads((engine / NAME).read_text())
    change(manifest)
    (engine / NAME).write_bytes(seal({k: v for k, v in manifest.items() if k not in ("files", "digest")}, engine))


def test_a_changed_manifest_is_damage(engine: Path) -> None:
    text = (engine / NAME).read_text()
    (engine / NAME).write_text(text.replace('"hidden_size": 64', '"hidden_size": 65'))
    assert f"{engine / NAME}: the engine is damaged; found another content" in refused(engine)
    (engine / NAME).write_text(text[:-100])
    assert f"{engine / NAME}: the engine is damaged; found no JSON" in refused(engine)


@pytest.mark.parametrize(("number", "kind"), [(FORMAT + 1, "a newer"), (0, "an older")])
def test_another_format_names_the_version_that_wrote_it_and_the_command(engine: Path, number: int, kind: str) -> None:
    reseal(engine, lambda m: m.update(format=number, version="7.7.7"))
    message = refused(engine)
    assert f"the engine has {kind} format than this version reads" in message
    assert f"found format {number}, written by version 7.7.7" in message
    assert f"--out {engine}" in message
    assert ("upgrade deepinfer-aot" in message) == (kind == "a newer")


@pytest.mark.parametrize(("key", "value", "sentence"), [
    ("runner_abi", 99, "the engine's runner speaks another ABI than this version; found ABI 99"),
    ("machine", "s390x", "compiled on another kind of machine; found s390x"),
    ("interface", {}, "the engine's manifest lacks something"),
    ("plan", {}, "the plan for the runtime is damaged"),
])
def test_an_engine_of_other_surroundings_is_refused(engine: Path, key: str, value: object, sentence: str) -> None:
    reseal(engine, lambda m: m.update({key: value}))
    assert sentence in refused(engine)


def test_an_engine_for_another_target_names_both(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reseal(engine, lambda m: m.update(target="sm90"))
    monkeypatch.setenv(accelerator.VARIABLE, "cpu")
    assert "found an engine for sm90 on cpu (DEEPINFER_ACCELERATOR=cpu); allowed cpu" in refused(engine)


def test_an_engine_for_a_target_that_is_compiled_for_only_says_so(engine: Path) -> None:
    reseal(engine, lambda m: m.update(target="sm100"))
    assert re.search("does not run them yet; found an engine for sm100; allowed .*cpu", refused(engine))


def test_foreign_folders_are_told_from_damaged_ones(tmp_path: Path) -> None:
    assert "there is no such engine folder" in refused(tmp_path / "absent")
    assert "the folder is no engine; found no manifest.json" in refused(tmp_path)
    for text in ("{}", "[]", '{"kind": "other"}'):
        (tmp_path / NAME).write_text(text)
        assert "another program's manifest.json" in refused(tmp_path)
    (tmp_path / NAME).write_text("not JSON")
    assert "a manifest.json that is no JSON" in refused(tmp_path)
    with pytest.raises(ArtifactError, match="is not overwritten"):
        check_out(tmp_path)


def test_a_truncated_tokenizer_is_named_where_the_engram_tables_need_it(tmp_path: Path) -> None:
    whole = (CASE / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArtifactError, match=r"tokenizer\.json: the tokenizer cannot be read; found .*fetch the file"):
        token_classes(tmp_path, Config.load(CASE / "config.json"))


# ---- checkpoint and config -----------------------------------------------------------------------------------------
def test_the_same_config_fits_and_unread_keys_do_not_count() -> None:
    config = {"a": 1, "text_config": {"b": [1, 2], "dtype": "x"}, "transformers_version": "1"}
    other = {"a": 1, "text_config": {"b": [1, 2]}, "transformers_version": "2"}
    require_same_config(config, other, {"dtype": "", "transformers_version": ""}, "here", "again")


@pytest.mark.parametrize(("change", "sentence"), [
    ({"a": 2}, "a differs; found 2; allowed 1"), ({"c": 3}, "c differs; found 3; allowed no such key"),
    ({"text_config": {"b": [1]}}, r"text_config\.b differs; found \[1\]; allowed \[1, 2\]"),
    ({"text_config": None}, r"text_config differs; found None; allowed \{'b'"),
])
def test_another_config_is_refused_by_its_first_key(change: dict[str, Any], sentence: str) -> None:
    config = {"a": 1, "text_config": {"b": [1, 2]}}
    with pytest.raises(ArtifactError, match="engine: the engine was compiled for another config: " + sentence):
        require_same_config(config, config | change, {}, "engine", "again")


def test_a_checkpoint_of_another_config_is_refused_before_its_weights_are_read(written: Path, checkpoint: Checkpoint,
                                                                               tmp_path: Path) -> None:
    config = json.loads((checkpoint.folder / "config.json").read_text())
    config["text_config"]["swiglu_limit"] = 2.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(checkpoint.folder / "model.safetensors", tmp_path)
    with pytest.raises(ArtifactError, match=r"text_config\.swiglu_limit differs; found 2\.0; allowed 1\.0"):
        load_engine(written).checkpoint(tmp_path)


def test_without_a_checkpoint_the_message_says_what_could_be_given(written: Path) -> None:
    with pytest.raises(ArtifactError, match="no checkpoint is named; allowed a checkpoint folder, deepseek-ai/"):
        load_engine(written).checkpoint()
