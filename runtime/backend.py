"""The narrow interface between the runtime and whatever runs a step: the native engine, or a stand-in of a test."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime.batch import Batch
from deepinfer.runtime.placement import Placement
from deepinfer.runtime.plan import EnginePlan

Outputs = dict[str, NDArray[Any]]


class Engine(Protocol):
    """A model with weights and memory. One ``run`` at a time; nothing is allocated in it.

    ``checkpoint``: the folder whose weights are bound (config and tokenizer lie beside them).
    """

    @property
    def checkpoint(self) -> Path | None: ...

    def run(self, entry: str, batch: Batch, pins: Mapping[str, NDArray[np.int32]] | None = None) -> Outputs:
        """One step of ``entry`` for a batch: outputs by name, [rows of the output's axis, ...].

        ``pins``: selections given from outside by name, i32 [rows of the pin's axis, k]. The arrays that come back
        are valid until the next run.
        """
        ...

    def state(self, name: str, unit: int) -> NDArray[np.uint8]:
        """Writable bytes of one slot of a ring, or of one block of a paged state."""
        ...

    def close(self) -> None:
        """Give all memory back."""
        ...


class MemoryNeed(Protocol):
    """Bytes that starting an engine takes besides its weights."""

    @property
    def total(self) -> int: ...


class Package(Protocol):
    """A compiled engine that is not running yet: what ``load_engine`` returns."""

    @property
    def plan(self) -> EnginePlan: ...

    def memory(self, slots: int, blocks: int) -> MemoryNeed:
        """Bytes for ``slots`` sequences and ``blocks`` cache blocks; nothing is allocated."""
        ...

    def start(self, checkpoint: str | Path | None, *, slots: int, blocks: int, threads: int | None = None,
              placement: Placement | None = None, progress: bool = True) -> Engine:
        """Open a checkpoint (folder, hub id, or None for the engine's own), take the memory and bind the weights.

        Raises ArtifactError or PlanError in one sentence.
        """
        ...


def block_table(seq: np.void) -> NDArray[np.int32]:
    """The block table of one sequence of a batch, for engines written in Python."""
    count = int(seq["num_blocks"])
    if not count:
        return np.zeros(0, dtype=np.int32)
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(int(seq["blocks"])))
