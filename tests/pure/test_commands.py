"""The commands: what they hand to the compiler, and what they refuse before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import deepinfer.codegen
from deepinfer.cli import main
from deepinfer.codegen.cached_engine import CachedEngine
from deepinfer.dsl.model import EngineOptions


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keyword arguments of each call that reaches the compiler, which is replaced."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        deepinfer.codegen, "compile_engine", lambda **given: calls.append(given), raising=False
    )
    monkeypatch.delenv("DEEPINFER_ACCELERATOR", raising=False)
    return calls


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_compile_hands_every_option_to_the_compiler(compiled) -> None:
    limits = ("--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--max-model-len", "300")
    numerics = ("--replay", "128", "--profile", "wide", "--cache-format", "f32", "--act-format", "f32")
    rest = ("--wheel", "--pack-weights", "--dump-ir", "ir", "--jobs", "3", "--isa", "host", "--revision", "v2",
            "--target", "cpu")
    result = invoke("compile", "--model", "m", "--out", "e", *limits, *numerics, *rest)
    assert result.exit_code == 0, result.output
    (call,) = compiled
    options = call.pop("options")
    assert call == {
        "model": "m",
        "out": Path("e"),
        "target": "cpu",
        "revision": "v2",
        "wheel": True,
        "pack": True,
        "dump_ir": Path("ir"),
        "jobs": 3,
        "isa": "host",
    }
    assert options == EngineOptions(
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=300,
        replay="128",
        profile="wide",
        cache_format="f32",
        act_format="f32",
    )


def test_compile_has_no_defaults_of_its_own(compiled) -> None:
    assert invoke("compile", "--model", "m", "--out", "e").exit_code == 0
    assert compiled[0]["options"] == EngineOptions()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--replay", "some"),
        ("--max-num-seqs", "0"),
        ("--max-model-len", "long"),
        ("--profile", "fp8"),
        ("--target", "sm80"),
        ("--jobs", "0"),
        ("--isa", "sse"),
        ("--no-such-option",),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(compiled, arguments) -> None:
    result = invoke("compile", "--model", "m", "--out", "e", *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert arguments[-1] in line
    assert not compiled


def test_a_missing_option_is_named(compiled) -> None:
    result = invoke("compile", "--out", "e")
    assert result.exit_code == 2
    assert "--model" in result.stderr


def test_an_unknown_command_is_named() -> None:
    result = invoke("comple")
    assert result.exit_code == 2
    assert "comple" in result.stderr


def test_no_arguments_print_the_help() -> None:
    result = invoke()
    assert result.exit_code == 0
    assert "First steps" in result.stdout


def test_the_first_steps_use_options_that_exist() -> None:
    steps = [words for line in invoke("--help").stdout.splitlines() if (words := line.split())[:1] == ["deepinfer"]]
    assert len(steps) == 3
    for _, command, *rest in steps:
        known = {flag for option in main.commands[command].params for flag in option.opts}
        assert {word for word in rest if word.startswith("--")} <= known


@pytest.mark.parametrize("command", [name for name in main.commands])
def test_the_help_of_a_command_teaches_by_example(command) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout


def test_an_engine_in_the_cache_is_found_by_what_it_is_made_of(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))
    made = CachedEngine("some-org/A-Model.1", "cpu", {"max_num_seqs": 2})
    assert made.folder.parent == tmp_path / "engines" and made.folder.name.isidentifier()
    assert made.folder == CachedEngine("some-org/A-Model.1", "cpu", {"max_num_seqs": 2}).folder
    others = [CachedEngine("some-org/A-Model.1", "cpu", {"max_num_seqs": 3}), CachedEngine("b/A-Model.1", "cpu", {})]
    assert len({made.folder, *(o.folder for o in others)}) == 3
    assert made.command()[1:] == ["--target", "cpu", "--model", "some-org/A-Model.1", "--isa", "host",
                                  "--max-num-seqs", "2", "--out", str(made.folder)]
