"""Engines compiled from the golden cases, once a test session; kernels come from the cache when it holds them."""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from golden.cases import load_case
from rich.console import Console

from deepinfer.backends.base import HOST
from deepinfer.codegen.compile import compile_engine
from deepinfer.dsl.model import EngineOptions

# Another target runs the same tests: ascend950 on its CPU twin, with DEEPINFER_ASCEND_TWIN=1.
TARGET = os.environ.get("DEEPINFER_TEST_TARGET", "cpu")
_ROOT = tempfile.TemporaryDirectory(prefix="deepinfer-tests-")


@cache
def checkpoint_of(name: str) -> Path:
    """A case's checkpoint without the object that only the tests know."""
    case, folder = load_case(name), Path(_ROOT.name) / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(case.config))
    for file in ("model.safetensors", "tokenizer.json"):
        if (case.folder / file).is_file():
            shutil.copy(case.folder / file, folder / file)
    return folder


def engine_of(name: str, isa: str = HOST, workspace_bytes: int | None = None, target: str = TARGET,
              **options: Any) -> Path:
    """The engine folder of a case under its formats, with ``options`` laid over them; as a rule for this machine."""
    return _compiled(name, isa, workspace_bytes, target, tuple(sorted((load_case(name).formats | options).items())))


@cache
def _compiled(name: str, isa: str, workspace_bytes: int | None, target: str,
              options: tuple[tuple[str, Any], ...]) -> Path:
    folder = Path(_ROOT.name) / f"engine_{name}_{len(list(Path(_ROOT.name).iterdir()))}"
    compile_engine(model=str(checkpoint_of(name)), out=folder, target=target, isa=isa, workspace_bytes=workspace_bytes,
                   options=EngineOptions(**dict(options)), console=Console(file=io.StringIO()))
    return folder
