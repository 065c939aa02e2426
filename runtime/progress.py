"""The progress bar of a generation."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deepinfer.runtime.sequence import Request


class GenerationProgress:
    """Requests done, prompt rows while they are read, tokens and tokens a second, on standard error.

    Nothing is shown when ``show`` is false.
    """

    def __init__(self, total: int, show: bool) -> None:
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                             TextColumn("{task.fields[rate]}"), console=Console(stderr=True), disable=not show,
                             transient=False)
        self._task = self._bar.add_task("requests", total=total, rate="")
        self._start = time.monotonic()

    def __enter__(self) -> GenerationProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, requests: Sequence[Request]) -> None:
        """Bring the bar up to date."""
        if self._bar.disable:
            return
        tokens = sum(s.known - len(r.prompt_ids) for r in requests for s in r.sequences)
        read = sum(min(r.sequences[0].clock.row, len(r.prompt_ids)) for r in requests if r.sequences)
        total = sum(len(r.prompt_ids) for r in requests)
        seconds = max(1e-9, time.monotonic() - self._start)
        reading = f"prompt rows {read}/{total}, " if read < total else ""
        self._bar.update(self._task, completed=sum(r.finished for r in requests),
                         rate=f"{reading}{tokens} tokens, {tokens / seconds:.1f}/s")
