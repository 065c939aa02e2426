"""Measured schedules: how they are chosen, kept and replayed, and what a database that does not fit ends in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from cuda.test_schedules import dense, experts

from deepinfer.backends.cuda_sm100.backend import CudaBackend
from deepinfer.backends.cuda_sm100.schedule import Schedule, Tile, default_schedule
from deepinfer.backends.cuda_sm100.source import CudaSource
from deepinfer.backends.cuda_sm100.tune.candidates import candidates
from deepinfer.backends.cuda_sm100.tune.database import (
    TUNED,
    VARIABLE,
    Database,
    Timed,
    choose,
    database_for,
    installed_triton,
    shapes,
    skeleton,
)
from deepinfer.cli import main
from deepinfer.errors import ArtifactError

SPEC = dense(96, 1536, "mxfp8(32,32)")
OTHER = replace(default_schedule(SPEC), parts=2).with_tile(Tile(16, 8, 64, 64, 4, 3))


def database(schedule: Schedule = OTHER, target: str = "sm90", **skeletons: str) -> Database:
    known = {f: skeleton(f) for f in TUNED} | skeletons
    return Database("a device", target, installed_triton(), known, {shapes(SPEC): {"schedule": schedule.as_json()}})


def test_the_compiler_replays_a_measured_schedule_and_says_where_it_is_from(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database().save(tmp_path / "db.json")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "db.json"))
    found = CudaBackend("sm90").emit(SPEC)
    assert isinstance(found, CudaSource)
    assert found.schedule == "measured on a device"
    assert dict(found.variants[0].stages[0].constants)["BT"] == 8
    unknown = CudaBackend("sm90").emit(dense(64, 64, "bf16"))
    assert isinstance(unknown, CudaSource)
    assert unknown.schedule == "default"


@pytest.mark.parametrize("changed", [{"gemm": "another text"}, {}])
def test_a_schedule_of_another_skeleton_or_compiler_is_not_taken(changed: dict[str, str]) -> None:
    triton = installed_triton() if changed else "0.1"
    assert database(**changed).schedule(SPEC, triton) is None
    assert database().schedule(SPEC, installed_triton()) == OTHER


def test_the_shipped_database_was_measured_with_the_skeletons_of_today() -> None:
    shipped = database_for("sm90")
    assert shipped is not None
    assert shipped.device == "NVIDIA H200"
    assert dict(shipped.skeletons) == {f: skeleton(f) for f in TUNED}


def test_a_database_of_another_target_or_a_damaged_one_is_one_sentence(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "db.json"
    monkeypatch.setenv(VARIABLE, str(file))
    database(target="sm100").save(file)
    with pytest.raises(ArtifactError, match=r"for another target.*found sm100; allowed sm90"):
        database_for("sm90")
    file.write_text(json.dumps({"format": 99}))
    with pytest.raises(ArtifactError, match="another format; found 99"):
        database_for("sm90")
    file.write_text("{")
    with pytest.raises(ArtifactError, match="cannot be read"):
        database_for("sm90")


def test_parts_are_those_that_are_best_for_few_rows_and_tiles_those_that_are_best_for_theirs() -> None:
    base = default_schedule(SPEC)
    few = (Tile(16, 16, 64, 128, 4, 4), Tile(16, 8, 64, 128, 4, 4))
    many = (Tile(0, 128, 128, 64, 8, 4), Tile(0, 256, 128, 64, 8, 3))
    timed = [Timed(replace(base, parts=p).with_tile(t), t, rows, False, us) for p, t, rows, us in (
        (4, few[0], 1, 9.0), (4, few[1], 1, 8.0), (8, few[0], 1, 6.0), (8, few[1], 1, 7.0),
        (4, many[0], 4096, 50.0), (4, many[1], 4096, 40.0))]
    best, us = choose(base, timed)
    assert best.parts == 8
    assert best.tiles[0] == few[0]
    assert best.tiles[-1] == many[1]
    assert us == {"1": 6.0, "4096": 40.0}


@pytest.mark.parametrize(("together", "rows"), [(7.0, 16), (9.0, 64)])
def test_parts_are_summed_apart_up_to_the_rows_where_that_was_faster(together: float, rows: int) -> None:
    base = default_schedule(dense(2048, 1536, "mxfp8(32,32)"))
    some, more = Tile(64, 64, 64, 64, 4, 4), Tile(256, 128, 64, 64, 4, 4)
    timed = [Timed(replace(base, apart=apart).with_tile(t), t, n, False, us) for apart, t, n, us in (
        (256, some, 64, 8.0), (16, some, 64, together), (256, more, 256, 20.0), (64, more, 256, 10.0))]
    assert base.parts > 1
    best, us = choose(base, timed)
    assert best.apart == rows
    assert us == {"64": min(8.0, together), "256": 10.0}


def test_candidates_differ_and_hold_the_tile_they_measure() -> None:
    for spec in (SPEC, experts(4, 64, 256), dense(24, 2048, "f32")):
        found = list(candidates(spec))
        assert len(set(found)) == len(found) > 3
        assert all(c.tile in c.schedule.tiles for c in found)


def test_tune_asks_for_something_to_write() -> None:
    result = CliRunner().invoke(main, ["tune", "--model", "m", "--target", "sm90"])
    assert result.exit_code == 2
    assert "nothing to write" in result.output
    assert "Examples" in CliRunner().invoke(main, ["tune", "--help"]).output
