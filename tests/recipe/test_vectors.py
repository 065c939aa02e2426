"""Every recorded encoding, parse, token list, image size and budget of the official package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deepinfer.recipe import RecipeTokenizer
from deepinfer.recipe.check_vectors import VectorChecks, main, run_checks


@pytest.mark.parametrize("section", ["encode", "parse", "tokenizer", "image", "budget"])
def test_every_recorded_behaviour_is_reproduced(
    section: str, vectors: dict[str, Any], tokenizers: Mapping[str, RecipeTokenizer]
) -> None:
    passed, total, failures = run_checks({section: vectors[section]}, VectorChecks(tokenizers))
    assert total.total() == vectors["meta"]["counts"][section]
    assert not failures
    assert passed == total


def damaged(vector: dict[str, Any]) -> dict[str, Any]:
    """A copy whose recorded result differs in one character."""
    copy: dict[str, Any] = json.loads(json.dumps(vector))
    if "v41" in copy.get("expect", {}):
        copy["expect"]["v41"]["prompt"] += "!"
    elif "final" in copy.get("expect", {}):
        copy["expect"]["final"]["model"] += "!"
    else:
        copy["text"] = copy.get("text", "") + "!"
    return copy


def test_a_damaged_vector_fails_with_its_first_difference(
    tmp_path: Path, vectors: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "damaged.json"
    chosen = {
        "encode": [vectors["encode"][0], damaged(vectors["encode"][0])],
        "parse": [damaged(vectors["parse"][0])],
        "tokenizer": [damaged(vectors["tokenizer"][1])],
    }
    file.write_text(json.dumps(chosen), encoding="utf-8")
    assert main([str(file)]) == 1
    shown = capsys.readouterr().out
    assert "encode/basic                     1/2" in shown
    assert "all                              1/4" in shown
    assert f"encode {vectors['encode'][0]['id']}: v41.prompt: from character" in shown
    assert "final.model" in shown


def test_whole_files_pass_with_exit_code_zero(vector_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(vector_file)]) == 0
    assert "405/405" in capsys.readouterr().out


def test_a_missing_file_is_one_sentence_and_exit_code_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none.json")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "none.json" in said
