"""DeepInfer-AOT: inference engines compiled ahead of time from a description of the model.

`from deepinfer import LLM, SamplingParams` and `deepinfer.load_engine(path)` are the public
surface; nothing heavy is imported before one of them is used.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.runtime import LLM as LLM
    from deepinfer.runtime import SamplingParams as SamplingParams
    from deepinfer.runtime import load_engine as load_engine

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "load_engine"]

DISTRIBUTION = "deepinfer-aot"
_FROM_RUNTIME = frozenset({"LLM", "SamplingParams", "load_engine"})


def _check_own_files() -> None:
    """Another project installs an import package of the same name; its files must not be mixed with ours."""
    marker = Path(__file__).with_name("distribution.txt")
    if not marker.is_file() or marker.read_text(encoding="ascii").strip() != DISTRIBUTION:
        raise ImportError(
            f"{marker.parent} is not an intact installation of {DISTRIBUTION}: another project's package "
            f"`deepinfer` is shadowing it; uninstall `deepinfer`, then reinstall `{DISTRIBUTION}`, "
            "or use a fresh environment"
        )


_check_own_files()


def __getattr__(name: str) -> Any:
    if name in _FROM_RUNTIME:
        return getattr(importlib.import_module("deepinfer.runtime"), name)
    raise AttributeError(f"module 'deepinfer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM_RUNTIME})
