"""The interface of a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from deepinfer.runtime.store.reader import Run


class Mover(Protocol):
    """Moves runs of records. ``submit`` never waits for a disk; runs end through ``Reader.finish`` on other threads."""

    name: str

    @property
    def run_length(self) -> int:
        """Most records of a run."""
        ...

    def submit(self, runs: Sequence[Run]) -> None: ...

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        """Write whole records of the arena; returns when they are written. OSError as the folder has it."""
        ...

    def close(self, patience: float) -> None:
        """Stop after what is under way, or after ``patience`` seconds."""
        ...
