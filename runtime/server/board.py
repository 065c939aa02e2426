"""What front ends tell each other: a few numbers in memory that all of them see."""

from __future__ import annotations

import mmap
import os
from enum import IntEnum

import numpy as np


class Column(IntEnum):
    """A number that each front end keeps of itself: requests that the engine has not finished for it, prompt and answer
    tokens since its start, whether it takes requests."""

    OPEN = 0
    PROMPT_TOKENS = 1
    TOKENS = 2
    READY = 3


class Board:
    """[front ends, columns] i64. A front end writes its own row only; everybody reads all, each number whole and
    perhaps a moment old.

    ``fd``: of the memory, for a process that is started with it; None makes a new one.
    """

    def __init__(self, front_ends: int, fd: int | None = None) -> None:
        size = 8 * front_ends * len(Column)
        self.fd = os.memfd_create("deepinfer-front-ends") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, size)
        self._rows = np.frombuffer(mmap.mmap(self.fd, size), np.int64).reshape(front_ends, len(Column))

    def set(self, front_end: int, column: Column, value: int) -> None:
        self._rows[front_end, column] = value

    def add(self, front_end: int, column: Column, value: int) -> None:
        self._rows[front_end, column] += value

    def total(self, column: Column) -> int:
        """Of all front ends."""
        return int(self._rows[:, column].sum())

    @property
    def all_ready(self) -> bool:
        """Whether every front end takes requests."""
        return bool(self._rows[:, Column.READY].all())

    def left(self, front_end: int) -> None:
        """A front end has ended: nothing is open there and nobody waits for it; its tokens stay counted."""
        self._rows[front_end, Column.OPEN] = 0
        self._rows[front_end, Column.READY] = 1
