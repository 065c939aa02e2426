"""`deepinfer doctor`: what it looks at, and when it says that nothing works."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import deepinfer
from deepinfer.cli import doctor
from deepinfer.errors import ToolchainError
from deepinfer.machine import Miss


def looked(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(doctor.main, ["--json", *arguments])
    return done.exit_code, json.loads(done.stdout)


def states(report: dict[str, Any]) -> dict[str, str]:
    return {f["topic"]: f["state"] for f in report["findings"]}


def test_a_report_names_everything_a_bug_report_needs() -> None:
    code, report = looked()
    assert code == (0 if report["ok"] else ToolchainError.exit_code)
    assert report["version"] == deepinfer.__version__
    topics = states(report)
    for topic in ("version", "machine", "package", "packages base", "default target", "target cpu", "NVIDIA device",
                  "Ascend device", "memory", "cache", "checkpoints"):
        assert topic in topics
    text = CliRunner().invoke(doctor.main).stdout
    assert all(f["text"] in text for f in report["findings"] if f["topic"] not in ("memory", "cache", "checkpoints"))


def test_another_projects_distribution_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == "deepinfer" else known(name))
    code, report = looked()
    assert code == ToolchainError.exit_code and not report["ok"] and states(report)["package"] == "error"


def test_a_missing_compiler_is_an_error_and_a_missing_extra_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "misses", lambda target: [Miss("no compiler", needed=True)])
    known = importlib.metadata.version

    def version(name: str) -> str:
        if name == "msgspec":
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    code, report = looked()
    assert code == ToolchainError.exit_code
    assert states(report)["target cpu"] == "error" and states(report)["packages server"] == "note"
    line = next(f["text"] for f in report["findings"] if f["topic"] == "packages server")
    assert "missing msgspec" in line and "deepinfer-aot[server]" in line


def test_the_packages_looked_for_are_the_declared_ones(repository: Path) -> None:
    import tomllib

    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    declared = {"base": project["dependencies"], **project["optional-dependencies"]}
    for extra, names in doctor._EXTRAS.items():
        assert [d.split(">")[0] for d in declared[extra]] == list(names), extra


def test_a_cache_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))
    assert states(looked()[1])["cache"] == "ok"
    monkeypatch.setattr("os.access", lambda place, mode: place != tmp_path)
    assert states(looked()[1])["cache"] == "error"
