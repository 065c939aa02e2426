"""Weights packed with an engine: the same answers, damage named, nothing lost by what fails."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from compiled import checkpoint_of, engine_of
from safetensors import safe_open

import deepinfer
from deepinfer import LLM, SamplingParams
from deepinfer.codegen import compile_engine
from deepinfer.codegen.package import load_engine, pack_weights
from deepinfer.codegen.package.aside import aside_of
from deepinfer.errors import ArtifactError, PlanError
from deepinfer.runtime.checkpoint import open_checkpoint, packed, room, scan
from deepinfer.runtime.checkpoint.bind import bind_weights

CASE = "v41_a_f32"
GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPT = list(range(3, 40))


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine with packed weights in pieces of 64 kB, so that a small model has many."""
    monkeypatch.setattr(packed, "_PIECE", 1 << 16)
    folder = shutil.copytree(engine_of(CASE), tmp_path / "engine")
    pack_weights(load_engine(folder), open_checkpoint(checkpoint_of(CASE)), progress=False)
    return folder


def answer(engine: Path, checkpoint: Path | None = None) -> list[int]:
    llm = LLM(engine, checkpoint, max_num_seqs=1, threads=1, progress=False)
    try:
        return list(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids)
    finally:
        llm.close()


def test_an_engine_with_packed_weights_needs_no_checkpoint_and_answers_the_same(engine: Path) -> None:
    assert answer(engine) == answer(engine, checkpoint_of(CASE))


@pytest.mark.parametrize(("depth", "packed", "small", "there"), [
    ("weights", False, True, True), ("plain", False, True, False), ("off", False, True, False),
    ("weights", False, False, False), ("plain", True, True, True), ("off", True, True, False),
    ("weights", True, False, False)])
def test_rows_of_tables_are_not_asked_for_where_the_start_has_read_them_and_they_are_small(
        engine: Path, depth: str, packed: bool, small: bool, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    package = load_engine(engine)
    assert any(p.table and not p.derive for p in package.interface.params)
    if not small:
        monkeypatch.setattr(scan, "SMALL_TABLES", 0)
    checkpoint = open_checkpoint(engine / "weights" if packed else checkpoint_of(CASE))
    weights = bind_weights(checkpoint, package.interface.params, package.manifest["model"], depth=depth, progress=False)
    assert weights.tables_in_memory == there


def test_packed_tensors_are_a_safetensors_file_in_the_order_of_the_launch_table(engine: Path) -> None:
    package = load_engine(engine)
    with safe_open(engine / "weights" / "model.safetensors", "np") as file:
        names = set(file.keys())
    first = [p for p in package.interface.params if not p.derive]
    assert names == {n for p in first for n in (*p.names, *p.scale_names)}
    places = open_checkpoint(engine / "weights").places
    starts = {p.name: places[p.names[0]].start for p in first if not p.table}
    aligned = [starts[p.name] for p in first
               if p.name in starts and places[p.names[0]].tensor.nbytes % 64 == 0]
    assert aligned == sorted(aligned)
    assert all(start % 64 == 0 for start in aligned)
    tables = [places[n].start for p in first if p.table for n in p.names]
    assert not tables or min(tables) > max(starts.values())


def test_a_flipped_byte_anywhere_is_named_and_an_index_that_lies_too(engine: Path) -> None:
    file = engine / "weights" / "model.safetensors"
    raw = file.read_bytes()
    for at in (len(raw) - 1, len(raw) // 2, 70_000):
        file.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1:])
        with pytest.raises(ArtifactError, match=r"model\.safetensors.*damaged"):
            answer(engine)
    file.write_bytes(raw[:-64])
    with pytest.raises(ArtifactError, match=r"damaged|truncated"):
        answer(engine)
    file.write_bytes(raw)
    index = engine / "weights" / "pack.json"
    index.write_text(index.read_text().replace('"source": "', '"source": "x'))
    with pytest.raises(ArtifactError, match=r"index of the packed weights is damaged"):
        answer(engine)


def test_a_pack_of_another_checkpoint_and_a_pack_of_a_pack_are_refused(engine: Path, tmp_path: Path) -> None:
    package = load_engine(engine)
    with pytest.raises(ArtifactError, match="packed already"):
        pack_weights(package, progress=False)
    other = shutil.copytree(checkpoint_of(CASE), tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["text_config"]["rms_norm_eps"] = 0.5
    (other / "config.json").write_text(json.dumps(config))
    before = (engine / "weights" / "pack.json").read_bytes()
    with pytest.raises(ArtifactError, match="rms_norm_eps"):
        pack_weights(package, open_checkpoint(other), progress=False)
    assert (engine / "weights" / "pack.json").read_bytes() == before


def test_what_a_killed_process_left_is_removed_and_the_folder_of_a_living_one_stays(engine: Path) -> None:
    with aside_of("weights", engine) as living:
        dead, fresh = engine / ".weights.making-dead", engine / ".weights.making-fresh"
        for folder in (dead, fresh):
            (folder / "part").mkdir(parents=True)
        for folder in (dead, living):
            os.utime(folder, (0, 0))
        pack_weights(load_engine(engine), open_checkpoint(checkpoint_of(CASE)), progress=False)
        assert not dead.exists()
        assert fresh.exists()
        assert living.exists()
    assert not living.exists()


def test_weights_that_are_absent_or_do_not_fit_are_refused_before_any_work(engine: Path, tmp_path: Path,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config_only"
    config.mkdir()
    shutil.copyfile(checkpoint_of(CASE) / "config.json", config / "config.json")
    with pytest.raises(ArtifactError, match="there are no weights to pack; found a config without weights"):
        compile_engine(model=str(config), out=tmp_path / "none", target="cpu", pack=True)
    assert not (tmp_path / "none").exists()
    monkeypatch.setattr(room, "free_disk", lambda _: 1000)
    with pytest.raises(PlanError, match=r"MB to pack into \S+; allowed 0\.0 MB free; compile into a"):
        pack_weights(load_engine(engine), open_checkpoint(checkpoint_of(CASE)), progress=False)


def test_what_fails_while_packing_leaves_the_pack_that_was_there(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {p.name: p.read_bytes() for p in (engine / "weights").iterdir()}

    def full(*args: object, **kw: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("deepinfer.codegen.package.pack.write_pack", full)
    with pytest.raises(deepinfer.errors.PlanError):
        pack_weights(load_engine(engine), open_checkpoint(checkpoint_of(CASE)), progress=False)
    assert {p.name: p.read_bytes() for p in (engine / "weights").iterdir()} == before
    assert not [p for p in engine.iterdir() if p.name.startswith(".")]
