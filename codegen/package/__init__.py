"""Engine packages: what a compile leaves behind, written once and checked on loading.

Entry functions: ``write_engine(contents, out)``, ``pack_weights(engine, checkpoint)`` and ``load_engine(path)``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.codegen.package.contents import EngineContents as EngineContents
    from deepinfer.codegen.package.load import EnginePackage as EnginePackage
    from deepinfer.codegen.package.load import load_engine as load_engine
    from deepinfer.codegen.package.pack import pack_weights as pack_weights
    from deepinfer.codegen.package.write import check_out as check_out
    from deepinfer.codegen.package.write import write_engine as write_engine

# Loaded when asked for: a runtime that loads an engine needs nothing of the compiler.
_HOME = {"EngineContents": "contents", "EnginePackage": "load", "load_engine": "load", "check_out": "write",
         "pack_weights": "pack", "write_engine": "write"}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"deepinfer.codegen.package.{_HOME[name]}"), name)
    raise AttributeError(f"deepinfer.codegen.package has no {name}")
