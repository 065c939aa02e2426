"""The reference meaning of Graph IR, in torch: slow, plain, and the oracle of every kernel.

``Interpreter`` runs entries and regions of a program on one sequence; ``ReferenceSession`` wraps it for tests and
tools that think in token ids. The numbers of the storage formats are in ``formats``.
"""

from deepinfer.dsl.interpreter.context import Value, first_largest, greedy
from deepinfer.dsl.interpreter.frame import Frame, Override, StepRows
from deepinfer.dsl.interpreter.run import Interpreter, Result, evaluate
from deepinfer.dsl.interpreter.session import ReferenceSession
from deepinfer.dsl.interpreter.state import Entries, Ring, SequenceState
from deepinfer.dsl.interpreter.weights import Weights, derived_values, read_checkpoint

__all__ = [
    "Entries", "Frame", "Interpreter", "Override", "ReferenceSession", "Result", "Ring", "SequenceState", "StepRows",
    "Value", "Weights", "derived_values", "evaluate", "first_largest", "greedy", "read_checkpoint",
]
