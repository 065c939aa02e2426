"""The narrow interface between the runtime and whatever runs a step: the native engine, or a stand-in of a test."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime.plan import EnginePlan

# One sequence of a step, laid out as DiSeq in runtime/native/abi.h, so that a batch is passed by address.
SEQ = np.dtype([
    ("slot", np.int32), ("rows", np.int32), ("kept", np.int32), ("wanted", np.int32),
    ("c", np.int64), ("floor", np.int64), ("start_step", np.int64), ("start_kept", np.int64),
    ("blocks", np.uintp), ("num_blocks", np.int32), ("reserved", np.int32),
], align=True)

Seqs = NDArray[np.void]
Outputs = dict[str, NDArray[np.generic]]


@runtime_checkable
class Engine(Protocol):
    """A compiled model on one machine.

    ``load`` binds a checkpoint, ``allocate`` takes all memory, both once and before the first ``run``.
    """

    @property
    def plan(self) -> EnginePlan: ...

    def load(self, checkpoint: str | Path) -> None:
        """Bind the weights of a checkpoint folder; ArtifactError or PlanError in one sentence."""
        ...

    def memory(self, slots: int, blocks: int) -> Mapping[str, int]:
        """Bytes that ``allocate`` will take, by purpose (arena, scratch, rings, paged)."""
        ...

    def allocate(self, slots: int, blocks: int) -> None:
        """Take the memory of ``slots`` sequences and ``blocks`` cache blocks."""
        ...

    def run(self, entry: str, seqs: Seqs, token_ids: NDArray[np.int64], lookback: NDArray[np.int64],
            pins: Mapping[str, NDArray[np.int32]] | None = None) -> Outputs:
        """One step of ``entry`` for a batch.

        Args:
            seqs: [S] of ``SEQ``; the field ``blocks`` is the address of the sequence's int32 block table.
            token_ids: [rows] of all sequences, in the batch's order.
            lookback: [rows, plan.lookback + 1], newest first, -1 before the start of a sequence.
            pins: selections from outside, [rows of the pin's axis, k] int32.

        Returns:
            Output arrays by name, [rows of the output's axis, ...]; valid until the next run.
        """
        ...

    def state(self, name: str, unit: int) -> NDArray[np.uint8]:
        """Writable bytes of one slot of a ring or one block of a paged state."""
        ...

    def close(self) -> None:
        """Give all memory back."""
        ...


def block_table(seq: np.void) -> NDArray[np.int32]:
    """The block table behind ``seq["blocks"]``, for engines written in Python."""
    count = int(seq["num_blocks"])
    if not count:
        return np.zeros(0, dtype=np.int32)
    kind = ctypes.c_int32 * count
    return np.ctypeslib.as_array(kind.from_address(int(seq["blocks"])))
