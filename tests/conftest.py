"""What every test can rely on: the source tree, a way to run Python apart, skips that give a reason."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import hypothesis
import pytest

from deepinfer.devices import ascend_device, nvidia_device

ROOT = Path(__file__).resolve().parents[1]

# Cases take as long as a compiler does, and a failure has to repeat on another machine.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Skip what needs a device this machine lacks, with the driver's own reason."""
    missing = {}
    if nvidia_device().capability is None:
        missing["cuda"] = nvidia_device().note
    if ascend_device().soc is None:
        missing["ascend"] = ascend_device().note
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return ROOT


RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Run `python ARGUMENTS` in a fresh process outside the source tree.

    Keyword arguments: `env` is laid over a copy of this process's environment without DeepInfer's
    variables; `cwd` and `python` replace the working folder and the interpreter.
    """

    def run(
        *arguments: str,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        python: str | Path = sys.executable,
    ) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("DEEPINFER_")}
        return subprocess.run(
            [str(python), *arguments],
            cwd=cwd or tmp_path,
            env=inherited | (env or {}),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run
