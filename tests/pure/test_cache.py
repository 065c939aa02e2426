"""The content-addressed cache: whole entries or none, damaged ones remade, keys readable."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from deepinfer.codegen.cache import Cache, digest_of
from deepinfer.errors import ArtifactError, PlanError

KEY = {"source": "abc", "flags": ["-O2"]}


def writer(text: str):
    def make(folder: Path) -> None:
        (folder / "out.o").write_text(text)

    return make


def never(folder: Path) -> None:
    raise AssertionError("made again")


def test_a_second_fetch_hits_and_makes_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    first = cache.fetch(KEY, writer("x"))
    second = cache.fetch(dict(reversed(KEY.items())), never)
    assert (first.hit, second.hit) == (False, True)
    assert second.files["out.o"].read_text() == "x"
    assert first.digest == second.digest == digest_of(KEY)


def test_the_key_is_written_beside_the_files(tmp_path: Path) -> None:
    entry = Cache(tmp_path).fetch(KEY, writer("x"))
    assert json.loads((entry.folder / "key.json").read_text()) == KEY


def test_a_damaged_entry_is_made_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    entry = cache.fetch(KEY, writer("good"))
    entry.files["out.o"].write_text("bad!")
    again = cache.fetch(KEY, writer("good"))
    assert not again.hit
    assert again.files["out.o"].read_text() == "good"


def test_a_failed_make_leaves_nothing_behind(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        Cache(tmp_path).fetch(KEY, broken)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
    assert Cache(tmp_path).lookup(KEY) is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_names_the_cache_and_how_to_move_it(tmp_path: Path, number: int) -> None:
    def full(folder: Path) -> None:
        raise OSError(number, "full")  # a write names no file

    with pytest.raises(PlanError) as caught:
        Cache(tmp_path).fetch(KEY, full)
    assert caught.value.where == tmp_path
    assert number == errno.EFBIG or "DEEPINFER_CACHE_DIR" in str(caught.value)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_a_cache_in_an_impossible_place_says_how_to_move_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match=f"{tmp_path}/file/cache.*Not a directory; name .* DEEPINFER_CACHE_DIR"):
        Cache(tmp_path / "file" / "cache").fetch(KEY, never)


def test_a_lost_race_takes_the_winner_s_entry(tmp_path: Path) -> None:
    def slow(folder: Path) -> None:
        Cache(tmp_path).fetch(KEY, writer("same"))
        (folder / "out.o").write_text("same")

    entry = Cache(tmp_path).fetch(KEY, slow)
    assert entry.files["out.o"].read_text() == "same"
    assert len(list(entry.folder.parent.iterdir())) == 1
