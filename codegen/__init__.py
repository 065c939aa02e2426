"""The compiler: from a Graph to a Plan, from a Plan to kernels, from kernels to an engine folder.

Entry functions of the stage: ``lower(model, backend, target) -> Plan`` and ``compile_engine(...)``, loaded on
demand.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.codegen.compile import Compiled, compile_engine
    from deepinfer.codegen.lower import Plan, lower

_HOME = {"compile_engine": "compile", "Compiled": "compile", "lower": "lower", "Plan": "lower"}

__all__ = ["Compiled", "Plan", "compile_engine", "lower"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"deepinfer.codegen has no {name}")
    return getattr(import_module(f"deepinfer.codegen.{_HOME[name]}"), name)
