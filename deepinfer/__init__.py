"""DeepInfer-AOT: inference engines compiled ahead of time from a description of the model.

`from deepinfer import LLM, SamplingParams` and `deepinfer.load_engine(path)` are the public surface; nothing heavy
is imported before one of them is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.runtime import LLM, SamplingParams, load_engine

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__", "load_engine"]

_FROM_RUNTIME = frozenset({"LLM", "SamplingParams", "load_engine"})


def __getattr__(name: str) -> Any:
    if name in _FROM_RUNTIME:
        import deepinfer.runtime

        return getattr(deepinfer.runtime, name)
    raise AttributeError(f"module 'deepinfer' has no attribute {name!r}")
