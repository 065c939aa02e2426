"""What runs an engine: scheduling, KV cache, sampling, loading and the public `LLM`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.codegen.package.load import load_engine as load_engine
    from deepinfer.runtime.llm import LLM as LLM
    from deepinfer.runtime.sampling_params import SamplingParams as SamplingParams

_HOME = {
    "LLM": "deepinfer.runtime.llm",
    "SamplingParams": "deepinfer.runtime.sampling_params",
    "load_engine": "deepinfer.codegen.package.load",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'deepinfer.runtime' has no attribute {name!r}")
