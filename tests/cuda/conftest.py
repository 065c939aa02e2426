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
