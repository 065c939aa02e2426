"""An engine compiled ahead of time by DeepInfer-AOT: `import` it, `load` it with a checkpoint, call `generate`.

    import my_engine
    llm = my_engine.load("path/to/checkpoint")
    print(llm.generate("Hello")[0].outputs[0].text)

report.html shows what became of the model; manifest.json says what it was compiled from, src/ holds the kernels as
text, explain.json says which kernel computes what.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer import LLM as LLM
    from deepinfer import SamplingParams as SamplingParams

FOLDER = Path(__file__).resolve().parent
__all__ = ["FOLDER", "LLM", "SamplingParams", "load"]


def load(checkpoint: str | Path | None = None, **options: Any) -> LLM:
    """This engine, started with a checkpoint folder or hub id; see ``deepinfer.LLM`` for the options."""
    from deepinfer import LLM

    return LLM(FOLDER, checkpoint, **options)


def __getattr__(name: str) -> Any:
    if name in ("LLM", "SamplingParams"):
        import deepinfer

        return getattr(deepinfer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
