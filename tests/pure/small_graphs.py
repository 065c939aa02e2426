"""One-entry graphs for tests of the interpreter: trace, verify, run on one sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepinfer.dsl import Graph, Node, Source, functional
from deepinfer.dsl.build import current, tracing
from deepinfer.dsl.interpreter import Interpreter, StepRows
from deepinfer.dsl.verifier import verify


def traced(entry: Callable[[], object]) -> Graph:
    with tracing("step") as b:
        entry()
    verify(b.graph)
    return b.graph


def run(entry: Callable[[], object], step: StepRows | None = None, weights: Mapping[str, Tensor] | None = None,
        dtype: torch.dtype = torch.float64, pins: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """What the entry publishes in the first step of a sequence."""
    interpreter = Interpreter({"step": traced(entry)}, weights or {}, dtype)
    return interpreter.step(interpreter.new_state(), step or StepRows([0]), pins).outputs


def attend(q: Node, sources: Sequence[Source], scale: float, **more: Any) -> Node:
    """Without rounding of the probabilities."""
    return functional.attend(q, sources, scale, rounds=None, **more)


def keep(x: Node, rows: str) -> Node:
    return current().add("keep", (x,), rows=rows)
