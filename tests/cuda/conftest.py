"""Kernels for NVIDIA devices, on a machine without one: Triton interprets them here, and compiles them elsewhere."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported; the toolchain's own processes do not inherit it

_REASON = "Triton is not installed: pip install 'deepinfer-aot[cuda]'"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("triton") is not None:
        return
    for item in items:
        if item.path.parent.name == "cuda":
            item.add_marker(pytest.mark.skip(reason=_REASON))


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver without a device in place of the real one, from here to the end of the process."""
    from cuda import fake

    from deepinfer.devices import NvidiaDevice

    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "nvidia")
    monkeypatch.setattr("deepinfer.accelerator.nvidia_device", lambda: NvidiaDevice((9, 0), ""))
    fake.library()
    fake.forget()
